"""The keys that stock's own source reads for one config class, each with a value to set it to.

The source is parsed, nothing is listed by hand: every field of the class, the `kwargs` that its
code and its parents' code read, and the keys that the modeling file reads by getattr. This module
does not use ropext.
"""

import ast
import inspect
import re
import textwrap
import typing
from pathlib import Path

# Values for a model of 4 layers with 4 heads of 32 channels, for keys whose default is too little.
VALUES = {
    "attention_other_setting": {"num_attention_heads": 8},
    "attention_windows": [7, 0, 7, 0],
    "attention_k_eq_v": True,
    "attention_multiplier": 0.25,
    "attention_chunk_size": 7,
    "attn_config": {"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 54321.0},
    "attn_layer_indices": [0, 2],
    "compress_rate_csa": 3,
    "compress_rate_hca": 2,
    "compress_ratios": [0, 4, 128, 4],
    "compress_rope_theta": 54321.0,
    "full_attention_interval": 3,
    "full_attn_idxs": [0, 2],
    "global_attn_every_n_layers": 2,
    "global_head_dim": 64,
    "global_rope_theta": 54321.0,
    "head_dim": 48,
    "kv_source_layers": [0, 0, 2, 2],
    "layer_rope_theta": [10000.0, 0, 10000.0, 2345.0],
    "local_attention": 6,
    "local_rope_theta": 2345.0,
    "no_rope_layer_interval": 2,
    "no_rope_layers": [1, 1, 0, 1],
    "num_attention_heads_per_layer": [4, 8, 4, 8],
    "num_global_key_value_heads": 1,
    "num_hidden_layers": 5,
    "num_key_value_heads": 1,
    "num_kv_heads": 2,
    "num_layers_per_stack": 2,
    "num_nextn_predict_layers": 1,
    "num_sliding_attention_heads": 8,
    "partial_rotary_factor": 0.5,
    "partial_rotary_factors": [0.5, 0.5, 0.5, 0.5],
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "query_pre_attn_scalar": 16,
    "rope_local_base_freq": 2345.0,
    "rope_theta": 54321.0,
    "rotary_dim": 16,
    "rotary_emb_base": 54321.0,
    "rotary_pct": 0.5,
    "sliding_window": 7,
    "sliding_window_pattern": 2,
    "sliding_window_size": 6,
    "swa_qk_rope_head_dim": 64,
    "swa_rope_theta": 2345.0,
    "use_bidirectional_attention": True,
    "use_dsa": False,
    "use_sliding_window": True,
    "v_head_dim": 8,
}


CONCERNS = re.compile(
    r"rope|rotary|theta|layer|att(entio)?n_|local_attention|window|head_dim|num_.*heads|kv_|interval|pattern|idx|pct"
    r"|partial|lora|alibi|cycles|every|compress|multi_query|new_decoder|position|use_dsa|bidirectional"
)
NOT = re.compile(r"dropout|norm|bias|mlp|vision|index|linear|mamba|moe|kernel|initial|embedding_")
# Varied with the methods elsewhere, or lists for which the keys here are the short form ...
UNVARIED = {
    *("rope_parameters", "rope_scaling", "original_max_position_embeddings", "_rope_type_labels"),
    *("layer_types", "layers_block_type", "per_layer_config", "compress_rates"),
    *("mtp_layer_types", "cross_attention_layers"),
    # ... and keys that are no size, no layer and no rotation.
    *("L_bp_cycles", "activation_sparsity_pattern", "attention_mask", "attention_scaling"),
    *("attn_logit_softcapping", "moshi_delay_pattern_mask", "user_delay_pattern_mask"),
    *("num_hash_layers", "ple_layer_ids", "position_ids", "qk_head_dim", "shared_kv_states"),
    *("return_shared_kv_states", "sparse_attention_config", "target_layer_ids"),
}


def concerns_positions(key):
    return CONCERNS.search(key) and not NOT.search(key) and key not in UNVARIED


def _asked(tree, holders):
    """Yield the keys that the code reads from these objects: by pop, get, setdefault, getattr or
    `in`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            holder, key = node.comparators[0], node.left
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            holder, key = node.func.value, node.args[0]
        elif isinstance(node, ast.Call) and len(node.args) > 1:
            holder, key = node.args[:2]
        else:
            continue
        named = isinstance(key, ast.Constant) and isinstance(key.value, str)
        if named and ast.unparse(holder) in holders:
            yield key.value


def _another(field):
    """Return a value other than a field's default, of its own type; None if there is none."""
    default, kinds = field.default, (field.type, *typing.get_args(field.type))
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return (2 if default != 2 else 1) if isinstance(default, int) else default / 2 or 0.5
    choices = [
        v for k in kinds if typing.get_origin(k) is typing.Literal for v in typing.get_args(k)
    ]
    return next((v for v in choices if v != default), None)


def position_keys(cls):
    """Return key -> a value other than its default, None if none is known."""
    from transformers import PreTrainedConfig

    general = PreTrainedConfig.__dataclass_fields__
    fields = {key: f for key, f in cls.__dataclass_fields__.items() if key not in general}
    out = {key: VALUES.get(key, _another(field)) for key, field in fields.items()}
    sources = [c for c in cls.__mro__ if c.__module__.startswith("transformers.mod")]
    trees = [ast.parse(textwrap.dedent(inspect.getsource(source))) for source in sources]
    file = Path(inspect.getsourcefile(cls))
    modeling = file.with_name(file.name.replace("configuration_", "modeling_"))
    if modeling.exists():
        trees.append(ast.parse(modeling.read_text("utf-8")))
    for tree in trees:
        for key in _asked(tree, ("kwargs", "self", "config", "self.config")):
            if key != "head_dim":  # if it is no field, it follows from the width
                out.setdefault(key, VALUES.get(key))
    return {
        key: value
        for key, value in out.items()
        if concerns_positions(key) and key not in cls.attribute_map
    }
