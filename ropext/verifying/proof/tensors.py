"""Read the tensors that a directory stores, and see how transformers loads them.

child.py loads this file by path: it imports nothing of ropext.
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

    from ropext.verifying.proof.answers import ComparedTensors

    class StoredTensors(Protocol):
        """A file of safetensors."""

        def keys(self) -> Sequence[str]:
            """Return the names of the stored tensors, for the check against transformers' model."""

        def get_tensor(self, name: str) -> Tensor:
            """Return a stored tensor, to compare with transformers' model."""

    class Fates(TypedDict):
        """The report of from_pretrained on the tensors that it was given."""

        missing_keys: Collection[str]
        unexpected_keys: Collection[str]
        mismatched_keys: Collection[tuple[str, Sequence[int], Sequence[int]]]
        unconverted: list[str]

    # How transformers fills a parameter: converter ("" if it only renames) -> the part of the
    # parameter -> the stored names that fill this part.
    Sources = dict[str, dict[str, list[str]]]


# What quantisers call the packed weight itself; everything else that they add is read as side data.
PACKED = re.compile(r"(.+)(?:\.(?:qweight|weight_packed)|_blocks)$")
UNCONVERTED = re.compile(r"^([\w.]+)\s*\|.*CONVERSION", re.MULTILINE)
INTEGER = re.compile(r"[UI]\d+|F4|F6.*|F8_E8M0")


def loaded_weight_files(directory: str) -> list[Path]:
    """List the weight files of a directory that transformers loads: the single file, or the shards
    of the index."""
    single = Path(directory, "model.safetensors")
    index = single.with_name("model.safetensors.index.json")
    if single.exists():
        return [single]
    if not index.exists():
        return []
    shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    return [single.with_name(name) for name in sorted(set(shards))]


