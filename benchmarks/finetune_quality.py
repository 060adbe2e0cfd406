"""Measure a short fine-tuning on the bundled checkpoint: recovery, control, short tax, pose.

Claims: at 4 times the context, after at most 60 steps of 8k tokens, the tail loss is at or below
the base's in-window value and the control's, on the same tokens. The short tax is at most 0.02
nats. With PI most of the recovery happens in the first fifth of the steps (at the defaults, and at
a higher rate). Pose to 8 times the context comes within 3 % (perplexity) of training at full length
on the same number of tokens, and below the same rows without a jump. A warm-up of a twentieth of
the steps ends no higher than one of a fifth.

    python benchmarks/finetune_quality.py [--model DIR] [--part yarn pi pose warmup] [--folder DIR]
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import ropext
from ropext.options.training import TrainingOptions
from ropext.training import finetune
from ropext.training.rows import FullRows, PoseRows, row_strategy

DEMO = Path(ropext.__path__[0], "demo")
STEPS = 60


def told(sentence: str) -> None:
    sys.stderr.write(sentence + "\n")


def tuned(
    model: Path, folder: Path, method: str, factor: int, name: str, **options: Any
) -> dict[str, Any]:
    """Extend once per method and factor, fine-tune, give the numbers at the target."""
    extended = folder / f"{method}-{factor}x"
    if not extended.exists():
        ropext.extend(str(model), extended, method=method, factor=factor, no_verify=True)
    done = ropext.finetune(
        extended,
        str(DEMO / "data" / "tuning.jsonl"),
        folder / name,
        steps=STEPS,
        batch_tokens=8192,
        evaluate=str(DEMO / "data" / "held-out.jsonl"),
        patience=0,
        force=True,
        say=told,
        **options,
    )
    numbers: dict[str, Any] = done.to_json()
    return numbers


def at_target(done: dict[str, Any], label: str) -> str:
    """Return the tail at the longest length, with its interval."""
    target = done["plan"]["target"]
    value = done["numbers"][label][f"tail_nll@{target}"]
    ends = value["ci95"] or value["range"]
    return f"{value['value']:.4f} ({ends[0]:.4f} to {ends[1]:.4f})"


def nll(done: dict[str, Any], label: str) -> float:
    return float(done["numbers"][label][f"tail_nll@{done['plan']['target']}"]["value"])


def yarn(model: Path, folder: Path, documents: int) -> None:
    done = tuned(model, folder, "yarn", 4, "yarn", control=True, eval_documents=documents)
    print("\n## YaRN, 4 times the context, 60 steps of 8,192 tokens\n")
    print("| | tail loss at the target, nats (95 % interval) | short tax |")
    print("|---|---|---|")
    for label in ("base", "untuned", "control", "tuned"):
        tax = done["numbers"][label]["short_tax"]["value"]
        print(f"| {label} | {at_target(done, label)} | {tax:+.4f} |")
    curve(done)


def curve(done: dict[str, Any]) -> None:
    before, after = nll(done, "untuned"), nll(done, "tuned")
    shown = [f"{e['step']}: {e['tail_nll']:.4f}" for e in done["evaluations"]]
    first = done["evaluations"][0]
    share = (before - first["tail_nll"]) / (before - after)
    print(f"\nTail loss by step: 0: {before:.4f}, {', '.join(shown)}.")
    print(f"Share of the recovery by step {first['step']} of {STEPS}: {share:.0%}.")


def pi(model: Path, folder: Path, documents: int) -> None:
    print("\n## PI, 4 times the context, 60 steps of 8,192 tokens\n")
    quick = {"learning_rate": 5e-3, "warmup": 3}
    for title, options in (("At the defaults", {}), ("At 5e-3 after 3 steps of warm-up", quick)):
        done = tuned(model, folder, "pi", 4, "pi", eval_documents=documents, **options)
        print(f"{title}: base in its window {at_target(done, 'base')},")
        print(f"untuned {at_target(done, 'untuned')}, tuned {at_target(done, 'tuned')}.")
        curve(done)


def warmup(model: Path, folder: Path, documents: int) -> None:
    """Train with a warm-up of a twentieth of the steps (YaRN's 20 of 400) and of a fifth, all else
    at its default."""
    for method, factor, strategy in (("yarn", 4, "full"), ("pi", 4, "full"), ("yarn", 8, "pose")):
        for steps in (STEPS // 20, STEPS // 5):
            print(f"\n## {method}, {factor} times, {strategy}, {steps} steps of warm-up\n")
            options = {"strategy": strategy, "warmup": steps, "eval_documents": documents}
            done = tuned(model, folder, method, factor, method, **options)
            tax = done["numbers"]["tuned"]["short_tax"]["value"]
            print(f"untuned {at_target(done, 'untuned')}, tuned {at_target(done, 'tuned')},")
            print(f"short tax {tax:+.4f}.", flush=True)
            curve(done)


@contextmanager
def without_jumps() -> Iterator[None]:
    """Let `--strategy pose` cut its rows unchanged from the text.

    This separates the gain of a jump in rows of that length from the gain of training alone.
    """

    def cut_rows(
        options: TrainingOptions, length: int, target: int, beyond: int
    ) -> FullRows | PoseRows:
        return FullRows(length)

    with mock.patch.object(finetune, row_strategy.__name__, cut_rows):
        yield


def pose(model: Path, folder: Path, documents: int) -> None:
    print("\n## YaRN, 8 times the context: pose in windows of the context against full length\n")
    print("| rows | row | tail loss at the target, nats (95 % interval) | short tax |")
    print("|---|---|---|---|")
    found = {}
    arms: dict[str, tuple[str, AbstractContextManager[None]]] = {
        "full": ("full", nullcontext()),
        "pose": ("pose", nullcontext()),
        "pose without its jump": ("pose", without_jumps()),
    }
    for name, (strategy, manner) in arms.items():
        place = f"8x-{name.replace(' ', '-')}"
        with manner:
            done = tuned(
                model, folder, "yarn", 8, place, strategy=strategy, eval_documents=documents
            )
        found[name] = nll(done, "tuned")
        row = done["plan"]["settings"]["row_tokens"]["value"]
        tax = done["numbers"]["tuned"]["short_tax"]["value"]
        print(f"| {name} | {row} | {at_target(done, 'tuned')} | {tax:+.4f} |", flush=True)
    print(f"\nUntuned {at_target(done, 'untuned')}, base in its window {at_target(done, 'base')}.")
    ratio = math.exp(found["pose"] - found["full"])
    print(f"Perplexity of pose over full: {ratio:.4f}.")
    ratio = math.exp(found["pose"] - found["pose without its jump"])
    print(f"Perplexity of pose over the same rows without a jump: {ratio:.4f}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DEMO / "checkpoint")
    parser.add_argument("--part", nargs="+", choices=("yarn", "pi", "pose", "warmup"))
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--documents", type=int, default=16)
    given = parser.parse_args()
    parts = {"yarn": yarn, "pi": pi, "pose": pose, "warmup": warmup}
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        for name in given.part or parts:
            parts[name](given.model, Path(folder), given.documents)


if __name__ == "__main__":
    main()
