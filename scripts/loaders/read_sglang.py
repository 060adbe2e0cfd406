"""Rotary tables by SGLang's own code: python read_sglang.py CHECKPOINTS OUT.npz [FAMILY ...]

Runs in an environment of its own (measure.py makes it): torch 2.13.0, transformers 5.19.0 and
sglang 0.5.23 without its kernels. Its ModelConfig reads each directory and gives the length, its
registry names the model class, and the class is built as at a start of its server, on the
processor. What is written is how the rotary module of each layer turns a probe, and each layer's
softmax scale; no weight is loaded and nothing is attended to.
"""

# ruff: noqa: E402 (the loader is imported after what stands in for its kernels)

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"

import numpy as np
import torch
from absent import hide_from_transformers, stand_in

KERNELS = (
    *("aiter", "av", "cutlass", "decord", "deep_gemm", "flash_attn", "flashinfer", "IPython"),
    *("kernels", "mistral_common", "pynvml", "quack", "sgl_kernel", "soundfile", "tilelang"),
    *("torch_memory_saver", "torchaudio", "torchcodec", "torchvision", "uvloop"),
)
hide_from_transformers(*KERNELS)
stand_in(*KERNELS)

from sglang.srt import runtime_context
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import parallel_state
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import factory
from sglang.srt.model_loader.loader import _initialize_model
from sglang.srt.models import deepseek_v2, ministral3
from sglang.srt.server_args import ServerArgs


def as_on_a_gpu(*words: Any, device: str, **named: Any) -> Any:
    """DeepSeek's rotary module; for a processor SGLang has another, that knows yarn alone."""
    return factory.get_rope_wrapper(*words, **named)


deepseek_v2.get_rope_wrapper = as_on_a_gpu


def publish(directory: Path) -> None:
    """What a worker of the server knows when it builds its model; one worker, on the processor."""
    # gpt-oss asks for a backend that can hold its sinks; none is run here.
    backend = "triton" if directory.parent.name == "gpt_oss" else "torch_native"
    arguments = ServerArgs(
        model_path=str(directory),
        device="cpu",
        dtype="float32",
        attention_backend=backend,
        skip_tokenizer_init=True,
    )
    arguments.resolve_once()
    ranks = runtime_context.SpawnRanks(world_rank=0, gpu_id=0)
    runtime_context.publish(arguments, role="scheduler", ranks=ranks)
    if not torch.distributed.is_initialized():
        meeting = f"file://{tempfile.mkdtemp()}/meeting"
        parallel_state.init_distributed_environment(
            world_size=1, rank=0, local_rank=0, distributed_init_method=meeting, backend="gloo"
        )
        parallel_state.initialize_model_parallel(backend="gloo")


def turned(rotary: Any, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of each position and pair: where the module takes a probe that is 1 in the first
    place of each pair and 0 in the second."""
    places = torch.arange(rotary.rotary_dim)
    neox = getattr(rotary, "is_neox_style", True)
    first = places < rotary.rotary_dim // 2 if neox else places % 2 == 0
    probe = torch.zeros(len(positions), rotary.head_size)
    probe[:, : rotary.rotary_dim] = first.float()
    call = getattr(rotary, "forward_native", rotary)
    if "Deepseek" in type(rotary).__name__:
        out = call(positions, probe[:, None].clone(), probe[:, None].clone())[0][:, 0]
    else:
        out = call(positions, probe.clone(), probe.clone())[0].reshape(len(positions), -1)
    out = out[:, : rotary.rotary_dim]
    return out[:, first], out[:, ~first]


def tables(directory: Path, length: int) -> dict[str, np.ndarray]:
    """LAYER/cos, LAYER/sin, LAYER/softmax, LAYER/queries and the length of the server's context."""
    factory._ROPE_DICT.clear()
    publish(directory)
    config = ModelConfig(str(directory), trust_remote_code=False, dtype="float32")
    model = _initialize_model(config, LoadConfig())
    model = getattr(model, "language_model", model)  # of a composite, its text part
    found = {"length": np.array(config.context_len)}
    positions = torch.arange(length)
    shared = getattr(model.model, "rotary_emb", None)
    layers = [*model.model.layers]
    for number, layer in enumerate(layers):
        attention = getattr(layer, "self_attn", None) or layer.attention
        radix = [own for own in attention.modules() if isinstance(own, RadixAttention)]
        scaling = radix[0].scaling if radix else attention.scaling
        found[f"{number}/softmax"] = np.array(scaling)
        if shared is not None:
            # Gemma 3 on a GPU, and models that SGLang takes from transformers: the model's tables.
            own = (
                model.model.rotary_emb_local if getattr(attention, "is_sliding", False) else shared
            )
            if not getattr(attention, "use_rope", True):
                continue
            cos, sin = (x[0].chunk(2, -1)[0] for x in own(torch.zeros(1), positions[None]))
        elif getattr(attention, "v1", True) is False and attention.sliding_window_size < 0:
            continue  # Cohere 2 rotates in windowed layers alone
        elif attention.rotary_emb is not None:
            cos, sin = turned(attention.rotary_emb, positions)
        else:
            continue
        found[f"{number}/cos"], found[f"{number}/sin"] = cos, sin
        beta = getattr(attention, "llama_4_scaling_beta", None)
        if beta is not None:
            found[f"{number}/queries"] = ministral3._get_llama_4_attn_scale(
                positions, beta, attention.max_position_embeddings
            ).flatten()
    return {name: np.asarray(own) for name, own in found.items()}


def main(folder: Path, output: Path, families: list[str]) -> None:
    length = len(np.load(folder / "ids.npy"))
    found = {}
    for place in sorted(folder.glob("*/*/config.json")):
        family, form = place.parts[-3:-1]
        if form == "base" or (families and family not in families):
            continue  # the table of a base ends before the target
        name = f"{family}/{form}"
        try:
            with torch.no_grad():
                own = tables(place.parent, length)
            found |= {f"{name}/{key}": value for key, value in own.items()}
        except Exception as error:  # a loader fails in its own ways: what it says is kept
            found[f"{name}/error"] = np.array(f"{type(error).__name__}: {error}"[:2000])
        print(name, found.get(f"{name}/length"), found.get(f"{name}/error", ""), flush=True)
    np.savez(output, **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
