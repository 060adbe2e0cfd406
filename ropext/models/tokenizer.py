"""The tokenizer beside a model, tried in a process of its own before it is loaded here."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ropext.checkpoint import Snapshot
from ropext.errors import InputError
from ropext.families.config import Dict, flat, parts
from ropext.models.sandbox import try_class, try_tokenizer

# Keys of tokenizer_config.json that no class counts to, and what others are counted to at once.
LENGTHS_OF_TOKENIZERS = ("model_max_length", "max_length")
COUNTED = 10_000


def load_tokenizer(snapshot: Snapshot, trust_remote_code: bool) -> Any:
    """The tokenizer that lies beside the model."""
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
