"""Small GGUF files by gguf's own writer, which the reader under test knows nothing of."""

import numpy as np
import pytest

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
    """A few tensors with the names of a model's: the embedding, two layers' norms and weights."""
    draw = np.random.default_rng(seed)
    names = {"token_embd.weight": (vocab, width), "output_norm.weight": (width,)}
    for layer in range(2):
        names[f"blk.{layer}.attn_norm.weight"] = (width,)
        names[f"blk.{layer}.attn_q.weight"] = (width, width)
    return {name: draw.standard_normal(shape).astype(np.float32) for name, shape in names.items()}


def write(path, arch="llama", metadata=LLAMA, general=(), data=None, tokens=8, q8=()):
    """One file; `metadata` without the architecture's prefix, `general` with whole keys."""
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
        kind = gguf.GGMLQuantizationType.Q8_0 if name in q8 else None
        packed = gguf.quants.quantize(array, kind) if kind else array
        writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
