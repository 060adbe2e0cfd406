"""Rotary tables by SGLang's own code: python read_sglang.py CHECKPOINTS OUT.npz [FAMILY ...]

With `--lines FILE.json OUT.npz LENGTH`: of directories or of whole lines `python -m
sglang.launch_server ...`, whose flags SGLang's own parser reads.

Runs in an environment of its own (measure.py makes it): torch 2.13.0, transformers 5.19.0 and
sglang 0.5.23 without its kernels. Its ModelConfig reads each directory and gives the length, its
registry names the model class, and the class is built as at a start of its server, on the
processor. What is written is how the rotary module of each layer turns a probe, and each layer's
softmax scale; no weight is loaded and nothing is attended to.
"""

# ruff: noqa: E402 (the loader is imported after the substitutes for its kernels)

import json
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"

import numpy as np
import torch
from absent import hide_from_transformers, stand_in
from telling import axes_of

KERNELS = (
    *("aiter", "av", "cutlass", "decord", "deep_gemm", "flash_attn", "flashinfer", "IPython"),
    *("kernels", "mistral_common", "pynvml", "quack", "sgl_kernel", "soundfile", "tilelang"),
    *("torch_memory_saver", "torchaudio", "torchcodec", "torchvision", "uvloop"),
)
hide_from_transformers(*KERNELS)
stand_in(*KERNELS)
# On a processor Qwen 3.5's module looks these kernels up at its import.
for kernel in (
    *("fused_input_proj_cpu", "fused_qk_gemma_rmsnorm_cpu", "fused_qk_gemma_rmsnorm_with_gate_cpu"),
    *("fused_qkvzba_split_reshape_cat_contiguous_cpu", "fused_qkvzba_split_reshape_cat_cpu"),
    "fused_sigmoid_mul_cpu",
):
    torch.library.define(f"sgl_kernel::{kernel}", "(Tensor a, Tensor b) -> Tensor")

from sglang.srt import runtime_context
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import parallel_state
from sglang.srt.layers.attention.dsa import dsa_indexer
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import factory
from sglang.srt.model_loader.loader import _initialize_model
from sglang.srt.models import deepseek_v2, ministral3
from sglang.srt.server_args import ServerArgs, prepare_server_args


def as_on_a_gpu(*words: Any, device: str, **named: Any) -> Any:
    """Return DeepSeek's rotary module; for a processor SGLang has another, that knows yarn
    alone."""
    return factory.get_rope_wrapper(*words, **named)


deepseek_v2.get_rope_wrapper = dsa_indexer.get_rope_wrapper = as_on_a_gpu
torch.cuda.get_device_capability = lambda *_: (9, 0)  # asked for by sparse attention


def publish(place: str) -> ServerArgs:
    """Set up a worker's state for building its model; one worker, on the processor."""
    # gpt-oss asks for a backend that can hold its sinks, Gemma 4 for one of some; none is run here.
    named = Path(place).parent.name in ("gpt_oss", "gemma4")
    backend = "triton" if named else "torch_native"
    launched = place.startswith("python -m sglang.launch_server ")
    words = shlex.split(place)[3:] if launched else ["--model-path", place]
    here = ["--device", "cpu", "--dtype", "float32", "--attention-backend", backend]
    here += ["--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule"]
    arguments = prepare_server_args([*words, *here, "--skip-tokenizer-init"])
    arguments.resolve_once()
    ranks = runtime_context.SpawnRanks(world_rank=0, gpu_id=0)
    runtime_context.publish(arguments, role="scheduler", ranks=ranks)
    if not torch.distributed.is_initialized():
        meeting = f"file://{tempfile.mkdtemp()}/meeting"
        parallel_state.init_distributed_environment(
            world_size=1, rank=0, local_rank=0, distributed_init_method=meeting, backend="gloo"
        )
        parallel_state.initialize_model_parallel(backend="gloo")
    return arguments


