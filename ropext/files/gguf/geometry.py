"""Read the header of a GGUF file as the config that transformers would have, with every key about
positions checked.

The Model is read from this config, as from a directory's. Plans and records show it before and
after the extension, and dequantised weights need it to load in transformers.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from ropext.base.errors import UnsupportedModel
from ropext.base.jsontext import Json, JsonObject
from ropext.families.config import defaults_of, named
from ropext.families.described import NO_FACTS
from ropext.families.geometry import MOST_CHANNELS, MOST_LAYERS, MOST_ROTARY
from ropext.families.loaders.gguf import Architecture, GgufRope, given_by_ollama, older_names
from ropext.families.table import Label, family
from ropext.files.gguf.header import GgufHeader
from ropext.files.gguf.stock_form import stock_form
from ropext.scaling import forms
from ropext.scaling.forms import ORIGINAL

FREQS = "rope_freqs.weight"
LONG = "rope_factors_long.weight"
SHORT = "rope_factors_short.weight"
WINDOWED = "sliding_attention"
FULL = "full_attention"


def share_of(turning: int, head_dim: int) -> float:
    """Return the share of a head's channels that rotate in a GGUF file. Readers multiply it by the
    head's size and round down. If that would lose a channel, return the next float."""
    share = turning / head_dim
    if int(head_dim * share) < turning:
        share = math.nextafter(share, 1.0)
    return share


def read_config(parts: Sequence[GgufHeader], row: Architecture) -> tuple[dict[str, Json], int]:
    """Return the config that transformers would have for a GGUF, as far as positions need it, and
    the number of channels of a head that rotate."""
    head = parts[0]
    sizes = _sizes(head, row)
    layers = sizes["num_hidden_layers"]
    context = sizes["max_position_embeddings"]
    dim, head_dim = _rotating_channels(head, row, sizes)
    window, kinds = _windows(head, row, layers)
    if window and row.windowed:
        row = replace(row, type=row.windowed)
    elif head.whole(f"{row.name}.expert_count", 0) and row.experts:
        row = replace(row, type=row.experts)
    rope = rope_of(parts, row, dim, context)
    scaling = _scaling(head, row, rope, dim, context)
    if not row.partial and dim != head_dim and row.name != "deepseek2":
        raise head.wrong(f"it rotates {dim} of {head_dim} channels, where {row.name} turns all")
    latent = head.whole(f"{row.name}.attention.kv_lora_rank", 1, MOST_CHANNELS)  # checked in any
    known = family(row.type, NO_FACTS)
    config: dict[str, Json] = {"model_type": row.type, **sizes, "head_dim": head_dim}
    config |= {
        known.theta[0]: rope.freq_base,
        "rope_scaling": scaling,
        "sliding_window": window,
        "layer_types": kinds,
        "max_window_layers": layers,
        "use_sliding_window": None if window else False,  # None = the class's default
    }
    if row.partial:
        config[row.partial] = share_of(dim, head_dim)
    if row.name == "deepseek2":
        config["qk_rope_head_dim"] = dim
        config["kv_lora_rank"] = latent
        config["head_dim"] = None
    default = defaults_of(row.type, NO_FACTS).get(ORIGINAL)
    original = scaling.get(ORIGINAL, default)
    if default not in (None, original):
        config[ORIGINAL] = original  # without it, the class's default would override the dict's
    if known.labels:
        config |= _by_layer_type(head, row, rope, config, known.labels)
    return {name: value for name, value in config.items() if value is not None}, dim


