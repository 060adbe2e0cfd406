"""What the sliced loss saves: peak memory and speed beside plain Trainer + PEFT on the same model.

Claims: on the logits' part of the peak at most a quarter of plain Trainer + PEFT (vocabulary 128k,
rows of 8k tokens, hidden 256, 4 layers); tokens per second at least equal (interleaved, median of
five steps). The logits' part is what the peak above the weights grows by when the vocabulary goes
from 1k to 128k. Each peak is that of a process of its own.

    python benchmarks/finetune_memory.py [--tokens 8192] [--speed-tokens 2048]
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCABULARIES = (1024, 131072)


def status(key: str) -> float:
    """Megabytes, from the kernel's own accounting of this process."""
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"{key}:\s+(\d+)", text)
    assert found is not None
    return int(found[1]) / 1024


def new_model(vocabulary: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def settings(tokens: int, steps: int) -> Any:
    from ropext.training import defaults
    from ropext.training.options import Options

    asked = Options(steps=steps, batch_tokens=tokens, device="cpu")
    return asked, defaults.settings(asked, 50_000_000, tokens // 4, tokens)


def trainer(engine: str, vocabulary: int, tokens: int, steps: int, folder: Path) -> Any:
    """One step at a time is asked of it; both sides have the same adapter and checkpointing."""
    import numpy as np
    import transformers

    from ropext.training import adapters
    from ropext.training import engine as ours
    from ropext.training.collating import Collator
    from ropext.training.loss import use_sliced_loss
    from ropext.training.sequences import Document, Full, Rows

    options, chosen = settings(tokens, steps)
    model = new_model(vocabulary)
    if engine == "ropext":
        assert use_sliced_loss(model) is None
    joined = adapters.add_adapter(model, options, chosen)
    ids = np.random.default_rng(0).integers(0, vocabulary, 4 * tokens)
    rows = Rows([Document(ids)], Full(tokens), steps, 0)
    job = ours.Job(joined, rows, 1, tokens, 0, chosen, options, folder)
    kind = ours._Trainer if engine == "ropext" else transformers.Trainer
    return kind(
        model=joined,
        args=ours.arguments(job, 1),
        train_dataset=ours._Rows(rows),
        data_collator=Collator(0),
    )


def one_peak(engine: str, vocabulary: int, tokens: int, folder: Path) -> None:
    """In a process of its own: print the peak above what the model itself takes."""
    from transformers import PrinterCallback

    runner = trainer(engine, vocabulary, tokens, 1, folder)
    runner.remove_callback(PrinterCallback)
    before = status("VmRSS")
    runner.args.save_strategy = "no"
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


def estimated(vocabulary: int, tokens: int) -> float:
    """What --dry-run would say, in MB above the weights."""
    from ropext.evaluation.costs import shape_of
    from ropext.training import estimates

    _, chosen = settings(tokens, 1)
    shape = shape_of(new_model(vocabulary))
    # Rank times in plus out, of q, k, v, o, gate, up, down.
    trained = 16 * shape.layers * (4 * 256 + 2 * (256 + 128) + 3 * (256 + 688))
    found = estimates.estimate(shape, chosen, trained, 1)
    return (found.peak_bytes - found.weight_bytes) / 2**20


def peaks(tokens: int) -> None:
    print("| engine | vocabulary | tokens | peak above the weights, MB | estimated | first loss |")
    print("|---|---|---|---|---|---|")
    found: dict[tuple[str, int], float] = {}
    small, large = VOCABULARIES
    shapes = [(e, v, tokens) for v in VOCABULARIES for e in ("plain", "ropext")]
    for engine, vocabulary, size in [*shapes, ("ropext", 32768, tokens // 2)]:
        told = measured(engine, vocabulary, size)
        found[engine, vocabulary] = told["peak"]
        guess = f"{estimated(vocabulary, size):.0f}" if engine == "ropext" else ""
        print(
            f"| {engine} | {vocabulary} | {size} | {told['peak']:.0f} | {guess} | "
            f"{told['loss']:.5f} |",
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

    from ropext.training.collating import Collator

    steps: dict[str, Callable[[], None]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for engine in ("plain", "ropext"):
            runner = trainer(engine, VOCABULARIES[1], tokens, 1, Path(folder))
            inputs = Collator(0)([runner.train_dataset[0]])
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
