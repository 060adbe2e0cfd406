"""What an evaluation takes, counted from configs before it starts: passes, tokens, FLOPs, memory.

FLOPs of a causal pass over N tokens: N (2 P_body + 2 h V) + 2 layers d_attention N^2. Memory is
above the weights. Both are within a factor of two of what is then measured (benchmarks/).
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ropext.checkpoint import with_weights
from ropext.evaluation import loading
from ropext.evaluation.forward import (
    HEAD_BYTES,
    TILE_TOKENS,
    Manner,
    bends_logits,
    columns_for,
    plain_head,
    slice_for,
)
from ropext.evaluation.layers import Layer, layers_of
from ropext.evaluation.manifest import workdir_of
from ropext.evaluation.preparing import Settled, settle
from ropext.evaluation.reading import hf_stride, short_windows, strided_windows
from ropext.evaluation.variants import Lineup
from ropext.lengths import length_text
from ropext.narration import duration
from ropext.options.evaluate import DocumentOptions
from ropext.results.gates import Gate

# Chunks shorter than this cost more time than they save memory.
SHORTEST_CHUNK, LONGEST_CHUNK = 1024, 16384
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
    body_parameters: int  # active per token, embeddings and head left out
    all_parameters: int
    dtype_bytes: int
    eager: bool = False
    plain_head: bool = True
    device: str = "cpu"  # its type
    parts: tuple[Layer, ...] = ()  # what each layer computes
    masks: bool = True  # where a window is narrower than a row: flash attention needs none

    def is_windowed_at(self, num_tokens: int) -> bool:
        """Whether a layer's window is narrower than so many tokens, which takes a mask."""
        return any(own.window is not None and own.window <= num_tokens for own in self.parts)

    def flops(self, num_tokens: int) -> float:
        """One causal pass over `num_tokens`."""
        dense = 2 * self.body_parameters + 2 * self.hidden * self.vocabulary
        attention = 2 * self.layers * self.heads * self.head_dim * num_tokens**2
        return float(num_tokens * dense + attention)

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
        if at_once < num_tokens or (self.masks and self.is_windowed_at(num_tokens)):
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
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    share = (getattr(config, "num_experts_per_tok", 1) or 1) / experts if experts else 1.0
    body, total = 0.0, 0
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    tables = {id(embedding), id(getattr(head, "weight", None))}
    for name, parameter in model.named_parameters():
        count = _numel(parameter)
        total += count
        if id(parameter) not in tables:
            body += count * (share if ".experts." in name else 1.0)
    width = getattr(config, "intermediate_size", None) or 4 * hidden
    return Shape(
        layers=int(config.num_hidden_layers),
        hidden=hidden,
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or hidden // heads),
        feed_forward=int(max(width) if isinstance(width, list | tuple) else width),
        vocabulary=int(config.vocab_size),
        body_parameters=int(body),
        all_parameters=total,
        dtype_bytes=int(embedding.element_size()),
        eager=getattr(model.config, "_attn_implementation", "") == "eager",
        plain_head=plain_head(model) is not None and not bends_logits(config),
        device=embedding.device.type,
        parts=layers_of(model),
        masks=getattr(model.config, "_attn_implementation", "sdpa") == "sdpa",
    )


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
    ways, size = [whole], LONGEST_CHUNK
    while size >= SHORTEST_CHUNK:
        ways += [replace(whole, chunk=size)] if size < longest else []
        size //= 2
    fitting = [way for way in ways if shape.peak_bytes(longest, way) <= USABLE * free]
    # A chunk's mask over all that came before can be larger than what it saves.
    return fitting[0] if fitting else min(ways, key=lambda way: shape.peak_bytes(longest, way))


def manner_of(model: Any, longest: int, options: DocumentOptions) -> Manner:
    """How a loaded model is read in the memory that is free."""
    free = loading.free_memory(model.get_input_embeddings().weight.device)
    return choose_manner(shape_of(model), longest, free, options.chunk, options.slice_memory * MIB)


@dataclass(frozen=True)
class Passes:
    """So many passes of so many tokens."""

    what: str
    passes: int
    tokens: int  # of one pass


@dataclass(frozen=True)
class Timed:
    """How long all of the work takes on this machine, by one step that was timed."""

    seconds: float  # of all
    step: str  # what was done once
    took: float

    @property
    def sentence(self) -> str:
        return (
            f"about {duration(self.seconds)} on this machine ({self.step} took {self.took:.2g} s)"
        )


