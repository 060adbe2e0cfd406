"""Compute which context fits into a memory: the weights, and the cache of whole sequences."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from ropext.base.errors import UsageError
from ropext.families.geometry import CacheLayer, attends
from ropext.options.memory import MemoryOptions
from ropext.planning.carrier import CacheRules, Carrier

LONGEST = 1 << 31  # tokens: positions are 32-bit integers in most engines
STEP = 256  # tokens by which the longest length is sought, as llama.cpp makes a cache


@dataclass(frozen=True)
class CacheType:
    """The storage of a cache's numbers in an engine: blocks, each with its scale."""

    values: int  # in one block
    bytes: int  # in one block

    def bytes_of(self, values: int) -> int | None:
        """Return the bytes of so many values of a KV cache, for `plan --memory`. Return None if
        they do not fill whole blocks."""
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
    """The KV caches of a model in one engine, of one type, for so many sequences at once."""

    layers: tuple[CacheLayer, ...]
    kind: CacheType
    parallel: int
    rules: CacheRules

    def bytes_at(self, tokens: int) -> int | None:
        """Return the bytes of the KV caches of all sequences in `plan --memory`, each full with so
        many tokens. Return None if the type cannot hold the cache."""
        total = 0
        for layer in self.layers:
            if self.kind.bytes_of(layer.values) is None:
                return None
            kept = layer.kept(tokens, self.rules.step, self.rules.micro_batch)
            total += self.kind.bytes_of(kept) or 0
        return self.parallel * total

    def longest_in(self, room: int) -> int | None:
        """Return the most tokens whose KV caches fit into so many bytes, for `plan --memory`, in
        whole steps. It is 0 if not even one step fits, and None if the type cannot hold the cache.
        """
        if self.bytes_at(STEP) is None:
            return None
        low = 0
        high = LONGEST // STEP
        while low < high:
            middle = (low + high + 1) // 2
            taken = self.bytes_at(middle * STEP)
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
    fits: bool | None  # whether the given length fits; None if that is not known


@dataclass(frozen=True)
class MemoryFit:
    """The lengths that fit into a memory, by type of cache: the answer of `plan --memory`."""

    memory: int  # bytes
    weights: int | None  # bytes; None if no weight file is here
    parallel: int
    length: int  # the length to check: the plan's target, or the model's context
    rows: tuple[CacheRow, ...] = ()
    unknown: str = ""  # why the cache is not known
    no_attention: int = 0  # layers that keep a state of fixed size, which is not counted
    flags: str = ""  # of llama-server, for the slots and tokens that are counted

    @property
    def room(self) -> int | None:
        """Return the bytes of memory that the weights leave for the KV cache in `plan --memory`.
        Return None if the size of the weights is not known."""
        return None if self.weights is None else max(0, self.memory - self.weights)

    def to_json(self) -> dict[str, Any]:
        """Return the answer of `plan --memory` as JSON."""
        return asdict(self)


def fit_memory(
    carrier: Carrier, length: int, memory: int, weights: int | None, options: MemoryOptions
) -> MemoryFit:
    """Return which lengths of a planned or unextended model fit into the memory of `plan --memory`,
    for each type of KV cache in --kv; without --kv, for every type that its programs have."""
    model = carrier.model
    fit = MemoryFit(memory, weights, options.parallel, length)
    if model.masked_lm:
        reason = "a masked language model reads all at once and keeps no cache"
        return replace(fit, unknown=reason)
    if model.kv_layers is None:
        reason = "the config does not say what every layer keeps in the cache"
        return replace(fit, unknown=reason)
    rows = list[CacheRow]()
    usual = carrier.cache.types
    for name in options.kv or usual:
        if name not in usual:
            raise UsageError(f"--kv {name}: no program that runs a GGUF has it; it is for vLLM")
        cache = Cache(model.kv_layers, CACHE_TYPES[name], options.parallel, carrier.cache)
        rows.append(_cache_row(name, cache, fit))
    flags = ""
    if carrier.cache.by_slots:
        flags = f"-c {options.parallel * length} -np {options.parallel}"
    without = sum(1 for kind in model.layer_types if not attends(kind))
    return replace(fit, rows=tuple(rows), no_attention=without, flags=flags)


def _cache_row(name: str, cache: Cache, fit: MemoryFit) -> CacheRow:
    """Return the row of `plan --memory` for a type of KV cache: its bytes, and whether the length
    fits."""
    taken = cache.bytes_at(fit.length)
    room = fit.room
    a_token = 0
    if taken is not None:
        a_token = sum(cache.kind.bytes_of(layer.values) or 0 for layer in cache.layers)
    if room is None:
        return CacheRow(name, a_token, taken, None, None)
    fits = None if taken is None else taken <= room
    return CacheRow(name, a_token, taken, cache.longest_in(room), fits)
