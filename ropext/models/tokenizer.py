"""Load the tokenizer of a model, after a trial in a child process."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from ropext.base.errors import InputError
from ropext.base.jsontext import Json, JsonObject
from ropext.families.config import Dict, entries, flat
from ropext.files.checkpoint import Snapshot
from ropext.files.checkpoint.snapshot import TOKENIZER_CONFIG
from ropext.models import sandbox

# Keys of tokenizer_config.json that no class counts to, and the largest number of another key for
# which a class may count without a trial.
LENGTHS_OF_TOKENIZERS = ("model_max_length", "max_length")
COUNTED = 10_000

_idle: dict[tuple[str, int], subprocess.Popen[str]] = {}


def ask_sandbox(kind: str, question: JsonObject, size: int = 0) -> Json:
    """Return the answer of the sandbox: a child process that loads a model's tokenizer on trial,
    renders a loaded model's chat template or parses its answer.

    Its limits grow with the size of the files that it reads. Raise ValueError with its reason if it
    refuses, and TimeoutError if it ended itself.
    """
    seconds = sandbox.SECONDS + sandbox.SECONDS_A_MEGABYTE * size / 1e6
    memory = sandbox.MEMORY + sandbox.MEMORY_A_BYTE * size
    # Taken out during a question: a child that was interrupted in an answer gets no other question.
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
    if kind in ("render", "parse"):  # a command needs these often, and a tokenizer once
        _idle[key] = child
    else:
        child.communicate()
    if "failed" in answer:
        raise ValueError(answer["failed"])
    return answer["made"]


@cache
def try_tokenizer(file: Path, changed: int) -> None:
    """Try a model's tokenizer in the sandbox before it is loaded into memory: raise InputError if
    its tokenizer.json makes too many tokens from a short text.

    `changed` is its time of change, which keys the cache.
    """
    try:
        characters, tokens = ask_sandbox("encode", {"file": str(file.absolute())})
    except ValueError:
        return  # transformers raises the reason later
    except TimeoutError as error:
        raise InputError(f"{file} cannot be used: for a few lines of text {error}") from None
    if tokens > sandbox.MOST_TOKENS * characters:
        raise InputError(
            f"{file} cannot be used: it makes {tokens:,} tokens of {characters:,} characters"
        )


@cache
def try_tokenizer_class(directory: Path, size: int, changed: int) -> None:
    """Try a model's tokenizer in the sandbox before it is loaded into memory: raise InputError if
    transformers cannot load it from the directory's files within the limits.

    `size` is their bytes; `changed` is their time of change, which keys the cache.
    """
    try:
        ask_sandbox("build", {"directory": str(directory.absolute())}, size)
    except ValueError:
        return  # load_tokenizer raises the reason
    except TimeoutError as error:
        raise InputError(
            f"the tokenizer in {directory} cannot be used: to make it of its files and of the "
            f"numbers in tokenizer_config.json {error}"
        ) from None


def load_tokenizer(snapshot: Snapshot, trust_remote_code: bool) -> Any:
    """Load the tokenizer of a model, after a trial in a child process."""
    from transformers import AutoTokenizer

    if "tokenizer.json" in snapshot.files:
        file = snapshot.path("tokenizer.json")
        try_tokenizer(file, file.stat().st_mtime_ns)
    if not trust_remote_code and _needs_trial(snapshot):
        files = [snapshot.path(name).stat() for name in snapshot.files if _is_tokenizer_file(name)]
        size = sum(file.st_size for file in files)
        try_tokenizer_class(
            snapshot.directory, size, max((file.st_mtime_ns for file in files), default=0)
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            snapshot.directory, trust_remote_code=trust_remote_code
        )
        # some classes build this without any file
        if len(tokenizer) <= len(set(tokenizer.all_special_tokens)):
            raise ValueError("its files are missing")
        return tokenizer
    except Exception as error:  # tokenizers raises this very class for a file it cannot read
        reason = " ".join(str(error).split())
        if "tokenizer.json" not in snapshot.files:
            reason = f"there is no tokenizer.json, and {reason}"
        raise InputError(
            f"{snapshot.name} has no tokenizer that transformers can load: {reason}"
        ) from error


def _is_tokenizer_file(name: str) -> bool:
    """Return whether a file counts in the trial of a model's tokenizer: transformers may read it to
    load the tokenizer into memory."""
    return "/" not in name and not name.endswith((".safetensors", ".py", ".md"))


def _needs_trial(snapshot: Snapshot) -> bool:
    """Return whether a model's tokenizer needs a trial before it is loaded into memory: loading may
    take longer than the size of its files suggests.

    That happens if they are converted, or if its class receives a number that it may count to.
    """
    if "tokenizer.json" not in snapshot.files:
        return True
    for _, key, value in entries(Dict(snapshot.length_files.get(TOKENIZER_CONFIG, {}))):
        if key in LENGTHS_OF_TOKENIZERS:
            continue
        if any(type(item) in (int, float) and item > COUNTED for item in flat(value)):
            return True
    return False


@contextmanager
def tokenizer_panics_refused(model: str, what: str) -> Iterator[None]:
    """Turn a panic of `tokenizers`, which is no Exception, into an InputError that the tokenizer
    loaded with a model cannot read `what`."""
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
