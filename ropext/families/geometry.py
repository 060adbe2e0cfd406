"""The text part of a config: heads, layers, windows, and what the KV cache holds."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ropext.errors import InputError
from ropext.families.config import Dict, defaults_of
from ropext.families.table import Label, family
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


class TextConfig(Dict):
    """The text part of a config, with the row of its type and what absent keys mean there."""

    def __init__(
        self,
        values: Mapping[str, Any],
        text_type: str,
        where: str = "",
        context: int | None = None,
        original: int | None = None,
    ) -> None:
        super().__init__(values, where)
        self.type = text_type
        # Lengths that the user states, where the config misstates or lacks them.
        self.context, self.original = context, original
        self.row, self.defaults = family(text_type), defaults_of(text_type)

    def names_of(self, key: str) -> tuple[str, ...]:
        """The names under which the config may hold a key; the family's own first."""
        name = self.defaults.get("names", {}).get(key)
        return (name, key) if name else (key,)

    def stated(self, key: str, high: int = MOST_CHANNELS) -> int | None:
        """A size as it stands in the config, under either of its names."""
        for name in self.names_of(key):
            value = self.integer(name, 0 if key == "max_window_layers" else 1, high)
            if value is not None:
                return value
        return None

    def size(self, key: str, high: int = MOST_CHANNELS) -> int | None:
        """A size as it stands in the config, or the class default where its key is absent."""
        value = self.stated(key, high)
        if value is None and not any(name in self.values for name in self.names_of(key)):
            default = self.defaults.get(key)
            return default if isinstance(default, int) else None
        return value

    @cached_property
    def sizes(self) -> Sizes:
        """Every size, read and checked."""
        layers = self.size("num_hidden_layers", MOST_LAYERS)
        hidden = self.size("hidden_size")
        heads = self.size("num_attention_heads")
        kv_heads = self.size("num_key_value_heads") or heads
        head_dim = derived_head_dim(hidden, heads)
        if self.row.head_multiple:
            head_dim = self.row.head_multiple * hidden // heads if hidden and heads else None
        else:
            head_dim = self.size("head_dim") or head_dim
        context = self.size("max_position_embeddings", 1 << 40) or self.context
        if context is None:
            name = self.names_of("max_position_embeddings")[0]
            raise InputError(
                f"config.json: {self.name(name)} is missing and this model type has no default for"
                " it; name the trained length with --context"
            )
        layer_types = _layer_types(self, layers)
        window, layer_types = _window(self, layer_types)
        thetas = None
        if self.row.layer_thetas:
            thetas = self.numbers("layer_rope_theta", zero=True, most=LARGEST_THETA)
        vocab, nope_layers = self.size("vocab_size", 1 << 31), _nope_layers(self, layers)
        return Sizes(
            *(context, layers, hidden, heads, kv_heads, head_dim, vocab),
            *(layer_types, window, tuple(thetas or ()), nope_layers),
        )


def derived_head_dim(hidden: int | None, heads: int | None) -> int | None:
    return hidden // heads if hidden and heads and hidden >= heads else None


def _layer_types(text: TextConfig, layers: int | None) -> tuple[str, ...]:
    """The type of each layer, where the config or the class gives one."""
    given = text.strings("layer_types")
    if given is None:
        given = text.strings("layers_block_type")
    if given is not None:
        return tuple(given)
    run = text.defaults.get("layer_types")
    every = text.integer("sliding_window_pattern", 1, MOST_LAYERS)
    if every is not None:
        run = ["sliding_attention"] * (every - 1) + ["full_attention"]
    if not run or not layers:
        return ()
    kinds = [run[i % len(run)] for i in range(layers)]
    return (*kinds[:-1], text.defaults.get("last_layer_type", kinds[-1]))