def _sizes(head: GgufHeader, row: Architecture) -> dict[str, Json]:
    """Return the sizes of the model in a GGUF's header by the keys of a config. A size is None if
    the header leaves its key to the class's default."""
    key = f"{row.name}.{{}}".format
    drafting = head.whole(key("nextn_predict_layers"), 0, MOST_LAYERS) or 0
    layers = (head.whole(key("block_count"), 1, MOST_LAYERS) or 0) - drafting
    hidden = head.whole(key("embedding_length"), 1, MOST_CHANNELS)
    context = head.whole(key("context_length"))
    heads = _single(head, key("attention.head_count"))
    if not (layers > 0 and hidden and context and heads):
        raise head.wrong("it lacks block_count, embedding_length, context_length or head_count")
    interval = head.whole(key("full_attention_interval"), 1, MOST_LAYERS) or row.interval
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": _single(head, key("attention.head_count_kv")) or heads,
        "max_position_embeddings": context,
        "vocab_size": head.whole(key("vocab_size"), 1, MOST_CHANNELS) or _tokens(head),
        "full_attention_interval": interval or None,
        "num_nextn_predict_layers": drafting or None,
        # these layers have no cache of their own
        "num_kv_shared_layers": head.whole(key("attention.shared_kv_layers"), 0, layers),
    }


def _single(head: GgufHeader, key: str) -> int | None:
    """Return a number of heads in a GGUF's header. If it lists one for each layer, as llama.cpp
    allows, return the most common non-zero number."""
    listed = _by_layer(head, key)
    if listed is None:
        return head.whole(key, 0, MOST_CHANNELS)
    some = [heads for heads in listed if heads]
    return max(some, key=some.count, default=0)


def _by_layer(head: GgufHeader, key: str) -> tuple[int, ...] | None:
    """Return the number of heads in each layer, or None if the GGUF file has no list of them."""
    entry = head.entries.get(key)
    if entry is None or entry.value is not None:
        return None
    listed = head.numbers(key) or ()
    for heads in listed:
        if not 0 <= heads <= MOST_CHANNELS:
            raise head.wrong(
                f"{named(key)} lists {heads}, not whole numbers of 0 to {MOST_CHANNELS}"
            )
    return listed


def _tokens(head: GgufHeader) -> int | None:
    """Return the number of tokens that the GGUF file lists, or None."""
    tokens = head.entries.get("tokenizer.ggml.tokens")
    if tokens is None:
        return None
    return tokens.items


def _rotating_channels(head: GgufHeader, row: Architecture, sizes: JsonObject) -> tuple[int, int]:
    """Return (channels of a head that rotate, all its channels), in the layers that see all
    tokens. A header without key_length divides the hidden size among the heads."""
    key = f"{row.name}.{{}}".format
    head_dim = head.whole(key("attention.key_length"), 1, 1 << 20)
    head_dim = head_dim or sizes["hidden_size"] // sizes["num_attention_heads"]
    dim = head.whole(key("rope.dimension_count"), 2, MOST_ROTARY) or head_dim
    if row.halves:
        dim //= 2
    if dim < 2 or dim % 2 or (dim > head_dim and row.name != "deepseek2"):
        raise head.wrong(f"it rotates {dim} of {head_dim} channels, which is not possible")
    return dim, head_dim


def _windows(
    head: GgufHeader, row: Architecture, layers: int
) -> tuple[int | None, list[str] | None]:
    """Return the window and the type of each layer in a GGUF, by the rules of llama.cpp's
    load_swa_pattern. Return None for the class's default."""
    key = f"{row.name}.attention.sliding_window"
    window: int | None = row.window
    if key in head.entries:
        window = head.whole(key, 0)
    if not row.every or not window:
        if family(row.type, NO_FACTS).labels:
            return None, [FULL] * layers
        return None, None
    kinds = list[str]()
    for is_windowed in _sees_window(head, row, layers):
        if is_windowed:
            kinds.append(WINDOWED)
        else:
            kinds.append(FULL)
    return window, kinds


def _sees_window(head: GgufHeader, row: Architecture, layers: int) -> list[bool]:
    """Return a list with True for each layer that sees a window, by the GGUF file's pattern or the
    architecture's own."""
    key = f"{row.name}.attention.sliding_window_pattern"
    entry = head.entries.get(key)
    if entry is not None and entry.value is None:
        listed = [bool(number) for number in head.numbers(key) or ()]
        missing = max(0, layers - len(listed))
        return listed[:layers] + [False] * missing
    every: int | None = row.every
    if entry is not None:
        every = head.whole(key, 0)
    if not every:
        return [True] * layers
    first = 1
    if row.dense_first:
        first = 0
    return [(layer + first) % every != 0 for layer in range(layers)]


