"""Tiny configs of every family, with a theta and a partial factor that are no class default.

Sizes are small if a family has the key and the class default elsewhere: no unneeded weight is
allocated, and a lost key shows as another spectrum.
"""

from ropext.families import config
from ropext.families.described import NO_FACTS
from ropext.families.table import family

THETA, LOCAL_THETA, PARTIAL, CONTEXT = 12345.0, 4321.0, 0.75, 512

# Many families read these names; a family keeps and ignores a name that it does not know.
SMALL = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size_per_layer_input": 256,
    "hidden_size_per_layer_input": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
}
# Keys that single families need besides.
SPECIAL = {
    "cohere_compass_text": {
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "head_dim": 32,
    },
    "hunyuan_v1_dense": {"head_dim": 32},  # its attention fails on null
    "hunyuan_v1_moe": {"head_dim": 32},
    "ministral": {"head_dim": 32},
    "longcat_flash": {"head_dim": 16},
    "dots1": {"num_experts_per_tok": 2, "n_shared_experts": 1},
    "qwen4_exp_text": {
        "num_experts_per_tok": 2,
        "indexer_budget": 64,
        "indexer_compress_ratio": 16,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
    },
    "hunyuan_vl_text": {"head_dim": 32},
    "dbrx": {"attn_config": {"rope_theta": THETA, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "esmc": {"num_key_value_heads": 4},
    "zamba2": {"num_hidden_layers": 54},
    "gemma3n_text": {"num_hidden_layers": 35},
    "beam": {"n_group": 1, "topk_group": 1},
    "deepseek_v4": {"num_key_value_heads": 1},
    "zaya": {"num_experts_per_tok": 1},
    "minimax_m2": {"rotary_dim": 24},  # three quarters, as released ones state them
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
}


# Families that rotate rightly under a scaled type alone.
ROPE = {
    "mistral4": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256},
    "cosmos3_edge_text": {"mrope_section": [6, 5, 5]},
}
# Composites whose vision tower is tied to the default width of the text part.
FULL_WIDTH = ("dots3_note",)


def text_part(model_type):
    """Return the rotary type inside a model type and the path to it, or None."""
    path = ()
    known = config.census().get(model_type)
    while known is not None and known.scheme == "composite":
        path, model_type = (*path, *known.path), known.text
        known = config.census().get(model_type)
    return (model_type, path) if known is not None and known.scheme == "rotary" else None


def _sizes(text_type):
    row, defaults = family(text_type, NO_FACTS), config.defaults_of(text_type, NO_FACTS)
    sizes = SMALL | (LATENT if "kv_lora_rank" in defaults else {})
    names = defaults.get("names", {})
    out = {names.get(key, key): value for key, value in sizes.items()}
    if "head_dim" in defaults and row.dim == "head_dim":
        out[names.get("head_dim", "head_dim")] = 32
    out[names.get("max_position_embeddings", "max_position_embeddings")] = CONTEXT
    layers = names.get("num_hidden_layers", "num_hidden_layers")
    if 4 < len(defaults.get("layer_types", ())) <= 8:
        out[layers] = len(defaults["layer_types"])  # so that every type of layer is there
    if row.gate:
        key, value, _ = row.gate
        out[key] = value
    return {"model_type": text_type} | out | SPECIAL.get(text_type, {})


def modern(text_type):
    """Return the config as transformers 5 saves it: rope_parameters alone."""
    row, out = family(text_type, NO_FACTS), _sizes(text_type)
    partial = {"partial_rotary_factor": row.fixed_partial or PARTIAL}
    if not row.labels:
        out["rope_parameters"] = {"rope_type": "default", "rope_theta": THETA}
        out["rope_parameters"] |= ROPE.get(text_type, {})
        if row.partial:
            out["rope_parameters"] |= partial
        if row.layer_thetas:
            out["layer_rope_theta"] = [THETA, LOCAL_THETA, 0, THETA]
        return out
    nested = {}
    for label in row.labels:
        default = config.defaults_of(text_type, NO_FACTS).get("rope", {}).get(label.name)
        if default is None and not label.windowed:
            nested[label.name] = None
            continue
        entry = {"rope_theta": LOCAL_THETA if label.windowed else THETA}
        nested[label.name] = (default or {"rope_type": "default"}) | entry
    out["rope_parameters"] = nested
    return out


def legacy(text_type):
    """Return the config as transformers 4 had it: top-level names, no rope_parameters; None if no
    4.x had this type."""
    row, out = family(text_type, NO_FACTS), _sizes(text_type)
    if row.legacy == "absent" or row.layer_thetas or text_type in ROPE:
        return None
    if row.labels:
        for label in row.labels:
            out[label.theta] = LOCAL_THETA if label.windowed else THETA
    else:
        out[row.theta[0]] = THETA
    for name in row.partial[:1]:
        out[name] = row.fixed_partial or PARTIAL
    return out


def bare(text_type):
    """Sizes alone: everything about rotation is left to the class defaults; None if there are none.

    DBRX keeps its theta in attn_config, which transformers 5 forgets and ropext reads; the default
    sections of Cosmos 3 Edge fit its default width alone.
    """
    left = text_type in ("dbrx", "cosmos3_edge_text")
    if left or "rope" not in config.defaults_of(text_type, NO_FACTS):
        return None
    return _sizes(text_type)


def wrapped(model_type, text):
    """Wrap the text config in its composite, if there is one."""
    found = text_part(model_type)
    if model_type in FULL_WIDTH:
        text = {key: value for key, value in text.items() if key != "hidden_size"}
    for key in reversed(found[1]):
        text = {key: text}
    return text | {"model_type": model_type}
