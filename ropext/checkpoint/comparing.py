"""The file side of `verify`: are these the base's weights?"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ropext.checkpoint import headers
from ropext.checkpoint.jsontext import open_regular
from ropext.checkpoint.provenance import WeightFile
from ropext.checkpoint.snapshot import Snapshot
from ropext.errors import InputError

CHUNK = 4 << 20  # bytes of each of two files compared at once


@dataclass(frozen=True)
class Finding:
    """What one weight file turned out to be. `how` says how far it was looked at."""

    file: str
    same: bool | None  # None: its bytes were asked about and never recorded
    how: str  # "same file" | "bytes" | "sha256" | "header and size"
    sentence: str


def compare_weights(
    base: Snapshot | Mapping[str, WeightFile], directory: Path, *, deep: bool = False
) -> tuple[Finding, ...]:
    """Compare every weight file with the base's own, or with what a record says about it.

    By size and header; with `deep` by every byte. Against a record that is the SHA-256 in it, or
    the one that the hub's cache named the file by; where there is neither, nothing is known. Two
    names of one file are the same without reading.
    """
    names = base.weight_files if isinstance(base, Snapshot) else sorted(base)
    findings = []
    for name in names:
        path = directory / name
        if not path.exists():
            findings.append(Finding(name, False, "header and size", f"{name} is missing"))
        elif isinstance(base, Snapshot):
            findings.append(_with_file(name, base.path(name), path, deep))
        else:
            findings.append(_with_record(name, base[name], path, deep))
    return (*findings, *_extra(set(names), directory))


def _extra(names: set[str], directory: Path) -> list[Finding]:
    there = {path.name for path in directory.glob("*.safetensors")}
    return [
        Finding(name, False, "header and size", f"{name} is not one of the base's weight files")
        for name in sorted(there - names)
    ]


def _with_file(name: str, base: Path, path: Path, deep: bool) -> Finding:
    if headers.same_inode(base, path):
        return Finding(name, True, "same file", f"{name} is the base's own file")
    old, new = headers.read_header(base), headers.read_header(path)
    if difference := _difference(name, WeightFile(old.size, old.digest), new):
        return difference
    if not deep:
        return Finding(name, True, "header and size", f"{name} has the base's header and size")
    place = first_difference(base, path)
    if place is None:
        return Finding(name, True, "bytes", f"{name} equals the base's file in every byte")
    return Finding(name, False, "bytes", f"{name} differs from the base's file at byte {place:,}")


def _with_record(name: str, record: WeightFile, path: Path, deep: bool) -> Finding:
    new = headers.read_header(path)
    if difference := _difference(name, record, new):
        return difference
    if not deep:
        return Finding(name, True, "header and size", f"{name} has the recorded header and size")
    recorded = record.sha256 or headers.blob_digest(path)
    if recorded is None:
        how, sentence = "header and size", f"the bytes of {name} were never recorded"
        return Finding(name, None, how, sentence)
    same = headers.content_digest(path) == recorded
    verb = "has" if same else "does not have"
    return Finding(name, same, "sha256", f"{name} {verb} the recorded SHA-256")


def _difference(name: str, old: WeightFile, new: headers.Header) -> Finding | None:
    def finding(sentence: str) -> Finding:
        return Finding(name, False, "header and size", sentence)

    if new.size != old.size:
        return finding(f"{name} has {new.size:,} bytes, the base's {old.size:,}")
    if new.digest != old.header_sha256:
        return finding(f"{name} has another header than the base's: names, shapes or types differ")
    return None


def first_difference(one: Path, two: Path) -> int | None:
    """The first byte at which two files of one size differ, or None."""
    with open(open_regular(one), "rb") as a, open(open_regular(two), "rb") as b:
        if os.fstat(a.fileno()).st_size != os.fstat(b.fileno()).st_size:
            raise InputError(f"{one} and {two} have different sizes")
        passed = 0
        while chunk := a.read(CHUNK):
            other = b.read(CHUNK)
            if chunk != other:
                pairs = zip(chunk, other, strict=False)
                return passed + next(i for i, (x, y) in enumerate(pairs) if x != y)
            passed += len(chunk)
    return None