def _by_layer_type(
    head: GgufHeader,
    row: Architecture,
    rope: GgufRope,
    config: JsonObject,
    labels: tuple[Label, ...],
) -> dict[str, Json]:
    """Return the rope dicts of windowed and other layers in a GGUF, and the sizes of their heads.
    The caller leaves keys with the value None out of the config."""
    key = f"{row.name}.{{}}".format
    head_dim = config["head_dim"]
    local = head.whole(key("attention.key_length_swa"), 1, 1 << 20) or head_dim
    theta = known_key(head, row, "rope.freq_base_swa") or row.local or rope.freq_base
    turning = head.whole(key("rope.dimension_count_swa"))
    turning = turning or head.whole(key("rope.dimension_count")) or local
    of_full: dict[str, Json] = {"rope_theta": rope.freq_base}
    of_windowed: dict[str, Json] = {"rope_type": "default", "rope_theta": theta}
    if row.partial:
        of_full[row.partial] = config[row.partial]
        of_windowed[row.partial] = share_of(min(turning, local), local)
    of_full |= config["rope_scaling"]
    rows = dict[str, Json]()
    for label in labels:
        if label.windowed:
            rows[label.name] = of_windowed
        else:
            rows[label.name] = of_full
    by_kind = _kv_heads_by_kind(head, row, config["layer_types"] or ())
    changed: dict[str, Json] = {
        "num_key_value_heads": by_kind.get(WINDOWED, config["num_key_value_heads"]),
        "num_global_key_value_heads": by_kind.get(FULL),
    }
    if by_kind:
        changed["attention_k_eq_v"] = True  # without it, stock ignores the heads by layer type
    changed["head_dim"] = local
    changed["global_head_dim"] = head_dim
    changed["rope_parameters"] = rows
    of_full_layers = {"num_key_value_heads": by_kind.get(FULL), "head_dim": head_dim}
    own = dict[str, Json]()  # sizes for which the model type has no key
    for name, size in of_full_layers.items():
        if size not in (None, changed[name]) and not any(name in label.sizes for label in labels):
            own[name] = size
    if own:
        kinds = enumerate(config["layer_types"] or ())
        changed["per_layer_config"] = {str(i): own for i, kind in kinds if kind == FULL}
    for moved in ("rope_theta", "rope_scaling", row.partial):
        changed[moved] = None
    return changed


def _kv_heads_by_kind(head: GgufHeader, row: Architecture, kinds: Sequence[str]) -> dict[str, int]:
    """Return the heads of keys and values by layer type, if the GGUF file lists them by layer."""
    listed = _by_layer(head, f"{row.name}.attention.head_count_kv") or ()
    by_kind = dict[str, int]()
    for kind, heads in zip(kinds, listed, strict=False):
        if heads:
            by_kind[kind] = heads
    return by_kind


def _scaling(
    head: GgufHeader, row: Architecture, rope: GgufRope, dim: int, context: int
) -> dict[str, Json]:
    """Return the stock rope dict of the GGUF file's spectrum, with the scaling of the queries."""
    original = _original(head, row)
    scaling = stock_form(rope, family(row.type, NO_FACTS).forms, dim, context, original)
    if row.name == "deepseek2" and scaling != {"rope_type": "default"}:
        raise UnsupportedModel(
            f"{head.path} is a scaled model of latent attention (deepseek2), for which llama.cpp "
            "scales the softmax differently; extend the Hugging Face checkpoint"
        )
    beta = None
    if row.name == "mistral3":
        beta = known_key(head, row, "attention.temperature_scale")
    if beta:
        scaling[ORIGINAL] = original or context
        scaling["llama_4_scaling_beta"] = beta
    return scaling


