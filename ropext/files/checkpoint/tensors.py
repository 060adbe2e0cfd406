"""The tensors of a safetensors file: their names, shapes, dtypes and places from its header, and
their bytes as numbers. A row of a GGUF is read here, too: files.gguf loads no numpy.

A file is 8 bytes (the header's length, little endian), the header (a JSON object) and the tensors.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropext.base.errors import InputError
from ropext.base.inputs import open_regular
from ropext.base.jsontext import parse_object

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
