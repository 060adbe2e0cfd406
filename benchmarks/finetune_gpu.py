"""LoRA on one GPU beside plain Trainer + PEFT: a 1B-shaped random model, rows of 32k tokens, bf16.

Claim: less memory, and at least as many tokens a second, in the same run (peaks of the allocator;
steps of both engines in turn, median of five). Without a GPU it prints "not run".

    python benchmarks/finetune_gpu.py [--tokens 32768] [--rounds 5]

`--try` does the same with a tiny model on the CPU, without figures of memory, to try the script.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from finetune_engines import PLAIN, ROPEXT, Model, Run, trainer

# Llama 3.2 1B, its embeddings not tied.
ONE_BILLION = Model(128256, 2048, 8192, 16, 32, 8)
TINY = Model(512, 64, 128, 2, 2, 2)


def one_step(engine: str, shape: Model, run: Run, folder: Path) -> Callable[[], float]:
    """A function that trains one step and gives its loss."""
    import torch

    from ropext.training.rows import Collator

    dtype = torch.bfloat16 if run.device == "cuda" else torch.float32
    model = shape.build(dtype, run.device)
    runner = trainer(engine, model, shape.vocabulary, run, folder)
    inputs = Collator(0)([runner.train_dataset[0]])
    count = torch.tensor(run.tokens - 1, device=run.device)
    optimiser = runner.create_optimizer()

    def step() -> float:
        runner.current_gradient_accumulation_steps = 1
        loss = runner.training_step(runner.model, dict(inputs), count)
        optimiser.step()
        runner.model.zero_grad()
        return float(loss)

    return step


def timed(step: Callable[[], float], device: str) -> tuple[float, float]:
    """Seconds and loss of one step."""
    import torch

    start = time.perf_counter()
    loss = step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, loss


def peak_of(engine: str, shape: Model, run: Run, folder: Path) -> tuple[float, float]:
    """GiB at the highest, and of the weights alone, with nothing else on the device."""
    import gc

    import torch

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step = one_step(engine, shape, run, folder)
    weights = torch.cuda.memory_allocated() / 2**30
    step()
    step()  # the optimiser's moments are there from the second one on
    return torch.cuda.max_memory_allocated() / 2**30, weights


def measure(shape: Model, run: Run, rounds: int) -> None:
    steps: dict[str, Callable[[], float]] = {}
    times: dict[str, list[float]] = {PLAIN: [], ROPEXT: []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if run.device == "cuda":
            for engine in times:
                peak, weights = peak_of(engine, shape, run, folder)
                print(f"{engine}: peak {peak:.2f} GiB, of which weights {weights:.2f} GiB")
        for engine in times:
            steps[engine] = one_step(engine, shape, run, folder)
            print(f"{engine}: first loss {steps[engine]():.5f}")
        for _ in range(rounds):
            for engine, step in steps.items():
                times[engine].append(timed(step, run.device)[0])
    ratios = [a / b for a, b in zip(times[PLAIN], times[ROPEXT], strict=True)]
    shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"tokens per second, ropext over plain: {shown}; median {statistics.median(ratios):.2f}")
    for engine, own in times.items():
        print(f"{engine}: {run.tokens / statistics.median(own):.0f} tokens a second")


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--try", dest="trying", action="store_true")
    given: Any = parser.parse_args()
    if given.trying:
        measure(TINY, Run(256), 2)
    elif torch.cuda.is_available():
        print(torch.cuda.get_device_name())
        measure(ONE_BILLION, Run(given.tokens, device="cuda"), given.rounds)
    else:
        print("not run: torch finds no CUDA device")


if __name__ == "__main__":
    main()
