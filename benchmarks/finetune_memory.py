"""Measure the savings of the sliced loss: peak memory and speed against plain Trainer + PEFT.

Claims: on the logits' part of the peak at most a quarter of plain Trainer + PEFT (vocabulary 128k,
rows of 8k tokens, hidden 256, 4 layers). Tokens per second are at least equal (interleaved, median
of five steps). The logits' part is the growth of the peak above the weights when the vocabulary
goes from 1k to 128k. Each peak comes from a process of its own.

    python benchmarks/finetune_memory.py [--tokens 8192] [--speed-tokens 2048]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from finetune_engines import Model, Run, status, trainer

VOCABULARIES = (1024, 131072)


def one_peak(engine: str, vocabulary: int, tokens: int, folder: Path) -> None:
    """Print the peak above the model's own memory, in a process of its own."""
    runner = trainer(engine, Model(vocabulary).build(), vocabulary, Run(tokens), folder)
    before = status("VmRSS")
    runner.train()
    losses = [entry["loss"] for entry in runner.state.log_history if "loss" in entry]
    print(json.dumps({"peak": status("VmHWM") - before, "loss": losses[0]}))


def measured(engine: str, vocabulary: int, tokens: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        words = ["--peak", engine, str(vocabulary), "--tokens", str(tokens), "--folder", folder]
        done = subprocess.run(
            [sys.executable, __file__, *words], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise SystemExit(f"{engine}, {vocabulary}, {tokens} ended with {done.returncode}")
    told: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return told


def peaks(tokens: int) -> None:
    print("| engine | vocabulary | tokens | peak above the weights, MiB | first loss |")
    print("|---|---|---|---|---|")
    found: dict[tuple[str, int], float] = {}
    small, large = VOCABULARIES
    shapes = [(e, v, tokens) for v in VOCABULARIES for e in ("plain", "ropext")]
    for engine, vocabulary, size in [*shapes, ("ropext", 32768, tokens // 2)]:
        told = measured(engine, vocabulary, size)
        found[engine, vocabulary] = told["peak"]
        print(
            f"| {engine} | {vocabulary} | {size} | {told['peak']:.0f} | {told['loss']:.5f} |",
            flush=True,
        )
    parts = {e: found[e, large] - found[e, small] for e in ("plain", "ropext")}
    print(
        f"\nLogits' part at {tokens} tokens: plain {parts['plain']:.0f} MB, ropext "
        f"{parts['ropext']:.0f} MB, ratio {parts['ropext'] / parts['plain']:.3f}."
    )


def speed(tokens: int, rounds: int) -> None:
    """Steps of both engines in turn, in one process."""
    import torch

    from ropext.training.rows import RowCollator

    steps: dict[str, Callable[..., None]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for engine in ("plain", "ropext"):
            large = VOCABULARIES[1]
            runner = trainer(engine, Model(large).build(), large, Run(tokens), Path(folder))
            inputs = RowCollator(0)([runner.train_dataset[0]])
            count = torch.tensor(tokens - 1)

            def step(runner: Any = runner, inputs: Any = inputs, count: Any = count) -> None:
                runner.current_gradient_accumulation_steps = 1
                runner.training_step(runner.model, dict(inputs), count)
                runner.model.zero_grad()

            step()
            steps[engine] = step
        times: dict[str, list[float]] = {engine: [] for engine in steps}
        for _ in range(rounds):
            for engine, step in steps.items():
                start = time.perf_counter()
                step()
                times[engine].append(time.perf_counter() - start)
    ratios = [a / b for a, b in zip(times["plain"], times["ropext"], strict=True)]
    shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    print(
        f"\nTokens per second, ropext over plain, vocabulary {VOCABULARIES[1]}, rows of {tokens}: "
        f"per round {shown}; median {statistics.median(ratios):.2f}."
    )
    medians = {engine: tokens / statistics.median(own) for engine, own in times.items()}
    print(f"Medians: plain {medians['plain']:.0f}, ropext {medians['ropext']:.0f} tokens/s.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--speed-tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if given.peak:
        one_peak(given.peak[0], int(given.peak[1]), given.tokens, given.folder)
        return
    peaks(given.tokens)
    speed(given.speed_tokens, given.rounds)
    print("\nOn a GPU: not run.")


if __name__ == "__main__":
    main()
