"""Read the text part of a config: heads, layers, windows, and the size of the KV cache."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ropext.base.errors import ConfigError
from ropext.families.config import Dict, defaults_of
from ropext.families.described import Facts
from ropext.families.table import Family, Label, family
from ropext.scaling.forms import LARGEST_THETA, Params

MOST_LAYERS = 1 << 10
MOST_CHANNELS = 1 << 24
MOST_ROTARY = 1 << 13  # the widest real heads have 512
MAY_BE_ZERO = ("max_window_layers", "num_kv_shared_layers", "sliding_window")
NOT_ATTENTION = ("linear", "conv", "mamba", "recurrent", "moe", "ssm")


@dataclass(frozen=True)
class Sizes:
    """The sizes that the config states, or the class defaults of absent ones."""

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
    rotates: tuple[bool, ...]  # whether each layer does, if the config states it layer by layer


class CacheLayer(NamedTuple):
    """The content of the KV cache for one layer."""

    values: int  # numbers per token
    window: int | None  # only of so many last tokens
    rate: int | None = None  # and one entry for every so many tokens, in addition to the window
    is_latent: bool = False  # one vector for all heads, from which keys and values are made

    def kept(self, tokens: int, step: int = 1, beside: int = 0) -> int:
        """Return how many numbers a layer keeps in the KV cache for so many tokens, by the sizes
        that its config's keys state. The engine's cache grows by `step` tokens. A windowed layer
        keeps `beside` tokens more than its window."""
        cells = -(-tokens // step) * step
        if self.window:
            cells = min(cells, -(-(self.window + beside) // step) * step)
        entries = tokens // self.rate if self.rate else 0
        return self.values * (cells + entries)


class TextConfig(Dict):
    """The text part of a config, with the row of its type and the meaning of absent keys."""

    def __init__(
        self,
        values: Mapping[str, Any],
        text_type: str,
        facts: Facts,
        where: str = "",
        context: int | None = None,
        original: int | None = None,
    ) -> None:
        """Hold the text part of a config.json with its model type's row, defaults and facts."""
        super().__init__(values, where)
        self.type = text_type
        # Lengths that the user states, if the config misstates or lacks them.
        self.context = context
        self.original = original
        self.facts = facts
        self.row = family(text_type, facts)
        self.defaults = defaults_of(text_type, facts)

    def names_of(self, key: str) -> tuple[str, ...]:
        """Return the names under which config.json may hold a key; the family's own first."""
        name = self.defaults.get("names", {}).get(key)
        return (name, key) if name else (key,)

    def stated(self, key: str, high: int = MOST_CHANNELS) -> int | None:
        """Return a size of a model as its config states it, under either of its names."""
        for name in self.names_of(key):
            value = self.integer(name, 0 if key in MAY_BE_ZERO else 1, high)
            if value is not None:
                return value
        return None

    def size(self, key: str, high: int = MOST_CHANNELS) -> int | None:
        """Return a size of a model as its config states it, or the class default if its key is
        absent."""
        value = self.stated(key, high)
        if value is None and not any(name in self.values for name in self.names_of(key)):
            default = self.defaults.get(key)
            return default if isinstance(default, int) else None
        return value

    @cached_property
    def sizes(self) -> Sizes:
        """Return the sizes of the model in config.json, each checked."""
        layers = self.size("num_hidden_layers", MOST_LAYERS)
        if layers is None and (pairs := self.size("num_layers", MOST_LAYERS)):
            layers = 2 * pairs  # LongCat: two attention layers in each
        hidden = self.size("hidden_size")
        heads = self.size("num_attention_heads")
        if self.row.kv_heads:
            kv_heads = _own_kv_heads(self) or heads
        else:
            kv_heads = self.size("num_key_value_heads") or heads
        if self.row.head_multiple:
            head_dim = self.row.head_multiple * hidden // heads if hidden and heads else None
        else:
            derived = hidden // heads if hidden and heads else None
            head_dim = self.size("head_dim") or derived or None
        context = self.size("max_position_embeddings", 1 << 40) or self.context
        if context is None:
            name = self.names_of("max_position_embeddings")[0]
            raise ConfigError(
                f"{self.name(name)} is missing and this model type has no default for"
                " it; name the trained length with --context"
            )
        layer_types = _layer_types(self, layers)
        window, layer_types = _window(self, layer_types)
        thetas = None
        if self.row.layer_thetas:
            thetas = self.numbers("layer_rope_theta", zero=True, most=LARGEST_THETA)
        vocab = self.size("vocab_size", 1 << 31)
        rotates = _rotates(self, layers)
        return Sizes(
            context=context,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab=vocab,
            layer_types=layer_types,
            window=window,
            layer_thetas=tuple(thetas or ()),
            rotates=tuple(rotates),
        )


