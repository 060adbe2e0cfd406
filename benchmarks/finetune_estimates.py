"""What `ropext finetune --dry-run` says a run takes, beside what it takes; pose at three targets.

Claims: tokens, peak memory and FLOPs within a factor of two of what three shapes take (none of them
the shapes of finetune_memory.py, by which the estimate of memory was set); the peak of pose does
not depend on the target.

    python benchmarks/finetune_estimates.py

Memory is that of a process of its own, above its model's weights, after a first small run, with
malloc told to give back what is freed. FLOPs are torch's own counter's,
which sees every matrix product; eager attention computes the whole square of positions, of which
the causal half is counted here. Tokens are counted where the model reads them.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from finetune_engines import PLAIN, ROPEXT, Model, Run, estimated, status, trainer

SHAPES = {
    "wide head": (Model(65536, 384, 1024, 3, 6, 6), Run(2048)),
    "deep, short rows": (Model(1024, 192, 512, 8, 3, 1), Run(512, rows=8)),
    "kept activations": (Model(4096, 320, 1280, 5, 5, 5), Run(512, rows=6, recompute=False)),
}
POSE = Model(4096, 256, 688, 4, 4, 2)
TARGETS = (4096, 32768, 262144)
WINDOW = 2048


def run_of(name: str) -> tuple[Model, Run]:
    if name in SHAPES:
        return SHAPES[name]
    return POSE, Run(int(name), window=WINDOW)


def one_peak(name: str) -> dict[str, float]:
    """In a process of its own: the peak above the weights, and the tokens that were read."""
    shape, run = run_of(name)
    with tempfile.TemporaryDirectory() as folder:
        runner = trainer(ROPEXT, shape.build(), shape.vocabulary, run, Path(folder))
        read: list[int] = []
        collate = runner.data_collator

        def counting(rows: Any) -> Any:
            found = collate(rows)
            read.append(int(found["attention_mask"].sum()))
            return found

        runner.data_collator = counting
        # What the first step of a process loads is none of the run's.
        small = Model(64, 32, 64, 1, 2, 1)
        trainer(ROPEXT, small.build(), small.vocabulary, Run(64), Path(folder) / "warm").train()
        before = status("VmRSS")
        runner.train()
        return {"peak": status("VmHWM") - before, "tokens": sum(read)}


def counted(attention: str, shape: Model, run: Run) -> float:
    """What torch's counter sees of one row, with the model's own loss: it sees neither the linear
    cross-entropy of torch, which makes the same products in slices, nor a CPU's fused attention."""
    from torch.utils.flop_counter import FlopCounterMode

    from ropext.training.rows import Collator

    model = shape.build()
    model.set_attn_implementation(attention)
    with tempfile.TemporaryDirectory() as folder:
        runner = trainer(PLAIN, model, shape.vocabulary, run, Path(folder))
        runner.model.train()
        inputs = Collator(0)([runner.train_dataset[0]])
        with FlopCounterMode(display=False) as counter:
            runner.model(**inputs).loss.backward()
    return float(counter.get_total_flops())


def one_flops(name: str) -> dict[str, float]:
    shape, run = run_of(name)
    dense, whole = (counted(attention, shape, run) for attention in ("sdpa", "eager"))
    return {"flops": run.rows * (dense + (whole - dense) / 2)}


def measured(kind: str, name: str) -> dict[str, float]:
    # Freed blocks go back at once: a process of this size would else keep as much again in gaps.
    blocks = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, __file__, "--one", kind, name],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | blocks | {"MALLOC_ARENA_MAX": "1"},
    )
    if done.returncode:
        raise SystemExit(f"{kind} of {name}: {done.stderr[-2000:]}")
    told: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if given.one:
        kind, name = given.one
        print(json.dumps(one_peak(name) if kind == "peak" else one_flops(name)))
        return
    print("| shape | | said | measured | said / measured |\n|---|---|---|---|---|")
    for name, (shape, run) in SHAPES.items():
        said = estimated(shape.build(), run)
        took = measured("peak", name) | measured("flops", name)
        peak = (said.peak_bytes - said.weight_bytes) / 2**20
        for what, one, two in (
            ("tokens", said.tokens, took["tokens"]),
            ("peak above the weights, MiB", peak, took["peak"]),
            ("FLOPs, in billions", said.flops / 1e9, took["flops"] / 1e9),
        ):
            print(f"| {name} | {what} | {one:.0f} | {two:.0f} | {one / two:.2f} |", flush=True)
    print(f"\n| target of pose, window {WINDOW} | said, MiB | peak above the weights, MiB |")
    print("|---|---|---|")
    for target in TARGETS:
        shape, run = run_of(str(target))
        said = estimated(shape.build(), run)
        peak = (said.peak_bytes - said.weight_bytes) / 2**20
        print(f"| {target} | {peak:.0f} | {measured('peak', str(target))['peak']:.0f} |")


if __name__ == "__main__":
    main()
