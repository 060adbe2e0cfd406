"""Rotary tables by vLLM's own code: python read_vllm_tables.py IDS.npy OUT.npz DIRECTORY ...

For a family whose attention or experts its CPU build does not compute as in float32: the engine
builds the model as it would serve it, and its rotary modules are asked what they hold.
"""

from typing import Any

import numpy as np
import telling
from read_vllm import engine_of
from torch import nn


def layers(model: nn.Module) -> dict[str, Any]:
    """LAYER/cos, LAYER/sin and LAYER/softmax."""
    found = {}
    for number, layer in enumerate(model.model.layers):
        attention = getattr(layer, "self_attn", None) or layer.attn
        found[f"{number}/softmax"] = np.array(attention.scaling)
        # Cohere 2 rotates in windowed layers alone.
        if getattr(attention, "v1", True) or attention.sliding_window:
            cos, sin = attention.rotary_emb.cos_sin_cache.chunk(2, -1)
            found |= {f"{number}/cos": cos.numpy(), f"{number}/sin": sin.numpy()}
    return found


def read(directory: str, ids: np.ndarray) -> dict[str, Any]:
    engine = engine_of(directory, None)
    length = engine.llm_engine.model_config.max_model_len
    (found,) = engine.apply_model(layers)
    size = len(ids) + 1
    tables = {key: own if own.ndim == 0 else own[:size] for key, own in found.items()}
    return tables | {"length": length}


if __name__ == "__main__":
    import vllm

    telling.main(vllm.__version__, read)