def _own_kv_heads(text: TextConfig) -> int | None:
    """Return the number of key/value heads for a model family that has its own config key for
    it."""
    holder, key = text.at(text.row.kv_heads)
    if holder is not text:  # DBRX, whose class has one by default
        return holder.integer(key) or 1
    many = text.get("multi_query", bool) is False or text.get("new_decoder_architecture", bool)
    return text.integer(key) if many else 1  # Falcon's own rule


def _layer_types(text: TextConfig, layers: int | None) -> tuple[str, ...]:
    """Return the type of each layer. It comes from a list in the config, from a key with the
    interval of another type, or from the pattern of the model's class."""
    for key in ("layer_types", "layers_block_type"):
        given = text.get(key, list, "strings")
        if given is None:
            continue
        if not all(isinstance(kind, str) for kind in given):
            raise text.wrong(key, "a list of strings")
        return tuple(given[:layers])  # Step pads its lists with layers that predict further tokens
    ratios = text.numbers("compress_ratios", zero=True) if text.row.compression else None
    if ratios is not None:
        kinds: dict[float, str] = {rate: kind for kind, (_, rate) in text.row.compression.items()}
        return tuple(kinds.get(ratio, "sliding_attention") for ratio in ratios[:layers])
    if not layers:
        return ()
    defaults = text.defaults
    run: list[str] = defaults.get("layer_types") or []
    for key, (first, second) in defaults.get("layers_by", {}).items():
        if isinstance(text.values.get(key), list):
            listed = text.numbers(key, zero=True) or []
            return tuple(second if i in listed else first for i in range(layers))
        every = text.integer(key, 1, MOST_LAYERS)
        if every is None:
            continue
        others = every - 1
        if first == "full_attention":
            run = [first] + [second] * others
        else:
            run = [first] * others + [second]
    if not run:
        return ()
    start = defaults["num_hidden_layers"] - layers if text.row.counts_back else 0
    made = [run[(start + i) % len(run)] for i in range(layers)]
    made[-1] = defaults.get("last_layer_type", made[-1])
    return tuple(made)


def _window(text: TextConfig, layer_types: tuple[str, ...]) -> tuple[int | None, tuple[str, ...]]:
    """Return the sliding window and the type of each layer, for the ways in which families state
    them in config.json."""
    window = text.size("sliding_window", 1 << 40) or None
    full = "full_attention"
    rotates = _rotates(text, len(layer_types)) if not text.has("layer_types") else []
    if text.row.window is not None:
        key, divisor, more, default = text.row.window
        stated = text.integer(key) if window is None or (divisor, more) != (1, 0) else None
        window = stated // divisor + more if stated else window or default
    if window is None:
        chunk = text.size("attention_chunk_size", 1 << 40)
        kinds = tuple("chunked_attention" if turns else full for turns in rotates)
        return chunk, kinds if chunk and kinds else layer_types  # Llama 4
    used = text.get("use_sliding_window", bool)
    if used is None:
        used = text.defaults.get("use_sliding_window")
    if used is False:
        return None, layer_types
    first = text.size("max_window_layers", MOST_LAYERS)
    if first is None or text.has("layer_types") or "max_window_layers" not in text.defaults:
        kinds = tuple(full if turns else "sliding_attention" for turns in rotates)
        return window, kinds if used and kinds else layer_types  # SmolLM 3
    count = range(len(layer_types))
    if text.row.alternates:
        return window, tuple(full if i % 2 or i >= first else "sliding_attention" for i in count)
    # Qwen: the layers from max_window_layers on.
    return window, tuple(full if i < first else "sliding_attention" for i in count)


def _rotates(text: TextConfig, layers: int | None) -> list[bool]:
    """Return for each layer whether it rotates by its config; an empty list if nothing states it.
    SmolLM 3 and Llama 4 list 1 or 0; Muse and Granite list a theta, or 0."""
    given = text.numbers("no_rope_layers", zero=True)
    if not given and (text.row.zero_theta_stops or text.row.layer_thetas):
        given = text.numbers("layer_rope_theta", zero=True, most=LARGEST_THETA)
    if given:
        return [value != 0 for value in given[:layers]]
    every = text.size("no_rope_layer_interval", MOST_LAYERS) or text.row.skips_every
    if not every or not ("no_rope_layer_interval" in text.defaults or text.row.skips_every):
        return []
    return [(i + 1) % every != 0 for i in range(layers or 0)]


def label_size(text: TextConfig, label: Label | None, key: str) -> int | None:
    """Return a size of the layers that use a label of a nested rope dict (Gemma 4's full layers
    have wider heads). It is in per_layer_config, else under a key of the label, else it is the size
    of all layers."""
    layered = text.object("per_layer_config")
    if label is not None and layered is not None:
        for index, kind in enumerate(text.sizes.layer_types):
            layer = layered.object(str(index)) if kind in label.kinds else None
            if layer is not None and layer.has(key):
                return layer.integer(key, 1, MOST_CHANNELS)
    name, default = label.sizes.get(key, ("", None)) if label else ("", None)
    stated = text.integer(name, 1, MOST_CHANNELS) if name else None
    general = {"head_dim": text.sizes.head_dim, "num_key_value_heads": text.sizes.kv_heads}
    return stated or default or (general[key] if key in general else text.size(key))


