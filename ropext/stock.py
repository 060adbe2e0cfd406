"""What stock transformers makes of a config: asked in a child process, and kept.

The child (proof/child.py) cannot import ropext and has limits of memory and time; nothing here
imports transformers. What it says of a model type is kept in the user's cache, by the digest of
the config, of the transformers version and of the child's own code. A process remembers it by the
config without the keys that an extension writes.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from ropext.errors import InputError, ProofFailed
from ropext.jsontext import Json, JsonObject, dump, write_json
from ropext.narration import tell_listener
from ropext.systems import user_cache

CHILD = Path(__file__).with_name("proof") / "child.py"
DESCRIBING = ("child.py", "describing.py", "turning.py", "forward.py")  # what describes a type
# Keys that an extension writes: rope dicts, theta, the partial factor and lengths. They change no
# fact of a type, for the child sets them itself.
WRITTEN = re.compile(
    r"theta|rotary_emb_base|rope_\w*base|^rope_(scaling|parameters)$|^partial_rotary_factor$"
    r"|^rotary_pct$|max_position_embeddings$"
    r"|^(max_)?seq(uence)?_len(gth)?$|^n_(positions|ctx)$|^model_max_length$"
)
ROOM = 8 << 30  # bytes beside those of weights that are mapped; Kimi K2's proof takes a tenth
LEAST_ROOM = 4 << 30  # also where a machine has hardly any left
SECONDS = 600.0  # to describe a type; the largest mixture of experts takes one of them


@dataclass(frozen=True)
class Numbers:
    """What one rotary module of a config computes."""

    label: str
    inv_freq: tuple[float, ...]
    attention_factor: float


@dataclass(frozen=True)
class Described:
    """What stock transformers shows of one model type."""

    transformers: str  # the version that was asked
    scheme: str  # "rotary", "composite" or "none"
    path: tuple[str, ...]  # composite: where its text part stands
    text: str  # composite: the type of that part
    auto_class: str  # the class by which it is loaded; "" where none does
    added: JsonObject  # composite: what it adds to a text part that leaves keys out
    defaults: JsonObject  # what absent keys mean, as the entries of families/defaults.json
    row: JsonObject  # how its keys are read, as the fields of a family's row
    rotates: tuple[bool | None, ...]  # of a small copy, whether each of its first layers turns
    unseen: str  # why there is no small copy of it
    asked: str  # the digest of the config that was asked about ...
    numbers: tuple[Numbers, ...]  # ... and what stock computes of it

    def numbers_of(self, config: JsonObject) -> tuple[Numbers, ...]:
        """What stock computes of a config; nothing where it was asked about another one."""
        return self.numbers if _digest(config) == self.asked else ()


@dataclass(frozen=True)
class ChildTask:
    """What a child is asked for, as sentences speak of it."""

    name: str  # "the proof"
    advice: str = ""  # what to do where it takes too long


DESCRIPTION = ChildTask("the description")

# Of this process, by the digest of a config without the keys that an extension writes: its types.
_BY_CONFIG: dict[str, dict[str, Described]] = {}
# By model type: what the config of that type that was read last showed.
_DESCRIBED: dict[str, Described] = {}


def described(model_type: str) -> Described | None:
    """What stock shows of a type, in the config of that type that was read last."""
    return _DESCRIBED.get(model_type)


def installed() -> str:
    """The version of the transformers that is here; "" where there is none."""
    try:
        return metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return ""


@cache
def _type_names(folder: Path) -> str:
    """The text of the files in which transformers lists its model types."""
    names = ("auto_mappings.py", "configuration_auto.py")
    files = [folder / "models" / "auto" / name for name in names]
    return "\n".join(file.read_text("utf-8") for file in files if file.is_file())


def knows(model_type: str) -> bool:
    """Tell whether the installed transformers lists a model type, without importing it."""
    found = find_spec("transformers")
    if found is None or not found.submodule_search_locations:
        return False
    listed = rf'"{re.escape(model_type)}"\s*[,:]\s*"(?!AutoConfig")\w+Config"'
    names = _type_names(Path(found.submodule_search_locations[0]))
    return re.search(listed, names) is not None


def describe(config: JsonObject, kind: str, known: Collection[str]) -> Mapping[str, Described]:
    """Find out what stock makes of the model types of a config, and remember it for `described`.

    `kind` is the type of it for which stock is asked; those that are `known` are left out.
    """
    shape = _digest(_without_written(config))
    if shape not in _BY_CONFIG:
        answer = _answer(config, kind)
        facts = {name: each for name, each in answer["types"].items() if name not in known}
        _BY_CONFIG[shape] = {name: _from_json(facts[name], answer, config) for name in facts}
    _DESCRIBED.update(_BY_CONFIG[shape])
    return _BY_CONFIG[shape]


def _answer(config: JsonObject, kind: str) -> JsonObject:
    """The kept answer about a config, else the child's, which is then kept."""
    place = _place_of(config)
    answer: JsonObject | None = _kept(place)
    if answer is None:
        tell_listener(
            f"this ropext does not know the model type {kind!r}: transformers {installed()} is"
            " asked, in a child process, how it reads such a config"
        )
        answer = _asked(config, kind)
        if place is not None:
            with suppress(InputError):  # a home that cannot be written: asked again the next time
                write_json(place, answer)
    return answer


