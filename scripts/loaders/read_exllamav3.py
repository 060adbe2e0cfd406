"""Rotary tables by ExLlamaV3's own code: python read_exllamav3.py CHECKPOINTS OUT.npz

Runs in an environment of its own (measure.py makes it): torch 2.13.0 and exllamav3 1.4.1 without
its kernels. Its config class reads each directory, its model class builds the attention modules,
and its RoPE makes the table that they rotate by; no weight is loaded and nothing is attended to.
"""

# ruff: noqa: E402 (the loader is imported after the substitutes for its kernels)

import sys
from pathlib import Path

import numpy as np
import torch
from absent import stand_in

stand_in("exllamav3_ext", "fla", "flash_attn", "flashinfer", "llguidance", "marisa_trie", "triton")

from exllamav3 import Config, Model
from exllamav3.util.rope import RoPE, RopeStyle


def tables(directory: Path, length: int) -> dict[str, np.ndarray]:
    """Return LAYER/cos, LAYER/sin, LAYER/softmax and the length that it takes from the config."""
    config = Config.from_directory(str(directory))
    found = {"length": np.array(config.max_position_embeddings)}
    positions = torch.arange(length)
    for block in Model.from_config(config).modules:
        for module in block:
            if not hasattr(module, "rope_settings") or not hasattr(module, "sm_scale"):
                continue
            layer = module.layer_idx
            found[f"{layer}/softmax"] = np.array(module.sm_scale)
            if module.rope_settings is None:
                continue
            rope = RoPE("cpu", module.rope_settings)
            sin, cos = rope.compute_sincos(positions)
            every = slice(None, None, 2)
            if rope.rope_settings.rope_style != RopeStyle.GPTJ:
                every = slice(sin.shape[-1] // 2)
            found[f"{layer}/cos"], found[f"{layer}/sin"] = cos[:, every], sin[:, every]
            # As its kernel has it (rope.cu).
            beta, original = rope.llama_4_scaling_beta, rope.llama_4_scaling_original
            found[f"{layer}/queries"] = 1 + beta * torch.log1p(positions // original)
    return {name: np.asarray(own) for name, own in found.items()}


def main(folder: Path, output: Path, family: str) -> None:
    length = len(np.load(folder / "ids.npy"))
    found = {}
    for place in sorted(folder.glob(f"{family}/*/config.json")):
        name = "/".join(place.parts[-3:-1])
        try:
            own = tables(place.parent, length)
            found |= {f"{name}/{key}": value for key, value in own.items()}
        except Exception as error:  # a loader fails in its own ways: its message is kept
            found[f"{name}/error"] = np.array(f"{type(error).__name__}: {error}"[:2000])
        print(name, found.get(f"{name}/error", "read"), flush=True)
    np.savez(output, **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