def rotary_dim(text: TextConfig, label: Label | None, params: Params) -> int:
    """Return the number of rotating channels in a head by its config: head_dim times the partial
    factor if the family reads it."""
    key = label.rotation if label else text.row.dim
    head = label_size(text, label, key) or text.sizes.head_dim
    if head is None:
        raise ConfigError(
            "neither head_dim nor hidden_size and num_attention_heads are given, so"
            " the rotary dim is unknown"
        )
    if params["rope_type"] == "proportional" or (label and label.rotation != "head_dim"):
        dim = head  # its pairs count over the whole head, also non-rotating pairs
    else:
        dim = int(head * partial_factor(text.row, params))
    if dim < 2 or dim % 2 or dim > MOST_ROTARY:
        raise ConfigError(
            f"this model rotates {dim} of {head} channels per head, but a rotary"
            f" embedding needs an even number of 2 to {MOST_ROTARY}"
        )
    return dim


def partial_factor(row: Family, params: Params) -> float:
    """Return the partial factor as this family reads it (1 if it ignores the key)."""
    if not (row.partial or row.labels):
        return 1.0
    factor: float = params.get("partial_rotary_factor", row.fixed_partial or 1.0)
    if row.fixed_partial not in (0.0, factor):
        raise ConfigError(
            f"partial_rotary_factor is {factor:g}, but this model type always rotates"
            f" {row.fixed_partial:g} of each head; remove the key"
        )
    if not 0 < factor <= 1:
        raise ConfigError(f"partial_rotary_factor must be above 0 and at most 1, was {factor:g}")
    return factor


def attends(layer_type: str) -> bool:
    """Return whether layers of this type in a config's layer_types attend."""
    return not any(word in layer_type for word in NOT_ATTENTION)


def is_windowed(layer_type: str) -> bool:
    """Return whether layers of this type in a config's layer_types see a window only."""
    return "sliding" in layer_type or "chunked" in layer_type or "local" in layer_type


def kv_layers(text: TextConfig) -> tuple[CacheLayer, ...] | None:
    """Return every layer's sizes in the KV cache, as the config keys of its model family state
    them; None if one is not known."""
    sizes = text.sizes
    out = list[CacheLayer]()
    layers = sizes.layers or 0
    listed = len(sizes.layer_types) == layers
    sources = text.numbers("kv_source_layers", zero=True)
    storing = layers - (text.size("num_kv_shared_layers", layers) or 0)
    for index, kind in enumerate(sizes.layer_types if listed else ("",) * layers):
        borrows = sources is not None and sources[index : index + 1] != [index]
        if borrows or index >= storing or not attends(kind):
            continue
        layer = _cache_layer(text, index, kind)
        if layer is None:
            return None
        out.append(layer)
    high = text.size("H_cycles")
    low = text.size("L_cycles")
    if high and low and not text.has("num_layers_per_stack"):
        # HRM passes every layer so often, each time with a cache of its own.
        out *= high * (low + 1)
    return tuple(out) or None


def _cache_layer(text: TextConfig, index: int, kind: str) -> CacheLayer | None:
    """Return a layer's sizes in the KV cache, as its model family's config keys or transformers'
    own module state them. Return None if one is not known. If keys and values are one vector
    (DeepSeek V4), it is kept once."""
    row = text.row
    label = next((one for one in row.labels if kind in one.kinds), None)
    # Latent attention (MLA) keeps one compressed vector and one rotary key for all heads.
    latent = label_size(text, label, "kv_lora_rank")
    rotary = label_size(text, label, "qk_rope_head_dim")
    is_latent = bool(latent and rotary)
    about = text.facts.get(text.type)
    built = about.widths[index] if about and index < len(about.widths) else None
    if built:
        values = built  # as transformers built it
    elif latent and rotary:
        values = latent + rotary
    else:
        gated = text.get("attention_k_eq_v", bool)
        gated = text.defaults.get("attention_k_eq_v") if gated is None else gated
        heads = label_size(text, None if gated is False else label, "num_key_value_heads")
        key = label_size(text, label, "head_dim")
        if not heads or not key:
            return None
        heads *= label.kv_multiple if label else 1
        shared = kind in row.compression
        values = key if shared else heads * (key + (text.size("v_head_dim") or key))
    rate = None
    if kind in row.compression:
        # In addition to its window it keeps one entry for so many tokens.
        alias, default = row.compression[kind]
        rates = text.object("compress_rates")
        rate = text.integer(alias) or (rates.integer(kind) if rates else None) or default
    windowed = row.every_layer_windowed or is_windowed(kind) or rate is not None
    return CacheLayer(values, text.sizes.window if windowed else None, rate, is_latent)
