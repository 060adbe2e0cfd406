"""Read a ropext.json, which may come from anyone: every type in it is checked."""

import os
import re
from pathlib import Path
from typing import Any

from ropext.checkpoint.jsontext import read_object
from ropext.checkpoint.provenance import (
    NAME,
    SCHEMA,
    TRAINED_ON,
    Record,
    SiteRecord,
    WeightFile,
    with_training,
)
from ropext.checkpoint.snapshot import is_plain_name
from ropext.errors import InputError
from ropext.rope import Spectrum


def read_record(directory: Path) -> Record | None:
    """The record in a directory, or None where there is none. Each spectrum in it must have the
    digest that stands beside it."""
    path = directory / NAME
    if not os.path.lexists(path):
        return None
    content = read_object(path)
    schema = content.get("schema")
    if schema != SCHEMA:
        raise InputError(
            f"{path} has schema {str(schema)[:20]}, this ropext reads {SCHEMA}; use the version "
            "that wrote it"
        )
    reader = _Reader(path)
    known = {key: content.pop(key, None) for key in _KNOWN}
    return Record(
        base=reader.object("base", known["base"]),
        method=reader.text("method", known["method"]),
        knobs=reader.object("knobs", known["knobs"]),
        context=reader.count("context", known["context"], least=1),
        target=reader.count("target", known["target"], least=1),
        sites=tuple(map(reader.site, reader.array("sites", known["sites"]))),
        edits=tuple(reader.object("edits", edit) for edit in reader.array("edits", known["edits"])),
        weights=reader.weights(known["weights"]),
        recipe=reader.object("recipe", known["recipe"]),
        command=tuple(reader.text("command", w) for w in reader.array("command", known["command"])),
        versions=reader.object("versions", known["versions"]),
        proof=None if known["proof"] is None else reader.object("proof", known["proof"]),
        more=content,
    )


def inherited_training(directory: Path) -> dict[str, Any]:
    """The section of what was trained on, for the record of a checkpoint that is made of this
    one."""
    try:
        record = read_record(directory)
    except InputError:
        return {TRAINED_ON: {"not_recorded": ["its base's record cannot be read"]}}
    known = with_training(record).get(TRAINED_ON) if record else None
    return {TRAINED_ON: known} if known else {}


_KNOWN = (
    "schema", "versions", "base", "method", "knobs", "context", "target", "sites", "edits",
    "weights", "recipe", "command", "proof",
)  # fmt: skip


class _Reader:
    """Checked values out of a ropext.json, each wrong one named in the error."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def wrong(self, key: str, wanted: str) -> InputError:
        return InputError(f"{self.path} is damaged: {key} is not {wanted}")

    def object(self, key: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return value

    def array(self, key: str, value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise self.wrong(key, "an array")
        return value

    def text(self, key: str, value: Any) -> str:
        if not isinstance(value, str):
            raise self.wrong(key, "a text")
        return value

    def count(self, key: str, value: Any, least: int = 0) -> int:
        if type(value) is not int or not least <= value < 1 << 63:
            raise self.wrong(key, f"a whole number of at least {least}")
        return value

    def number(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, "a number")
        try:
            return float(value)
        except OverflowError:
            raise self.wrong(key, "a number that a float holds") from None

    def numbers(self, key: str, value: Any) -> tuple[float, ...]:
        return tuple(self.number(key, item) for item in self.array(key, value))

    def hash(self, key: str, value: Any) -> str:
        if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{64}", value):
            raise self.wrong(key, "a SHA-256 in hexadecimal")
        return value

    def weights(self, value: Any) -> dict[str, WeightFile]:
        found = {}
        for name, entry in self.object("weights", value).items():
            if not is_plain_name(name):
                raise self.wrong(f"weights: {name[:80]!r}", "a plain file name")
            entry = self.object("weights", entry)
            sha256 = entry.get("sha256")
            found[name] = WeightFile(
                self.count("size", entry.get("size")),
                self.hash("header_sha256", entry.get("header_sha256")),
                None if sha256 is None else self.hash("sha256", sha256),
            )
        return found

    def site(self, value: Any) -> SiteRecord:
        entry = self.object("sites", value)
        return SiteRecord(
            label=self.text("label", entry.get("label")),
            dim=self.count("dim", entry.get("dim")),
            context=self.count("context", entry.get("context")),
            base=self.spectrum(entry.get("base")),
            spectrum=self.spectrum(entry.get("spectrum")),
            params=self.object("params", entry.get("params")),
            scaled=entry.get("scaled") is not False,
        )

    def spectrum(self, value: Any) -> Spectrum:
        entry = self.object("spectrum", value)
        short = entry.get("short_inv_freq")
        found = Spectrum(
            self.numbers("inv_freq", entry.get("inv_freq")),
            self.number("attention_factor", entry.get("attention_factor")),
            self.number("softmax_factor", entry.get("softmax_factor")),
            None if short is None else self.numbers("short_inv_freq", short),
            0 if short is None else self.count("short_context", entry.get("short_context")),
        )
        if found.digest() != entry.get("digest"):
            raise InputError(f"{self.path} is damaged: a spectrum does not have its digest")
        return found
