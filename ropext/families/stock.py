"""Ask stock transformers, in a child process, how it reads a config, and keep the answer.

The child (verifying/proof/child.py) cannot import ropext and has limits of memory and time. Nothing
here imports transformers. Its answer about a model type is kept in the user's cache. The key is a
digest of the config, of the transformers version and of the child's own code.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from ropext.base.errors import ConfigError, InputError, ProofFailed
from ropext.base.jsontext import Json, JsonObject, digest, dump, write_json
from ropext.base.narration import tell_listener
from ropext.base.systems import user_cache
from ropext.families.config import UnknownType, census, locate, unknown_type_message
from ropext.families.described import Described, Numbers, is_remembered, remember_facts

CHILD = Path(__file__).parents[1] / "verifying/proof/child.py"
# The code of the child, which decides its answer about a type.
DESCRIBING = ("child.py", "describing.py", "turning.py", "forward.py", "tensors.py")
ROOM = 8 << 30  # bytes, without mapped weights; Kimi K2's proof takes a tenth
LEAST_ROOM = 4 << 30  # also if a machine has hardly any left
SECONDS = 600.0  # to describe a type; the largest mixture of experts takes one of them


@dataclass(frozen=True)
class ChildTask:
    """The task of a child, as messages name it."""

    name: str  # "the proof"
    advice: str = ""  # advice if it takes too long


DESCRIPTION = ChildTask("the description")


def installed() -> str:
    """Return the version of the installed transformers; "" if there is none."""
    try:
        return metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return ""


@cache
def _type_names(folder: Path) -> str:
    """Return the text of the files in which transformers lists its model types."""
    names = ("auto_mappings.py", "configuration_auto.py")
    files = [folder / "models" / "auto" / name for name in names]
    return "\n".join(file.read_text("utf-8") for file in files if file.is_file())


def knows(model_type: str) -> bool:
    """Return whether the installed transformers knows the model type of a config, by its lists and
    without importing it."""
    found = find_spec("transformers")
    if found is None or not found.submodule_search_locations:
        return False
    listed = rf'"{re.escape(model_type)}"\s*[,:]\s*"(?!AutoConfig")\w+Config"'
    names = _type_names(Path(found.submodule_search_locations[0]))
    return re.search(listed, names) is not None


def describe_unknown_types(config: JsonObject) -> None:
    """Query stock about the model types of a config that the census lacks, and remember the facts.

    The code that opens a config calls this. Known types need no query, and neither does a config
    that is refused in any case.
    """
    try:
        found = locate(dict(config))
    except UnknownType as error:
        kind = error.kind
    except InputError:
        return
    else:
        unlisted = [each for each in (found.model_type, found.text_type) if each not in census()]
        # Facts from another config's numbers are not enough.
        if not unlisted or is_remembered(config):
            return
        kind = unlisted[0]
    if not knows(kind):
        here = installed()
        lacks = "none is installed"
        if here:
            lacks = f"installed is {here}, which lacks it too"
        raise InputError(unknown_type_message(kind, lacks))
    answer = _answer_about_config(config, kind)
    facts = {}
    for name, each in answer["types"].items():
        if name not in census():
            facts[name] = _from_json(each, answer, config)
    remember_facts(config, facts)


def _answer_about_config(config: JsonObject, kind: str) -> JsonObject:
    """Return the kept answer of transformers about a config, else a child process's, which is then
    kept."""
    place = _place_of(config)
    answer: JsonObject | None = _kept_answer(place)
    if answer is None:
        tell_listener(
            f"this ropext does not know the model type {kind!r}: transformers {installed()} is"
            " asked, in a child process, how it reads such a config"
        )
        answer = _answer_of_child(config, kind)
        if place is not None:
            with suppress(InputError):  # a home that cannot be written: asked again the next time
                write_json(place, answer)
    return answer


def _from_json(facts: JsonObject, answer: JsonObject, config: JsonObject) -> Described:
    """Return the facts about a model type in the child's answer about a config."""
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
        widths=tuple(facts.get("widths", ())),
        asked=digest(config),
        numbers=tuple(numbers),
    )


def _place_of(config: JsonObject) -> Path | None:
    """Return the file that keeps the answer of transformers about a config; None if the user has no
    home."""
    folder = user_cache()
    if folder is None:
        return None
    decides = sha256(installed().encode() + b"\0" + dump(dict(config)))
    for name in DESCRIBING:
        decides.update(CHILD.with_name(name).read_bytes())
    return folder / "described" / f"{decides.hexdigest()}.json"


def _kept_answer(place: Path | None) -> Json:
    """Return the kept answer of transformers about a config; None if there is none, or if it was
    damaged."""
    if place is None:
        return None
    try:
        answer = json.loads(place.read_text("utf-8"))
        return answer if answer["types"] and answer["error"] is None else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _answer_of_child(config: JsonObject, kind: str) -> JsonObject:
    """Return the answer about a config from a child process that loads transformers."""
    with tempfile.TemporaryDirectory(prefix="ropext-described-") as folder:
        (Path(folder) / "config.json").write_bytes(dump(dict(config)))
        entry = {"directory": folder, "describe": True}
        job = {"directories": [entry], "tensors": False, "trust_remote_code": False}
        job["room"] = max(LEAST_ROOM, min(ROOM, int(free_memory() * 0.8)))
        try:
            (answer,) = ask_child(job, [Path("config.json")], SECONDS, DESCRIPTION)
        except (ProofFailed, ModuleNotFoundError) as error:
            raise ConfigError(f"ropext asked transformers about this type, but {error}") from None
    if answer["error"]:
        raise ConfigError(
            f"transformers {answer['transformers']} knows the model type {kind!r},"
            f" which this ropext does not, but cannot build this config: {answer['error']}"
        )
    return answer


def free_memory() -> int:
    """Return the free bytes of this machine for a child that loads stock transformers to answer
    about a config. Return 0 if accelerate, and with it psutil, is missing. The child's own sentence
    reports that."""
    try:
        import psutil
    except ImportError:
        return 0
    return int(psutil.virtual_memory().available)


def ask_child(
    job: Mapping[str, Json], directories: Sequence[Path], timeout: float, task: ChildTask
) -> list[dict[str, Json]]:
    """Return stock transformers' answer about each directory's config from a fresh process, such as
    on an unknown model type."""
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
