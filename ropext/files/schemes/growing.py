"""Rewrite a weight file with more rows in its position table, and read the rows back.

The bytes of every other tensor stay as they were.
"""

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropext.base.errors import InputError, ProofFailed
from ropext.base.inputs import open_regular
from ropext.base.jsontext import dump
from ropext.base.narration import Show, no_progress
from ropext.base.systems import open_raw, read_at, write_at
from ropext.files.checkpoint.snapshot import INDEX, Snapshot
from ropext.files.checkpoint.weights import (
    DECODED,
    Header,
    Tensor,
    content_digest,
    decoded,
    encoded,
    read_header,
    read_tensor,
)
from ropext.files.checkpoint.writing import Copying
from ropext.scaling.rope import Positions
from ropext.scaling.tables import Growth

# Buffers of a fixed length that old versions saved and that stock computes again: position
# numbers, and the causal masks of GPT-2 and GPT-Neo.
STALE = re.compile(r"(^|\.)(position_ids|token_type_ids|attn\.(attention\.)?(masked_)?bias)$")


@dataclass(frozen=True)
class PositionTable:
    """One position table and its place in the weight files."""

    file: str
    name: str
    dtype: str
    shape: tuple[int, int]


def _is_stale(name: str, tensor: Tensor) -> bool:
    """Tell whether a weight file's tensor is a stale buffer. A bias of one dimension is a
    parameter."""
    return bool(STALE.search(name)) and (name.endswith("ids") or len(tensor.shape) != 1)


def find_tables(snapshot: Snapshot, positions: Positions) -> tuple[PositionTable, ...]:
    """Return the tables of a checkpoint from its headers. Raise if they do not match the config.

    Tables of one length under several names (an encoder's and a decoder's, a tied copy) all grow.
    Relative positions have none.
    """
    tables = []
    for file in snapshot.weight_files:
        for name, tensor in read_header(snapshot.path(file)).tensors.items():
            if positions.is_table(name):
                tables.append(_table(file, name, tensor))
    if positions.tensors and not tables:
        wanted = " or ".join(positions.tensors)
        raise InputError(
            f"{snapshot.name} has no tensor {wanted}, which holds the positions of"
            f" {positions.text_type!r}; its weights are incomplete, or of another type"
        )
    for table in tables:
        if table.shape[0] != positions.rows:
            raise InputError(_other_length(table, positions, tables))
        if table.dtype not in DECODED:
            raise InputError(
                f"{table.name} is stored as {table.dtype}, whose rows cannot be interpolated;"
                " extend the checkpoint before it was quantised"
            )
    return tuple(tables)


def _table(file: str, name: str, tensor: Tensor) -> PositionTable:
    """Return a position table from its entry in the header of a safetensors file. Raise InputError
    unless it is a matrix."""
    if len(tensor.shape) != 2:
        raise InputError(f"{name} of {file} has the shape {list(tensor.shape)}, not rows of values")
    return PositionTable(file, name, tensor.dtype, (tensor.shape[0], tensor.shape[1]))


def _other_length(
    table: PositionTable, positions: Positions, tables: Iterable[PositionTable]
) -> str:
    """Return why position tables of other lengths than config.json states are refused."""
    others = [other for other in tables if other.shape[0] != table.shape[0]]
    wanted = (
        f"{positions.rows} rows as {positions.key} has it ({positions.context} positions and"
        f" {positions.offset} rows in front of them)"
    )
    if others:
        return (
            f"{table.name} has {table.shape[0]} rows and {others[0].name} {others[0].shape[0]}, but"
            f" one key sets the length of both; transformers would load {wanted}"
        )
    return (
        f"{table.name} has {table.shape[0]} rows, not {wanted}; the config is of another checkpoint"
    )


