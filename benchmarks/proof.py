"""Compare the cost of proving a 70B-shaped checkpoint with importing transformers.

    python benchmarks/proof.py > benchmarks/results/proof-DATE.md

The checkpoints are sparse files: real headers, no weights. One child process proves a tiny
checkpoint of the same family, which pays every import. A second one then proves the large
checkpoint many times, and a third one does so without the one forward pass of a small model. Their
differences, for one of the times, are the proof's own cost and the cost of that pass: imports vary
more than either. Any program that loads such a model pays the import. The figures are CPU seconds,
since cores may be shared; the claim is the ratio, in one run.
"""

import importlib.metadata as metadata
import json
import os
import platform
import resource
import struct
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from ropext.scaling import forms
from ropext.scaling.rope import Rope, Site
from ropext.verifying import proof
from ropext.verifying.proof.answers import Built

ROUNDS = 3
TIMES = 20  # that a child process proves the large checkpoint
PLAIN = {"rope_type": "default", "rope_theta": 5e5}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5}
YARN |= {"original_max_position_embeddings": 8192}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 32768,
    "rope_parameters": YARN,
    "dtype": "bfloat16",
}
MIXTRAL = LLAMA | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 6144,
    "intermediate_size": 16384,
    "num_hidden_layers": 56,
    "num_attention_heads": 48,
    "head_dim": 128,
    "vocab_size": 32768,
    "num_local_experts": 8,
}
SMALL = {"hidden_size": 256, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 2}


def llama_shapes(config: dict[str, Any]) -> dict[str, list[int]]:
    hidden, inner, heads = (
        config[k] for k in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    kv = hidden // heads * config["num_key_value_heads"]
    tokens = [config["vocab_size"], hidden]
    shapes = {"model.embed_tokens.weight": tokens, "lm_head.weight": tokens}
    shapes["model.norm.weight"] = [hidden]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.{n}_layernorm.weight": [hidden] for n in ("input", "post_attention")}
        shapes |= {f"{at}.self_attn.{n}_proj.weight": [hidden, hidden] for n in "qo"}
        shapes |= {f"{at}.self_attn.{n}_proj.weight": [kv, hidden] for n in "kv"}
        if experts := config.get("num_local_experts"):
            moe = f"{at}.block_sparse_moe"
            shapes[f"{moe}.gate.weight"] = [experts, hidden]
            for e in range(experts):
                shapes |= {f"{moe}.experts.{e}.w{n}.weight": [inner, hidden] for n in (1, 3)}
                shapes[f"{moe}.experts.{e}.w2.weight"] = [hidden, inner]
        else:
            shapes |= {f"{at}.mlp.{n}_proj.weight": [inner, hidden] for n in ("gate", "up")}
            shapes[f"{at}.mlp.down_proj.weight"] = [hidden, inner]
    return shapes


def write(directory: Path, config: dict[str, Any]) -> int:
    """Write a sparse checkpoint; return its size in bytes."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    table, offset = {}, 0
    for name, shape in llama_shapes(config).items():
        size = 2
        for n in shape:
            size *= n
        spot = [offset, offset + size]
        table[name] = {"dtype": "BF16", "shape": shape, "data_offsets": spot}
        offset += size
    header = json.dumps(table).encode()
    with open(directory / "model.safetensors", "wb") as stream:
        stream.write(struct.pack("<Q", len(header)) + header)
        stream.truncate(8 + len(header) + offset)
    return offset


def children_seconds() -> float:
    """Return the CPU seconds of all finished children."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def import_seconds(name: str) -> float:
    """Return the CPU seconds of a fresh process that does the imports of loading this model."""
    code = f"import torch, accelerate; from transformers import AutoConfig, {name}"
    before = children_seconds()
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
    return children_seconds() - before


class Proved(NamedTuple):
    """The last answer of a child process, and the cost of the process."""

    built: Built
    cpu_seconds: float
    wall_seconds: float
    peak: int  # KiB


def build_all(requests: list[proof.BuildRequest]) -> Proved:
    """Build directories in the first child of this process."""
    start = time.monotonic()
    built = proof.build(requests)[-1]
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return Proved(built, children_seconds(), time.monotonic() - start, peak)


def proved(*requests: proof.BuildRequest) -> Proved:
    """Build directories from a fresh process: a process knows only the largest peak of all its
    children."""
    with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
        return fresh.submit(build_all, list(requests)).result()


def measure(root: Path, title: str, config: dict[str, Any]) -> str:
    size = write(root / "large", config)
    write(root / "small", config | SMALL)
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    wanted = forms.read(YARN, Rope(head_dim, YARN["rope_theta"], 8192)).spectrum
    promise = proof.ExpectedRotary((Site("", wanted, YARN),), 4.0)
    rows = []
    for number in range(1, ROUNDS + 1):
        imports = import_seconds(config["architectures"][0])
        before = config | {"rope_parameters": PLAIN, "max_position_embeddings": 8192}
        small = proof.BuildRequest(root / "small")
        large = proof.BuildRequest(root / "large", (), before, promise)
        least = proved(small)
        without = proved(small, *[large] * TIMES)
        whole = proved(small, *[replace(large, context=8192, target=32768)] * TIMES)
        result = proof.compare(whole.built, promise)
        own = (whole.cpu_seconds - least.cpu_seconds) / TIMES
        once = (whole.cpu_seconds - without.cpu_seconds) / TIMES
        wall = (whole.wall_seconds - least.wall_seconds) / TIMES
        rows.append(
            f"| {number} | {imports:.2f} | {own:.2f} | {own / imports:.2f} | "
            f"{once:.2f} | {wall:.1f} | {whole.peak / 2**10:.0f} | "
            f"{(whole.peak - without.peak) / 2**10:.0f} |"
        )
    lines = [
        f"## {title}: {size / 1e9:.0f} GB, {result.tensors_compared} tensors compared, "
        f"{result.attention_modules} attention modules",
        "",
        f"{result.forward}.",
        "",
        "| round | imports, CPU s | proof's own, CPU s | ratio | of it the forward pass, CPU s | "
        "proof's own, wall s | peak, MiB | of it by the forward pass |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "accelerate")}
    print("# Cost of the proof\n")
    print("Command: `python benchmarks/proof.py`\n")
    print(f"Machine: {os.cpu_count()} cores, CPU, {platform.system()}; other work may share it.")
    said = ", ".join(f"{k} {v}" for k, v in versions.items())
    print(f"Versions: Python {platform.python_version()}, {said}.\n")
    for title, config in (("Llama-3-70B shape", LLAMA), ("Mixtral-8x22B shape", MIXTRAL)):
        with tempfile.TemporaryDirectory() as folder:
            print(measure(Path(folder), title, config), flush=True)


if __name__ == "__main__":
    main()
