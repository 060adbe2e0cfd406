"""Raise the length limits in the files next to config.json, and clear the stored truncation of
tokenizer.json.

tokenizer.json can have tens of megabytes, and thirty times as much as Python objects. So one
regular expression reads it, one member of its top level at a time. Clearing the truncation replaces
only the bytes of that value.
"""

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ropext.base.errors import InputError
from ropext.base.inputs import read_bytes
from ropext.base.jsontext import CONFIG_DEPTH_LIMIT, Json, parse_object
from ropext.files.checkpoint.snapshot import (
    GENERATION_CONFIG,
    SENTENCE_CONFIG,
    TOKENIZER_CONFIG,
    Snapshot,
)
from ropext.scaling.rope import Edit

TOKENIZER = "tokenizer.json"

# transformers writes int(1e30) if a tokenizer has no limit; a number this large is no limit.
NO_LIMIT = 10**15

LIMIT = 256 * 10**6  # bytes; the largest real one has 35 million
VALUE_LIMIT = 1 << 16  # bytes of a truncation value; real ones have a hundred

_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_BARE_WORD = rb'[^\s"{}\[\]:,]++'
# All text up to the next bracket outside a string, or to a string that does not end.
_PLAIN = rb'[^"{}\[\]]*+(?:' + _STRING + rb'[^"{}\[\]]*+)*+'


_OPENING = re.compile(rb"\s*+\{\s*+(?P<end>\})?+")


@cache
def _member() -> re.Pattern[bytes]:
    """Return the expression of one member of tokenizer.json's top level and the mark that ends it.
    Each part is optional: if the text is no JSON, the match ends at the first wrong byte."""
    inside = b""  # the content of an object or array: others, nested to the limit
    for _ in range(CONFIG_DEPTH_LIMIT):
        inside = rb"(?:[{\[]" + _PLAIN + inside + rb"[}\]]" + _PLAIN + rb")*+"
    nested = rb"[{\[]" + _PLAIN + inside + rb"[}\]]"
    value = _STRING + b"|" + nested + b"|" + _BARE_WORD
    return re.compile(
        rb"\s*+(?:(?P<key>" + _STRING + rb")\s*+(?::\s*+(?:(?P<value>" + value + rb")\s*+"
        rb"(?P<end>[,}])?+)?+)?+)?+",
        re.DOTALL,
    )


def length_edits(
    snapshot: Snapshot, context: int, target: int
) -> tuple[tuple[Edit, ...], tuple[str, ...]]:
    """Open tokenizer.json, and return (edits, notes on limits left alone) for it and other files
    next to a checkpoint's config.json; after = None clears a value.

    A tokenizer's limit below the target is raised; a missing or huge limit stays. A stored
    truncation below the target is cleared. A limit on generation or on sentence embeddings below
    the trained context was somebody's choice and stays.
    """
    edits: list[Edit] = []
    notes: list[str] = []
    for file, key, lowest in (
        (TOKENIZER_CONFIG, "model_max_length", 0),
        (GENERATION_CONFIG, "max_length", context),
        (SENTENCE_CONFIG, "max_seq_length", context),
    ):
        value = snapshot.length_files.get(file, {}).get(key)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or value < -NO_LIMIT:
            raise InputError(f"{file}: {key} is {str(value)[:40]!r}; expected a number")
        if value >= min(target, NO_LIMIT):
            continue
        if value >= lowest:
            edits.append(Edit(key, value, target, file))
        else:
            notes.append(
                f"{file} keeps {key} {value:g}: it was below the trained context ({context}) "
                "already"
            )
    truncation = find_truncation(snapshot.path(TOKENIZER)) if TOKENIZER in snapshot.files else None
    if truncation is not None and not _reaches(truncation.value, target):
        edits.append(Edit("truncation", truncation.value, None, TOKENIZER))
    return tuple(edits), tuple(notes)


def _reaches(truncation: dict[str, Json], target: int) -> bool:
    """Return True if the truncation of a tokenizer.json cuts no text within the target length."""
    longest = truncation.get("max_length")
    return type(longest) is int and longest >= target


@dataclass(frozen=True)
class Span:
    """A value in a file: its first byte, the byte after its last, and its content."""

    start: int
    end: int
    value: dict[str, Json]


def find_truncation(path: Path) -> Span | None:
    """Return the truncation stored in a tokenizer.json, or None if it is null or absent."""
    text = read_bytes(path, LIMIT)
    opening = _OPENING.match(text)
    if opening is None:
        raise InputError(_cut(path) if not text.strip() else f"{path} is not a JSON object")
    at = opening.end()
    last = opening["end"]
    while last != b"}":
        member = _member().match(text, at)
        assert member is not None  # each of its parts is optional
        if member["end"] is None:
            raise _no_member(member, path)
        try:
            key = json.loads(member["key"])
        except ValueError:  # an escape that JSON does not have
            raise InputError(f"{path} is not valid JSON at its top level") from None
        if key == "truncation" and member["value"] != b"null":
            return _span(member, path)
        at = member.end()
        last = member["end"]
    return None


def _span(member: re.Match[bytes], path: Path) -> Span:
    """Return the bytes of tokenizer.json that hold its truncation, and their content. Raise
    InputError if they are too many."""
    value = member["value"]
    if len(value) > VALUE_LIMIT:
        raise InputError(f"{path}: its truncation has {len(value):,} bytes")
    content = parse_object(value, f"the truncation in {path}")
    return Span(member.start("value"), member.end("value"), content)


def _no_member(member: re.Match[bytes], path: Path) -> InputError:
    """Return the error for a member of tokenizer.json that ends too early."""
    at = member.end()
    following = member.string[at : at + 1]
    if following in (b"", b'"'):
        return InputError(_cut(path))
    if following in (b"{", b"[") and member["key"] and not member["value"]:
        return InputError(f"{_cut(path)}, or is nested more than {CONFIG_DEPTH_LIMIT} levels deep")
    return InputError(f"{path} is not valid JSON at byte {at + 1}")


def _cut(path: Path) -> str:
    """Return the message for a tokenizer.json that ends inside a value."""
    return f"{path} is cut short: the JSON ends inside a value"


def clear_truncation(source: Path, target: Path, span: Span) -> None:
    """Copy a tokenizer.json with `null` in place of its truncation. Every other byte stays."""
    text = read_bytes(source, LIMIT)
    with open(target, "xb") as out:
        for part in (text[: span.start], b"null", text[span.end :]):
            out.write(part)
