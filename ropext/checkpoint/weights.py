"""Weight files without their weights: read a safetensors header, hash a file, and say whether it is
the base's, by header and size or in every byte.

A file is 8 bytes (the header's length, little endian), the header (a JSON object) and the tensors.
"""

import hashlib
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from pydantic import Field

from ropext import guard
from ropext.checkpoint.snapshot import Snapshot
from ropext.errors import InputError
from ropext.files import open_regular, parse_object
from ropext.narration import Show, unseen

HEADER_LIMIT = 100_000_000  # bytes; safetensors' own limit
TENSOR_LIMIT = 500_000  # in one file; the largest mixtures of experts have a tenth of it
CHUNK = 4 << 20  # bytes read at once, of each of two files that are compared

# Bits per element; a type that is missing here is newer than this table and its size not checked.
BITS = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16,
    "BF16": 16, "I16": 16, "U16": 16, "I8": 8, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """One row of the table; offsets count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, int]


@dataclass(frozen=True)
class Header:
    """What a safetensors file says about itself. Equal headers and sizes: same names, shapes,
    dtypes and places."""

    path: Path
    size: int  # bytes of the whole file
    raw: bytes  # the header's JSON text

    @property
    def digest(self) -> str:
        """SHA-256 over the 8-byte length and the header."""
        return hashlib.sha256(len(self.raw).to_bytes(8, "little") + self.raw).hexdigest()

    @cached_property
    def _table(self) -> dict[str, Any]:
        return parse_object(self.raw, f"the header of {self.path}", containers=3 * TENSOR_LIMIT)

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """Name -> dtype, shape, offsets, checked against one another and against the file."""
        tensors = {
            name: _tensor(name, entry, self.path)
            for name, entry in self._table.items()
            if name != "__metadata__"
        }
        end = max((tensor.offsets[1] for tensor in tensors.values()), default=0)
        wanted = 8 + len(self.raw) + end
        if self.size != wanted:
            state = "cut short" if self.size < wanted else "longer than it says"
            raise InputError(
                f"{self.path} is {state}: its header describes {wanted:,} bytes, the file has "
                f"{self.size:,}; fetch it again"
            )
        return tensors

    def part(self, name: str) -> tuple[int, int]:
        """Where the bytes of a tensor begin and end in the file."""
        begin, end = self.tensors[name].offsets
        return 8 + len(self.raw) + begin, 8 + len(self.raw) + end

    @property
    def metadata(self) -> Mapping[str, str]:
        """The free text that the writer put beside the table ({"format": "pt"} as a rule)."""
        text = self._table.get("__metadata__", {})
        return text if isinstance(text, dict) else {}


def _tensor(name: str, entry: Any, path: Path) -> Tensor:
    try:
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, *offsets]
        if any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError
        begin, end = offsets
        bits = BITS.get(dtype)
        if begin > end or (bits is not None and prod(shape) * bits != (end - begin) * 8):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise InputError(f"the header of {path} is damaged at the tensor {name[:80]!r}") from None
    return Tensor(dtype, tuple(shape), (begin, end))


def read_header(path: Path) -> Header:
    """Read the header alone: a few kilobytes, whatever the size of the file."""
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 10:
            raise InputError(f"{path} has {size} bytes, too few for a safetensors file")
        if length > HEADER_LIMIT or length > size - 8:
            raise InputError(
                f"{path} is not a safetensors file, or cut short: its first 8 bytes announce a "
                f"header of {length:,} bytes in a file of {size:,}"
            )
        raw = file.read(length)
    if len(raw) != length:
        raise InputError(f"{path} shrank while it was read")
    return Header(path, size, raw)


def content_digest(path: Path, show: Show = unseen) -> str:
    """SHA-256 over the whole file, read in chunks."""
    digest = hashlib.sha256()
    with open(open_regular(path), "rb") as file:
        for chunk in chunks(file, f"hashing {path.name}", show):
            digest.update(chunk)
    return digest.hexdigest()


def chunks(
    file: BinaryIO, what: str, show: Show = unseen, part: tuple[int, int] | None = None
) -> Iterator[bytes]:
    """The bytes of a file or of a part of it, CHUNK at once, and how far they are shown."""
    done, end = part or (0, os.fstat(file.fileno()).st_size)
    file.seek(done)
    show(done, end, what)
    while chunk := file.read(min(CHUNK, end - done)):
        yield chunk
        done += len(chunk)
        show(done, end, what)
    if done < end:
        raise InputError(f"{file.name} shrank while it was read")


def blob_digest(path: Path) -> str | None:
    """The SHA-256 that the hub cache gives a large file as its name, or None elsewhere."""
    real = Path(os.path.realpath(path))
    if real.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", real.name):
        return real.name
    return None


def known_digest(path: Path) -> str | None:
    """The SHA-256 of a file that is known without reading it: by its name in the hub's cache, or by
    the record of the output of ropext's that it lies in."""
    return blob_digest(path) or guard.listed_digest(path)


Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True)
class WeightFile:
    """What identifies one weight file without its bytes, and with `sha256` its bytes too."""

    size: Count
    header_sha256: Sha256
    sha256: Sha256 | None = None


def weigh(path: Path, *, content: bool = False, show: Show = unseen) -> WeightFile:
    """The record of one weight file. Its content is hashed only when asked for, or known by the
    name that the hub's cache gave it."""
    header = read_header(path)
    header.tensors  # noqa: B018 - raises where the file is cut short or its table damaged
    sha256 = content_digest(path, show) if content else blob_digest(path)
    return WeightFile(header.size, header.digest, sha256)


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
    if isinstance(base, WeightFile) and base.sha256 and path.is_symlink():
        now = known_digest(path)
        if now not in (None, base.sha256):
            said = "leads to a file with other bytes than when the record was written"
            return finding(False, said, "sha256")
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
