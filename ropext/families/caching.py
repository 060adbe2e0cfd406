"""What the KV cache holds of each layer, as stock transformers' DynamicCache keeps it."""

from ropext.families.geometry import TextConfig, attends, is_windowed, label_size
from ropext.families.model import CacheLayer


def kv_layers(text: TextConfig) -> tuple[CacheLayer, ...] | None:
    """What every layer keeps; None where a size is not known."""
    sizes, out = text.sizes, list[CacheLayer]()
    layers = sizes.layers or 0
    listed = len(sizes.layer_types) == layers
    sources = text.numbers("kv_source_layers", zero=True)
    storing = layers - (text.size("num_kv_shared_layers", layers) or 0)
    for index, kind in enumerate(sizes.layer_types if listed else ("",) * layers):
        borrows = sources is not None and sources[index : index + 1] != [index]
        if borrows or index >= storing or not attends(kind):
            continue
        each = _values(text, kind)
        if each is None:
            return None
        rate = _compression(text, kind)
        windowed = text.row.every_layer_windowed or is_windowed(kind) or rate is not None
        out.append(CacheLayer(each, sizes.window if windowed else None, rate))
    return tuple(out) * _passes(text) or None


def _values(text: TextConfig, kind: str) -> int | None:
    """Numbers that a layer of this kind keeps per token.

    Latent attention (MLA) keeps one compressed vector and one rotary key for all heads; where keys
    and values are one vector (DeepSeek V4), it is kept once.
    """
    label = next((one for one in text.row.labels if kind in one.kinds), None)
    latent = label_size(text, label, "kv_lora_rank")
    rotary = label_size(text, label, "qk_rope_head_dim")
    if latent and rotary:
        return latent + rotary
    gated = text.flag("attention_k_eq_v")
    gated = text.defaults.get("attention_k_eq_v") if gated is None else gated
    heads = label_size(text, None if gated is False else label, "num_key_value_heads")
    key = label_size(text, label, "head_dim")
    if not heads or not key:
        return None
    if kind in text.row.compression:
        return key
    heads *= label.kv_multiple if label else 1
    return heads * (key + (text.size("v_head_dim") or key))


def _compression(text: TextConfig, kind: str) -> int | None:
    """How many tokens make one entry, in layers that keep such beside their window."""
    if kind not in text.row.compression:
        return None
    alias, default = text.row.compression[kind]
    rates = text.object("compress_rates")
    return text.integer(alias) or (rates.integer(kind) if rates else None) or default


def _passes(text: TextConfig) -> int:
    """How often every layer is passed, each time with a cache of its own (HRM)."""
    high, low = text.size("H_cycles"), text.size("L_cycles")
    return high * (low + 1) if high and low and not text.has("num_layers_per_stack") else 1
