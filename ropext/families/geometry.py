"""Sizes of a text config: heads, layers, windows and what the KV cache holds."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ropext.errors import InputError
from ropext.families.config import Dict
from ropext.families.table import Family, Label
from ropext.forms import LARGEST_THETA, Params

MOST_LAYERS = 1 << 14
MOST_CHANNELS = 1 << 24
MOST_ROTARY = 1 << 13  # the widest real heads have 512
NOT_ATTENTION = ("linear", "conv", "mamba", "recurrent", "moe", "ssm")


@dataclass(frozen=True)
class Sizes:
    """What the config says, with the class default where it says nothing."""

    context: int
    layers: int | None
    hidden: int | None
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    vocab: int | None
    layer_types: tuple[str, ...]
    window: int | None
    layer_thetas: tuple[float, ...]
    nope_layers: int  # layers that the config exempts from rotation by number


def names_of(key: str, defaults: Mapping[str, Any]) -> tuple[str, ...]:
    """The names under which a config may hold a key; the family's own first."""
    own = defaults.get("names", {}).get(key)
    return (own, key) if own else (key,)


def stated(text: Dict, key: str, defaults: Mapping[str, Any], high: int) -> int | None:
    """A size as it stands in the config, under either of its names."""
    for name in names_of(key, defaults):
        value = text.integer(name, 0 if key == "max_window_layers" else 1, high)
        if value is not None:
            return value
    return None


def size(text: Dict, key: str, defaults: Mapping[str, Any], high: int) -> int | None:
    value = stated(text, key, defaults, high)
    if value is None and not any(name in text.values for name in names_of(key, defaults)):
        default = defaults.get(key)
        return default if isinstance(default, int) else None
    return value


def derived_head_dim(hidden: int | None, heads: int | None) -> int | None:
    return hidden // heads if hidden and heads and hidden >= heads else None


def _layer_types(text: Dict, layers: int | None, defaults: Mapping[str, Any]) -> tuple[str, ...]:
    """The type of each layer, where the config or the class gives one."""
    given = text.strings("layer_types")
    if given is None:
        given = text.strings("layers_block_type")
    if given is not None:
        return tuple(given)
    run = defaults.get("layer_types")
    every = text.integer("sliding_window_pattern", 1, MOST_LAYERS)
    if every is not None:
        run = ["sliding_attention"] * (every - 1) + ["full_attention"]
    if not run or not layers:
        return ()
    kinds = [run[i % len(run)] for i in range(layers)]
    return (*kinds[:-1], defaults.get("last_layer_type", kinds[-1]))


def _window(
    text: Dict, layer_types: tuple[str, ...], defaults: Mapping[str, Any]
) -> tuple[int | None, tuple[str, ...]]:
    """The window and the layers that have it, for the ways in which families say so."""
    window = size(text, "sliding_window", defaults, 1 << 40)
    if window is None:
        return size(text, "attention_chunk_size", defaults, 1 << 40), layer_types
    used = text.flag("use_sliding_window")
    if used is None:
        used = defaults.get("use_sliding_window")
    if used is False:
        return None, layer_types
    first = size(text, "max_window_layers", defaults, MOST_LAYERS)
    if used and first is not None and not text.has("layer_types"):
        # Qwen: the layers from max_window_layers on.
        kinds = ("full_attention", "sliding_attention")
        return window, tuple(kinds[i >= first] for i in range(len(layer_types)))
    return window, layer_types


def sizes(
    text: Dict, family: Family, defaults: Mapping[str, Any], trained: int | None = None
) -> Sizes:
    """Read and check every size; `trained` stands in where the config has no length."""
    layers = size(text, "num_hidden_layers", defaults, MOST_LAYERS)
    hidden = size(text, "hidden_size", defaults, MOST_CHANNELS)
    heads = size(text, "num_attention_heads", defaults, MOST_CHANNELS)
    kv_heads = size(text, "num_key_value_heads", defaults, MOST_CHANNELS) or heads
    head_dim = derived_head_dim(hidden, heads)
    if family.head_multiple:
        head_dim = family.head_multiple * hidden // heads if hidden and heads else None
    else:
        head_dim = size(text, "head_dim", defaults, MOST_CHANNELS) or head_dim
    context = size(text, "max_position_embeddings", defaults, 1 << 40) or trained
    if context is None:
        name = names_of("max_position_embeddings", defaults)[0]
        raise InputError(
            f"config.json: {text.name(name)} is missing and this model type has no default for it;"
            " name the trained length with --context"
        )
    layer_types = _layer_types(text, layers, defaults)
    window, layer_types = _window(text, layer_types, defaults)
    thetas = None
    if family.layer_thetas:
        thetas = text.numbers("layer_rope_theta", zero=True, most=LARGEST_THETA)
    return Sizes(
        context,
        layers,
        hidden,
        heads,
        kv_heads,
        head_dim,
        size(text, "vocab_size", defaults, 1 << 31),
        layer_types,
        window,
        tuple(thetas or ()),
        _nope_layers(text, layers, defaults),
    )