def stored_tensors(directory: str) -> dict[str, tuple[str, list[int]]]:
    """Return the dtype and the shape of every stored tensor that transformers loads, by its
    name."""
    tensors: dict[str, tuple[str, list[int]]] = {}
    for path in loaded_weight_files(directory):
        with open(path, "rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            table = json.loads(stream.read(size))
        table.pop("__metadata__", None)
        tensors |= {key: (value["dtype"], value["shape"]) for key, value in table.items()}
    return tensors


def load_empty_tensors(
    cls: type[PreTrainedModel], config: PreTrainedConfig, state: Mapping[str, object]
) -> tuple[PreTrainedModel | None, Fates]:
    """Load empty tensors in the child process by transformers' from_pretrained. Return the model
    and its report on them.

    from_pretrained names the tensors that it cannot convert only in its log, and then raises. In
    this case return no model, and these names in the report.
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
        return None, {
            "missing_keys": (),
            "unexpected_keys": (),
            "mismatched_keys": (),
            "unconverted": sorted(names),
        }
    finally:
        logger.removeHandler(report)
    model, info = cast("tuple[PreTrainedModel, Fates]", loaded)
    return model, {**info, "unconverted": []}


def stored_names_by_parameter(
    model: PreTrainedModel, stored: Mapping[str, list[str]]
) -> dict[str, Sources]:
    """Return the stored tensors that fill each parameter of the child process's model, as when
    transformers loads it (`convert_and_load_state_dict_in_model`)."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    prefix = model.base_model_prefix
    wanted = model.state_dict()
    filled: dict[str, Sources] = {}
    for name in sorted(stored, key=dot_natural_key):
        key, pattern = rename_source_key(name, renamings, converters, prefix, wanted)
        if key not in wanted and name in wanted:
            key, pattern = rename_source_key(name, [], [], prefix, wanted)
        if key not in wanted:
            continue  # from_pretrained reports it
        targets = [key]
        way = ""
        part = ""
        if pattern is not None:
            converter = by_pattern[pattern]
            targets = [
                key.replace(converter.target_patterns[0], t) for t in converter.target_patterns
            ]
            way = str(converters.index(converter))
            part, _ = rename_source_key(name, renamings, [], prefix, wanted)
            part = part.removeprefix(f"{prefix}.")
        for target in targets:
            parts = filled.setdefault(target, {}).setdefault(way, {})
            parts[part] = parts.get(part, []) + stored[name]
    return filled


def find_parameter_filled_twice(
    filled: Mapping[str, Sources], directory: str
) -> tuple[str, list[str]] | None:
    """Return a parameter of transformers' model whose elements two stored tensors fill, with their
    names. Return None if there is none.

    Names that transformers does not convert may repeat a parameter if their bytes are equal.
    """
    repeated = list[tuple[str, list[str]]]()
    for parameter, ways in filled.items():
        if len(ways) > 1:  # each way alone fills the whole parameter
            return parameter, [next(iter(parts.values()))[0] for parts in ways.values()]
        for way, parts in ways.items():
            names = max(parts.values(), key=len)
            if way and len(names) > 1:
                return parameter, names
            if len(names) > 1:
                repeated.append((parameter, names))
    holder = files_by_tensor(directory) if repeated else {}
    for parameter, names in repeated:
        first, *others = [holder[name].get_tensor(name) for name in names]
        if not all(same_bytes(first, other) for other in others):
            return parameter, names
    return None


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Return whether two stored tensors that the child process compares have the same dtype, shape
    and bytes."""
    import torch

    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return one.reshape(-1).view(torch.uint8).equal(other.reshape(-1).view(torch.uint8))


def compare_stored_tensors(
    cls: type[PreTrainedModel],
    config: PreTrainedConfig,
    directory: str,
    table: dict[str, tuple[str, list[int]]],
    quantised: bool,
) -> ComparedTensors:
    """Compare the tensors of a directory with the model that transformers loads from them, empty on
    the meta device.

    Its key conversion (renaming, stacking of experts, fusing, tying) then runs on names and shapes.
    A packed tensor gets no elements, so that transformers names it but compares nothing.
    """
    import torch

    state = {}
    stored: dict[str, list[str]] = {}  # the stored names of each name that transformers is given
    packed = 0
    for own_name, (dtype, shape) in table.items():
        name = own_name
        match = PACKED.match(name) if quantised else None
        opaque = match or (quantised and name.endswith("weight") and INTEGER.fullmatch(dtype))
        if opaque:
            packed += 1
            name = (match[1] + ("" if name.endswith("_blocks") else ".weight")) if match else name
            shape = [0] * max(len(shape), 2)
        state[name] = torch.empty(shape, device="meta")
        stored.setdefault(name, []).append(own_name)
    model, info = load_empty_tensors(cls, config, state)
    twice = None
    if model is not None:
        twice = find_parameter_filled_twice(stored_names_by_parameter(model, stored), directory)
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
        "twice": twice,
    }


def files_by_tensor(directory: str) -> dict[str, StoredTensors]:
    """Return the open safetensors file of each stored tensor: a file that transformers loads, else
    any other."""
    from safetensors import safe_open

    loaded = loaded_weight_files(directory)
    paths = sorted(set(Path(directory).glob("*.safetensors")) - set(loaded))
    files: list[StoredTensors] = [safe_open(path, "pt") for path in [*paths, *loaded]]
    holder = {}
    for file in files:
        for name in file.keys():  # noqa: SIM118 (it is no dict)
            holder[name] = file
    return holder


def differing_tied_tensors(
    cls: type[PreTrainedModel], config: PreTrainedConfig, directory: str
) -> list[str]:
    """Return the pairs of stored tensors that the config ties although their values differ."""
    ties = getattr(cls, "_tied_weights_keys", None)
    if not getattr(config.get_text_config(), "tie_word_embeddings", False) or not ties:
        return []
    holder = files_by_tensor(directory)
    pairs = []
    for one, other in dict(ties).items():
        if one in holder and other in holder:
            stored = holder[one].get_tensor(one)
            if not stored.equal(holder[other].get_tensor(other)):
                pairs.append(f"{one} and {other}")
    return pairs
