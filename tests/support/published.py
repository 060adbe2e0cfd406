"""Position keys of released checkpoints as their config.json spells them, sizes made small."""

LLAMA = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "intermediate_size": 64,
    "vocab_size": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LONG = [1.0, 1.1, 1.2, 1.3, 1.5, 1.8, 2.2, 3.0, 4.0, 6.0, 9.0, 13.0, 20.0, 30.0, 40.0, 50.0]

CONFIGS = {
    "Llama 2": {"model_type": "llama", "max_position_embeddings": 4096, "rope_scaling": None},
    "Llama 3.1": {
        "model_type": "llama",
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": LLAMA3,
    },
    "Qwen2.5 with its card's YaRN": {
        "model_type": "qwen2",
        "max_position_embeddings": 32768,
        "max_window_layers": 28,
        "sliding_window": 131072,
        "use_sliding_window": False,
        "rope_theta": 1000000.0,
        "rope_scaling": {
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
            "type": "yarn",
        },
    },
    "Phi-3-mini-128k": {
        "model_type": "phi3",
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rope_scaling": {"long_factor": LONG, "short_factor": LONG, "type": "longrope"},
        "sliding_window": 262144,
    },
    "Phi-3.5-MoE": {
        "model_type": "phimoe",
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "long_factor": LONG,
            "long_mscale": 1.243163121016122,
            "original_max_position_embeddings": 4096,
            "short_factor": LONG,
            "short_mscale": 1.243163121016122,
            "type": "longrope",
        },
        "sliding_window": 131072,
    },
    "DeepSeek-V3": {
        "model_type": "deepseek_v3",
        "max_position_embeddings": 163840,
        "rope_theta": 10000,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
    },
    "HunYuan": {
        "model_type": "hunyuan_v1_dense",
        "max_position_embeddings": 32768,
        "head_dim": 32,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "alpha": 1000.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "type": "dynamic",
        },
    },
    "Gemma 3 4B": {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 64,
            "num_hidden_layers": 6,
            "vocab_size": 256,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
    },
    "Pythia": {
        "model_type": "gpt_neox",
        "max_position_embeddings": 2048,
        "rotary_emb_base": 20000,
        "rotary_pct": 0.5,
    },
    "GLM-4": {
        "model_type": "glm4",
        "max_position_embeddings": 32768,
        "head_dim": 32,
        "partial_rotary_factor": 0.75,
        "rope_theta": 20000.0,
        "rope_scaling": None,
    },
    "ModernBERT": {
        "model_type": "modernbert",
        "max_position_embeddings": 8192,
        "global_rope_theta": 120000.0,
        "local_rope_theta": 20000.0,
        "global_attn_every_n_layers": 3,
        "local_attention": 128,
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        "max_position_embeddings": 131072,
        "head_dim": 32,
        "num_local_experts": 4,
        "initial_context_length": 4096,
        "rope_theta": 160000,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
    },
    "Qwen2.5-VL": {
        "model_type": "qwen2_5_vl",
        "text_config": {
            "model_type": "qwen2_5_vl_text",
            **LLAMA,
            "max_position_embeddings": 128000,
            "rope_theta": 1000000.0,
            "rope_scaling": {"mrope_section": [4, 6, 6], "type": "mrope"},
        },
    },
    "Apertus by class default": {"model_type": "apertus"},
    "Ministral 3 by class default": {"model_type": "ministral3", "head_dim": 32},
    "LFM3 by class default": {"model_type": "lfm3", "head_dim": 32},
    "Granite with windows": {
        "model_type": "granite_swa",
        "max_position_embeddings": 8192,
        "rope_theta": 20000.0,
        "layer_rope_theta": [20000.0, 500000.0, 0, 20000.0],
    },
    "Llama of one layer size (linear, v4)": {
        "model_type": "llama",
        "max_position_embeddings": 16384,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "linear", "factor": 4.0},
    },
}


def config(name):
    found = CONFIGS[name]
    return found if "text_config" in found else LLAMA | found


PHI4 = [1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817]
PHI4 += [2.187582649, 2.446418898, 2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023]
PHI4 += [4.785517845, 5.351743533, 5.984965424, 6.693110555, 7.485043894, 8.370679318, 9.36110372]
PHI4 += [10.4687158, 11.70738129, 13.09260651, 14.64173252, 16.37415215, 18.31155283, 20.47818807]
PHI4 += [22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64]
PHI4 += [32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77]
PHI35 = [1.0800000429153442, 1.1100000143051147, 1.1399999856948853, 1.340000033378601]
PHI35 += [1.5899999141693115, 1.600000023841858, 1.6200000047683716, 2.620000123977661]
PHI35 += [3.2300000190734863, 3.2300000190734863, 4.789999961853027, 7.400000095367432]
PHI35 += [7.700000286102295, 9.09000015258789, 12.199999809265137, 17.670000076293945]
PHI35 += [24.46000099182129, 28.57000160217285, 30.420001983642578, 30.840002059936523]
PHI35 += [32.590003967285156, 32.93000411987305, 42.320003509521484, 44.96000289916992]
PHI35 += [50.340003967285156, 50.45000457763672, 57.55000305175781, 57.93000411987305]
PHI35 += [58.21000289916992, 60.1400032043457, 62.61000442504883, 62.62000274658203]
PHI35 += [62.71000289916992, 63.1400032043457, 63.1400032043457, 63.77000427246094]
PHI35 += [63.93000411987305, 63.96000289916992, 63.970001220703125, 64.02999877929688]
PHI35 += [64.06999969482422, 64.08000183105469, 64.12000274658203, 64.41000366210938]
PHI35 += [64.4800033569336, 64.51000213623047, 64.52999877929688, 64.83999633789062]