def _original(head: GgufHeader, row: Architecture) -> int | None:
    """Read the key of the original context from the header of a GGUF file on the disk. Return None
    if it has none."""
    return head.whole(f"{row.name}.rope.scaling.original_context_length", 0) or None


def known_key(head: GgufHeader, row: Architecture, key: str) -> float | None:
    """Read a number from the header of a GGUF file on the disk, under llama.cpp's name, or under
    the name of Ollama's converter."""
    value = head.decimal(f"{row.name}.{key}")
    older = older_names(row.name).get(key)
    if value is None and older:
        return head.decimal(f"{row.name}.{older}")
    return value


def part_with(parts: Sequence[GgufHeader], name: str) -> GgufHeader | None:
    """Return the part of a GGUF that holds a tensor, or None. The first part of a split model may
    hold no tensor."""
    for part in parts:
        if part.tensor(name) is not None:
            return part
    return None


def _factors(parts: Sequence[GgufHeader], name: str) -> tuple[float, ...]:
    """Return the rope factors of a GGUF tensor, or none if no part has it."""
    part = part_with(parts, name)
    if part is None:
        return ()
    return part.floats(name)


def rope_of(
    parts: Sequence[GgufHeader], row: Architecture, dim: int, context: int, *, ollama: bool = True
) -> GgufRope:
    """Return the rotary settings that llama.cpp takes from the GGUF file's keys and tensors. With
    `ollama`, include the keys that Ollama adds and its older names."""
    head = parts[0]
    names = set(head.entries)
    for part in parts:
        names.update(tensor.name for tensor in part.tensors)
    given: JsonObject = {}
    if ollama:
        given = given_by_ollama(row.name, names, context)

    def at(key: str, default: float, least: float = 0.0) -> float:
        """Read a rope key from the GGUF file's header. If it is absent, return the value that
        Ollama adds, else `default`."""
        place = f"{row.name}.rope.{key}"
        value = head.decimal(place)
        if ollama:
            value = known_key(head, row, f"rope.{key}")
        if value is None:
            value = given.get(key, default)
        if value != default and not least < value < forms.LARGEST_THETA:
            raise head.wrong(f"{place} is {value:g}, which is out of range")
        return value

    scaling = head.text(f"{row.name}.rope.scaling.type") or given.get("scaling.type", "linear")
    if scaling not in ("none", "linear", "yarn", "longrope"):
        raise head.wrong(f"rope.scaling.type is {named(scaling)}, which llama.cpp does not know")
    factor_key = "scale_linear"
    if "scaling.factor" in given or f"{row.name}.rope.scaling.factor" in names:
        factor_key = "scaling.factor"
    factor = at(factor_key, 0.0) or 1.0
    if scaling == "longrope" or row.name == "phi3":
        divisors = _factors(parts, LONG)
        short = _factors(parts, SHORT)
    else:
        divisors = _factors(parts, FREQS)
        short = divisors
    if row.halves:  # the row is as long as windowed layers need; the others read its first half
        divisors = divisors[: dim // 2]
        short = short[: dim // 2]
    sizes_told = {len(divisors), len(short)}
    if sizes_told not in ({0}, {dim // 2}):
        raise head.wrong(f"its rope factors are not one number for each of {dim // 2} pairs")
    base = at("freq_base", 10000.0, 1.0)
    attention = at("scaling.attn_factor", 1.0)
    rope = GgufRope(base, scaling, factor, _original(head, row) or context, attention)
    if "betas" in row.adds:
        fast = at("scaling.yarn_beta_fast", 0.0)
        slow = at("scaling.yarn_beta_slow", 0.0)
        rope = replace(rope, beta_fast=fast or rope.beta_fast, beta_slow=slow or rope.beta_slow)
    if "log" in row.adds:
        rope = replace(rope, log_multiplier=at("scaling.yarn_log_multiplier", 0.0))
    if factor == 1 and scaling in ("linear", "yarn"):
        rope = replace(rope, scaling="none")
    return replace(rope, divisors=divisors, short=short)
