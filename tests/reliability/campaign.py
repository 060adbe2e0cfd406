"""Kill commands, and make their file operations fail, and check the files that they leave.

After a SIGKILL the output is absent, resumable, or complete, and the input is unchanged. The same
command again ends with the bytes of an undisturbed run and leaves nothing else. After a failing
call the same holds, and the command gave the reason in one sentence and exited with 2 or 4.
"""

import hashlib
import itertools
import json
import math
import os
import resource
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from io import StringIO
from pathlib import Path
from random import Random
from typing import Any

import pictures
from marked import checkpoint
from proving import apart, here
from reliability.commands import Command
from reliability.layer import FAULTS, Ended, Wish, forked

PHASES = ("before any write", "between writes", "during a write", "between write and rename",
          "after")  # fmt: skip
OUT, RUN = "out", "out.run"  # the output, and the folder of its run
# Of no byte comparison: the log, which holds the time stamps; when the run hashed which file; which
# outputs it ever wrote under this name.
HISTORY = (f"{RUN}/log.txt", f"{RUN}/stages/output.json")


# Bytes of the largest file that may be written: below a config, a report, the weights.
LARGEST = (300, 3_000, 12_000)
SHARES = (0.1, 0.5, 0.9)  # shares of a write that is killed in its middle


class Broken(AssertionError):
    """A promise was not kept."""


@dataclass
class Tally:
    """What the campaign counted: (command, phase), (command, state), faults and their sentences."""

    phases: Counter[tuple[str, str]] = field(default_factory=Counter)
    states: Counter[tuple[str, str]] = field(default_factory=Counter)
    faults: Counter[tuple[str, str]] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)

    def phase(self, phase: str) -> int:
        return sum(n for (_, p), n in self.phases.items() if p == phase)


def tree(directory: Path) -> dict[str, str]:
    """Map every file below a directory to its SHA-256, and every link to its target."""
    found = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


PRELOADED = (
    *("matplotlib.pyplot", "matplotlib.backends.backend_agg", "peft", "transformers.trainer"),
    *("transformers.models.llama.modeling_llama", "peft.utils.transformers_weight_conversion"),
    *("ropext.evaluation.evaluation", "ropext.verifying.proof.child", "ropext.training.finetune"),
    *("ropext.training.fit", "ropext.results.report.tables"),
    *(
        "ropext.cli.app",
        "ropext.pipeline.running",
        "ropext.pipeline.run_output",
    ),
)


def files(room: Path) -> dict[str, str]:
    """Return all files that a command wrote, without its history and the log of used steps."""
    found = {name: own for name, own in tree(room).items() if name not in HISTORY}
    return {name: own for name, own in found.items() if not name.endswith("/used.log")}


def below(folder: str, found: dict[str, str]) -> dict[str, str]:
    """Return the files of one folder, by their names inside it."""
    start = f"{folder}/"
    return {n.removeprefix(start): own for n, own in found.items() if n.startswith(start)}


def preload() -> None:
    """Import the modules that commands need, so that a forked child starts at once."""
    for name in PRELOADED:
        import_module(name)
    from PIL import Image

    Image.preinit()
    from ropext.cli import app

    app.build()
    with redirect_stdout(StringIO()):  # the option parser imports when it first parses
        app.build("methods")(["methods"], standalone_mode=False)
    import torch

    torch.set_num_threads(1)


def run(
    command: Command,
    room: Path,
    wish: Wish | None = None,
    kill_after: float | None = None,
    largest: int | None = None,
    meanwhile: Callable[[Path], None] | None = None,
) -> Ended:
    """Run one command in a forked child, and count its file operations.

    The child is killed after `kill_after` seconds, and the kernel lets it write no file beyond
    `largest` bytes. `meanwhile` is a user's change of the room: it runs when the output is complete
    but has no name yet.
    """
    call = partial(_command, command, room, largest, meanwhile)
    return forked(call, room, wish, kill_after)


def _disturb(room: Path, meanwhile: Callable[[Path], None]) -> None:
    from ropext.base import staging

    commit = staging._commit

    def disturbed(work: Path, target: Any) -> None:
        if staging.real_place(target.path) == room.resolve() / OUT:
            meanwhile(room)
        commit(work, target)

    staging._commit = disturbed


def _command(
    command: Command, room: Path, largest: int | None, meanwhile: Callable[[Path], None] | None
) -> int:
    """Run a command line in this process, a child; its exit code."""
    from ropext.cli import app
    from ropext.families import stock
    from ropext.pipeline import demo

    if largest is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
    if meanwhile is not None:
        _disturb(room, meanwhile)
    # An interpreter for each kill would take hours.
    stock.ask_child = apart if command.proved else partial(here, forward=False)
    pictures.draw(wholly=False)
    demo.RECIPE = "demo.yaml"  # a short one, in the room
    sys.argv = command.argv()
    try:
        app.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


