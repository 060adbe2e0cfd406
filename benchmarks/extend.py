"""`ropext extend` on large checkpoints: by link in an instant, by copy as fast as `cp -r`.

Claims: `--link hard --no-verify` of a 100-GB checkpoint takes the time of a 10-GB one within noise,
under 100 MB of memory, also with a tokenizer.json of 35 MB. It imports neither torch nor
transformers. `--link copy` takes at most 1.1 times `cp -r`. Shards of the linked checkpoints are
sparse files: only their headers are read.

    python benchmarks/extend.py [--folder DIR] [--rounds 7] [--copy-mib 1024]
    python benchmarks/extend.py --llamas [--folder DIR] [--rounds 3]

`--llamas` measures `extend --link hard` with its verification on sparse checkpoints that have every
tensor of a Llama of 8, 70 and 405 billion parameters.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SHARD = 4 << 30  # bytes
HIDDEN = 8192
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "torch_dtype": "bfloat16",
}
# hidden size, intermediate size, layers and heads of Llama 3 8B, Llama 3 70B and Llama 3.1 405B
LLAMAS = {
    "8B": (4096, 14336, 32, 32),
    "70B": (8192, 28672, 80, 64),
    "405B": (16384, 53248, 126, 128),
}
VOCABULARY = 128_256
KEY_VALUE_HEADS = 8
# Runs a command and prints its costs and the heavy modules that it imported.
CHILD = """
import re, sys, time
sys.argv = ["ropext", *sys.argv[1:]]
start = time.perf_counter()
from ropext.cli.app import main
try:
    main()
finally:
    heavy = {"torch", "transformers", "numpy", "huggingface_hub"} & sys.modules.keys()
    # Not ru_maxrss, which a child inherits from the process that forked it.
    peak = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
    print(time.perf_counter() - start, peak, ",".join(sorted(heavy)) or "none", file=sys.stderr)
