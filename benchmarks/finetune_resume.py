"""Kill a fine-tuning at six moments: it resumes and ends with the same bytes as without a kill.

Claim: losses, evaluations, numbers, merged weights and adapter are identical. It trains the bundled
checkpoint at 4 times its context, with the control. Each process gets SIGKILL at the named moment,
and the same command is started again.

    python benchmarks/finetune_resume.py [--folder DIR]
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ropext import extend

WORDS = (
    *("--steps", "12", "--batch-tokens", "4096", "--save-every", "2", "--eval-every", "6"),
    *("--eval", "ropext://held-out", "--eval-documents", "2", "--control"),
)
COMPARED = (
    "model.safetensors",
    "adapter/adapter_model.safetensors",
    "training/losses.json",
    "training/numbers.json",
)

Moment = Callable[[str, Path], bool]  # from the messages, and the output's place


def half_written(folder: Path) -> bool:
    """Return whether a checkpoint is there that was not written to its end."""
    return any(not (path / "complete").exists() for path in folder.glob("checkpoint-*"))


def said(words: str) -> Moment:
    return lambda told, output: words in told


def saved(step: int, label: str = "tuned") -> Moment:
    """Once there is a checkpoint of so many steps."""
    place = f"{label}/checkpoint-{step}/complete"
    return lambda told, output: (output.with_name("out.run") / place).exists()


MOMENTS: dict[str, Moment] = {
    "reading documents before the training": said("before the training"),
    "after the second step": saved(2),
    "while a checkpoint is written": lambda told, output: (
        saved(4)(told, output) and half_written(output.with_name("out.run") / "tuned")
    ),
    "after the evaluation of step 6": said("step 6: held-out loss"),
    "in the training of the control": saved(4, "control"),
    "while the result is written": lambda told, output: any(
        output.parent.glob(".out.ropext-*/new/model.safetensors")
    ),
}


def start(
    extended: Path, output: Path, log: Path, how: Sequence[str] = WORDS
) -> "subprocess.Popen[bytes]":
    words = ["finetune", str(extended), "--data", "ropext://tuning", "-o", str(output), *how]
    with open(log, "wb") as told:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "ropext", *words], stdout=subprocess.DEVNULL, stderr=told
        )


def killed(extended: Path, output: Path, moment: Moment, how: Sequence[str] = WORDS) -> str:
    """Run until the moment, and kill; return the run's last message."""
    log = output.with_name("log.txt")
    running = start(extended, output, log, how)
    while running.poll() is None:
        if moment(log.read_text(errors="replace"), output):
            running.kill()
            break
        time.sleep(0.002)
    running.wait()
    lines = log.read_text(errors="replace").splitlines()
    if running.returncode != -9:
        raise SystemExit(f"ended with {running.returncode} before the moment came: {lines[-1:]}")
    return lines[-1] if lines else ""


def finished(extended: Path, output: Path) -> list[str]:
    """Run to the end; return digests of its output."""
    log = output.with_name("log.txt")
    if start(extended, output, log).wait():
        raise SystemExit(log.read_text())
    for line in log.read_text().splitlines():
        if line.startswith("resuming"):
            print(f"last run: {line}")
    return [hashlib.sha256((output / name).read_bytes()).hexdigest() for name in COMPARED]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        extended = Path(name) / "extended"
        extend("ropext://demo", extended, method="yarn", factor=4, no_verify=True)
        broken = Path(name) / "broken" / "out"
        broken.parent.mkdir()
        print("| killed | last said |\n|---|---|")
        for title, moment in MOMENTS.items():
            print(f"| {title} | {killed(extended, broken, moment)} |", flush=True)
        one = finished(extended, broken)
        whole = Path(name) / "whole" / "out"
        whole.parent.mkdir()
        two = finished(extended, whole)
        left = [path.name for path in broken.parent.iterdir() if path.name != "log.txt"]
    print("\n| file | after six kills | without |\n|---|---|---|")
    for name, a, b in zip(COMPARED, one, two, strict=True):
        print(f"| {name} | {a[:12]} | {b[:12]} |{'' if a == b else ' DIFFERENT'}")
    print(f"\nLeft beside it: {', '.join(sorted(left))}.")
    if one != two:
        raise SystemExit("the runs differ")


if __name__ == "__main__":
    main()
