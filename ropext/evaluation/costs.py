"""What an evaluation takes, counted from configs before it starts: passes, tokens, bytes. And how a
model is read in the memory that is free, for which alone a peak is estimated.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ropext import families
from ropext.checkpoint import Snapshot
from ropext.errors import RopextError
from ropext.evaluation.divergence import OPTION
from ropext.evaluation.forward import (
    HEAD_BYTES,
    TILE_TOKENS,
    Manner,
    columns_for,
    no_matrix,
    slice_for,
)
from ropext.evaluation.plan import Evaluation
from ropext.models.head import foretold_bend
from ropext.models.load import device_of, free_memory, skeleton, with_attention
from ropext.options.evaluate import DocumentOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Chunks shorter than this cost more time than they save memory.
SHORTEST_CHUNK = 1024
LONGEST_CHUNK = 16384
MIB = 1 << 20
# Share of the free memory that a pass may plan to take.
USABLE = 0.8


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that costs depend on."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    parameters: int
    dtype_bytes: int
    eager: bool = False
    plain_head: bool = True
    device: str = "cpu"  # its type
    window: int | None = None  # where layers have one
    masks: bool = True  # where a window is narrower than a row: flash attention needs none

    def peak_bytes(self, num_tokens: int, manner: Manner) -> int:
        """Above the weights, at the widest moment of one pass."""
        at_once = min(num_tokens, manner.chunk or num_tokens)
        attention = 2 * self.hidden + (3 * self.heads + 4 * self.kv_heads) * self.head_dim
        widest = max(attention, 2 * self.hidden + 3 * self.feed_forward)
        activations = at_once * self.dtype_bytes * widest
        scores = self.heads * at_once * num_tokens * (self.dtype_bytes + 4) if self.eager else 0
        cache = mask = 0
        if at_once < num_tokens:
            values = 2 * self.kv_heads * self.head_dim * num_tokens * self.dtype_bytes
            # A layer's cache grows by concatenation, which holds the old and the new one.
            cache = values * (self.layers + 1)
        windowed = self.masks and self.window is not None and self.window <= num_tokens
        if at_once < num_tokens or windowed:
            # Booleans, and what SDPA adds to the logits in their place.
            mask = at_once * num_tokens * (1 + self.dtype_bytes)
            # With a mask, SDPA repeats keys and values for every query head.
            cache += 2 * self.heads * self.head_dim * num_tokens * self.dtype_bytes
        hidden = at_once * self.hidden * self.dtype_bytes
        return cache + max(activations + scores + mask, hidden + self._head_bytes(at_once, manner))

    def _head_bytes(self, num_tokens: int, manner: Manner) -> int:
        """A tile or a slice of logits."""
        if manner.columns is None:
            return int(HEAD_BYTES * min(manner.slice_tokens, num_tokens) * self.vocabulary)
        # In the dtype of the weights, and in float32 where that is another one.
        entry = self.dtype_bytes if self.dtype_bytes == 4 else self.dtype_bytes + 4
        columns = min(manner.columns, self.vocabulary)
        return entry * min(TILE_TOKENS, num_tokens) * columns


def shape_of(model: Any) -> Shape:
    """The sizes of a model, loaded or on the meta device."""
    config = model.config.get_text_config()
    heads = int(config.num_attention_heads)
    hidden = int(config.hidden_size)
    embedding = model.get_input_embeddings().weight
    width = getattr(config, "intermediate_size", None) or 4 * hidden
    return Shape(
        layers=int(config.num_hidden_layers),
        hidden=hidden,
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or hidden // heads),
        feed_forward=int(max(width) if isinstance(width, list | tuple) else width),
        vocabulary=int(config.vocab_size),
        parameters=sum(map(_numel, model.parameters())),
        dtype_bytes=int(embedding.element_size()),
        eager=getattr(model.config, "_attn_implementation", "") == "eager",
        plain_head=foretold_bend(model) is None,
        device=embedding.device.type,
        window=_window(config),
        masks=getattr(model.config, "_attn_implementation", "sdpa") == "sdpa",
    )


def _window(config: Any) -> int | None:
    """The window of layers that have one; without a list of types all layers have it."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    return int(window) if window and (not kinds or "sliding_attention" in kinds) else None


def _numel(parameter: Any) -> int:
    # bitsandbytes packs two 4-bit weights into a byte.
    packed = type(parameter).__name__ == "Params4bit"
    return int(parameter.numel()) * (2 if packed else 1)


