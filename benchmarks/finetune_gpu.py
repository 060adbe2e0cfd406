"""LoRA on one GPU against plain Trainer + PEFT: a 1B-shaped random model, rows of 32k tokens, bf16.

Claim: less memory, and at least as many tokens a second, in the same run.

    python benchmarks/gpu_day.py --only training -o OUT
"""

import gc
import statistics
from typing import Any

from finetune_engines import PLAIN, ROPEXT, Model, Run, step_seconds

# Llama 3.2 1B, its embeddings not tied.
ONE_BILLION = Model(128256, 2048, 8192, 16, 32, 8)
TINY = Model(512, 64, 128, 2, 2, 2)


def compare(shape: Model, run: Run) -> dict[str, Any]:
    """Steps of either engine in Trainer's own loop, one engine after the other, twice."""
    import torch
    from eval_gpu import peak_of

    dtype = torch.bfloat16 if run.device == "cuda" else torch.float32
    took: dict[str, list[float]] = {PLAIN: [], ROPEXT: []}
    peaks: dict[str, float] = {}

    def steps(engine: str) -> tuple[int, list[float]]:
        model = shape.build(dtype, run.device)
        return peak_of(lambda: step_seconds(engine, model, shape.vocabulary, run))

    for engine in 2 * (PLAIN, ROPEXT):
        peak, seconds = steps(engine)
        took[engine] += seconds
        peaks[engine] = peak / 2**30
        gc.collect()
    speed = {engine: run.row_tokens / statistics.median(took[engine]) for engine in took}
    return {
        "tokens a second, plain": speed[PLAIN],
        "tokens a second, ropext": speed[ROPEXT],
        "tokens a second, ropext over plain": speed[ROPEXT] / speed[PLAIN],
        "peak above the weights, plain, GiB": peaks[PLAIN],
        "peak above the weights, ropext, GiB": peaks[ROPEXT],
    }