def turned(rotary: Any, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin of each position and pair: the module rotates a probe that is 1 in the
    first place of each pair and 0 in the second."""
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


def text_of(model: torch.nn.Module) -> Any:
    """Return the module that holds the layers; in a composite, its text part's."""
    return next(
        own
        for name, own in model.named_modules()
        if hasattr(own, "layers") and not re.search("vis|audio|tower", name)
    )


def stock_factor(place: str) -> float:
    config = json.loads(Path(place, "config.json").read_text("utf-8"))
    return float(config["text_config"]["qk_scale_factor"])


def tables(place: str, length: int) -> dict[str, np.ndarray]:
    """Return LAYER/cos, LAYER/sin, LAYER/softmax, LAYER/queries and the length of the server's
    context."""
    factory._ROPE_DICT.clear()
    config = ModelConfig.from_server_args(publish(place))
    given = config.hf_text_config
    for heads in ("linear_num_key_heads", "linear_num_value_heads"):
        if hasattr(given, heads):  # as its runner does on a processor
            setattr(given, f"{heads}_cpu", getattr(given, heads))
    model = _initialize_model(config, LoadConfig())
    text = text_of(model)
    found = {"length": np.array(config.context_len)}
    positions = torch.arange(length)
    shared = getattr(text, "rotary_emb", None)
    for number, layer in enumerate(text.layers):
        attention = getattr(layer, "self_attn", None) or getattr(layer, "attention", layer)
        radix = [own for own in attention.modules() if isinstance(own, RadixAttention)]
        if not radix and not hasattr(attention, "scaling"):
            continue  # a layer that does not attend
        scaling = radix[0].scaling if radix else attention.scaling
        if "MuseGlimmer" in type(attention).__name__:  # stock multiplies the queries by this
            scaling /= stock_factor(place)
        found[f"{number}/softmax"] = np.array(scaling)
        if shared is not None:
            # Gemma 3 on a GPU, and models that SGLang takes from transformers: the model's tables.
            slides = getattr(attention, "is_sliding", False)
            own = getattr(text, "rotary_emb_local", shared) if slides else shared
            if "Exaone4" in type(attention).__name__ and attention.sliding_window and not slides:
                continue
            if not getattr(attention, "use_rope", True):
                continue
            cos, sin = (x[0].chunk(2, -1)[0] for x in own(torch.zeros(1), positions[None]))
        elif getattr(attention, "v1", True) is False and attention.sliding_window_size < 0:
            continue  # Cohere 2 rotates in windowed layers alone
        elif attention.rotary_emb is not None:
            cos, sin = turned(attention.rotary_emb, positions)
            if (axes := axes_of(attention.rotary_emb)) is not None:
                found[f"{number}/axes"] = axes
        else:
            continue
        found[f"{number}/cos"], found[f"{number}/sin"] = cos, sin
        beta = getattr(attention, "llama_4_scaling_beta", None)
        if beta is not None:
            found[f"{number}/queries"] = ministral3._get_llama_4_attn_scale(
                positions, beta, attention.max_position_embeddings
            ).flatten()
    return {name: np.asarray(own) for name, own in found.items()}


def read(places: dict[str, str], output: Path, length: int) -> None:
    """Write NAME/... for every name and its place."""
    found = {}
    for name, place in places.items():
        try:
            with torch.no_grad():
                own = tables(place, length)
            found |= {f"{name}/{key}": value for key, value in own.items()}
        except Exception as error:  # a loader fails in its own ways: its message is kept
            found[f"{name}/error"] = np.array(f"{type(error).__name__}: {error}"[:2000])
        print(name, found.get(f"{name}/length"), found.get(f"{name}/error", ""), flush=True)
    np.savez(output, **found)


def main(folder: Path, output: Path, families: list[str]) -> None:
    places = {"/".join(p.parts[-3:-1]): str(p.parent) for p in folder.glob("*/*/config.json")}
    # The table of a base ends before the target.
    wanted = {
        name: place
        for name, place in sorted(places.items())
        if not name.endswith("/base") and (not families or name.split("/")[0] in families)
    }
    read(wanted, output, len(np.load(folder / "ids.npy")))


if __name__ == "__main__":
    if sys.argv[1] == "--lines":
        given = json.loads(Path(sys.argv[2]).read_text("utf-8"))
        read(dict(zip(given, given, strict=True)), Path(sys.argv[3]), int(sys.argv[4]))
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
