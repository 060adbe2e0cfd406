"""Lengths that the files beside config.json cap, and tokenizer.json's stored truncation.

tokenizer.json can have tens of megabytes and would take thirty times as much as Python objects, so
it is scanned at its top level; clearing the truncation replaces that value's bytes and no other.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropext.checkpoint.snapshot import Snapshot
from ropext.errors import InputError
from ropext.inputs import read_bytes
from ropext.jsontext import parse_object
from ropext.rope import Edit

TOKENIZER = "tokenizer.json"

# transformers writes int(1e30) where a tokenizer has no limit; anything of that kind is no limit.
NO_LIMIT = 10**15

LIMIT = 256 * 10**6  # bytes; the largest real one has 35 million
VALUE_LIMIT = 1 << 16  # bytes of a truncation value; real ones have a hundred

_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_TOKEN = re.compile(rb"\s*+(" + _STRING + rb'|[{}\[\]:,]|[^\s"{}\[\]:,]++)', re.DOTALL)
# Everything up to the next bracket outside a string (or to a string that does not end).
_SKIP = re.compile(rb'[^"{}\[\]]*+(?:' + _STRING + rb'[^"{}\[\]]*+)*+', re.DOTALL)


def length_edits(
    snapshot: Snapshot, context: int, target: int
) -> tuple[tuple[Edit, ...], tuple[str, ...]]:
    """(edits, notes on limits left alone) for the files beside config.json; after = None clears.

    A tokenizer's limit below the target is raised, its missing or huge one left; a stored
    truncation below it is cleared. A limit on
    generation or on sentence embeddings below the trained context was somebody's choice and stays.
    """
    edits: list[Edit] = []
    notes: list[str] = []
    for file, key, content, lowest in (
        ("tokenizer_config.json", "model_max_length", snapshot.tokenizer_config, 0),
        ("generation_config.json", "max_length", snapshot.generation_config, context),
        ("sentence_bert_config.json", "max_seq_length", snapshot.sentence_bert_config, context),
    ):
        value = _length(file, key, content or {})
        if value is None or value >= target:
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


def _reaches(truncation: dict[str, Any], target: int) -> bool:
    """Whether a stored truncation cuts nothing that the model reads."""
    longest = truncation.get("max_length")
    return type(longest) is int and longest >= target


def _length(file: str, key: str, content: dict[str, Any]) -> float | None:
    value = content.get(key)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or value < -NO_LIMIT:
        raise InputError(f"{file}: {key} is {str(value)[:40]!r}, where a number is expected")
    return None if value >= NO_LIMIT else value


@dataclass(frozen=True)
class Span:
    """Where a value stands in a file, in bytes, and what it is."""

    start: int
    end: int
    value: dict[str, Any]


def find_truncation(path: Path) -> Span | None:
    """The truncation stored in a tokenizer.json, or None where it is null or absent."""
    text = read_bytes(path, LIMIT)
    scan = _Scan(text, path)
    scan.expect(b"{")
    token = scan.token()
    while token != b"}":
        key = token
        scan.expect(b":")
        start, end = scan.value()
        try:
            name = json.loads(key)
        except ValueError:
            raise InputError(f"{path} is not valid JSON at its top level") from None
        if name == "truncation" and text[start:end] != b"null":
            if end - start > VALUE_LIMIT:
                raise InputError(f"{path}: its truncation has {end - start:,} bytes")
            value = parse_object(text[start:end], f"the truncation in {path}")
            return Span(start, end, value)
        token = scan.token()
        if token == b",":
            token = scan.token()
    return None


def clear_truncation(source: Path, target: Path, span: Span) -> None:
    """Copy a tokenizer.json with `null` in place of its truncation, every other byte as it was."""
    text = read_bytes(source, LIMIT)
    with open(target, "xb") as out:
        for part in (text[: span.start], b"null", text[span.end :]):
            out.write(part)


class _Scan:
    """The top level of a JSON object, one token at a time."""

    def __init__(self, text: bytes, path: Path) -> None:
        self.text = text
        self.path = path
        self.position = 0

    def token(self) -> bytes:
        """The next string, bracket, comma, colon or bare word."""
        match = _TOKEN.match(self.text, self.position)
        if match is None:
            raise self._cut()
        self.position = match.end()
        return match[1]

    def expect(self, wanted: bytes) -> None:
        if self.token() != wanted:
            raise InputError(f"{self.path} is not a JSON object")

    def value(self) -> tuple[int, int]:
        """Skip one value; where it begins and ends."""
        token = self.token()
        start = self.position - len(token)
        if token in (b"}", b"]", b",", b":"):
            raise InputError(f"{self.path} is not valid JSON at byte {start + 1}")
        depth = int(token in (b"{", b"["))
        while depth:
            match = _SKIP.match(self.text, self.position)
            end = match.end() if match else self.position
            if self.text[end : end + 1] in (b"", b'"'):
                raise self._cut()
            depth += 1 if self.text[end : end + 1] in (b"{", b"[") else -1
            self.position = end + 1
        return start, self.position

    def _cut(self) -> InputError:
        return InputError(f"{self.path} is cut short: the JSON ends inside a value")
