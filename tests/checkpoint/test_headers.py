"""Safetensors headers: against the safetensors library, and against damaged files."""

import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from sample_checkpoint import safetensors

from ropext.base.errors import InputError
from ropext.files.checkpoint import weights
from ropext.files.checkpoint.weights import read_header


def test_the_table_equals_the_librarys(tmp_path: Path):
    tensors = {
        "a.weight": np.zeros((3, 5), np.float16),
        "b": np.arange(7, dtype=np.int64),
        "scalar": np.array(1.5, np.float32),
        "mask": np.ones((4, 2), bool),
        "empty": np.zeros((0, 4), np.float32),
    }
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, {"format": "pt"})
    header = read_header(path)
    assert {name: (t.dtype, t.shape) for name, t in header.tensors.items()} == {
        "a.weight": ("F16", (3, 5)),
        "b": ("I64", (7,)),
        "scalar": ("F32", ()),
        "mask": ("BOOL", (4, 2)),
        "empty": ("F32", (0, 4)),
    }
    begin, end = header.tensors["b"].offsets
    data = path.read_bytes()[-(header.size - 8 - len(header.raw)) :]
    assert data[begin:end] == tensors["b"].tobytes()
    assert header.metadata == {"format": "pt"}


def test_digest_is_over_length_and_header_alone(tmp_path: Path):
    data = safetensors({"a": ("U8", [4], b"abcd")})
    end = 8 + struct.unpack("<Q", data[:8])[0]
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    expected = (len(data), hashlib.sha256(data[:end]).hexdigest())
    assert (read_header(path).size, read_header(path).digest) == expected
    path.write_bytes(data[:end] + b"wxyz")
    assert (read_header(path).size, read_header(path).digest) == expected
    path.write_bytes(safetensors({"b": ("U8", [4], b"abcd")}))
    assert read_header(path).digest != expected[1]


GOOD = safetensors({"a": ("F32", [2], bytes(8))})
DAMAGED = {
    "nothing": (b"", "too few"),
    "a pickle": (b"\x80\x02}q\x00X" + bytes(40), "not a safetensors file"),
    "a pointer of git-lfs": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n",
        "not a safetensors file",
    ),
    "a huge header": (struct.pack("<Q", 200_000_000) + bytes(100), "header of 200,000,000"),
    "cut in the data": (GOOD[:-3], "cut short"),
    "cut in the header": (GOOD[:30], "cut short"),
    "longer": (GOOD + b"x", "longer"),
    "no JSON": (struct.pack("<Q", 4) + b"abcd" + bytes(8), "not valid JSON"),
    "wrong bytes": (safetensors({"a": ("F32", [3], bytes(8))}), "damaged at the tensor 'a'"),
    "negative shape": (safetensors({"a": ("F32", [-2], bytes(8))}), "damaged"),
    "text shape": (safetensors({"a": ("F32", ["2"], bytes(8))}), "damaged"),
    "boolean shape": (safetensors({"a": ("U8", [True], b"x")}), "damaged"),
}


@pytest.mark.parametrize(("data", "words"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_files_are_named(tmp_path: Path, data: bytes, words: str):
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(InputError) as error:
        _ = read_header(path).tensors
    assert words in str(error.value)
    assert str(path) in str(error.value)


def test_read_header_accepts_an_unknown_dtype(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors({"a": ("F2_NEW", [16], bytes(4))}))
    assert read_header(path).tensors["a"].dtype == "F2_NEW"


def test_hash_of_a_hub_blob_is_its_name(tmp_path: Path):
    name = hashlib.sha256(b"weights").hexdigest()
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    (blobs / name).write_bytes(b"weights")
    (tmp_path / "model.safetensors").symlink_to(blobs / name)
    (tmp_path / "other.safetensors").write_bytes(b"weights")
    assert weights.blob_digest(tmp_path / "model.safetensors") == name
    assert weights.blob_digest(tmp_path / "other.safetensors") is None
    assert weights.content_digest(tmp_path / "other.safetensors") == name
