"""A tiny random Llama on the disk, written without torch."""

import json

import numpy
from safetensors.numpy import save_file

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rope_theta": 50000.0,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


def make_llama(directory, **changes):
    """Write a random Llama; `changes` go into its config."""
    directory.mkdir(parents=True)
    config = CONFIG | changes
    random = numpy.random.default_rng(0)
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        shapes |= {
            f"{name}.input_layernorm.weight": (hidden,),
            f"{name}.post_attention_layernorm.weight": (hidden,),
            f"{name}.self_attn.q_proj.weight": (queries, hidden),
            f"{name}.self_attn.k_proj.weight": (keys, hidden),
            f"{name}.self_attn.v_proj.weight": (keys, hidden),
            f"{name}.self_attn.o_proj.weight": (hidden, queries),
            f"{name}.mlp.gate_proj.weight": (inner, hidden),
            f"{name}.mlp.up_proj.weight": (inner, hidden),
            f"{name}.mlp.down_proj.weight": (hidden, inner),
        }
    weights = {
        name: random.normal(0, 0.3, shape).astype("float32") for name, shape in shapes.items()
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    (directory / "tokenizer_config.json").write_text('{"model_max_length": 128}')
    return directory
