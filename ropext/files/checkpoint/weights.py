"""Weight files: read the header and the tensors of a safetensors file, hash the file, and compare
it with the base's by header and size or in every byte. A row of a GGUF is read here, too:
files.gguf loads no numpy.

A safetensors file is 8 bytes (the header's length, little endian), the header (a JSON object) and
the tensors.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ropext.base import guard
from ropext.base.errors import InputError
from ropext.base.inputs import open_regular
from ropext.base.jsontext import parse_object
from ropext.base.narration import Show, no_progress

if TYPE_CHECKING:
    import numpy as np

    Rows = np.ndarray[Any, np.dtype[np.float64]]

HEADER_LIMIT = 100_000_000  # bytes; safetensors' own limit
TENSOR_LIMIT = 500_000  # in one file; the largest mixtures of experts have a tenth of it

# Bits per element; a type that is missing here is newer than this table, and its size is not
# checked.
BITS = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16,
    "BF16": 16, "I16": 16, "U16": 16, "I8": 8, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip

FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
DECODED = (*FLOATS, "BF16")

CHUNK = 4 << 20  # bytes per read, from each of two compared files
Parts = Iterable[tuple[int, int]]  # the first byte of each, and the byte after its last


@dataclass(frozen=True)
class Tensor:
    """One entry of the header; offsets count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, int]


@dataclass(frozen=True)
class Header:
    """The header of a safetensors file. If headers and sizes are equal, so are names, shapes,
    dtypes and places."""

    path: Path
    size: int  # bytes of the whole file
    raw: bytes  # the header's JSON text

    @property
    def digest(self) -> str:
        """Return the SHA-256 over the 8-byte length and the header of a safetensors file."""
        return hashlib.sha256(len(self.raw).to_bytes(8, "little") + self.raw).hexdigest()

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """Return dtype, shape and offsets of each tensor of a safetensors file, by name. Raise
        InputError if they contradict one another or the file's size."""
        where = f"the header of {self.path}"
        tensors = dict[str, Tensor]()
        for name, entry in parse_object(self.raw, where, containers=3 * TENSOR_LIMIT).items():
            if name == "__metadata__":
                continue
            try:
                numbers = [*entry["shape"], *entry["data_offsets"]]
                if any(type(number) is not int or number < 0 for number in numbers):
                    raise ValueError
                begin, end = entry["data_offsets"]
                bits = BITS.get(entry["dtype"])
                if begin > end or (bits and prod(entry["shape"]) * bits != (end - begin) * 8):
                    raise ValueError
                tensors[name] = Tensor(entry["dtype"], tuple(entry["shape"]), (begin, end))
            except (KeyError, TypeError, ValueError):
                raise InputError(f"{where} is damaged at the tensor {name[:80]!r}") from None
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
        """Return the first byte of a tensor in the safetensors file, and the byte after its
        last."""
        begin, end = self.tensors[name].offsets
        return 8 + len(self.raw) + begin, 8 + len(self.raw) + end

    @property
    def metadata(self) -> Mapping[str, str]:
        """Return the metadata that the writer of a safetensors file added ({"format": "pt"} as a
        rule)."""
        text = json.loads(self.raw).get("__metadata__", {})
        return text if isinstance(text, dict) else {}


def read_header(path: Path) -> Header:
    """Read only the header of a safetensors file: a few kilobytes, whatever the file's size."""
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


def read_tensor(path: Path, name: str) -> tuple[bytes, Tensor]:
    """Return the bytes of one tensor of a safetensors file, and its entry in the header."""
    header = read_header(path)
    start, end = header.part(name)
    with open(header.path, "rb") as file:
        file.seek(start)
        return file.read(end - start), header.tensors[name]


def decoded(data: bytes, dtype: str) -> "Rows":
    """Return the numbers in the bytes of a safetensors tensor, as float64."""
    import numpy as np

    if dtype == "BF16":  # the upper half of a float32
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").astype(np.float64)
    return np.frombuffer(data, FLOATS[dtype]).astype(np.float64)


def encoded(values: "Rows", dtype: str) -> bytes:
    """Return numbers as the bytes of a safetensors tensor, rounded to the nearest, half to even."""
    if dtype != "BF16":
        return values.astype(FLOATS[dtype]).tobytes()
    bits = values.astype("<f4").view("<u4")
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    data: bytes = rounded.astype("<u2").tobytes()
    return data


def quantised_row(data: bytes, kind: int) -> "Rows | None":
    """Return the numbers of a row of a GGUF tensor, or None if gguf does not know its type."""
    import numpy as np
    from gguf import GGMLQuantizationType, quants  # late: a light installation lacks it

    try:
        return quants.dequantize(np.frombuffer(data, np.uint8), GGMLQuantizationType(kind))
    except (NotImplementedError, ValueError):
        return None


def content_digest(path: Path, show: Show = no_progress, parts: Parts | None = None) -> str:
    """Open a checkpoint's file or a GGUF, and return the SHA-256 of its bytes or of these parts of
    it. Read it in chunks."""
    digest = hashlib.sha256()
    for chunk in _chunks(path, f"hashing {path.name}", show, parts):
        digest.update(chunk)
    return digest.hexdigest()


def _chunks(path: Path, what: str, show: Show, parts: Parts | None = None) -> Iterator[bytes]:
    """Open a safetensors file or a GGUF, and yield its bytes or parts of them, CHUNK bytes at a
    time. Show the progress."""
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
    """Return the identity of one safetensors file. Its content is hashed only with `content`.
    Otherwise the SHA-256 comes from its name in the hub's cache, if it has one."""
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
    base: Mapping[str, Path | WeightFile],
    directory: Path,
    *,
    deep: bool = False,
    show: Show = no_progress,
) -> tuple[Finding, ...]:
    """Open each safetensors file in a checkpoint's directory, and return whether it is as the
    base's own file, or as ropext.json lists it.

    The comparison is by size and header; with `deep`, by every byte. Against a record, `deep` uses
    the recorded SHA-256, or the SHA-256 that names the file in the hub's cache. If there is
    neither, `same` is None. Two names of one file are the same without reading.
    """
    findings = [_compare(base[name], directory / name, deep, show) for name in sorted(base)]
    extra = sorted({path.name for path in directory.glob("*.safetensors")} - base.keys())
    for name in extra:
        findings.append(Finding(name, False, f"{name} is not one of the base's weight files"))
    return tuple(findings)


def _compare(base: Path | WeightFile, path: Path, deep: bool, show: Show) -> Finding:
    """Open a checkpoint's safetensors file, and compare its header and size with the base's own
    file or with ropext.json. With `deep`, compare every byte."""
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
    """Open two weight files of checkpoints, with one size, and read their bytes. Return the first
    byte at which they differ, or None."""
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
