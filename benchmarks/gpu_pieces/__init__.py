"""The pieces of `gpu_day.py`, in order of worth, and the interface of a piece.

A piece is a module here with `cases(day)`: name of a case -> a function that gives its figures.
This file imports neither torch nor ropext, for the parent reads it too.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STAND_IN = "ropext://demo"  # the model if no --model is given
Case = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Piece:
    """One child process: its module, and its title on the page."""

    name: str
    title: str
    limit: int  # seconds of one case, which is ended there
    least: int  # with fewer seconds left in a call no case is begun
    resumes: bool = False  # a case keeps its work at its limit, and the next call resumes


# Reckoned for one H100, in minutes: 1, 2, 7, 2 and 3 for the first five. A loan of a quarter of an
# hour holds them in two calls (`--minutes 9`, then `--minutes 5`): a piece that resumes ends with
# the first call and continues in the second.
PIECES = (
    Piece("correctness", "Correctness: the bundled model on the GPU beside the CPU", 120, 40),
    Piece("folding", "Self-Extend in blocks", 120, 40),
    Piece("result", "A result: tuned against its control", 480, 100, resumes=True),
    Piece("pose", "Rows with a jump beside the same rows without one", 300, 90, resumes=True),
    Piece("groups", "Self-Extend's groups that double with distance", 120, 40),
    Piece("questions", "The result with half of the rows asking for keys", 480, 100, resumes=True),
    Piece("training", "Training, random weights", 300, 90),
    Piece("processes", "Processes: accelerate launch with the shipped configs", 240, 60),
    Piece("evaluation", "Evaluation, random weights", 240, 60),
    Piece("recipes", "Recipes, random weights and three steps", 480, 150, resumes=True),
)


class LeftOut(Exception):
    """Why a case cannot be executed here; no failure."""


@dataclass(frozen=True)
class Day:
    """The facts that every piece receives, and the file of its lines."""

    out: Path
    dry: bool = False
    model: str = STAND_IN
    data: Path | None = None  # folders tuning, novels, manuals and code

    @classmethod
    def of(cls, text: str) -> "Day":
        values = json.loads(text)
        data = values["data"] and Path(values["data"])
        return cls(Path(values["out"]), bool(values["dry"]), values["model"], data)

    def to_json(self) -> str:
        return json.dumps({key: value and str(value) for key, value in vars(self).items()})

    @property
    def device(self) -> Any:
        return "cpu" if self.dry else "cuda"

    @property
    def work(self) -> Path:
        """The folder that keeps checkpoints between two calls."""
        return self.out / "work"

    @property
    def lines(self) -> Path:
        return self.out / "lines.jsonl"

    @property
    def running(self) -> Path:
        """The name of the case that is under way."""
        return self.out / "running"

    @property
    def log(self) -> Path:
        """What the commands said."""
        return self.out / "log.txt"

    def read(self) -> list[dict[str, Any]]:
        """Return the whole lines: a kill may have left a part of the last one."""
        lines = []
        for line in self.lines.read_text("utf-8").split("\n") if self.lines.is_file() else ():
            with suppress(ValueError):
                lines.append(json.loads(line))
        return lines

    def append(self, line: dict[str, Any]) -> None:
        with self.lines.open("a", encoding="utf-8") as file:
            file.write("\n" + json.dumps(line))

    def noted(self, piece: str) -> set[str | None]:
        """Return the cases of a piece that need not run again; None means all of them."""
        return {line["case"] for line in self.read() if line["piece"] == piece}

    def forget(self) -> None:
        """Keep only lines with figures, so that the rest runs again."""
        lines = [line for line in self.read() if "figures" in line]
        self.lines.write_text("\n".join(map(json.dumps, lines)), "utf-8")


def at_most(value: float, bound: float) -> dict[str, Any]:
    """Return a figure with its goal."""
    return {"value": value, "goal": f"≤ {bound:.4g}", "met": bool(value <= bound)}


def at_least(value: float, bound: float) -> dict[str, Any]:
    return {"value": value, "goal": f"≥ {bound:.4g}", "met": bool(value >= bound)}


def command(day: Day, words: Sequence[str], ends: int = 0) -> tuple[str, str]:
    """Run a Python program that has to end with this code; return its stdout and its stderr."""
    with day.log.open("a+", encoding="utf-8") as log:
        log.write(f"+ {' '.join(words)}\n")
        log.flush()
        start = log.tell()
        done = subprocess.run(
            [sys.executable, *words], stdout=subprocess.PIPE, stderr=log, text=True, check=False
        )
        log.seek(start)
        said = log.read()
    if done.returncode != ends:
        shown = "\n".join([*done.stdout.splitlines()[-10:], *said.splitlines()[-40:]])
        raise RuntimeError(f"{' '.join(words)}\nended with {done.returncode}:\n{shown}")
    return done.stdout, said


def ropext(day: Day, *words: str, launch: Sequence[str] = ()) -> str:
    """Return the output of a command of ropext, under `accelerate launch` if requested."""
    return command(day, [*launch, "-m", "ropext", *words])[0]


def extended(day: Day, model: str, factor: int, name: str, *more: str) -> str:
    """Return the model extended by YaRN, made once."""
    place = day.work / name
    if not place.exists():
        how = ("--method", "yarn", "--factor", str(factor), "--no-verify", "--link", "symlink")
        ropext(day, "extend", model, *how, *more, "-o", str(place))
    return os.fspath(place)