@dataclass(frozen=True)
class Costs:
    """All of it together."""

    work: tuple[Passes, ...]
    passes: int
    tokens: int
    flops: float
    weight_bytes: int
    peak_bytes: int  # above the weights
    chunk: int | None
    slice_tokens: int
    columns: int | None
    time: Timed | None = None  # where it was asked for

    def to_json(self) -> dict[str, Any]:
        """As --dry-run --json prints it."""
        return {k: v for k, v in asdict(self).items() if k != "time" or v is not None}


def estimate(shape: Shape, work: list[Passes], manner: Manner) -> Costs:
    """The sum over all passes, and the largest of their peaks."""
    return Costs(
        work=tuple(work),
        passes=sum(part.passes for part in work),
        tokens=sum(part.passes * part.tokens for part in work),
        flops=sum(part.passes * shape.flops(part.tokens) for part in work),
        weight_bytes=shape.all_parameters * shape.dtype_bytes,
        peak_bytes=max((shape.peak_bytes(part.tokens, manner) for part in work), default=0),
        chunk=manner.chunk,
        slice_tokens=manner.slice_tokens,
        columns=manner.columns,
    )


def estimate_evaluation(
    model: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    lineup: Lineup | None = None,
    gates: Sequence[Gate] = (),
    output: Path | None = None,
    force: bool = False,
    timed: Callable[..., Timed] | None = None,
    **values: Any,
) -> tuple[Settled, Costs]:
    """What `evaluate` would take; no weight is read, and what it would refuse is refused. `timed`
    tells how long (`timing.timed_reading`)."""
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoConfig

    settled = settle(model, revision, trust_remote_code, values, lineup, gates)
    _check_places(settled, output, force)
    snapshot, options = settled.lineup.variants[-1].snapshot, settled.options
    config = AutoConfig.from_pretrained(snapshot.directory, trust_remote_code=trust_remote_code)
    dtype = config.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    with init_empty_weights(include_buffers=False):
        skeleton = loading.with_attention(
            options.attn_implementation,
            lambda kind: loading.auto_class(settled.lineup.masked).from_config(
                config,
                dtype=dtype or torch.float32,
                trust_remote_code=trust_remote_code,
                attn_implementation=kind,
            ),
        )
    device = torch.device(loading.device_of(options))
    shape = replace(shape_of(skeleton), device=device.type)
    free = loading.free_memory(device)
    manner = choose_manner(
        shape,
        settled.frame.longest,
        free - shape.all_parameters * shape.dtype_bytes,
        options.chunk,
        options.slice_memory * MIB,
    )
    found = estimate(shape, work_of(settled), manner)
    if timed is not None:
        kind = dtype or torch.float32
        found = replace(found, time=timed(skeleton, device, kind, found, settled.frame.longest))
    return settled, found


def _check_places(settled: Settled, output: Path | None, force: bool) -> None:
    """Weights that should lie here and do not; an output that holds something else."""
    for own in settled.lineup.variants:
        if own.snapshot.hub_id != own.snapshot.name:
            with_weights(own.snapshot)
        elif not own.snapshot.weight_files:
            return  # fetched first, and part of what says which run it is
    if output is not None:
        workdir_of(output, settled).check(force)


def work_of(settled: Settled) -> list[Passes]:
    """Passes by kind, from configs alone."""
    frame, options = settled.frame, settled.options
    num = len(settled.documents or ())
    work = list[Passes]()
    for own in settled.lineup.variants if num else ():
        if own.reads_short and settled.masking is None:
            windows = sum(1 for _ in short_windows(frame.longest, frame.context))
            size = min(frame.context, frame.longest)
            work.append(Passes(f"{own.label}, short window", num * windows, size))
            continue
        for length in own.passes(frame):
            work.append(Passes(f"{own.label}, whole", num * (frame.mask_stride or 1), length))
        for length in frame.lengths if options.protocol == "hf-stride" else ():
            count = sum(1 for _ in strided_windows(frame.longest, length, hf_stride(length)))
            work.append(Passes(f"{own.label}, strided at {length}", num * count, length))
    return work + _questions_work(settled)


def _questions_work(settled: Settled) -> list[Passes]:
    """One entry for all questions of a task and length, each haystack's as many tokens as the
    largest takes; every variant but the base answers them."""
    readers = [own.label for own in settled.lineup.variants if not own.reads_short]
    who = readers[0] if len(readers) == 1 else f"each of {len(readers)} variants"
    sizes, extra = dict[str, list[int]](), 0 if settled.encoder.bos is None else 1
    for group in settled.questions:
        shared = group[0].shared if len(group) > 1 else 0
        tokens = shared + sum(item.most_read - shared for item in group)
        name = f"{who}, {group[0].task} at {length_text(group[0].length + extra)}"
        sizes.setdefault(name, []).append(tokens)
    return [Passes(what, len(own) * len(readers), max(own)) for what, own in sizes.items()]