def rewrite(
    source: Path, target: Path, growth: Growth, names: Iterable[str], show: Show = no_progress
) -> tuple[str, ...]:
    """Write a weight file with its tables grown. Return the stale buffers that it leaves out."""
    header = read_header(source)
    names = set(names)
    stale = tuple(name for name, tensor in header.tensors.items() if _is_stale(name, tensor))
    remaining = {name: tensor for name, tensor in header.tensors.items() if name not in stale}
    ordered = sorted(remaining.items(), key=lambda item: item[1].offsets)
    place = 0
    starts = {}
    entries: dict[str, dict[str, Any]] = {}
    for name, tensor in ordered:
        shape = [growth.rows, tensor.shape[1]] if name in names else list(tensor.shape)
        size = tensor.offsets[1] - tensor.offsets[0]
        size = size // tensor.shape[0] * growth.rows if name in names else size
        entries[name] = {
            "dtype": tensor.dtype, "shape": shape, "data_offsets": [place, place + size],
        }  # fmt: skip
        starts[name], place = place, place + size
    table = {"__metadata__": dict(header.metadata)} | entries if header.metadata else entries
    raw = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    begin_new = 8 + len(raw)
    descriptor = open_regular(source)
    out = open_raw(target, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        copying = Copying(descriptor, out, source, show)
        write_at(out, len(raw).to_bytes(8, "little") + raw, 0)
        for name, tensor in ordered:
            (start, end), goal = header.part(name), begin_new + starts[name]
            if name in names:
                rows = read_at(descriptor, end - start, start)
                write_at(out, grown(rows, tensor.dtype, growth), goal)
            else:
                copying.part(start, end, goal - start)
        os.ftruncate(out, begin_new + place)
    finally:
        os.close(out)
        os.close(descriptor)
    return stale


def grown(data: bytes, dtype: str, growth: Growth) -> bytes:
    """Return the bytes of the new position table as a checkpoint's safetensors file stores them.
    Rows that stay are copied as bytes."""
    import numpy as np

    count = growth.positions.rows
    offset = growth.positions.offset
    step = len(data) // count
    old = [data[i * step : (i + 1) * step] for i in range(count)]
    rows = growth.grow(decoded(data, dtype).reshape(count, -1)[offset:], growth.target)
    if not np.isfinite(rows).all():
        raise InputError("the position table holds values that are not finite")
    flat = encoded(rows, dtype)
    new = [flat[i * step : (i + 1) * step] for i in range(growth.target)]
    for row, same in growth.kept.items():
        new[row] = old[offset + same]
    return b"".join([*old[:offset], *new])


def without_stale(index: dict[str, Any], stale: Iterable[str], grown: int) -> bytes:
    """Return the index of the shards without the stale buffers, for weights of `grown` more
    bytes."""
    names = set(stale)
    weights = {name: file for name, file in index["weight_map"].items() if name not in names}
    metadata = dict(index.get("metadata") or {})
    if isinstance(metadata.get("total_size"), int):
        metadata["total_size"] += grown
    return dump(index | {"metadata": metadata, "weight_map": weights})


def grow_files(
    snapshot: Snapshot, directory: Path, growth: Growth, tables: Iterable[PositionTable], show: Show
) -> tuple[str, ...]:
    """Write the weight files that hold a position table, and the index if there is one.

    Return the stale buffers that were left out.
    """
    by_file: dict[str, list[str]] = {}
    for table in tables:
        by_file.setdefault(table.file, []).append(table.name)
    stale: list[str] = []
    more = 0
    for file, names in by_file.items():
        old = snapshot.path(file)
        new = directory / file
        stale += rewrite(old, new, growth, names, show)
        more += _data(read_header(new)) - _data(read_header(old))
    if snapshot.index is not None:
        (directory / INDEX).write_bytes(without_stale(snapshot.index, stale, more))
    return tuple(stale)


def _data(header: Header) -> int:
    """Return the number of bytes that a safetensors file has after its header."""
    return header.size - 8 - len(header.raw)


def compare_tables(
    base: Snapshot,
    directory: Path,
    growth: Growth,
    tables: Iterable[PositionTable],
    *,
    trained: bool = False,
) -> dict[str, Any]:
    """Read back the weight files with longer position tables. Raise ProofFailed at the first
    difference from the base's.

    Every other tensor must agree in every byte. The table is computed again from the base's and
    must agree in every bit. If the new rows were `trained`, only the rows in front of the first
    position and the rows that stay must agree.
    """
    longer = {table.name for table in tables}
    others = 0
    for file in sorted({table.file for table in tables}):
        old = read_header(base.path(file))
        new = read_header(directory / file)
        stored = {name for name, tensor in old.tensors.items() if not _is_stale(name, tensor)}
        if odd := sorted(stored ^ set(new.tensors)):
            raise ProofFailed(f"verification: {file} and the base's differ in the tensor {odd[0]}")
        for name in sorted(stored - longer):
            if _digest(old, name) != _digest(new, name):
                raise ProofFailed(f"verification: the bytes of {name} in {file} are not the base's")
            others += 1
    for table in tables:
        before, after = (
            _rows(place / table.file, table.name) for place in (base.directory, directory)
        )
        offset = growth.positions.offset
        if len(after) != growth.rows or before[:offset] != after[:offset]:
            raise ProofFailed(f"verification: {table.name} has other rows than the plan says")
        for row, same in growth.kept.items():
            if after[offset + row] != before[offset + same]:
                raise ProofFailed(
                    f"verification: row {row} of {table.name} is not the old row {same}"
                )
        made = grown(b"".join(before), table.dtype, growth)
        if not trained and made != b"".join(after):
            step = len(after[0])
            row = next(i for i, it in enumerate(after) if it != made[i * step : (i + 1) * step])
            said = (
                f"row {row - offset} of {table.name} differs from the interpolation of the old rows"
            )
            raise ProofFailed(f"verification: {said}")
    return {
        "tensors_unchanged": others,
        "rows_bit_exact": len(growth.kept) + growth.positions.offset,
    }


def _digest(header: Header, name: str) -> tuple[str, tuple[int, ...], str]:
    """Read the bytes of one tensor from a safetensors file. Return its type, shape and SHA-256."""
    tensor = header.tensors[name]
    digest = content_digest(header.path, parts=[header.part(name)])
    return tensor.dtype, tensor.shape, digest


def _rows(path: Path, name: str) -> list[bytes]:
    """Read a position table from a safetensors file, and return its rows as bytes."""
    data, tensor = read_tensor(path, name)
    step = len(data) // tensor.shape[0]
    return [data[i : i + step] for i in range(0, len(data), step)]
