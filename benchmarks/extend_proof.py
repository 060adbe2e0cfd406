"""Where the seconds of a proved `ropext extend` by link go, on a model of SmolLM2-360M's shape.

Claim: nearly all of it is the import of torch and transformers; the forward pass of the proof's
small model is about a hundredth. The weights are a hole in a file: nothing of them is read.

    python benchmarks/extend_proof.py [--rounds 3]
"""

import argparse
import json
import resource
import statistics
import struct
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from ropext.options.extend import Extend
from ropext.planning import make_plan
from ropext.verifying import proof

HIDDEN, LAYERS, VOCABULARY, INNER, KEYS = 960, 32, 49152, 2560, 320
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 15,
    "num_key_value_heads": 5,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 8192,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
}
IMPORTS = "import torch, accelerate; from transformers import LlamaForCausalLM"
TIMES = 20  # proofs in one process, to measure one pass of a small model


def checkpoint(directory: Path) -> None:
    """Write the config, and weights of the right names and shapes without any byte of them."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG), "utf-8")
    shapes = {"model.embed_tokens.weight": [VOCABULARY, HIDDEN], "model.norm.weight": [HIDDEN]}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{name}.weight"] = [HIDDEN]
        for name, rows in (("q", HIDDEN), ("k", KEYS), ("v", KEYS), ("o", HIDDEN)):
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = [rows, HIDDEN]
        for name in ("gate", "up"):
            shapes[f"{prefix}mlp.{name}_proj.weight"] = [INNER, HIDDEN]
        shapes[f"{prefix}mlp.down_proj.weight"] = [HIDDEN, INNER]
    table = {}
    end = 0
    for name, shape in shapes.items():
        begin = end
        end += 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        table[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(table).encode()
    with open(directory / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)


def processor_seconds(*command: str) -> float:
    """Run a command and return the seconds of processor that it and its children took."""
    before = children_seconds()
    subprocess.run(command, check=True, capture_output=True)
    return children_seconds() - before


def children_seconds() -> float:
    """Return the seconds of processor that all finished children took."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def proof_seconds(request: proof.BuildRequest) -> float:
    """Return the seconds of processor that the proof of a directory takes, many times in one
    process."""
    before = children_seconds()
    proof.build([request] * TIMES)
    return children_seconds() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    python = sys.executable
    rows: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, "base")
        checkpoint(base)
        plan = make_plan(CONFIG, Extend(factor=4.0))
        promise = proof.ExpectedRotary(plan.sites, plan.factor)
        for number in range(rounds):
            out = Path(folder, f"out-{number}")
            words = ("-P", "-m", "ropext", "extend", str(base), "--factor", "4", "--link", "hard")
            seconds = {"extend, proved": processor_seconds(python, *words, "-o", str(out))}
            bare = (*words, "--no-verify", "-o", f"{out}-bare")
            seconds["extend --no-verify"] = processor_seconds(python, *bare)
            seconds["import of torch, transformers, accelerate"] = processor_seconds(
                python, "-P", "-c", IMPORTS
            )
            without = proof.BuildRequest(out, (), CONFIG, promise)
            request = replace(without, context=plan.context, target=plan.target)
            name = "the proof's forward pass, with its two small models"
            # The imports of two processes differ by more than one pass takes.
            seconds[name] = (proof_seconds(request) - proof_seconds(without)) / TIMES
            for name, value in seconds.items():
                rows.setdefault(name, []).append(value)
    whole = statistics.median(rows["extend, proved"])
    print("| part | processor seconds, median (min-max) | of the whole |")
    print("|---|---|---|")
    for name, values in rows.items():
        middle = statistics.median(values)
        print(
            f"| {name} | {middle:.2f} ({min(values):.2f}-{max(values):.2f}) |"
            f" {100 * middle / whole:.0f} % |"
        )


if __name__ == "__main__":
    main()
