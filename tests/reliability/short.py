"""The suite's share of the campaigns: `python -m tests.reliability.short FOLDER`.

One interpreter imports all modules of the commands, which takes longer than a short campaign, and
each campaign runs in a fork of it. Two run on the unchanged code, and one on each fault, which must
be seen. A campaign's output is in FOLDER/NAME.txt, with its exit code in front.
"""

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from tests.support import paths  # noqa: F401  it makes the next imports possible

# isort: split
from reliability.__main__ import conduct, parse, ready

from ropext.base import guard, staging
from ropext.files.checkpoint import writing


def nothing() -> None:
    """Leave the code unchanged."""


def named_before_it_is_written() -> None:
    def staged(output: staging.Output) -> object:
        output.path.mkdir()
        return nullcontext(staging.Staged(output.path))

    writing.staged = staged


def never_swept_up() -> None:
    staging._recover = lambda *about: None


def replaced_unchecked() -> None:
    staging.Output.check_taken = lambda *about: None


def nothing_compared() -> None:
    guard.check = lambda *about: None


def compared_as_text() -> None:
    def identity(path: Path) -> str | None:
        return os.path.realpath(path) if os.path.exists(path) else None

    guard.identity = identity


@dataclass(frozen=True)
class Short:
    """A campaign's words, and the fault that is made before it begins."""

    words: str
    fault: Callable[[], None] = nothing


_KILLS = "--kills 60 --faults 0 --only extend"
CAMPAIGNS = {
    "kills": Short("--kills 13 --faults 4 --wanted 1"),
    "guard": Short("--guard part"),
    "named before it is written": Short(_KILLS, named_before_it_is_written),
    "what was left is never swept up": Short(_KILLS, never_swept_up),
    "what is replaced is not checked": Short("--guard meanwhile", replaced_unchecked),
    "nothing is compared": Short("--guard quick", nothing_compared),
    "places are compared as text": Short("--guard renamed", compared_as_text),
}


def main() -> None:
    said = Path(sys.argv[1])
    with ready() as folder:
        for name, short in CAMPAIGNS.items():
            child = os.fork()
            if child == 0:
                run(short, folder / name, said / f"{name}.txt")
            os.waitpid(child, 0)


def run(short: Short, folder: Path, said: Path) -> None:
    """Run one campaign in this process; never return."""
    folder.mkdir()
    with open(said.with_suffix(".part"), "w", encoding="utf-8") as file:
        sys.stdout = file
        short.fault()
        try:
            code = conduct(parse(short.words.split()), folder)
        except BaseException:
            traceback.print_exc(file=file)
            code = 70
    text = said.with_suffix(".part").read_text("utf-8")
    said.write_text(f"{code}\n{text}", "utf-8")
    os._exit(code)


if __name__ == "__main__":
    main()