def choose_manner(
    shape: Shape, longest: int, free: int, chunk: int | None, slice_bytes: int
) -> Manner:
    """Whole if it fits into the free memory, else the longest chunk that does, else what takes
    least."""
    whole = Manner(
        None,
        slice_for(slice_bytes, shape.vocabulary),
        columns=columns_for(slice_bytes, shape.device) if shape.plain_head else None,
    )
    if chunk is not None:
        return replace(whole, chunk=chunk) if chunk < longest else whole
    ways = [whole]
    size = LONGEST_CHUNK
    while size >= SHORTEST_CHUNK:
        if size < longest:
            ways.append(replace(whole, chunk=size))
        size //= 2
    fitting = [way for way in ways if shape.peak_bytes(longest, way) <= USABLE * free]
    # A chunk's mask over all that came before can be larger than what it saves.
    return fitting[0] if fitting else min(ways, key=lambda way: shape.peak_bytes(longest, way))


def manner_of(model: Any, longest: int, options: DocumentOptions) -> Manner:
    """How a loaded model is read in the memory that is free."""
    free = free_memory(model.get_input_embeddings().weight.device)
    return choose_manner(shape_of(model), longest, free, options.chunk, options.slice_memory * MIB)


@dataclass(frozen=True)
class Passes:
    """So many passes of so many tokens."""

    what: str
    passes: int
    tokens: int  # of one pass


@dataclass(frozen=True)
class Costs:
    """All of it together."""

    work: tuple[Passes, ...]
    passes: int
    tokens: int
    weight_bytes: int
    cache_bytes: int | None  # of one row of the longest length; None where that is not known
    chunk: int | None
    slice_tokens: int
    columns: int | None


def empty_model(evaluation: Evaluation, snapshot: Snapshot) -> "PreTrainedModel":
    """One of its models as it would be loaded, without weights."""
    import torch

    options = evaluation.options
    dtype = None if options.dtype == "auto" else getattr(torch, options.dtype)
    masked = evaluation.lineup.masked
    model: PreTrainedModel = with_attention(
        options.attn_implementation,
        partial(
            skeleton,
            snapshot,
            trust_remote_code=evaluation.trust_remote_code,
            masked=masked,
            dtype=dtype,
        ),
    )
    return model


def check_models(evaluation: Evaluation) -> None:
    """Refuse what --kl and --kv cannot be measured of, as far as class and config tell."""
    variants = evaluation.lineup.variants
    if evaluation.options.kl:
        for snapshot in {one.snapshot.directory: one.snapshot for one in variants}.values():
            if foretold_bend(empty_model(evaluation, snapshot)) is not None:
                raise no_matrix(OPTION)
    for variant in variants:
        if variant.cache is not None:
            from ropext.patching.rounding import kept_layers  # late: it loads torch

            kept_layers(variant.snapshot.config)


def count_evaluation(evaluation: Evaluation) -> Costs:
    """Count what an evaluation takes; no weight is read."""
    import torch

    snapshot = evaluation.lineup.variants[-1].snapshot
    options = evaluation.options
    device = torch.device(device_of(options))
    shape = replace(shape_of(empty_model(evaluation, snapshot)), device=device.type)
    free = free_memory(device)
    manner = choose_manner(
        shape,
        evaluation.frame.longest,
        free - shape.parameters * shape.dtype_bytes,
        options.chunk,
        options.slice_memory * MIB,
    )
    work = work_of(evaluation)
    cache = None
    with suppress(RopextError):  # nothing rotates
        cache = families.as_read(snapshot.config).kv_bytes(
            evaluation.frame.longest, shape.dtype_bytes
        )
    return Costs(
        work=tuple(work),
        passes=sum(part.passes for part in work),
        tokens=sum(map(evaluation.reads.tokens, evaluation.lineup.variants)),
        weight_bytes=shape.parameters * shape.dtype_bytes,
        cache_bytes=cache,
        chunk=manner.chunk,
        slice_tokens=manner.slice_tokens,
        columns=manner.columns,
    )


def work_of(evaluation: Evaluation) -> list[Passes]:
    """Passes by kind, from configs alone, those of questions last; every variant but the base
    answers the same ones."""
    variants = evaluation.lineup.variants
    parts = dict[Any, Passes]()
    readers = [variant.label for variant in variants if not variant.reads_short]
    everyone = readers[0] if len(readers) == 1 else f"each of {len(readers)} variants"
    for variant in variants:
        for unit in evaluation.reads.units(variant):
            what = f"{everyone if unit.asks else variant.label}, {unit.kind}"
            key = unit.asks, what, not unit.asks and unit.size
            before = parts.get(key, Passes(what, 0, 0))
            parts[key] = Passes(what, before.passes + unit.passes, max(before.tokens, unit.size))
    return [parts[key] for key in sorted(parts, key=lambda key: key[0])]