def _nope_layers(text: Dict, layers: int | None, defaults: Mapping[str, Any]) -> int:
    """SmolLM 3 and Llama 4 list 1 for a layer that rotates and 0 for one that does not."""
    given = text.numbers("no_rope_layers", zero=True)
    if given:
        return sum(value == 0 for value in given)
    every = size(text, "no_rope_layer_interval", defaults, MOST_LAYERS)
    return (layers or 0) // every if every and "no_rope_layer_interval" in defaults else 0


def label_head_dim(
    text: Dict, label: Label, sized: Sizes, defaults: Mapping[str, Any]
) -> int | None:
    """The head size of the layers that use a label (Gemma 4's global layers have their own)."""
    layered = text.object("per_layer_config")
    wanted = label.layer_types or (label.name,)
    key = "qk_rope_head_dim" if label.sizes_rotation else "head_dim"
    if layered is not None:
        for index, kind in enumerate(sized.layer_types):
            own = layered.object(str(index)) if kind in wanted else None
            if own is not None and own.has(key):
                return own.integer(key, 2, MOST_CHANNELS)
    if label.head_dim == "head_dim":
        return sized.head_dim
    own_size = text.integer(label.head_dim, 2, MOST_CHANNELS)
    return own_size or label.default_head_dim or size(text, key, defaults, MOST_CHANNELS)


def rotary_dim(
    text: Dict,
    family: Family,
    label: Label | None,
    params: Params,
    sized: Sizes,
    defaults: Mapping[str, Any],
) -> int:
    """How many channels of a head turn: head_dim times the partial factor where one is read."""
    if family.dim != "head_dim":
        head = size(text, family.dim, defaults, MOST_CHANNELS) or sized.head_dim
    else:
        head = label_head_dim(text, label, sized, defaults) if label else sized.head_dim
    if head is None:
        raise InputError(
            "config.json: neither head_dim nor hidden_size and num_attention_heads are given, so"
            " the rotary dim is unknown"
        )
    if params["rope_type"] == "proportional" or (label and label.sizes_rotation):
        dim = head  # its pairs count over the whole head, also those that stand still
    else:
        dim = int(head * partial_factor(family, params))
    if dim < 2 or dim % 2 or dim > MOST_ROTARY:
        raise InputError(
            f"config.json: this model rotates {dim} of {head} channels per head, but a rotary"
            f" embedding needs an even number of 2 to {MOST_ROTARY}"
        )
    return dim


def partial_factor(family: Family, params: Params) -> float:
    """The partial factor as this family reads it (1 where it ignores the key)."""
    if not (family.partial or family.labels):
        return 1.0
    factor: float = params.get("partial_rotary_factor", family.fixed_partial or 1.0)
    if family.fixed_partial not in (0.0, factor):
        raise InputError(
            f"config.json: partial_rotary_factor is {factor:g}, but this model type always rotates"
            f" {family.fixed_partial:g} of each head; remove the key"
        )
    if not 0 < factor <= 1:
        raise InputError(
            f"config.json: partial_rotary_factor must be above 0 and at most 1, was {factor:g}"
        )
    return factor


def attends(layer_type: str) -> bool:
    return not any(word in layer_type for word in NOT_ATTENTION)


def is_windowed(layer_type: str) -> bool:
    return "sliding" in layer_type or "chunked" in layer_type or "local" in layer_type


def kv_values(
    text: Dict, row: Family, sized: Sizes, defaults: Mapping[str, Any]
) -> tuple[int | None, int | None]:
    """Numbers kept per token: over layers that keep all tokens, and over layers with a window.

    Latent attention (MLA) keeps one compressed vector and one rotary key for all heads.
    """
    latent = size(text, "kv_lora_rank", defaults, MOST_CHANNELS)
    rotary = size(text, "qk_rope_head_dim", defaults, MOST_CHANNELS)
    if latent and rotary:
        each = latent + rotary
    elif sized.kv_heads and sized.head_dim:
        each = 2 * sized.kv_heads * sized.head_dim
    else:
        return None, None
    if not sized.layers:
        return None, None
    listed = len(sized.layer_types) == sized.layers
    kinds = [kind for kind in sized.layer_types if attends(kind)] if listed else []
    keeping = len(kinds) if listed else sized.layers
    windowed = sum(is_windowed(kind) for kind in kinds)
    if row.every_layer_windowed:
        windowed = keeping
    windowed = windowed if sized.window else 0
    return each * (keeping - windowed), each * windowed
