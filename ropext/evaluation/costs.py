"""What an evaluation takes, counted before it starts: passes, tokens, FLOPs, peak memory.

FLOPs of a causal pass over N tokens: N (2 P_body + 2 h V) + 2 layers d_attention N^2. Memory is
above the weights. Both are within a factor of two of what is then measured (benchmarks/).
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

from ropext.evaluation.forward import HEAD_BYTES, Manner, slice_for
from ropext.evaluation.heads import TILE_TOKENS, bends_logits, columns_for, plain_head

# Chunks shorter than this cost more time than they save memory.
SHORTEST_CHUNK, LONGEST_CHUNK = 1024, 16384
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

    @property
    def mlp_width(self) -> float:
        """Of a gated MLP with as many active parameters as a layer of this model has beside its
        attention: plain ones are narrower than their own width says, experts wider."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        return max(0.0, self.body_parameters / self.layers - attention) / (3 * self.hidden)

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
    tables = {id(model.get_input_embeddings().weight), id(_head_weight(model))}
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
        dtype_bytes=_dtype_bytes(model),
        eager=getattr(model.config, "_attn_implementation", "") == "eager",
        plain_head=plain_head(model) is not None and not bends_logits(config),
        device=model.get_input_embeddings().weight.device.type,
    )


def _head_weight(model: Any) -> Any:
    head = model.get_output_embeddings()
    return None if head is None else head.weight


def _numel(parameter: Any) -> int:
    # bitsandbytes packs two 4-bit weights into a byte.
    packed = type(parameter).__name__ == "Params4bit"
    return int(parameter.numel()) * (2 if packed else 1)


def _dtype_bytes(model: Any) -> int:
    return int(model.get_input_embeddings().weight.element_size())


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


@dataclass(frozen=True)
class Work:
    """So many passes of so many tokens."""

    what: str
    passes: int
    tokens: int  # of one pass


@dataclass(frozen=True)
class Estimate:
    """All of it together."""

    work: tuple[Work, ...]
    passes: int
    tokens: int
    flops: float
    weight_bytes: int
    peak_bytes: int  # above the weights
    chunk: int | None
    slice_tokens: int
    columns: int | None

    def to_json(self) -> dict[str, Any]:
        """As --dry-run --json prints it."""
        return asdict(self)


def estimate(shape: Shape, work: list[Work], manner: Manner) -> Estimate:
    """The sum over all passes, and the largest of their peaks."""
    return Estimate(
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
