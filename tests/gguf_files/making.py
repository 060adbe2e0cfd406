"""Small GGUF files by gguf's own writer, which the reader under test knows nothing of."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

gguf = pytest.importorskip("gguf", reason="writes the files that are read here; dev installs it")

LLAMA = {
    "context_length": 256,
    "embedding_length": 64,
    "block_count": 2,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "rope.dimension_count": 16,
    "rope.freq_base": 50_000.0,
}


def value(writer, key, item):
    kind = type(item)
    if isinstance(item, np.generic):
        writer.add_key_value(key, item.item(), gguf.GGUFValueType[kind.__name__.upper()])
    elif kind is bool:
        writer.add_bool(key, item)
    elif kind is int:
        writer.add_uint32(key, item)
    elif kind is float:
        writer.add_float32(key, item)
    elif kind is str:
        writer.add_string(key, item)
    else:
        writer.add_array(key, item)


def tensors(seed=0, width=64, vocab=8):
    """Return a few tensors with the names of a model's: the embedding, two layers' norms and
    weights."""
    draw = np.random.default_rng(seed)
    names = {"token_embd.weight": (vocab, width), "output_norm.weight": (width,)}
    for layer in range(2):
        names[f"blk.{layer}.attn_norm.weight"] = (width,)
        names[f"blk.{layer}.attn_q.weight"] = (width, width)
    return {name: draw.standard_normal(shape).astype(np.float32) for name, shape in names.items()}


def write(path, arch="llama", metadata=LLAMA, general=(), data=None, tokens=8, q8=(), kind="Q8_0"):
    """Write one file; `metadata` without the architecture's prefix, `general` with whole keys."""
    writer = gguf.GGUFWriter(path, arch)
    for key, item in metadata.items():
        value(writer, f"{arch}.{key}", item)
    for key, item in dict(general).items():
        value(writer, key, item)
    if tokens:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list([f"t{number}" for number in range(tokens)])
        writer.add_token_types([1] * tokens)
        writer.add_token_merges(["t 0", "t 1"])
    for name, array in (tensors() if data is None else data).items():
        taken = gguf.GGMLQuantizationType[kind] if name in q8 else None
        packed = gguf.quants.quantize(array, taken) if taken else array
        writer.add_tensor(name, packed, raw_dtype=taken)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def interleaved(weight, heads):
    """Reorder the rows: llama.cpp turns neighbouring channels, transformers turns halves of a
    head."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def of_checkpoint(source, path, q8=()):
    """Write a Llama directory with a byte-level tokenizer as an F32 GGUF, as llama.cpp's converter
    has it (which refuses tokenizers that it does not know)."""
    config = json.loads((source / "config.json").read_text())
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    held = load_file(source / "model.safetensors")
    shape = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.dimension_count": config["head_dim"],
        "rope.freq_base": config["rope_theta"],
        "vocab_size": config["vocab_size"],
    }
    names = {index: token for token, index in tokenizer["model"]["vocab"].items()}
    names |= {own["id"]: own["content"] for own in tokenizer["added_tokens"]}
    special = {own["id"] for own in tokenizer["added_tokens"]}
    size = config["vocab_size"]
    merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    general = {
        "general.name": "small",
        "general.file_type": 0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [names.get(i, f"<unused{i}>") for i in range(size)],
        "tokenizer.ggml.token_type": [3 if i in special else 1 for i in range(size)],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": config["bos_token_id"] or 0,
        "tokenizer.ggml.eos_token_id": config["eos_token_id"] or 0,
        "tokenizer.ggml.add_bos_token": False,
    }
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    data = {"token_embd.weight": held["model.embed_tokens.weight"]}
    for layer in range(config["num_hidden_layers"]):
        for theirs, own in PARTS.items():
            weight = held[f"model.layers.{layer}.{theirs}.weight"]
            weight = interleaved(weight, heads[own]) if own in heads else weight
            data[f"blk.{layer}.{own}.weight"] = np.ascontiguousarray(weight)
    data["output_norm.weight"] = held["model.norm.weight"]
    data = {name: array.astype(np.float32) for name, array in data.items()}
    return write(path, metadata=shape, general=general, data=data, tokens=0, q8=q8)