def _phi3(head_dim, factors, **more):
    rope = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": factors}
    sizes = {"hidden_size": 4 * head_dim, "num_attention_heads": 4, "rope_theta": 10000.0}
    lengths = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
    return {"model_type": "phi3", "rope_scaling": rope, **sizes, **lengths, **more}


def _plain(model_type, length, theta, **more):
    known = {"max_position_embeddings": length, "rope_theta": theta, "head_dim": 128}
    return {"model_type": model_type, **known, **more}


def _composite(model_type, text_type, **text):
    return {"model_type": model_type, "text_config": {"model_type": text_type, **text}}


def _mrope(theta, sections, **more):
    sections = {"mrope_interleaved": True, "mrope_section": sections}
    return {"rope_type": "default", "rope_theta": theta, **sections, **more}


YARN = {"rope_type": "yarn"}
QWEN35 = _mrope(1e7, [11, 11, 10], partial_rotary_factor=0.25)
QWEN3VL = _mrope(5e6, [24, 20, 20])
GPT_OSS = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "truncate": False}
GPT_OSS |= {"original_max_position_embeddings": 4096, **YARN}
DEEPSEEK4 = {"beta_fast": 32, "beta_slow": 1, "factor": 16, "type": "yarn"}
DEEPSEEK4 |= {"original_max_position_embeddings": 65536}
LAGUNA = {"factor": 32.0, "original_max_position_embeddings": 8192, **YARN}
LAGUNA |= {"rope_theta": 500000.0, "partial_rotary_factor": 0.5}
DEEPSEEK3 = CONFIGS["DeepSeek-V3"]
# As `--pair-factors config.json` reads the released file: sqrt(1 + ln 32 / ln 4096) = 1.19024.
PHI_OPTIONS = {"method": "longrope", "from_original": True, "factor": 32.0}
PHI_OPTIONS |= {"short_pair_factors": [1.0] * 48, "attention_factor": (17 / 12) ** 0.5}

# name -> the released config, the options that a user gives, and the keys that the authors write in
# its rope dict (None: they publish no scaling; betas of 32 and 1 are the default). From the places
# that published.json names.
RECIPES = {
    "Qwen3.5": (
        _composite(
            *("qwen3_5", "qwen3_5_text"),
            max_position_embeddings=262144,
            head_dim=256,
            rope_parameters=QWEN35,
        ),
        {"method": "yarn", "factor": 4.0},
        QWEN35 | YARN | {"factor": 4.0, "original_max_position_embeddings": 262144},
    ),
    "Qwen3-VL": (
        _composite(
            *("qwen3_vl", "qwen3_vl_text"),
            max_position_embeddings=262144,
            rope_theta=5e6,
            head_dim=128,
            rope_scaling={k: v for k, v in QWEN3VL.items() if k != "rope_theta"},
        ),
        {"method": "yarn", "factor": 3.0},
        QWEN3VL | YARN | {"factor": 3.0, "original_max_position_embeddings": 262144},
    ),
    "Qwen2.5": (
        _plain("qwen2", 32768, 1e6),
        {"method": "yarn", "factor": 4.0},
        {"factor": 4.0, "original_max_position_embeddings": 32768, **YARN},
    ),
    "Qwen3": (
        _plain("qwen3", 40960, 1e6),
        {"method": "yarn", "context": 32768, "factor": 4.0},
        {"factor": 4.0, "original_max_position_embeddings": 32768, **YARN},
    ),
    "gpt-oss": (
        _plain("gpt_oss", 131072, 150000, rope_scaling=GPT_OSS),
        {"method": "yarn", "from_original": True, "factor": 32.0, "truncate": False},
        GPT_OSS,
    ),
    "DeepSeek V3": (
        DEEPSEEK3,
        {"method": "yarn", "from_original": True, "factor": 40.0},
        {k: v for k, v in DEEPSEEK3["rope_scaling"].items() if k[:5] not in ("type", "beta_")},
    ),
    "DeepSeek V4": (
        _plain(
            *("deepseek_v4", 1048576, 10000),
            compress_rope_theta=160000,
            rope_scaling=DEEPSEEK4,
        ),
        {"method": "yarn", "from_original": True, "factor": 16.0, "attention_factor": 1.0},
        {
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "attention_factor": 1.0,  # set by the class for this config
            **YARN,
        },
    ),
    "Laguna": (
        {
            "model_type": "laguna",
            "max_position_embeddings": 262144,
            "head_dim": 128,
            "layer_types": ["full_attention", *["sliding_attention"] * 3] * 10,
            "num_hidden_layers": 40,
            "rope_parameters": {
                "full_attention": LAGUNA,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        {"method": "yarn", "from_original": True, "factor": 32.0},
        LAGUNA,
    ),
    "Llama 3.1": (
        CONFIGS["Llama 3.1"],
        {"method": "llama3", "from_original": True, "factor": 8.0},
        LLAMA3,
    ),
    "Phi-4-mini": (
        _phi3(128, PHI4, partial_rotary_factor=0.75),
        PHI_OPTIONS | {"pair_factors": PHI4},
        {"rope_type": "longrope", "long_factor": PHI4},
    ),
    "Phi-3.5": (
        _phi3(96, PHI35),
        PHI_OPTIONS | {"pair_factors": PHI35},
        {"rope_type": "longrope", "long_factor": PHI35},
    ),
    "MiniMax-M2": (
        _plain("minimax_m2", 196608, 5e6, rotary_dim=64),
        {"method": "yarn", "factor": 4.0},
        None,
    ),
}