def _window(text: TextConfig, layer_types: tuple[str, ...]) -> tuple[int | None, tuple[str, ...]]:
    """The window and the layers that have it, for the ways in which families say so."""
    window = text.size("sliding_window", 1 << 40)
    if window is None:
        return text.size("attention_chunk_size", 1 << 40), layer_types
    used = text.flag("use_sliding_window")
    if used is None:
        used = text.defaults.get("use_sliding_window")
    if used is False:
        return None, layer_types
    first = text.size("max_window_layers", MOST_LAYERS)
    if used and first is not None and not text.has("layer_types"):
        # Qwen: the layers from max_window_layers on.
        kinds = ("full_attention", "sliding_attention")
        return window, tuple(kinds[i >= first] for i in range(len(layer_types)))
    return window, layer_types


def _nope_layers(text: TextConfig, layers: int | None) -> int:
    """SmolLM 3 and Llama 4 list 1 for a layer that rotates and 0 for one that does not."""
    given = text.numbers("no_rope_layers", zero=True)
    if given:
        return sum(value == 0 for value in given)
    every = text.size("no_rope_layer_interval", MOST_LAYERS)
    return (layers or 0) // every if every and "no_rope_layer_interval" in text.defaults else 0


def label_head_dim(text: TextConfig, label: Label) -> int | None:
    """The head size of the layers that use a label (Gemma 4's global layers have their own)."""
    layered = text.object("per_layer_config")
    key = "qk_rope_head_dim" if label.sizes_rotation else "head_dim"
    if layered is not None:
        for index, kind in enumerate(text.sizes.layer_types):
            layer = layered.object(str(index)) if kind in label.kinds else None
            if layer is not None and layer.has(key):
                return layer.integer(key, 2, MOST_CHANNELS)
    if label.head_dim == "head_dim":
        return text.sizes.head_dim
    stated = text.integer(label.head_dim, 2, MOST_CHANNELS)
    return stated or label.default_head_dim or text.size(key)


def rotary_dim(text: TextConfig, label: Label | None, params: Params) -> int:
    """How many channels of a head turn: head_dim times the partial factor where one is read."""
    if text.row.dim != "head_dim":
        head = text.size(text.row.dim) or text.sizes.head_dim
    else:
        head = label_head_dim(text, label) if label else text.sizes.head_dim
    if head is None:
        raise InputError(
            "config.json: neither head_dim nor hidden_size and num_attention_heads are given, so"
            " the rotary dim is unknown"
        )
    if params["rope_type"] == "proportional" or (label and label.sizes_rotation):
        dim = head  # its pairs count over the whole head, also those that stand still
    else:
        dim = int(head * partial_factor(text, params))
    if dim < 2 or dim % 2 or dim > MOST_ROTARY:
        raise InputError(
            f"config.json: this model rotates {dim} of {head} channels per head, but a rotary"
            f" embedding needs an even number of 2 to {MOST_ROTARY}"
        )
    return dim


def partial_factor(text: TextConfig, params: Params) -> float:
    """The partial factor as this family reads it (1 where it ignores the key)."""
    row = text.row
    if not (row.partial or row.labels):
        return 1.0
    factor: float = params.get("partial_rotary_factor", row.fixed_partial or 1.0)
    if row.fixed_partial not in (0.0, factor):
        raise InputError(
            f"config.json: partial_rotary_factor is {factor:g}, but this model type always rotates"
            f" {row.fixed_partial:g} of each head; remove the key"
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


def kv_values(text: TextConfig) -> tuple[int | None, int | None]:
    """Numbers kept per token: over layers that keep all tokens, and over layers with a window.

    Latent attention (MLA) keeps one compressed vector and one rotary key for all heads.
    """
    sizes = text.sizes
    latent, rotary = text.size("kv_lora_rank"), text.size("qk_rope_head_dim")
    if latent and rotary:
        each = latent + rotary
    elif sizes.kv_heads and sizes.head_dim:
        each = 2 * sizes.kv_heads * sizes.head_dim
    else:
        return None, None
    if not sizes.layers:
        return None, None
    listed = len(sizes.layer_types) == sizes.layers
    kinds = [kind for kind in sizes.layer_types if attends(kind)] if listed else []
    keeping = len(kinds) if listed else sizes.layers
    windowed = keeping if text.row.every_layer_windowed else sum(map(is_windowed, kinds))
    windowed = windowed if sizes.window else 0
    return each * (keeping - windowed), each * windowed
