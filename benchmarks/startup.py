"""Start-up: every `--help`, `inspect` and `plan` against `python -c "import typer"`.

Claims: a --help costs at most 3 times that import, inspect and plan at most 4 times, and none of
them imports torch, transformers, numpy, huggingface_hub, peft or datasets. Commands are interleaved
and the median of the rounds is compared, so that a busy machine slows all alike.

    python benchmarks/startup.py [--rounds 15]
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HEAVY = {"torch", "transformers", "numpy", "huggingface_hub", "peft", "datasets"}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}


def commands(model: str) -> dict[str, tuple[list[str], float]]:
    """Return name -> (arguments of python, times the import of typer that it may cost)."""
    from ropext.cli.app import COMMANDS

    ropext = ["-m", "ropext"]
    out = {"ropext --help": ([*ropext, "--help"], 3.0)}
    for command in COMMANDS:
        out[f"ropext {command} --help"] = ([*ropext, command, "--help"], 3.0)
    out["ropext inspect DIR"] = ([*ropext, "inspect", model], 4.0)
    out["ropext plan DIR --factor 4"] = ([*ropext, "plan", model, "--factor", "4"], 4.0)
    return out


def run(arguments: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-P", *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def imported(arguments: list[str]) -> set[str]:
    """Return the heavy modules that a command imports."""
    done = subprocess.run(
        [sys.executable, "-P", "-X", "importtime", *arguments],
        check=True,
        capture_output=True,
        text=True,
    )
    names = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    return HEAVY & names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
        table = commands(folder)
        times: dict[str, list[float]] = {name: [] for name in (*table, "import typer")}
        for _ in range(rounds):
            times["import typer"].append(run(["-c", "import typer"]))
            for name, (arguments, _) in table.items():
                times[name].append(run(arguments))
        unit = statistics.median(times["import typer"])
        print(f"| command | ratio to import typer ({unit * 1000:.0f} ms) | bound | heavy modules |")
        print("|---|---|---|---|")
        for name, (arguments, bound) in table.items():
            ratio = statistics.median(times[name]) / unit
            heavy = ", ".join(sorted(imported(arguments))) or "none"
            verdict = "" if ratio <= bound and heavy == "none" else " **missed**"
            print(f"| `{name}` | {ratio:.2f}{verdict} | {bound:g} | {heavy} |")


if __name__ == "__main__":
    main()
