"""Hash weight files, and compare them with the base's by header and size or in every byte."""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from ropext.base import guard
from ropext.base.errors import InputError
from ropext.base.inputs import open_regular
from ropext.base.narration import Show, no_progress
from ropext.files.checkpoint.snapshot import Snapshot
from ropext.files.checkpoint.tensors import Header, read_header

CHUNK = 4 << 20  # bytes per read, from each of two compared files
Parts = Iterable[tuple[int, int]]  # of a file: the first byte of each, and the byte after its last


def content_digest(path: Path, show: Show = no_progress, parts: Parts | None = None) -> str:
    """Return the SHA-256 of a weight file, or of these parts of it, read in chunks."""
    digest = hashlib.sha256()
    for chunk in _chunks(path, f"hashing {path.name}", show, parts):
        digest.update(chunk)
    return digest.hexdigest()


def _chunks(path: Path, what: str, show: Show, parts: Parts | None = None) -> Iterator[bytes]:
    """Yield the bytes of a weight file or of parts of it, CHUNK bytes at a time, and show the
    progress."""
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        for done, end in ((0, size),) if parts is None else parts:
            file.seek(done)
            show(done, size, what)
            while chunk := file.read(min(CHUNK, end - done)):
                yield chunk
                done += len(chunk)
                show(done, size, what)
            if done < end:
                raise InputError(f"{path} shrank while it was read")


def blob_digest(path: Path) -> str | None:
    """Return the SHA-256 that names a large file in the hub's cache, or None for any other file."""
    real = Path(os.path.realpath(path))
    if real.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", real.name):
        return real.name
    return None


def known_digest(path: Path) -> str | None:
    """Return the SHA-256 of a weight file if it is known without reading the file, else None. Its
    name in the hub's cache tells it, or the record of the output of ropext that holds the file."""
    return blob_digest(path) or guard.listed_digest(path)


Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True)
class WeightFile:
    """The identity of one weight file: by size and header, and with `sha256` by its bytes too."""

    size: Count
    header_sha256: Sha256
    sha256: Sha256 | None = None


def identify_weights(path: Path, *, content: bool = False, show: Show = no_progress) -> WeightFile:
    """Return the identity of one safetensors file. Its content is hashed only with `content`;
    otherwise the SHA-256 comes from its name in the hub's cache, if it has one."""
    header = read_header(path)
    header.tensors  # noqa: B018 - raises if the file is cut short or its table damaged
    sha256 = content_digest(path, show) if content else blob_digest(path)
    return WeightFile(header.size, header.digest, sha256)


@dataclass(frozen=True)
class Finding:
    """The result of comparing one weight file. `how` names the comparison."""

    file: str
    same: bool | None  # None: a deep comparison found no recorded SHA-256
    sentence: str
    how: str = "header and size"  # or "same file", "bytes", "sha256"


def compare_weights(
    base: Snapshot | Mapping[str, WeightFile],
    directory: Path,
    *,
    deep: bool = False,
    show: Show = no_progress,
) -> tuple[Finding, ...]:
    """Compare every weight file of a written checkpoint with the base's own, or with its entry in
    the written ropext.json.

    The comparison is by size and header; with `deep`, by every byte. Against a record, `deep` uses
    the recorded SHA-256, or the SHA-256 that names the file in the hub's cache. If there is
    neither, `same` is None. Two names of one file are the same without reading.
    """
    names = base.weight_files if isinstance(base, Snapshot) else sorted(base)
    originals = [base.path(n) if isinstance(base, Snapshot) else base[n] for n in names]
    findings = [
        _compare(original, directory / name, deep, show)
        for name, original in zip(names, originals, strict=True)
    ]
    extra = sorted({path.name for path in directory.glob("*.safetensors")} - set(names))
    for name in extra:
        findings.append(Finding(name, False, f"{name} is not one of the base's weight files"))
    return tuple(findings)


def _compare(base: Path | WeightFile, path: Path, deep: bool, show: Show) -> Finding:
    """Compare one safetensors file with the base's own file or its entry in ropext.json."""
    name = path.name
    if not path.exists():
        return Finding(name, False, f"{name} is missing")
    if isinstance(base, Path) and base.samefile(path):
        return Finding(name, True, f"{name} is the base's own file", "same file")
    if isinstance(base, WeightFile) and base.sha256 and path.is_symlink():
        now = known_digest(path)
        if now not in (None, base.sha256):
            said = "leads to a file with other bytes than when the record was written"
            return Finding(name, False, f"{name} {said}", "sha256")
    header = read_header(base) if isinstance(base, Path) else base
    new = read_header(path)
    digest = header.digest if isinstance(header, Header) else header.header_sha256
    if new.size != header.size:
        said = f"{name} has {new.size:,} bytes, the base's {header.size:,}"
        return Finding(name, False, said)
    if new.digest != digest:
        said = "has another header than the base's: names, shapes or types differ"
        return Finding(name, False, f"{name} {said}")
    if not deep:
        owner = "base's" if isinstance(base, Path) else "recorded"
        return Finding(name, True, f"{name} has the {owner} header and size")
    if isinstance(base, Path):
        place = first_difference(base, path, show)
        said = "equals the base's file in every byte"
        if place is not None:
            said = f"differs from the base's file at byte {place:,}"
        return Finding(name, place is None, f"{name} {said}", "bytes")
    recorded = base.sha256 or blob_digest(path)
    if recorded is None:
        return Finding(name, None, f"the bytes of {name} were never recorded")
    same = content_digest(path, show) == recorded
    said = "has" if same else "does not have"
    return Finding(name, same, f"{name} {said} the recorded SHA-256", "sha256")


def first_difference(one: Path, two: Path, show: Show = no_progress) -> int | None:
    """Return the first byte at which two weight files of one size differ, or None."""
    with open(open_regular(two), "rb") as b:
        if os.stat(one).st_size != os.fstat(b.fileno()).st_size:
            raise InputError(f"{one} and {two} have different sizes")
        passed = 0
        for chunk in _chunks(one, f"comparing {two.name}", show):
            other = b.read(len(chunk))
            if chunk != other:
                pairs = zip(chunk, other, strict=False)
                return passed + next(i for i, (x, y) in enumerate(pairs) if x != y)
            passed += len(chunk)
    return None