"""


def shard(path: Path, size: int, name: str) -> None:
    """Write a sparse safetensors file of one tensor."""
    rows = size // (2 * HIDDEN)
    length = rows * HIDDEN * 2
    table = {name: {"dtype": "BF16", "shape": [rows, HIDDEN], "data_offsets": [0, length]}}
    header = json.dumps(table).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + length)


def checkpoint(directory: Path, gigabytes: int, tokenizer_mb: int, size: int = SHARD) -> Path:
    directory.mkdir()
    count = gigabytes * 10**9 // size + 1
    weight_map = {}
    for i in range(count):
        name = f"model-{i + 1:05}-of-{count:05}.safetensors"
        shard(directory / name, size if i + 1 < count else gigabytes * 10**9 % size, f"w{i}")
        weight_map[f"w{i}"] = name
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(CONFIG))
    vocabulary = {f"token-{i:07}": i for i in range(tokenizer_mb * 10**6 // 25)}
    tokenizer = {"version": "1.0", "truncation": {"max_length": 4096}, "model": vocabulary}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return directory


def llama(directory: Path, shape: tuple[int, int, int, int]) -> Path:
    """Write a sparse checkpoint with every tensor of a Llama of this shape, one file per layer."""
    hidden, intermediate, layers, heads = shape
    directory.mkdir()
    config = {
        **CONFIG,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": KEY_VALUE_HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    }
    (directory / "config.json").write_text(json.dumps(config))
    narrow = hidden // heads * KEY_VALUE_HEADS
    of_layer = {
        "self_attn.q_proj": [hidden, hidden],
        "self_attn.k_proj": [narrow, hidden],
        "self_attn.v_proj": [narrow, hidden],
        "self_attn.o_proj": [hidden, hidden],
        "mlp.gate_proj": [intermediate, hidden],
        "mlp.up_proj": [intermediate, hidden],
        "mlp.down_proj": [hidden, intermediate],
        "input_layernorm": [hidden],
        "post_attention_layernorm": [hidden],
    }
    shards = [
        {f"model.layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
        for layer in range(layers)
    ]
    shards.append(
        {
            "model.embed_tokens.weight": [VOCABULARY, hidden],
            "model.norm.weight": [hidden],
            "lm_head.weight": [VOCABULARY, hidden],
        }
    )
    weight_map = {}
    for number, shapes in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        sparse(directory / file, shapes)
        weight_map.update(dict.fromkeys(shapes, file))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def sparse(path: Path, shapes: dict[str, list[int]]) -> None:
    """Write a sparse safetensors file of bfloat16 tensors of these shapes."""
    table = {}
    end = 0
    for name, shape in shapes.items():
        begin = end
        end += 2 * math.prod(shape)
        table[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(table).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)


def verified(folder: Path, rounds: int) -> None:
    """Print what `extend --link hard` with its verification costs for each shape."""
    print("| shape | weights, GB | tensors | seconds, each round (of a core) | peak memory, MB |")
    print("|---|---|---|---|---|")
    for name, shape in LLAMAS.items():
        model = llama(folder / name, shape)
        sizes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        index = json.loads((model / "model.safetensors.index.json").read_text())
        times = []
        peak = 0.0
        for _ in range(rounds):
            out = folder / "out"
            words = [str(model), "--factor", "4", "-o", str(out), "--link", "hard", "--quiet"]
            start = time.perf_counter()
            child = os.posix_spawn(
                sys.executable,
                [sys.executable, "-P", "-m", "ropext", "extend", *words],
                os.environ,
                file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
            )
            # Both processes, ropext and its verification: the sum of their times, the larger peak.
            _, status, used = os.wait4(child, 0)
            took = time.perf_counter() - start
            times.append(f"{took:.1f} ({used.ru_utime + used.ru_stime:.1f})")
            assert os.waitstatus_to_exitcode(status) == 0
            peak = max(peak, used.ru_maxrss / 1024)
            shutil.rmtree(out)
        print(
            f"| {name} | {sizes / 1e9:.0f} | {len(index['weight_map'])} "
            f"| {', '.join(times)} | {peak:.0f} |",
            flush=True,
        )


def linked(folder: Path, rounds: int) -> None:
    models = {
        "10 GB": checkpoint(folder / "10", 10, 2),
        "100 GB": checkpoint(folder / "100", 100, 2),
        "100 GB, tokenizer.json of 35 MB": checkpoint(folder / "100t", 100, 35),
        "100 GB in 200 files": checkpoint(folder / "100f", 100, 2, 500 * 10**6 + 1),
    }
    rows: dict[str, list[tuple[float, float, str]]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            out = folder / "out"
            words = [str(model), "--factor", "4", "-o", str(out), "--link", "hard", "--no-verify"]
            done = subprocess.run(
                [sys.executable, "-P", "-c", CHILD, "extend", *words, "--quiet"],
                check=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            seconds, peak, heavy = done.stderr.split()[-3:]
            rows[name].append((float(seconds), float(peak), heavy))
            shutil.rmtree(out)
    unit = statistics.median(row[0] for row in rows["10 GB"])
    print("| checkpoint | time, ratio to 10 GB | spread (min-max) | peak memory, MB | heavy |")
    print("|---|---|---|---|---|")
    for name, runs in rows.items():
        ratios = sorted(row[0] / unit for row in runs)
        most = max(row[1] for row in runs)
        spread = f"{ratios[0]:.2f}-{ratios[-1]:.2f}"
        print(
            f"| {name} | {statistics.median(ratios):.2f} | {spread} | {most:.0f} | {runs[0][2]} |"
        )


def copied(folder: Path, rounds: int, mebibytes: int) -> None:
    model = folder / "real"
    model.mkdir()
    shard(model / "model.safetensors", mebibytes << 20, "w")
    with open(model / "model.safetensors", "r+b") as file:  # real bytes instead of a hole
        file.seek(4096)
        block = os.urandom(1 << 20)
        for _ in range(mebibytes - 1):
            file.write(block)
    (model / "config.json").write_text(json.dumps(CONFIG))
    out = folder / "out"
    ours = [
        sys.executable,
        "-P",
        "-m",
        "ropext",
        "extend",
        str(model),
        "--factor",
        "4",
        "-o",
        str(out),
    ]
    times: dict[str, list[float]] = {"cp -r && sync": [], "extend": []}
    ways = [
        # extend flushes its output, so its peer does too.
        ("cp -r && sync", ["sh", "-c", f"cp -r {model} {out} && sync -f {out}"]),
        ("extend", [*ours, "--no-verify", "--quiet"]),
    ]
    for turn in range(rounds):
        for name, command in ways if turn % 2 else ways[::-1]:
            os.sync()  # the deletions of the last one
            start = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            times[name].append(time.perf_counter() - start)
            shutil.rmtree(out)
    ratios = [a / b for a, b in zip(times["extend"], times["cp -r && sync"], strict=True)]
    print(f"\ncopy of {mebibytes} MiB: extend / (cp -r && sync), per round: ", end="")
    print(
        ", ".join(f"{ratio:.2f}" for ratio in ratios), f"; median {statistics.median(ratios):.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--copy-mib", type=int, default=1024)
    parser.add_argument("--llamas", action="store_true", help="verified, in the shapes of Llamas")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        if given.llamas:
            verified(Path(folder), given.rounds)
            return
        linked(Path(folder), given.rounds)
        copied(Path(folder), given.rounds, given.copy_mib)


if __name__ == "__main__":
    main()
