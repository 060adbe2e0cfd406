"""The widths of what each decoder layer computes for a token, from the layer's own modules."""

import math
from dataclasses import dataclass, field
from typing import Any

# Activations that are written in Python keep so many tensors of their input's width; others one.
PYTHON_ACTIVATIONS = {"NewGELUActivation": 4, "FastGELUActivation": 4}


@dataclass(frozen=True)
class Experts:
    """A mixture's weights that stand in one tensor; routers read every one, a token few."""

    chosen: int = 0
    all: int = 0
    inner: int = 0


@dataclass(frozen=True)
class Layer:
    """In numbers for each token."""

    hidden: int
    copied: int  # what norms written in Python read, of which they make a float32 copy
    streams: int  # what norms read that are one operator
    inputs: int  # of all linear layers together
    distinct: int  # the same, but what several of them read (and attention's result) counted once
    queries: int
    keys: int
    values: int  # with queries and keys where one projection makes all three: they are a view of it
    turned: int  # queries and keys that the rotation turns
    factors: int  # what the MLP's activation keeps, and the gate's product
    inner: int  # what the MLP's last projection reads
    experts: Experts = field(default_factory=Experts)
    window: int | None = None


def layers_of(model: Any) -> tuple[Layer, ...]:
    """Of a model, loaded or on the meta device."""
    config = model.config.get_text_config()
    decoder = model.get_decoder()
    lists = (own for own in decoder.modules() if type(own).__name__ == "ModuleList" and len(own))
    stack = next(lists, ())
    kinds = getattr(config, "layer_types", None) or [None] * len(stack)
    return tuple(_layer(own, config, kind) for own, kind in zip(stack, kinds, strict=False))


def _layer(module: Any, config: Any, kind: str | None) -> Layer:
    hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
    size = int(getattr(config, "head_dim", None) or hidden // heads)
    keys = size * int(getattr(config, "num_key_value_heads", None) or heads)
    queries = size * heads
    experts = _experts(module, config)
    attention, groups = _linears(module)
    fused = any(made >= queries + 2 * keys for _, made in attention)
    inputs = sum(read for read, _ in attention)
    distinct, factors, inner = hidden, 0.0, 0.0
    for inside, group in groups.items():
        share = experts[1] if "experts." in inside else 1.0
        read, own_factors, own_inner = _of_mlp(group, hidden, _activation(module, inside))
        inputs += round(share * read)
        factors += share * own_factors
        inner += share * own_inner
        distinct += round(share * own_inner) + (hidden if inner else 0)
    copied, streams = _norms(module, size, heads, keys // size)
    if getattr(config, "use_parallel_residual", False):
        streams = min(streams, hidden)
    return Layer(
        hidden,
        copied,
        streams,
        inputs,
        distinct,
        queries,
        keys,
        queries + 2 * keys if fused else keys,
        round((queries + keys) * _turned_share(config)),
        round(factors),
        round(inner),
        experts[0],
        _window(config, kind),
    )


Sides = tuple[int, int]  # what a linear layer reads and makes


def _linears(layer: Any) -> tuple[list[Sides], dict[str, list[Sides]]]:
    """Those of the attention, and all others by the module they stand in."""
    attention = list[Sides]()
    groups = dict[str, list[Sides]]()
    inside = "\0"
    for name, module in layer.named_modules():
        sides = _sides(module)
        if sides is None or name.startswith(inside):  # a LoRA stands inside its linear layer
            continue
        inside = f"{name}."
        if "attn" in name or "attention" in name:
            attention.append(sides)
        else:
            groups.setdefault(name.rpartition(".")[0], []).append(sides)
    return attention, groups


def _sides(module: Any) -> Sides | None:
    """nn.Linear, what quantisers make of it, and the transposed Conv1D of GPT-2."""
    if type(module).__name__ == "Conv1D":
        return int(module.nx), int(module.nf)
    if hasattr(module, "in_features") and hasattr(module, "out_features"):
        return int(module.in_features), int(module.out_features)
    return None


def _of_mlp(group: list[Sides], hidden: int, activation: int) -> tuple[int, int, int]:
    """What its linear layers read, what activation and gate keep, what its last layer reads."""
    inner = max((read for read, made in group if made == hidden), default=0)
    wide = sum(made for _, made in group if made != hidden) if inner else 0
    # What enters the activation; where a gate multiplies, also both that it multiplies.
    factors = activation * inner + 2 * max(0, wide - inner)
    return sum(read for read, _ in group), factors, inner


def _activation(layer: Any, inside: str) -> int:
    parent = layer.get_submodule(inside)
    kinds = (type(own).__name__ for own in parent.children())
    return max((PYTHON_ACTIVATIONS.get(kind, 1) for kind in kinds), default=1)


def _experts(layer: Any, config: Any) -> tuple[Experts, float]:
    """And the share of experts that one token goes through."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    count = next((int(own) for name in names if (own := getattr(config, name, None))), 0)
    chosen = int(getattr(config, "num_experts_per_tok", None) or 1)
    for name, weight in layer.named_parameters():
        if name.endswith("experts.down_proj"):
            # Experts by hidden size by width, or with the last two turned.
            inner = math.prod(weight.shape) // (weight.shape[0] * int(config.hidden_size))
            return Experts(chosen, int(weight.shape[0]), inner), chosen / weight.shape[0]
    return Experts(), chosen / count if count else 1.0


def _norms(layer: Any, size: int, heads: int, kv_heads: int) -> tuple[int, int]:
    """What norms read: those that copy it, and those that are one operator of torch."""
    from torch import nn

    copied = streams = 0
    for name, module in layer.named_modules():
        weight = getattr(module, "weight", None)
        if "norm" not in type(module).__name__.lower() or weight is None:
            continue
        width, own = int(weight.numel()), name.rpartition(".")[2]
        if width == size and own.startswith(("q", "k")):  # of each head
            width *= heads if own.startswith("q") else kv_heads
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            streams += width
        else:
            copied += width
    return copied, streams


def _turned_share(config: Any) -> float:
    rope = getattr(config, "rope_parameters", None) or {}
    names = ("partial_rotary_factor", "rotary_pct")
    found = (rope.get(name) or getattr(config, name, None) for name in names)
    return float(next((own for own in found if own), 1.0))


def _window(config: Any, kind: str | None) -> int | None:
    if kind is not None and kind != "sliding_attention":
        return None
    found = getattr(config, "sliding_window", None)
    return int(found) if found else None
