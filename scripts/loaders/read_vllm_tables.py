"""Write rotary tables by vLLM's own code: python read_vllm_tables.py IDS.npy OUT.npz DIRECTORY ...

This is for a family whose layers its CPU build does not compute, or not as in float32. Its config
and model classes build the model as for its engine, without weights, and the script reads the
tables of each layer's rotary module. No attention is computed.
"""

# ruff: noqa: E402 (vLLM is imported after the substitute for torchvision)

import contextlib
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import telling
import torch

# vLLM asks torchvision for operators of images that no text goes through; none comes for torch on a
# processor alone.
with contextlib.suppress(RuntimeError):
    torch.library.define("torchvision::nms", "(Tensor a, Tensor b, float c) -> Tensor")
from absent import hide_from_transformers, stand_in

hide_from_transformers("torchvision")
stand_in("torchvision")

import vllm
from read_vllm import options_of
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry
from vllm.platforms.cpu import CpuPlatform

chosen = CpuPlatform.get_attn_backend_cls.__func__


def dense(cls: type, *given: Any, attn_selector_config: Any, **named: Any) -> str:
    """Choose the attention: a processor has none that leaves tokens out."""
    whole = attn_selector_config._replace(use_sparse=False)
    return chosen(cls, *given, attn_selector_config=whole, **named)


CpuPlatform.get_attn_backend_cls = classmethod(dense)
# It looks at each model class in a process of its own, which knows no substitute.
registry._run_in_subprocess = lambda look: look()


@contextlib.contextmanager
def alone(config: VllmConfig) -> Iterator[None]:
    """Set up a worker's state for building its model; one worker, on the processor."""
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            meeting = f"file://{tempfile.mkdtemp()}/meeting"
            parallel_state.init_distributed_environment(1, 0, meeting, 0, "gloo")
            parallel_state.ensure_model_parallel_initialized(1, 1)
        yield


def cache_of(rotary: Any) -> torch.Tensor:
    """Return the table from position 0 on; a longrope has its short rows before its long ones."""
    if not hasattr(rotary, "long_short_cos_sin_cache"):
        return rotary.cos_sin_cache
    first = rotary.original_max_position_embeddings if rotary.use_long_rope else 0
    return rotary.long_short_cos_sin_cache[first:]


def layers(model: nn.Module) -> dict[str, Any]:
    """Return LAYER/cos, LAYER/sin and LAYER/softmax of the layers that attend."""
    found = {}
    model = getattr(model, "language_model", model)  # a composite's text part
    for number, layer in enumerate(model.model.layers):
        attention = getattr(layer, "self_attn", None) or getattr(layer, "attn", None)
        if attention is None:
            continue
        scaling = getattr(attention, "scaling", None)
        scaling = attention.attn.impl.scale if scaling is None else scaling
        found[f"{number}/softmax"] = np.array(scaling)
        rotary = getattr(attention, "rotary_emb", None)
        # Cohere 2 and EXAONE 4 rotate in windowed layers alone.
        windows = not getattr(attention, "v1", True) or hasattr(attention, "apply_rope_all_layers")
        everywhere = not windows or getattr(attention, "apply_rope_all_layers", False)
        if rotary is not None and (everywhere or attention.sliding_window):
            cos, sin = cache_of(rotary).chunk(2, -1)
            found |= {f"{number}/cos": cos.numpy(), f"{number}/sin": sin.numpy()}
            if (axes := telling.axes_of(rotary)) is not None:
                found[f"{number}/axes"] = axes
    return found


def built(place: str, length: int | None) -> tuple[dict[str, Any], int]:
    """Return the tables of one checkpoint, and the length that it is served at."""
    config = EngineArgs(
        **{"max_model_len": length} | options_of(place),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        load_format="dummy",
    ).create_engine_config()
    rotary_embedding._ROPE_DICT.clear()  # a module knows the length it was first built for
    with alone(config), torch.no_grad():
        return layers(initialize_model(config)), config.model_config.max_model_len


def read(place: str, ids: np.ndarray) -> dict[str, Any]:
    found, length = built(place, None)
    if length <= len(ids):  # as for the engine
        found, _ = built(place, len(ids) + 1)
    size = len(ids) + 1
    long = {key for key in found if key.endswith(("/cos", "/sin"))}
    tables = {key: own[:size] if key in long else own for key, own in found.items()}
    return tables | {"length": length}


if __name__ == "__main__":
    telling.main(vllm.__version__, read)
