"""Are these the base's weights: by header and size, or equal in every byte."""

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ropext.checkpoint.snapshot import Snapshot
from ropext.checkpoint.weights import (
    Header,
    WeightFile,
    blob_digest,
    chunks,
    content_digest,
    read_header,
)
from ropext.errors import InputError
from ropext.files import open_regular
from ropext.narration import Show, unseen


@dataclass(frozen=True)
class Finding:
    """What one weight file turned out to be. `how` says how far it was looked at."""

    file: str
    same: bool | None  # None: its bytes were asked about and never recorded
    how: str  # "same file" | "bytes" | "sha256" | "header and size"
    sentence: str


def compare_weights(
    base: Snapshot | Mapping[str, WeightFile],
    directory: Path,
    *,
    deep: bool = False,
    show: Show = unseen,
) -> tuple[Finding, ...]:
    """Compare every weight file with the base's own, or with what a record says about it.

    By size and header; with `deep` by every byte. Against a record that is the SHA-256 in it, or
    the one that the hub's cache named the file by; where there is neither, nothing is known. Two
    names of one file are the same without reading.
    """
    names = base.weight_files if isinstance(base, Snapshot) else sorted(base)
    originals = [base.path(n) if isinstance(base, Snapshot) else base[n] for n in names]
    findings = [
        _compare(original, directory / name, deep, show)
        for name, original in zip(names, originals, strict=True)
    ]
    extra = sorted({path.name for path in directory.glob("*.safetensors")} - set(names))
    said = "is not one of the base's weight files"
    return (*findings, *(Finding(n, False, "header and size", f"{n} {said}") for n in extra))


def _compare(base: Path | WeightFile, path: Path, deep: bool, show: Show) -> Finding:
    """One file against the base's own or its record."""
    name = path.name

    def finding(same: bool, said: str, how: str = "header and size") -> Finding:
        return Finding(name, same, how, f"{name} {said}")

    if not path.exists():
        return finding(False, "is missing")
    if isinstance(base, Path) and same_inode(base, path):
        return finding(True, "is the base's own file", "same file")
    header, new = read_header(base) if isinstance(base, Path) else base, read_header(path)
    digest = header.digest if isinstance(header, Header) else header.header_sha256
    if new.size != header.size:
        return finding(False, f"has {new.size:,} bytes, the base's {header.size:,}")
    if new.digest != digest:
        return finding(False, "has another header than the base's: names, shapes or types differ")
    if not deep:
        owner = "base's" if isinstance(base, Path) else "recorded"
        return finding(True, f"has the {owner} header and size")
    if isinstance(base, Path):
        place = first_difference(base, path, show)
        if place is None:
            return finding(True, "equals the base's file in every byte", "bytes")
        return finding(False, f"differs from the base's file at byte {place:,}", "bytes")
    recorded = base.sha256 or blob_digest(path)
    if recorded is None:
        return Finding(name, None, "header and size", f"the bytes of {name} were never recorded")
    same = content_digest(path, show) == recorded
    return finding(same, f"{'has' if same else 'does not have'} the recorded SHA-256", "sha256")


def same_inode(one: Path, two: Path) -> bool:
    """Whether two names are one file on the disk (hard links, or a link and what it points to)."""
    a, b = os.stat(one), os.stat(two)
    return stat.S_ISREG(a.st_mode) and (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)


def first_difference(one: Path, two: Path, show: Show = unseen) -> int | None:
    """The first byte at which two files of one size differ, or None."""
    with open(open_regular(one), "rb") as a, open(open_regular(two), "rb") as b:
        if os.fstat(a.fileno()).st_size != os.fstat(b.fileno()).st_size:
            raise InputError(f"{one} and {two} have different sizes")
        passed = 0
        for chunk in chunks(a, f"comparing {two.name}", show):
            other = b.read(len(chunk))
            if chunk != other:
                pairs = zip(chunk, other, strict=False)
                return passed + next(i for i, (x, y) in enumerate(pairs) if x != y)
            passed += len(chunk)
    return None
