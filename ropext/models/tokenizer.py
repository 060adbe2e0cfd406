"""The tokenizer of a model. A child process tries it before ropext loads it here."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from ropext.checkpoint import Snapshot
from ropext.errors import InputError
from ropext.families.config import Dict, flat, parts
from ropext.jsontext import Json, JsonObject
from ropext.models import sandbox

# Keys of tokenizer_config.json that no class counts to, and what others are counted to at once.
LENGTHS_OF_TOKENIZERS = ("model_max_length", "max_length")
COUNTED = 10_000

_idle: dict[tuple[str, int], subprocess.Popen[str]] = {}


def ask(kind: str, question: JsonObject, size: int = 0) -> Json:
    """Return what a child process answers. Raise ValueError with its reason if it refuses, and
    TimeoutError if it ended itself. Its limits grow with the size of the files that it reads."""
    seconds = sandbox.SECONDS + sandbox.SECONDS_A_MEGABYTE * size / 1e6
    memory = sandbox.MEMORY + sandbox.MEMORY_A_BYTE * size
    # Taken out while it is asked: one that was left in the middle of an answer is not asked again.
    key = kind, os.getpid()
    child = _idle.pop(key, None) or subprocess.Popen(
        # -P: neither the script's folder nor the working directory is importable.
        [sys.executable, "-P", sandbox.__file__, kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=Path(sandbox.__file__).parent,
        env=os.environ | {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1"},
        encoding="ascii",
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(json.dumps([seconds, memory, question], default=str) + "\n")
        child.stdin.flush()
        answer = json.loads(child.stdout.readline() or "null")
    except BrokenPipeError:
        answer = None
    if answer is None:
        raise TimeoutError(f"it takes more than {seconds:.0f} seconds or {memory >> 30} GiB")
    if kind in ("render", "parse"):  # these are asked often, and a tokenizer once
        _idle[key] = child
    else:
        child.communicate()
    if "failed" in answer:
        raise ValueError(answer["failed"])
    return answer["made"]


@cache
def try_tokenizer(file: Path, changed: int) -> None:
    """Refuse a tokenizer.json, `changed` then, that makes too much of a short text."""
    try:
        characters, tokens = ask("encode", {"file": str(file.absolute())})
    except ValueError:
        return  # transformers says why it cannot be loaded
    except TimeoutError as error:
        raise InputError(f"{file} cannot be used: for a few lines of text {error}") from None
    if tokens > sandbox.MOST_TOKENS * characters:
        raise InputError(
            f"{file} cannot be used: it makes {tokens:,} tokens of {characters:,} characters"
        )


@cache
def try_class(directory: Path, size: int, changed: int) -> None:
    """Refuse a tokenizer that transformers cannot make of a directory's files, so many bytes,
    `changed` then, within the limits."""
    try:
        ask("build", {"directory": str(directory.absolute())}, size)
    except ValueError:
        return  # it is said where it is loaded
    except TimeoutError as error:
        raise InputError(
            f"the tokenizer in {directory} cannot be used: to make it of its files and of the "
            f"numbers in tokenizer_config.json {error}"
        ) from None


def load_tokenizer(snapshot: Snapshot, trust_remote_code: bool) -> Any:
    """Load the tokenizer in a model's directory; a child process tries it first."""
    from transformers import AutoTokenizer

    if "tokenizer.json" in snapshot.files:
        file = snapshot.path("tokenizer.json")
        try_tokenizer(file, file.stat().st_mtime_ns)
    if not trust_remote_code and _needs_trial(snapshot):
        files = [snapshot.path(name).stat() for name in snapshot.files if _is_read(name)]
        size = sum(file.st_size for file in files)
        try_class(snapshot.directory, size, max((file.st_mtime_ns for file in files), default=0))
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            snapshot.directory, trust_remote_code=trust_remote_code
        )
        if len(tokenizer) <= len(set(tokenizer.all_special_tokens)):  # what some classes make of it
            raise ValueError("its files are missing")
        return tokenizer
    except Exception as error:  # tokenizers raises this very class for a file it cannot read
        reason = " ".join(str(error).split())
        if "tokenizer.json" not in snapshot.files:
            reason = f"there is no tokenizer.json, and {reason}"
        raise InputError(
            f"{snapshot.name} has no tokenizer that transformers can load: {reason}"
        ) from error


def _is_read(name: str) -> bool:
    """Whether a tokenizer may be made of a file."""
    return "/" not in name and not name.endswith((".safetensors", ".py", ".md"))


def _needs_trial(snapshot: Snapshot) -> bool:
    """Whether making the tokenizer may take more than its files say: they are converted, or its
    class is given a number that it may count to."""
    if "tokenizer.json" not in snapshot.files:
        return True
    for part in parts(Dict(snapshot.tokenizer_config or {})):
        for key, value in part.values.items():
            if key in LENGTHS_OF_TOKENIZERS:
                continue
            if any(type(item) in (int, float) and item > COUNTED for item in flat(value)):
                return True
    return False


@contextmanager
def panics_refused(model: str, what: str) -> Iterator[None]:
    """Turn a panic of `tokenizers`, which is no Exception, into the user's mistake that it is."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())[:300]
        raise InputError(
            f"the tokenizer of {model} cannot read {what}: the tokenizers library stopped with "
            f"{reason!r}"
        ) from None
