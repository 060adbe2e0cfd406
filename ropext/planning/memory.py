"""Compute which context fits into a memory: the weights, and the cache of whole sequences."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ropext.base.errors import UsageError
from ropext.families.geometry import CacheLayer, attends
from ropext.planning.carrier import CacheRules, Carrier

LONGEST = 1 << 31  # tokens: positions are 32-bit integers in most engines
STEP = 256  # tokens by which the longest length is sought, as llama.cpp makes a cache


@dataclass(frozen=True)
class CacheType:
    """The storage of a cache's numbers in an engine: blocks, each with its scale."""

    values: int  # in one block
    bytes: int  # in one block

    def bytes_of(self, values: int) -> int | None:
        """Return the bytes of so many values of a KV cache, for `plan --memory`; None if they do
        not fill whole blocks."""
        if values % self.values:
            return None
        return values // self.values * self.bytes


# By the names of ropext.options.memory.
CACHE_TYPES = {
    "f16": CacheType(1, 2),
    "q8_0": CacheType(32, 34),
    "q4_0": CacheType(32, 18),
    "fp8": CacheType(1, 1),
}


@dataclass(frozen=True)
class Cache:
    """The KV caches of a model in one engine, for so many sequences at once."""

    layers: tuple[CacheLayer, ...]
    parallel: int
    rules: CacheRules

    def bytes_at(self, tokens: int, kind: CacheType) -> int | None:
        """Return the bytes of the KV caches of all sequences in `plan --memory`, each full with so
        many tokens; None if the type cannot hold the cache."""
        total = 0
        for layer in self.layers:
            if kind.bytes_of(layer.values) is None:
                return None
            kept = layer.kept(tokens, self.rules.step, self.rules.micro_batch)
            total += kind.bytes_of(kept) or 0
        return self.parallel * total

    def longest_in(self, room: int, kind: CacheType) -> int | None:
        """Return the most tokens whose KV caches fit into so many bytes, for `plan --memory`, in
        whole steps. It is 0 if not even one step fits, and None if the type cannot hold the cache.
        """
        if self.bytes_at(STEP, kind) is None:
            return None
        low = 0
        high = LONGEST // STEP
        while low < high:
            middle = (low + high + 1) // 2
            taken = self.bytes_at(middle * STEP, kind)
            if taken is not None and taken <= room:
                low = middle
            else:
                high = middle - 1
        return low * STEP


@dataclass(frozen=True)
class CacheRow:
    """One type of cache: the bytes of the given length, and the longest length that fits."""

    cache: str
    bytes_a_token: int  # while every window is still open; 0 if the type cannot hold the cache
    bytes_at_length: int | None
    longest: int | None  # None if the weights or the bytes at this type are not known


@dataclass(frozen=True)
class MemoryFit:
    """The lengths that fit into a memory, by type of cache."""

    memory: int  # bytes
    weights: int | None  # bytes; None if no weight file is here
    parallel: int
    length: int  # the length to check: the plan's target, or the model's context
    rows: tuple[CacheRow, ...]
    unknown: str = ""  # why the cache is not known
    no_attention: int = 0  # layers that keep a state of fixed size, which is not counted
    flags: str = ""  # of llama-server, for the slots and tokens that are counted

    @property
    def room(self) -> int | None:
        """Return the bytes of memory that the weights leave for the KV cache in `plan --memory`."""
        return _free_bytes(self.memory, self.weights)

    def holds(self, row: CacheRow) -> bool:
        """Return whether the length of `plan --memory` fits into memory with this type of KV cache;
        False if that is not known."""
        taken = row.bytes_at_length
        return taken is not None and self.room is not None and taken <= self.room

    def to_json(self) -> dict[str, Any]:
        """Return the answer of `plan --memory` as JSON, each row with whether it fits."""
        rows = [asdict(row) | {"fits": self._fits_or_unknown(row)} for row in self.rows]
        return asdict(self) | {"rows": rows}

    def _fits_or_unknown(self, row: CacheRow) -> bool | None:
        """Return whether the KV cache of a row of `plan --memory` fits into memory; None if that is
        not known."""
        if self.room is None or row.bytes_at_length is None:
            return None
        return self.holds(row)


def _free_bytes(memory: int, weights: int | None) -> int | None:
    """Return the bytes of memory that the weights leave for the KV cache in `plan --memory`; None
    if their size is not known."""
    if weights is None:
        return None
    return max(0, memory - weights)


def fit_memory(
    carrier: Carrier,
    length: int,
    memory: int,
    weights: int | None,
    types: Sequence[str],
    parallel: int,
) -> MemoryFit:
    """Return which lengths of a planned or unextended model fit into a memory, for each of these
    types of cache; without `types`, for every type that its programs have."""
    model = carrier.model
    without = sum(1 for kind in model.layer_types if not attends(kind))
    if model.masked_lm:
        reason = "a masked language model reads all at once and keeps no cache"
        return MemoryFit(memory, weights, parallel, length, (), reason)
    if model.kv_layers is None:
        reason = "the config does not say what every layer keeps in the cache"
        return MemoryFit(memory, weights, parallel, length, (), reason)
    cache = Cache(model.kv_layers, parallel, carrier.cache)
    room = _free_bytes(memory, weights)
    rows = list[CacheRow]()
    usual = carrier.cache.types
    for name in types or usual:
        if name not in usual:
            raise UsageError(f"--kv {name}: no program that runs a GGUF has it; it is for vLLM")
        kind = CACHE_TYPES[name]
        a_token = sum(kind.bytes_of(layer.values) or 0 for layer in model.kv_layers)
        at_length = cache.bytes_at(length, kind)
        longest = None if room is None else cache.longest_in(room, kind)
        rows.append(CacheRow(name, 0 if at_length is None else a_token, at_length, longest))
    flags = ""
    if carrier.cache.by_slots:
        flags = f"-c {parallel * length} -np {parallel}"
    return MemoryFit(
        memory, weights, parallel, length, tuple(rows), no_attention=without, flags=flags
    )
