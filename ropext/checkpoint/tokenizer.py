"""Lengths that the files beside config.json cap, and tokenizer.json's stored truncation.

tokenizer.json can have tens of megabytes, so it is scanned at its top level and never parsed whole;
clearing the truncation replaces that value's bytes and no other.
"""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ropext.checkpoint.snapshot import Snapshot
from ropext.errors import InputError
from ropext.files import open_regular, parse_object

TOKENIZER = "tokenizer.json"

# transformers writes int(1e30) where a tokenizer has no limit; anything of that kind is no limit.
NO_LIMIT = 10**15

CHUNK = 1 << 20  # bytes read at once
STRING_LIMIT = 32 << 20  # bytes; the longest real one is a normaliser's table of some megabytes
VALUE_LIMIT = 1 << 16  # bytes of a truncation value; real ones have a hundred

_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_TOKEN = re.compile(rb"\s*+(" + _STRING + rb'|[{}\[\]:,]|[^\s"{}\[\]:,]++)', re.DOTALL)
# Everything up to the next bracket outside a string (or to a string that the buffer cuts).
_SKIP = re.compile(rb'[^"{}\[\]]*+(?:' + _STRING + rb'[^"{}\[\]]*+)*+', re.DOTALL)


@dataclass(frozen=True)
class LengthEdit:
    """One length that an extension raises, or a truncation that it clears (after = None)."""

    file: str
    key: str
    before: Any
    after: Any


def length_edits(
    snapshot: Snapshot, context: int, target: int
) -> tuple[tuple[LengthEdit, ...], tuple[str, ...]]:
    """(edits, notes on limits left alone) for the files beside config.json.

    A tokenizer's limit below the target is raised, its missing or huge one left. A limit on
    generation or on sentence embeddings below the trained context was somebody's choice and stays.
    """
    edits: list[LengthEdit] = []
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
            edits.append(LengthEdit(file, key, value, target))
        else:
            notes.append(
                f"{file} keeps {key} {value:g}: it was below the trained context ({context}) "
                "already"
            )
    truncation = find_truncation(snapshot.path(TOKENIZER)) if TOKENIZER in snapshot.files else None
    if truncation is not None:
        edits.append(LengthEdit(TOKENIZER, "truncation", truncation.value, None))
    return tuple(edits), tuple(notes)


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
    with open(open_regular(path), "rb") as file:
        scan = _Scan(file, path)
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
            if name == "truncation":
                return _span(file, start, end, path)
            token = scan.token()
            if token == b",":
                token = scan.token()
    return None


def clear_truncation(source: Path, target: Path, span: Span) -> None:
    """Copy a tokenizer.json with `null` in place of its truncation, every other byte as it was."""
    with open(open_regular(source), "rb") as file, open(target, "xb") as out:
        _copy(file, out, span.start)
        out.write(b"null")
        file.seek(span.end)
        _copy(file, out, os.fstat(file.fileno()).st_size - span.end)


def _copy(file: BinaryIO, out: BinaryIO, length: int) -> None:
    while length > 0 and (chunk := file.read(min(CHUNK, length))):
        out.write(chunk)
        length -= len(chunk)


def _span(file: BinaryIO, start: int, end: int, path: Path) -> Span | None:
    if end - start > VALUE_LIMIT:
        raise InputError(f"{path}: its truncation has {end - start:,} bytes")
    file.seek(start)
    text = file.read(end - start)
    if text == b"null":
        return None
    return Span(start, end, parse_object(text, f"the truncation in {path}"))


class _Scan:
    """The top level of a JSON object in a file, one token at a time, in constant memory."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file = file
        self.path = path
        self.buffer = b""
        self.position = 0  # in the buffer
        self.passed = 0  # bytes of the file before the buffer
        self.ended = False

    def token(self) -> bytes:
        """The next string, bracket, comma, colon or bare word."""
        while True:
            match = _TOKEN.match(self.buffer, self.position)
            # A word that touches the buffer's end may go on in the next chunk.
            if match and (match.end() < len(self.buffer) or self.ended):
                self.position = match.end()
                return match[1]
            self._more()

    def expect(self, wanted: bytes) -> None:
        if self.token() != wanted:
            raise InputError(f"{self.path} is not a JSON object")

    def value(self) -> tuple[int, int]:
        """Skip one value; where it begins and ends in the file."""
        token = self.token()
        end = self.passed + self.position
        start = end - len(token)
        if token in (b"{", b"["):
            self._skip_brackets()
            end = self.passed + self.position
        elif token in (b"}", b"]", b",", b":"):
            raise InputError(f"{self.path} is not valid JSON at byte {start + 1}")
        return start, end

    def _skip_brackets(self) -> None:
        depth = 1
        while depth:
            match = _SKIP.match(self.buffer, self.position)
            if match:
                self.position = match.end()
            bracket = self.buffer[self.position : self.position + 1]
            if bracket in (b"", b'"'):
                self._more()
                continue
            depth += 1 if bracket in (b"{", b"[") else -1
            self.position += 1

    def _more(self) -> None:
        if self.ended:
            raise InputError(f"{self.path} is cut short: the JSON ends inside a value")
        rest = self.buffer[self.position :]
        if len(rest) > STRING_LIMIT:
            raise InputError(f"{self.path} holds a string of more than {STRING_LIMIT:,} bytes")
        self.passed += self.position
        chunk = self.file.read(CHUNK)
        self.ended = not chunk
        self.buffer, self.position = rest + chunk, 0
