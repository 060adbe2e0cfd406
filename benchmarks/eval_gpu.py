"""A 7B-shaped random model at 128k tokens on a GPU: our reading against its own bare forward.

    python benchmarks/eval_gpu.py > benchmarks/results/eval-gpu-DATE.md

The bare forward computes the logits of the last token only, since all of them (128k by 32,000)
would not fit; ours takes the NLL of every token, so its FLOPs are those of the body and of the
head. The claim is a rate, FLOPs of a pass over its seconds: at least half of the bare forward's.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from ropext.evaluation.costs import choose_manner, shape_of
from ropext.evaluation.forward import TokenScorer

TOKENS = 131072
SLICE_BYTES = 256 << 20


def seconds_of(work: Callable[[], object], rounds: int) -> list[float]:
    """Each round's time; a first one that is not counted warms up."""
    took = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        took.append(time.perf_counter() - start)
    return took[1:]


def measure(tokens: int, rounds: int) -> None:
    config = LlamaConfig(max_position_embeddings=tokens)  # its other defaults are Llama-2-7B's
    with torch.device("cuda"):
        model: Any = LlamaForCausalLM(config)
    model = model.to(torch.bfloat16).eval()
    shape = shape_of(model)
    free = torch.cuda.mem_get_info()[0]
    scorer = TokenScorer(model, choose_manner(shape, tokens, free, None, SLICE_BYTES))
    ids = np.random.default_rng(0).integers(3, config.vocab_size, tokens).astype(np.int32)
    row = torch.as_tensor(ids).long()[None].cuda()
    with torch.inference_mode():
        manner = scorer.self_check()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        scorer.token_nll(ids)
        peak = torch.cuda.max_memory_allocated() - before
        bare = seconds_of(
            lambda: model(row, use_cache=False, logits_to_keep=1).logits.shape, rounds
        )
        ours = seconds_of(lambda: scorer.token_nll(ids), rounds)
    # One causal pass: two operations for each weight and token, and half a square of attention.
    tables = 2 * shape.hidden * shape.vocabulary
    head = float(tokens * tables)
    square = 2 * shape.layers * shape.heads * shape.head_dim * tokens**2
    body = 2.0 * tokens * (shape.parameters - tables) + square
    rate, own = body / statistics.median(bare), (body + head) / statistics.median(ours)
    print(f"{torch.cuda.get_device_name()}, {tokens} tokens, bfloat16, read as {manner}.\n")
    print("| | seconds, each round | TFLOP/s |\n|---|---|---|")
    for name, took, flops in (("bare forward", bare, rate), ("every token's NLL", ours, own)):
        print(f"| {name} | {', '.join(f'{s:.2f}' for s in took)} | {flops / 1e12:.0f} |")
    print(f"\nRate of ours over the bare forward's: {own / rate:.2f} (wanted: 0.5).")
    estimated = shape.peak_bytes(tokens, manner)
    print(f"Peak above the model: {peak / 2**30:.2f} GiB, estimated {estimated / 2**30:.2f} GiB.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print("# Evaluation of a 7B shape on a GPU\n")
    print("Command: `python benchmarks/eval_gpu.py`\n")
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}.\n"
    )
    if not torch.cuda.is_available():
        print("not run: no GPU on this machine")
        return
    measure(options.tokens, options.rounds)


if __name__ == "__main__":
    main()
