"""The tensors that a directory stores, and what stock's own loading makes of them. Loaded by
child.py, by path: it imports nothing of ropext.
"""

from __future__ import annotations

import copy
import io
import json
import re
import struct
from logging import StreamHandler, getLogger
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from typing import Protocol, TypedDict

    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

    from ropext.proof.answers import ComparedTensors

    class StoredTensors(Protocol):
        """A file of safetensors."""

        def keys(self) -> Sequence[str]: ...

        def get_tensor(self, name: str) -> Tensor: ...

    class Fates(TypedDict):
        """What from_pretrained says of the tensors that it was given."""

        missing_keys: Collection[str]
        unexpected_keys: Collection[str]
        mismatched_keys: Collection[tuple[str, Sequence[int], Sequence[int]]]
        unconverted: list[str]


# What quantisers call the packed weight itself; everything else that they add is read as side data.
PACKED = re.compile(r"(.+)(?:\.(?:qweight|weight_packed)|_blocks)$")
UNCONVERTED = re.compile(r"^([\w.]+)\s*\|.*CONVERSION", re.MULTILINE)
INTEGER = re.compile(r"[UI]\d+|F4|F6.*|F8_E8M0")


def headers(directory: str) -> dict[str, tuple[str, list[int]]]:
    """Name -> dtype and shape of every tensor that stock would load; no weight is read."""
    folder = Path(directory)
    files = ["model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if not (folder / files[0]).exists():
        table = json.loads(index.read_text(encoding="utf-8")) if index.exists() else None
        files = sorted(set(table["weight_map"].values())) if table else []
    tensors: dict[str, tuple[str, list[int]]] = {}
    for name in files:
        with open(folder / name, "rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            table = json.loads(stream.read(size))
        table.pop("__metadata__", None)
        tensors |= {key: (value["dtype"], value["shape"]) for key, value in table.items()}
    return tensors


def loading_info(
    cls: type[PreTrainedModel], config: PreTrainedConfig, state: Mapping[str, object]
) -> Fates:
    """What from_pretrained says of these tensors, and the names that it could not convert to.

    Those it tells in its logged report alone, before it raises.
    """
    import torch

    # Not transformers' own remove_handler: before 5.10 it refuses every handler that it has.
    logger = getLogger("transformers")
    report = StreamHandler(io.StringIO())
    logger.addHandler(report)
    try:
        loaded = cls.from_pretrained(
            None,
            config=copy.deepcopy(config),
            state_dict=state,
            device_map={"": "meta"},
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except RuntimeError:
        names = UNCONVERTED.findall(report.stream.getvalue())
        if not names:
            raise
        return {
            "missing_keys": (),
            "unexpected_keys": (),
            "mismatched_keys": (),
            "unconverted": sorted(names),
        }
    finally:
        logger.removeHandler(report)
    _, info = cast("tuple[object, Fates]", loaded)
    return {**info, "unconverted": []}


def compared(
    cls: type[PreTrainedModel],
    config: PreTrainedConfig,
    table: dict[str, tuple[str, list[int]]],
    quantised: bool,
) -> ComparedTensors:
    """Load the headers' tensors, empty on the meta device, by stock's own from_pretrained.

    Its key conversion (renaming, stacking of experts, fusing, tying) then runs on names and
    shapes. A packed tensor travels with no elements, so that stock names it but compares nothing.
    """
    import torch

    state = {}
    packed = 0
    for name, (dtype, shape) in table.items():
        match = PACKED.match(name) if quantised else None
        opaque = match or (quantised and name.endswith("weight") and INTEGER.fullmatch(dtype))
        if opaque:
            packed += 1
            name = (match[1] + ("" if name.endswith("_blocks") else ".weight")) if match else name
            shape = [0] * max(len(shape), 2)
        state[name] = torch.empty(shape, device="meta")
    info = loading_info(cls, config, state)
    missing = set(info["missing_keys"])
    unexpected = set(info["unexpected_keys"])
    misshapen = [(n, list(a), list(b)) for n, a, b in info["mismatched_keys"] if 0 not in a]
    if quantised:
        packed += len(unexpected)
        parents = {name.rpartition(".")[0] for name in unexpected}
        missing = {name for name in missing if name.rpartition(".")[0] not in parents}
        unexpected = set()
    return {
        "compared": len(table) - packed,
        "not_compared": packed,
        "missing": sorted(missing),
        "unexpected": sorted(unexpected),
        "misshapen": sorted(misshapen),
        "unconverted": info["unconverted"],
    }


def untied(cls: type[PreTrainedModel], config: PreTrainedConfig, directory: str) -> list[str]:
    """The stored tensors that the config ties to another that is stored too, with other bytes."""
    from safetensors import safe_open

    ties = getattr(cls, "_tied_weights_keys", None)
    if not getattr(config.get_text_config(), "tie_word_embeddings", False) or not ties:
        return []
    paths = sorted(Path(directory).glob("*.safetensors"))
    files: list[StoredTensors] = [safe_open(path, "pt") for path in paths]
    holder = {}
    for file in files:
        for name in file.keys():  # noqa: SIM118 (it is no dict)
            holder[name] = file
    pairs = []
    for one, other in dict(ties).items():
        if one in holder and other in holder:
            stored = holder[one].get_tensor(one)
            if not stored.equal(holder[other].get_tensor(other)):
                pairs.append(f"{one} and {other}")
    return pairs
