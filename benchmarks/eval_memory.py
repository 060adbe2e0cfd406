"""Measure the peak memory of a reading above the model, and the estimated peak that chooses a
chunk.

    OMP_NUM_THREADS=1 python benchmarks/eval_memory.py > benchmarks/results/eval-memory-DATE.md

The models are random Llamas of hidden 256 and 4 layers, each case in a process of its own. The
figure is resident memory at its highest, less its level with the model loaded and 64 tokens read.
The size of full logits is counted from their shape (in float32, one tensor: no log-softmax yet),
and measured if they are small.
"""

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

CASES = (
    # vocabulary, tokens, chunk, dtype
    (8_000, 8_192, None, "float32"),
    (128_256, 8_192, None, "float32"),
    (128_256, 8_192, 2_048, "float32"),
    (128_256, 4_096, None, "bfloat16"),
    (128_256, 16_384, None, "float32"),
    (128_256, 32_768, None, "float32"),
)
SLICE_BYTES = 256 << 20
MEASURABLE = 3 << 30  # bytes of one tensor of full logits


def resident(name: str) -> int:
    """Return VmRSS (now) or VmHWM (highest since the last reset), in bytes. Linux."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


def highest(work: Callable[[], Any]) -> int:
    """Return how far resident memory rises while something runs."""
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets VmHWM
    work()
    return resident("VmHWM") - before


def measure(vocabulary: int, tokens: int, chunk: int | None, dtype: str) -> dict[str, Any]:
    """Do one reading in a child process."""
    import numpy as np
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from ropext.evaluation.forward import TokenScorer
    from ropext.evaluation.reader import choose_reading_mode, shape_of

    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=65536,
    )
    model = LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()
    shape = shape_of(model)
    manner = choose_reading_mode(shape, tokens, 1 << 60, chunk, SLICE_BYTES)
    scorer = TokenScorer(model, manner)
    ids = np.random.default_rng(0).integers(3, vocabulary, tokens).astype(np.int32)
    with torch.inference_mode():
        scorer.self_check()
        scorer.token_nll(ids[:64])
        measured = highest(lambda: scorer.token_nll(ids))
        row, full = torch.as_tensor(ids).long()[None], tokens * vocabulary * 4
        peer = None
        if full <= MEASURABLE:
            peer = highest(lambda: model(row, labels=row, use_cache=False).loss.item())
    return {
        "measured": measured,
        "estimated": shape.peak_bytes(tokens, manner),
        "full_logits": full,
        "peer": peer,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", help="(for the child process)")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(*json.loads(options.case))))
        return
    import torch
    import transformers

    print("# Memory of evaluation\n")
    print("Command: `OMP_NUM_THREADS=1 python benchmarks/eval_memory.py`\n")
    print(
        f"Machine: CPU, {platform.system()}. Versions: torch {torch.__version__}, transformers "
        f"{transformers.__version__}.\n"
    )
    print(
        "| vocabulary | tokens | chunk | dtype | peak above the model, MiB | estimated, MiB | "
        "ratio | one tensor of full logits, MiB | peak of model(ids, labels=ids), MiB |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for case in CASES:
        command = [sys.executable, __file__, "--case", json.dumps(case)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        vocabulary, tokens, chunk, dtype = case
        peer = "not run" if found["peer"] is None else f"{found['peer'] / 2**20:.0f}"
        print(
            f"| {vocabulary} | {tokens} | {chunk or 'none'} | {dtype} | "
            f"{found['measured'] / 2**20:.0f} | "
            f"{found['estimated'] / 2**20:.0f} | "
            f"{found['estimated'] / max(found['measured'], 1):.2f} | "
            f"{found['full_logits'] / 2**20:.0f} | {peer} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
