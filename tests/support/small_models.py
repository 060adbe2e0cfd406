"""Tiny random models; large weights, so that a wrong rotation or a missing cap shows."""

import torch

CONTEXT = 64
VOCABULARY = 128


def tiny(kind="llama", seed=0, dtype=torch.float32, **changes):
    """Make a random two-layer model of a kind, in evaluation mode."""
    from transformers import AutoConfig, AutoModelForCausalLM

    small = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    config = AutoConfig.for_model(kind, **(small | changes))
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def rope(rope_type, factor=4.0, **more):
    """Return the rope parameters of a stock type, for a model of eight head dimensions."""
    params = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": factor, **more}
    if rope_type == "default":
        del params["factor"]
    if rope_type in ("yarn", "longrope", "llama3"):
        params["original_max_position_embeddings"] = CONTEXT
    if rope_type == "llama3":
        params |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if rope_type == "longrope":
        params |= {"short_factor": [1.0, 1.0, 1.5, 2.0], "long_factor": [1.0, 2.0, 4.0, 8.0]}
    return params


def random_ids(count, seed=0, vocabulary=VOCABULARY):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocabulary, (count,), generator=generator).int().numpy()
