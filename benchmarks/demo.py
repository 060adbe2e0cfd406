"""Write the measurements of `ropext demo` as a dated result, and the README's picture of it.

    python benchmarks/demo.py [--full] [--folder DIR] [--picture docs/images/demo.png]
        > benchmarks/results/demo-DATE.md

A directory that holds a finished demo is read back, and then the page has no time.
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

from ropext.base.table import as_markdown
from ropext.pipeline import demo
from ropext.results.report.gates import gate_table


def told(sentence: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {sentence}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the demo and write down what it found.")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--full", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as spare:
        folder = options.folder or Path(spare) / "demo"
        is_whole = not folder.exists()
        begun = time.monotonic()
        shown = demo.run(folder, options.full, say=told)
        minutes = (time.monotonic() - begun) / 60
        if options.picture is not None:
            options.picture.parent.mkdir(parents=True, exist_ok=True)
            options.picture.write_bytes((folder / "plots" / "overview.png").read_bytes())
    print("# What `ropext demo` measures\n")
    print(f"Command: `{' '.join(['python', 'benchmarks/demo.py', *sys.argv[1:]])}`\n")
    took = f" The whole demo took {minutes:.1f} minutes there." if is_whole else ""
    print(
        f"Machine: {platform.machine()} CPU, {os.cpu_count()} cores, {torch.get_num_threads()} "
        f"thread(s); Python {platform.python_version()}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}.{took}\n"
    )
    print(as_markdown([demo.table(shown.models), gate_table(shown.gates)]), "\n")
    print("\n".join(f"- {sentence}" for sentence in shown.sentences), "\n")
    print("## Commands\n")
    print("\n".join(f"    {line.replace(str(folder), 'DIR')}" for line in shown.commands))


if __name__ == "__main__":
    main()