class Campaign:
    """One input folder, the truth of each command, and any number of disturbed runs."""

    def __init__(self, folder: Path, inputs: Path, seed: int = 0) -> None:
        self.folder, self.inputs = folder, inputs
        self.before, self.random = tree(inputs), Random(seed)
        self.tally, self.number = Tally(), 0
        self.truths: dict[str, tuple[dict[str, str], list[str], float]] = {}
        self.until = math.inf  # on the monotonic clock; nothing is begun after it

    def truth(self, command: Command) -> tuple[dict[str, str], list[str], float]:
        """Return (files, steps, seconds) of an undisturbed run."""
        if command.name not in self.truths:
            room = self._room(command)
            start = time.perf_counter()
            ended = run(command, room)
            seconds = time.perf_counter() - start
            if ended.code != 0:
                raise Broken(f"{command.name} undisturbed: exit {ended.code}: {ended.said[-2000:]}")
            if stray := set(os.listdir(room)) - {command.output, *command.beside}:
                raise Broken(f"{command.name} undisturbed leaves {stray}")
            self.truths[command.name] = files(room), ended.steps, seconds
            shutil.rmtree(room)
        return self.truths[command.name]

    def _room(self, command: Command) -> Path:
        self.number += 1
        room = self.folder / f"room {self.number} é"
        room.mkdir()
        if command.old:
            checkpoint(room / "out", "old")
        return room

    def wishes(self, command: Command, count: int) -> Iterator[Wish]:
        """Yield boundaries and half-done writes, each phase of a run as often as the others.

        Each command begins with another phase, so that few kills of each see all of them.
        """
        steps = self.truth(command)[1]
        groups: dict[str, list[Wish]] = {phase: [] for phase in (*PHASES[1:], PHASES[0])}
        for at, kind in enumerate(steps):
            groups[phase_at(steps, at)].append(Wish(at, "before"))
            if kind == "write":
                groups[PHASES[2]] += [Wish(at, "middle", share) for share in SHARES]
        for group in groups.values():
            self.random.shuffle(group)
        first = 2 * (len(self.truths) - 1) % len(PHASES)
        ordered = [*groups.values()]
        ordered = ordered[first:] + ordered[:first]
        turns = itertools.chain.from_iterable(itertools.zip_longest(*ordered))
        yield from itertools.islice((wish for wish in turns if wish), count)

    def kill(self, command: Command, wish: Wish) -> None:
        """Kill the command at one step."""
        self._disturbed(command, wish, None)

    def kill_at_random(self, command: Command) -> None:
        """Kill the command at a random moment of the run's duration."""
        seconds = self.truth(command)[2]
        self._disturbed(command, None, self.random.uniform(0, seconds))

    def fail(self, command: Command, step: int, code: int) -> None:
        """Let one call fail."""
        self._disturbed(command, Wish(step, code), None)

    def limit(self, command: Command, largest: int) -> None:
        """Let the kernel cut a write short and refuse the rest, also below Rust and C++."""
        self._disturbed(command, None, None, largest)

    def _disturbed(
        self, command: Command, wish: Wish | None, after: float | None, largest: int | None = None
    ) -> None:
        if time.monotonic() > self.until:
            return
        truth, steps, _ = self.truth(command)
        room = self._room(command)
        about = f"{command.name}, {wish or (f'{after:.3f} s' if after else f'{largest} bytes')}"
        try:
            ended = run(command, room, wish, after, largest)
            if largest is not None:
                self._count_fault(command, ended, "a short write")
            elif wish is not None and isinstance(wish.how, int):
                self._count_fault(command, ended, os.strerror(wish.how))
            elif ended.code is None:
                self.tally.phases[command.name, phase(ended, steps)] += 1
            elif ended.code != 0:
                raise Broken(f"exit {ended.code}: {ended.said[-600:]}")
            state = self._state(command, room, truth)
            self.tally.states[command.name, state] += 1
            self._again(command, room, truth, state)
        except Broken as error:
            self.tally.broken.append(f"{about}: {error}")
            print(f"BROKEN {about}: {error}", flush=True)
        shutil.rmtree(room, ignore_errors=True)

    def _count_fault(self, command: Command, ended: Ended, what: str) -> None:
        lines = [line for line in ended.said.splitlines() if line.strip()]
        if ended.code == 0:
            self.tally.faults[command.name, "withstood"] += 1
            return
        if ended.code not in (2, 4) or "Traceback" in ended.said:
            raise Broken(f"exit {ended.code}: {' | '.join(lines[-3:])[:600]}")
        if not any(line.startswith("error: ") for line in lines[-2:]):
            raise Broken(f"no sentence: {' | '.join(lines[-3:])[:600]}")
        self.tally.faults[command.name, what] += 1

    def _state(self, command: Command, room: Path, truth: dict[str, str]) -> str:
        """Return the output's state; any state but the known ones breaks a promise."""
        if tree(self.inputs) != self.before:
            raise Broken("the input was changed")
        if command.output != OUT:
            return _state_of_file(command.output, files(room), truth)
        found, wanted = below(OUT, files(room)), below(OUT, truth)
        if command.name == "eval":
            if (manifest := room / OUT / "run.json").is_file():
                _check_manifest(manifest)
            return _state_of_run(found, wanted)
        if not (room / OUT).exists():
            return "resumable" if (room / RUN).exists() else "absent"
        if found == wanted:
            return "complete"
        if command.old and set(found) == {"config.json", "ropext.json"}:
            return "the old one"
        lacks = sorted(set(wanted) - set(found))[:3]
        raise Broken(f"an incomplete output bears the name: it lacks {lacks}")

    def _again(self, command: Command, room: Path, truth: dict[str, str], state: str) -> None:
        ended = run(command, room)
        # A complete output is refused, or found done.
        if ended.code != 0 and not (state == "complete" and ended.code == 2):
            raise Broken(f"the second run: exit {ended.code}: {ended.said[-900:]}")
        found = files(room)
        if state == "complete" and not below(RUN, truth):
            # Next to a complete output the folder of its run may stay: nobody can tell whether it
            # belongs to this output or to a later run that was to replace it.
            found = {n: own for n, own in found.items() if not n.startswith(f"{RUN}/")}
        if found != truth:
            names = [n for n in {*found, *truth} if found.get(n) != truth.get(n)]
            raise Broken(f"the second run's bytes differ: {sorted(names)[:6]}")
        if tree(self.inputs) != self.before:
            raise Broken("the second run changed the input")


