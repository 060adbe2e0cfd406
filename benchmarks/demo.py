"""What `ropext demo` measures, as a dated result, and the README's picture of it.

    python benchmarks/demo.py [--far] [--folder DIR] [--picture docs/images/demo.png]
        > benchmarks/results/demo-DATE.md

A directory that holds a finished demo is read back, and then no time is told.
"""

import argparse
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers

from ropext import demo
from ropext.narration import Hooks
from ropext.pipeline.series import run_series
from ropext.table import as_markdown


def told(sentence: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {sentence}\n")


def processor() -> float:
    """Seconds of this process and of those that it waited for."""
    return sum(os.times()[:4])


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the demo and write down what it found.")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--far", action="store_true")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as spare:
        folder = options.folder or Path(spare) / "demo"
        begun = time.monotonic()
        begun_at: dict[str, float] = {}  # by a step's sentence, which is said before it
        recipe = demo.read_recipe(finetune=True, far=options.far)

        def say(sentence: str) -> None:
            told(sentence)
            begun_at[sentence.split("] ", 1)[1]] = processor()

        done = run_series(recipe.steps, folder, Hooks(say=say))
        shown = demo.show(recipe, done, folder)
        ended = processor()
        minutes = (time.monotonic() - begun) / 60
        if options.picture is not None:
            options.picture.parent.mkdir(parents=True, exist_ok=True)
            options.picture.write_bytes((folder / "plots" / "overview.png").read_bytes())
    print("# What `ropext demo` measures\n")
    print(f"Command: `{' '.join(['python', 'benchmarks/demo.py', *sys.argv[1:]])}`\n")
    is_whole = len(begun_at) == len(done)
    took = f" The whole demo took {minutes:.1f} minutes there." if is_whole else ""
    print(
        f"Machine: {platform.machine()} CPU, {os.cpu_count()} cores, {torch.get_num_threads()} "
        f"thread(s); Python {platform.python_version()}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}.{took}\n"
    )
    print(as_markdown(shown.tables), "\n")
    print("\n".join(f"- {target.sentence}" for target in shown.targets), "\n")
    print("## Cost of each step\n")
    header = ("step", "read", "trained on", "forward-token equivalents", "processor seconds")
    print("| " + " | ".join(header) + " |\n" + "|---" * len(header) + "|")
    ends = dict(zip(begun_at, [*list(begun_at.values())[1:], ended], strict=False))
    for name, own in done.items():
        spent, what = own.spent, own.step.sentence
        took = f"{ends[what] - begun_at[what]:.0f}" if what in begun_at else ""
        counts = spent.forward, spent.trained, spent.equivalents
        print(f"| {name} | " + " | ".join(f"{own:,}" for own in counts) + f" | {took} |")
    print("\n## Commands\n")
    print("\n".join(f"    {' '.join(own.step.words(Path('DIR')))}" for own in done.values()))


if __name__ == "__main__":
    main()