def forget() -> None:
    """Ask anew about every type."""
    _BY_CONFIG.clear()
    _DESCRIBED.clear()


def _without_written(value: Json) -> Json:
    """A config without the keys that an extension writes, in its parts either."""
    if isinstance(value, list):
        return [_without_written(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    kept = {}
    for key, item in value.items():
        if not WRITTEN.search(key) or _may_stop_layers(item):
            kept[key] = _without_written(item)
    return kept


def _may_stop_layers(item: Json) -> bool:
    """Whether a rope key may say which layers rotate: by a list, or by a null in its dict."""
    return isinstance(item, list) or (isinstance(item, Mapping) and None in item.values())


def _digest(value: Json) -> str:
    """The digest of a piece of JSON, whatever the order of its keys."""
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _from_json(facts: JsonObject, answer: JsonObject, config: JsonObject) -> Described:
    numbers = []
    for module in answer["rotary"]:
        inv_freq = tuple(module["inv_freq"])
        numbers.append(Numbers(module["label"], inv_freq, module["attention_factor"]))
    return Described(
        transformers=answer["transformers"],
        scheme=facts["scheme"],
        path=tuple(facts.get("path", ())),
        text=facts.get("text", ""),
        auto_class=facts["auto_class"],
        added=facts.get("added", {}),
        defaults=facts.get("defaults", {}),
        row=facts.get("row", {}),
        rotates=tuple(facts.get("rotates", ())),
        unseen=facts.get("unseen", ""),
        asked=_digest(config),
        numbers=tuple(numbers),
    )


def _place_of(config: JsonObject) -> Path | None:
    """The file that keeps the answer; None where the user has no home."""
    folder = user_cache()
    if folder is None:
        return None
    decides = sha256(installed().encode() + b"\0" + dump(dict(config)))
    for name in DESCRIBING:
        decides.update(CHILD.with_name(name).read_bytes())
    return folder / "described" / f"{decides.hexdigest()}.json"


def _kept(place: Path | None) -> Json:
    """The answer that is kept; None where there is none, or where it was damaged."""
    if place is None:
        return None
    try:
        answer = json.loads(place.read_text("utf-8"))
        return answer if answer["types"] and answer["error"] is None else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _asked(config: JsonObject, kind: str) -> JsonObject:
    """The child's answer about a config."""
    with tempfile.TemporaryDirectory(prefix="ropext-described-") as folder:
        (Path(folder) / "config.json").write_bytes(dump(dict(config)))
        entry = {"directory": folder, "describe": True}
        job = {"directories": [entry], "tensors": False, "trust_remote_code": False}
        job["room"] = max(LEAST_ROOM, min(ROOM, int(free_memory() * 0.8)))
        try:
            (answer,) = ask_child(job, [Path("config.json")], SECONDS, DESCRIPTION)
        except (ProofFailed, ModuleNotFoundError) as error:
            raise InputError(f"config.json: stock transformers was asked, but {error}") from None
    if answer["error"]:
        raise InputError(
            f"config.json: transformers {answer['transformers']} knows the model type {kind!r},"
            f" which this ropext does not, but cannot build this config: {answer['error']}"
        )
    return answer


def free_memory() -> int:
    """How many bytes this machine has left; 0 where accelerate, and with it psutil, is missing,
    which the child says in its own sentence."""
    try:
        import psutil
    except ImportError:
        return 0
    return int(psutil.virtual_memory().available)


def ask_child(
    job: Mapping[str, Json], directories: Sequence[Path], timeout: float, task: ChildTask
) -> list[dict[str, Json]]:
    """What the fresh process says of each directory."""
    for needed in ("torch", "transformers", "accelerate"):
        if find_spec(needed) is None:
            raise ModuleNotFoundError(f"{task.name} needs {needed}", name=needed)
    # Nothing here runs on a GPU, and its driver costs seconds.
    offline = {} if job["trust_remote_code"] else {"HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory(prefix="ropext-proof-") as folder:
        out = Path(folder) / "built.jsonl"
        try:
            run = subprocess.run(
                # -P: neither the script's folder nor the working directory is importable.
                [sys.executable, "-P", str(CHILD), str(out)],
                cwd=folder,
                input=json.dumps(job),
                capture_output=True,
                encoding="utf-8",
                env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONUTF8": "1"} | offline,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ProofFailed(
                f"{task.name} of {directories[0]} took longer than {timeout:.0f} seconds and was "
                f"stopped{task.advice}"
            ) from None
        lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    if run.returncode:
        where = f"{task.name} of {directories[min(len(lines), len(directories) - 1)]}"
        if run.returncode < 0:
            name = signal.Signals(-run.returncode).name
            raise ProofFailed(f"{where} was killed by {name}, usually because memory ran out")
        final = next((line for line in run.stderr.splitlines()[::-1] if line.strip()), "no message")
        raise ProofFailed(f"{where} could not run (exit code {run.returncode:#x}): {final}")
    named = zip(lines, map(str, directories), strict=True)
    return [json.loads(line) | {"directory": name} for line, name in named]
