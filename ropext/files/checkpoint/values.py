"""Convert the bytes of tensors to numbers and back."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropext.files.checkpoint.headers import Tensor, read_header

if TYPE_CHECKING:
    import numpy as np

    Rows = np.ndarray[Any, np.dtype[np.float64]]

FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
DECODED = (*FLOATS, "BF16")


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
