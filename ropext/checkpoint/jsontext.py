"""JSON from strangers: read strictly and within limits, written as transformers writes it."""

import json
import math
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ropext.errors import InputError

# Bytes. Refused before parsing: parsed JSON takes up to thirty times the memory of its text.
CONFIG_LIMIT = 16 * 10**6
INDEX_LIMIT = 128 * 10**6

# Objects and arrays in one file. The largest real configs (added tokens, quantiser groups) hold
# some ten thousand; 16 MB of "{}" would be five million Python objects.
CONTAINER_LIMIT = 500_000

# Real configs nest five deep. Anything near Python's recursion limit would fail in later steps.
DEPTH_LIMIT = 64


def open_regular(path: Path) -> int:
    """A file descriptor of a regular file, reached through links or not; anything else is refused.

    O_NONBLOCK: opening a FIFO without a writer would otherwise hang before it can be looked at.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InputError(f"{path} is not a regular file (nor a link to one), so it is not read")
    return descriptor


def read_bytes(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes."""
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(limit + 1) if size <= limit else b""
    if size > limit or len(data) > limit:
        raise InputError(
            f"{path} has {max(size, len(data)):,} bytes, more than the {limit // 10**6} MB that a "
            "file of its kind may have"
        )
    return data


def read_object(path: Path, limit: int = CONFIG_LIMIT) -> dict[str, Any]:
    """The JSON object in a file; everything else about it is an InputError of one sentence."""
    return parse_object(read_bytes(path, limit), str(path))


def parse_object(data: bytes, name: str, containers: int = CONTAINER_LIMIT) -> dict[str, Any]:
    """The JSON object in `data`. Duplicate keys, NaN, Infinity and depth bombs are refused.

    transformers' {"__float__": "Infinity"} is an object like any other and stays one.
    """
    if data.count(b"{") + data.count(b"[") > containers:
        raise InputError(f"{name} holds more than {containers:,} objects and arrays")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8 text (byte {error.start + 1})") from None
    try:
        value = json.loads(
            text,
            parse_constant=lambda token: _refuse(f"{token} is not a JSON number"),
            parse_float=_finite,
            object_pairs_hook=_unique,
        )
    except json.JSONDecodeError as error:
        raise InputError(_describe(error, text, name)) from None
    except RecursionError:
        raise InputError(f"{name} is nested too deeply to be a config") from None
    except ValueError as error:  # our own refusals, and an integer of more than 4300 digits
        raise InputError(f"{name} is not valid: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"{name} holds a JSON {_kind(value)}, where an object is expected")
    _check_depth(value, name)
    return value


def _refuse(reason: str) -> Any:
    raise ValueError(reason)


def _finite(token: str) -> float:
    value = float(token)
    if math.isinf(value):
        raise ValueError(f"{token[:40]} is too large for a number")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key[:80]!r} stands twice in one object")
            seen.add(key)
    return found


def _kind(value: object) -> str:
    if isinstance(value, list):
        return "array"
    return "null" if value is None else type(value).__name__


def _describe(error: json.JSONDecodeError, text: str, name: str) -> str:
    if not text.strip():
        return f"{name} is empty, where a JSON object is expected"
    where = f"line {error.lineno}, column {error.colno}"
    if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated"):
        return f"{name} is cut short: the JSON ends inside a value ({where})"
    return f"{name} is not valid JSON: {error.msg} ({where})"


def _check_depth(value: Mapping[str, Any], name: str) -> None:
    level: list[Any] = [value]
    for _ in range(DEPTH_LIMIT):
        level = [child for item in level for child in _children(item)]
        if not level:
            return
    raise InputError(f"{name} is nested more than {DEPTH_LIMIT} levels deep")


def _children(value: Any) -> Iterable[Any]:
    inner = value.values() if isinstance(value, dict) else value
    return [item for item in inner if isinstance(item, dict | list)]


def dump(value: Mapping[str, Any]) -> bytes:
    """JSON as transformers writes it, but in the order of the keys: indent 2, a final newline."""
    value = _tagged(value)
    try:
        return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
    except UnicodeEncodeError:  # a lone surrogate, legal in JSON only as an escape
        return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()


def _tagged(value: Any) -> Any:
    """Infinity, which JSON lacks, as transformers spells it. A channel that never turns is a
    longrope factor of infinity."""
    if isinstance(value, Mapping):
        return {key: _tagged(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_tagged(item) for item in value]
    return {"__float__": "Infinity"} if value == math.inf else value
