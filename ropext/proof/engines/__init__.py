"""Ask engines that are installed here whether they read a checkpoint as stock transformers does.

Each reader (read_*.py) runs by its path in the Python that has its engine, and tells the
log-probabilities of given tokens; the same file asks stock transformers in ropext's own Python.
llama.cpp reads a GGUF: one that is given, or what llama.cpp's own converter makes of a directory.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ropext import loaders
from ropext.errors import InputError, ProofFailed, UsageError
from ropext.proof.server import special_tokens, token_ids

GGUF = "llama.cpp"  # the engine that reads one, by its Python package or by its server
SERVER = "llama-server"
# The module that has each engine.
MODULES = {"transformers": "transformers", "vllm": "vllm", "mlx": "mlx_lm", GGUF: "llama_cpp"}
# Nats, at every position. Engines that rotate alike in float32 were seen within 4e-3, a lost
# scaling moves positions by tenths and more.
SAME = 1e-2
# In the mean, where weights are not float32: llama.cpp rounds what it multiplies by them too. Seen
# alike: 0.03 to 0.1 (Q8_0, Q4_1; single positions 0.8), an attention factor lost alone: 0.3.
SAME_ROUNDED = 0.15
BEYOND = 1024  # tokens beyond the original context
LAST = 2048  # positions that the readers tell
TIMEOUT = 3600.0  # seconds for one engine


@dataclass(frozen=True)
class EngineRun:
    """What one engine made of a checkpoint, beside what the loader table says of it."""

    engine: str
    version: str  # "" where it failed before it told
    verdict: Literal["same", "different", "error"]
    largest: float | None  # difference, in nats
    mean: float | None
    error: str  # what it said, in one line
    table: str
    transformers: str  # what it is compared with
    rounded: bool = False  # the mean decides

    @property
    def sentence(self) -> str:
        if not self.version:  # it ended before it told a reading: nothing against the table
            return f"gave no answer: {self.error}; --python names a Python that has all it needs"
        found = self.error
        if self.largest is not None:
            found = (
                f"log-probabilities differ from transformers {self.transformers}'s by"
                f" {self.largest:.1e} at most and {self.mean:.1e} in the mean"
            )
            found += " (which counts where weights are quantised)" if self.rounded else ""
        says = f"{self.verdict}: {found}; the table says {self.table}"
        alike = self.table == "not measured" or (self.verdict == "same") == (self.table == "same")
        return says + ("" if alike else ", which is not what was measured here: please report it")


@dataclass(frozen=True)
class EngineText:
    """The tokens that every engine reads, of which the last are compared."""

    ids: list[int]
    context: int  # the original one

    def __str__(self) -> str:
        compared = min(len(self.ids) - 1, LAST)
        beyond = min(max(len(self.ids) - self.context, 0), compared)
        return (
            f"each engine reads {len(self.ids):,} tokens; {compared:,} positions are compared,"
            f" {beyond:,} of them beyond the original context of {self.context:,}"
        )


def text_for(directory: Path, vocab_size: int | None, context: int, target: int) -> EngineText:
    """Fixed tokens past the original context, one fewer than the target: vLLM answers with one."""
    if vocab_size is None:
        raise InputError(f"--run: the config of {directory} has no vocab_size")
    length = max(min(target - 1, context + BEYOND), 2)
    return EngineText(token_ids(length, vocab_size, special_tokens(directory)), context)


def check_installed(
    names: Sequence[str], python: str, place: Path, converter: Path | None = None
) -> None:
    """Refuse engines that are not known, not installed, or that cannot read what is there."""
    for name in names:
        if name not in MODULES:
            raise UsageError(
                f"--run {name!r}: engines that can be run here are {', '.join(MODULES)};"
                " --endpoint asks a server of another"
            )
        if place.is_file() and name != GGUF:
            raise UsageError(f"--run {name} reads a directory; {GGUF} reads a GGUF")
        if not _has(name, python) and not (name == GGUF and shutil.which(SERVER)):
            neither = f", and no {SERVER} is on PATH" if name == GGUF else ""
            raise UsageError(
                f"--run {name}: {python} has no {MODULES[name]}{neither}; --python PATH names the"
                " Python of an environment that has it"
            )
    if GGUF in names and not place.is_file() and not (converter and converter.is_file()):
        raise UsageError(
            f"--run {GGUF} reads a GGUF: --converter PATH names the convert_hf_to_gguf.py of a"
            f" llama.cpp checkout, which makes one of {place}"
            + (f" ({converter} is no file)" if converter else "")
        )


def _has(name: str, python: str) -> bool:
    """Whether a Python has an engine."""
    # An older Python has no -P, which keeps the working folder from being importable.
    look = "import sys; sys.path[:] = filter(None, sys.path); import importlib.util as found; "
    look += f"sys.exit(found.find_spec({MODULES[name]!r}) is None)"
    try:
        return not subprocess.run([python, "-c", look], capture_output=True, check=False).returncode
    except OSError as error:
        raise UsageError(f"--python {python} cannot be run ({error.strerror})") from None


def by_transformers(place: Path, text: EngineText) -> dict[str, Any]:
    """What stock transformers tells of a directory: `version`, and log-probabilities as `found`."""
    wanted = _read("transformers", sys.executable, place, text)
    if "error" in wanted:
        raise ProofFailed(f"stock transformers cannot read {place}: {wanted['error']}")
    return wanted


def compare(
    names: Sequence[str],
    python: str,
    place: Path,
    text: EngineText,
    readings: Sequence[loaders.LoaderReading] = (),
    *,
    converter: Path | None = None,
    wanted: Mapping[str, Any] | None = None,
    rounded: bool = False,
) -> Iterator[EngineRun]:
    """Each engine against stock transformers on the same tokens, and against the table's readings.

    `place` is a directory, or a GGUF with what transformers tells of it (`wanted`: `version`, and
    the log-probabilities as `found`) and whether its weights are `rounded`; `converter` is
    llama.cpp's convert_hf_to_gguf.py.
    """
    wanted = wanted or by_transformers(place, text)
    right = wanted["found"]
    for name in names:
        told = _read(name, python, place, text, converter)
        error, found = told.get("error", ""), told.get("found", right)
        wish = right[told["at"]] if "at" in told else right
        if found.shape != wish.shape:
            error = f"it tells {found.size} of {wish.size} positions"
        gaps = np.array([]) if error else np.abs(found - wish)
        largest, mean = (None, None) if error else (float(gaps.max()), float(gaps.mean()))
        alike = not error and bool(gaps.mean() < SAME_ROUNDED if rounded else gaps.max() < SAME)
        yield EngineRun(
            name,
            told["version"],
            "error" if error else "same" if alike else "different",
            largest,
            mean,
            error,
            _in_table(readings, name, told["version"], place.is_file()),
            wanted["version"],
            rounded,
        )


def _in_table(
    readings: Sequence[loaders.LoaderReading], engine: str, version: str, is_file: bool
) -> str:
    """What the table says of this version of an engine; that of a GGUF has one of each."""
    if is_file:
        return next((own.verdict for own in readings if own.loader == engine), "not measured")
    try:
        row = loaders.select(f"{engine}=={version.partition('+')[0]}")[0]
    except UsageError:  # a version that was not measured
        return "not measured"
    return readings[loaders.readers().index(row)].verdict if readings else "not measured"


def _read(
    name: str, python: str, place: Path, text: EngineText, converter: Path | None = None
) -> dict[str, Any]:
    """`version`, and `found` (log-probabilities) or `error`."""
    with tempfile.TemporaryDirectory(prefix="ropext-engine-") as folder:
        ids, output = Path(folder) / "ids.npy", Path(folder) / "told.npz"
        np.save(ids, np.array(text.ids))
        if name == GGUF and place.is_dir():
            made = Path(folder) / "model.gguf"
            # ropext's own Python has what the converter imports.
            said = _ran(sys.executable, "convert_gguf.py", converter, place, made)
            if said or not made.exists():
                return {"version": "", "error": f"its converter: {said or 'it made no GGUF'}"}
            place = made
        reader = f"read_{name.replace('.', '_')}.py"
        if name == GGUF and not _has(name, python):
            python, reader = sys.executable, "read_llama_server.py"
        said = _ran(python, reader, ids, output, place)
        if said or not output.exists():
            return {"version": "", "error": said or "no answer"}
        with np.load(output) as told:
            version = str(told["version"])
            if str(place) not in told:
                error = str(told[f"{place}/error"]).strip().splitlines()[0][:300]
                return {"version": version, "error": error}
            at = {"at": told[f"{place}/at"]} if f"{place}/at" in told else {}
            return {"version": version, "found": told[str(place)]} | at


def _ran(python: str, script: str, *words: object) -> str:
    """Run a script of this folder; what it said last where it failed."""
    try:
        done = subprocess.run(
            [python, str(Path(__file__).with_name(script)), *map(str, words)],
            capture_output=True,
            text=True,
            errors="replace",
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {TIMEOUT:.0f} seconds"
    if not done.returncode:
        return ""
    last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
    return last[0].strip()[:300] if last else f"no answer (exit code {done.returncode})"
