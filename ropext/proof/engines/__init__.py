"""Ask engines that are installed here whether they read a checkpoint as stock transformers does.

Each reader (read_*.py) runs by its path in the Python that has its engine, and tells the
log-probabilities of given tokens; the same file asks stock transformers in ropext's own Python.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ropext.errors import ProofFailed, UsageError
from ropext.proof.server import special_tokens, token_ids

MODULES = {"transformers": "transformers", "vllm": "vllm", "mlx": "mlx_lm"}  # of each engine
# Nats, at every position. Engines that rotate alike in float32 were seen within 4e-3, a lost
# scaling moves positions by tenths and more.
SAME = 1e-2
BEYOND = 1024  # tokens beyond the original context
LAST = 2048  # positions that the readers tell
TIMEOUT = 3600.0  # seconds for one engine

Verdict = Literal["same", "different", "error"]


@dataclass(frozen=True)
class EngineRun:
    """What one engine made of a checkpoint."""

    engine: str
    version: str  # "" where it failed before it told
    verdict: Verdict
    largest: float | None = None  # difference, in nats
    mean: float | None = None
    error: str = ""  # what it said, in one line


@dataclass(frozen=True)
class EngineText:
    """The tokens that every engine reads, and which of their positions are compared."""

    ids: list[int]
    context: int  # the original one

    @property
    def compared(self) -> int:
        return min(len(self.ids) - 1, LAST)

    @property
    def beyond(self) -> int:
        return min(max(len(self.ids) - self.context, 0), self.compared)

    def __str__(self) -> str:
        return (
            f"each engine reads {len(self.ids):,} tokens; {self.compared:,} positions are compared,"
            f" {self.beyond:,} of them beyond the original context of {self.context:,}"
        )


def text_for(directory: Path, vocab_size: int, context: int, target: int) -> EngineText:
    """Fixed tokens past the original context, one fewer than the target: vLLM answers with one."""
    length = max(min(target - 1, context + BEYOND), 2)
    return EngineText(token_ids(length, vocab_size, special_tokens(directory)), context)


def check_installed(names: Sequence[str], python: str) -> None:
    """Refuse engines that are not known, or that this Python does not have."""
    for name in names:
        if name not in MODULES:
            raise UsageError(
                f"--run {name!r}: engines that can be run here are {', '.join(MODULES)};"
                " --endpoint asks a server of another"
            )
        look = f"import importlib.util as u, sys; sys.exit(u.find_spec({MODULES[name]!r}) is None)"
        try:
            done = subprocess.run([python, "-c", look], capture_output=True, check=False)
        except OSError as error:
            raise UsageError(f"--python {python} cannot be run ({error.strerror})") from None
        if done.returncode:
            raise UsageError(
                f"--run {name}: {python} has no {MODULES[name]}; --python PATH names the Python of"
                " an environment that has it"
            )


def compare(
    names: Sequence[str], python: str, directory: Path, text: EngineText
) -> Iterator[tuple[EngineRun, str]]:
    """Each engine against stock transformers on the same tokens, and the version of that."""
    wanted = _read("transformers", sys.executable, directory, text)
    if "error" in wanted:
        raise ProofFailed(f"stock transformers cannot read {directory}: {wanted['error']}")
    for name in names:
        yield _judge(name, _read(name, python, directory, text), wanted["found"]), wanted["version"]


def _judge(name: str, told: Mapping[str, Any], wanted: Any) -> EngineRun:
    version = told["version"]
    if "error" in told:
        return EngineRun(name, version, "error", error=told["error"])
    if told["found"].shape != wanted.shape:
        error = f"it tells {told['found'].size} of {wanted.size} positions"
        return EngineRun(name, version, "error", error=error)
    gaps = np.abs(told["found"] - wanted)
    largest, mean = float(gaps.max()), float(gaps.mean())
    return EngineRun(name, version, "same" if largest < SAME else "different", largest, mean)


def _read(name: str, python: str, directory: Path, text: EngineText) -> dict[str, Any]:
    """`version`, and `found` (log-probabilities) or `error`."""
    reader = Path(__file__).with_name(f"read_{name}.py")
    with tempfile.TemporaryDirectory(prefix="ropext-engine-") as folder:
        ids, output = Path(folder) / "ids.npy", Path(folder) / "told.npz"
        np.save(ids, np.array(text.ids))
        try:
            done = subprocess.run(
                [python, str(reader), str(ids), str(output), str(directory)],
                capture_output=True,
                text=True,
                errors="replace",
                env=os.environ | {"HF_HUB_OFFLINE": "1"},
                timeout=TIMEOUT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"version": "", "error": f"no answer within {TIMEOUT:.0f} seconds"}
        if done.returncode or not output.exists():
            last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
            said = last[0].strip() if last else f"no answer (exit code {done.returncode})"
            return {"version": "", "error": said[:300]}
        with np.load(output) as told:
            version = str(told["version"])
            if str(directory) not in told:
                error = str(told[f"{directory}/error"]).strip().splitlines()[0][:300]
                return {"version": version, "error": error}
            return {"version": version, "found": told[str(directory)]}
