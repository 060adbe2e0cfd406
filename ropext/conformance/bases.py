"""What the families of the kit are: their config keys, at small sizes."""

from typing import Any

WINDOW = 64
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rope_theta": 50000.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "attention_bias": False,
}
GELU = {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "num_key_value_heads": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "hidden_act": "silu",
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    **EXPERTS,
}
# The classes of these two are scaled by default.
UNSCALED = {"rope_type": "default", "rope_theta": 50000.0}
QUERIES = {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 128}
LAYERS = ["sliding_attention"] * 3 + ["full_attention"]
# Of composites: no token is an image, so that nothing is asked of it.
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
# What makes a family's config differ from SIZES; None leaves a key out. No partial rotary factor is
# the default of its class: a reader that loses it is seen.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "ministral3": {"rope_parameters": UNSCALED | QUERIES},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "decoder_sparse_step": 1, "norm_topk_prob": True, **EXPERTS},
    "gemma2": {
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 32,
        "tie_word_embeddings": True,
        **GELU,
    },
    "gemma3_text": {
        "sliding_window": WINDOW,
        "num_hidden_layers": 6,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 32,
        "rope_local_base_freq": 10000.0,
        "tie_word_embeddings": True,
        **GELU,
    },
    "phi3": {
        "original_max_position_embeddings": 128,
        "sliding_window": None,
        "partial_rotary_factor": 0.75,
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "attention_bias": True,
        "rope_parameters": UNSCALED,
    },
    "deepseek_v2": {
        **LATENT,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "scoring_func": "softmax",
        "norm_topk_prob": False,
    },
    "deepseek_v3": {
        **LATENT,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
    "glm4": {"partial_rotary_factor": 0.75},
    "glm4_moe": {
        "partial_rotary_factor": 0.75,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        **EXPERTS,
    },
    "olmo2": {},
    # Its class default: another theta moves the windowed layers in transformers 4, not in 5.
    "olmo3": {"sliding_window": WINDOW, "layer_types": LAYERS, "rope_theta": 500000.0},
    "granite": {"attention_multiplier": 0.125},
    "cohere2": {"sliding_window": WINDOW, "layer_types": LAYERS, "tie_word_embeddings": True},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0], "no_rope_layer_interval": 4},
    "stablelm": {"partial_rotary_factor": 0.5},
    "gpt_neox": {
        "rotary_pct": 0.5,
        "rotary_emb_base": 50000,
        "num_key_value_heads": None,
        "attention_bias": True,
        "intermediate_size": 128,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "use_parallel_residual": True,
    },
    "gemma3": {
        "text_config": {"model_type": "gemma3_text"},
        "vision_config": {"model_type": "siglip_vision_model", **VISION},
        "mm_tokens_per_image": 4,
        "tie_word_embeddings": True,
    },
    "mistral3": {
        "text_config": {"model_type": "ministral3"},
        "vision_config": {"model_type": "pixtral", "head_dim": 16, **VISION},
        "spatial_merge_size": 1,
        "tie_word_embeddings": False,
    },
}


def keys_of(family: str, sizes: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """What stands in a family's config: of a composite, around the keys of its text part."""
    keys = FAMILIES[family]
    if "text_config" in keys:
        text = keys["text_config"]
        return keys | {"text_config": text | keys_of(text["model_type"], sizes, own)}
    return {key: value for key, value in (sizes | keys | own).items() if value is not None}