def _state_of_file(output: str, found: dict[str, str], truth: dict[str, str]) -> str:
    """Return the state of an output file. It must get its name when it is whole, and the files next
    to it must follow."""
    found = {name: digest for name, digest in found.items() if not name.startswith(".")}
    if not found:
        return "absent"
    if found.get(output) != truth[output] or not found.items() <= truth.items():
        raise Broken(f"{sorted(found)} stand there, and are not those of an undisturbed run")
    return "complete"


def _check_manifest(path: Path) -> None:
    """Check that the manifest is whole at any time, though it lists more files with time."""
    content = json.loads(path.read_text(encoding="utf-8"))
    seal = content.pop("ropext")
    text = f"written by ropext {json.dumps(content, sort_keys=True)}"
    if seal != hashlib.sha256(text.encode()).hexdigest():
        raise Broken("run.json does not bear its digest")


def _state_of_run(found: dict[str, str], wanted: dict[str, str]) -> str:
    """Return the state of an evaluation's directory: it is written piece by piece, and each piece
    is whole or absent."""
    if not found:
        return "absent"
    found = {name: digest for name, digest in found.items() if not name.endswith("-tmp")}
    there = [name for name in found if name != "run.json"]
    if wrong := [name for name in there if wanted.get(name) != found[name]]:
        raise Broken(f"torn or wrong files: {wrong[:4]}")
    return "complete" if found == wanted else "resumable"


def phase(ended: Ended, steps: list[str]) -> str:
    """Return the phase in which a kill fell."""
    return PHASES[2] if ended.writing else phase_at(steps, len(ended.steps))


def phase_at(steps: list[str], at: int) -> str:
    """Return the phase of a run before its step `at`."""
    left = steps[at:]
    if "write" not in steps[:at]:
        return PHASES[0]
    if not {"make", "write", "name", "sync"} & set(left):
        return PHASES[4]
    # A content is on its way to its name once it is flushed, or about to be.
    return PHASES[3] if left[0] in ("sync", "name") else PHASES[1]


def faults(campaign: Campaign, command: Command, count: int) -> None:
    """Make calls fail, spread evenly over the run; then let the kernel cut writes short."""
    steps = campaign.truth(command)[1]
    for largest in LARGEST[:count]:
        campaign.limit(command, largest)
    for number in range(count):
        at = number * len(steps) // count
        campaign.fail(command, at, FAULTS[number % len(FAULTS)])
