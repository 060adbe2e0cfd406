"""Do the demo's steps, count what they cost, and keep what they gave.

DIR/demo.json holds every finished step, so that a demo that was stopped goes on where it was: a
finished step whose output is there is not done again, and one that was stopped in the middle goes
on by its own means.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ropext
from ropext.checkpoint import provenance
from ropext.checkpoint.jsontext import read_object
from ropext.checkpoint.locks import locked
from ropext.demo.counting import Spent, counted
from ropext.demo.steps import Step
from ropext.errors import InputError, OutputExists, Stopped
from ropext.narration import Say, Show, silent, unseen
from ropext.results import rundir

RECORD = "demo.json"
SCHEMA = 1

# Of each command's answer.
KEPT = {
    "inspect": ("model_type", "context"),
    "plan": ("method", "target"),
    "extend": ("notes",),
    "fit": ("kept", "start", "step", "numbers", "pair_factors", "attention_factor", "notes"),
    "finetune": ("steps", "stopped_early", "numbers", "notes"),
    "verify": ("passed",),
}


@dataclass(frozen=True)
class Hooks:
    """How the demo speaks with whoever started it."""

    say: Say = silent
    bar: Callable[[], Show] = lambda: unseen  # a new one for each step
    stop: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class Done:
    """One finished step: its command, what it gave, what it cost."""

    step: Step
    words: tuple[str, ...]
    result: Mapping[str, Any]
    spent: Spent


def run(steps: Sequence[Step], folder: Path, hooks: Hooks) -> dict[str, Done]:
    """All steps, by name; those that this directory has already are read back."""
    with locked(folder.resolve(), folder):
        kept = _kept(folder)
        found: dict[str, Done] = {}
        for number, step in enumerate(steps, 1):
            key = step.words(Path("DIR"))  # the same from any working directory
            own = kept["steps"].get(step.name)
            is_gone = step.output is not None and not (folder / step.output).exists()
            if own is None or own["command"] != key or is_gone:
                if hooks.stop():
                    raise Stopped(_stopped(folder))
                hooks.say(f"[{number}/{len(steps)}] {step.sentence}")
                for later in steps:  # what was made of or measured on the old output
                    if step.output is not None and later.subject == step.output:
                        kept["steps"].pop(later.name, None)
                own = _do(step, folder, hooks, kept) | {"command": key}
                kept["steps"][step.name] = own
                rundir.write_json(folder / RECORD, kept)
            spent = Spent(own["spent"]["forward"], own["spent"]["trained"])
            found[step.name] = Done(step, tuple(step.words(folder)), own["result"], spent)
        return found


def _kept(folder: Path) -> dict[str, Any]:
    """What an earlier run finished in this directory."""
    versions = provenance.versions()
    fresh = {"schema": SCHEMA, "versions": versions, "unfinished": {}, "steps": {}}
    if not (folder / RECORD).is_file():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise OutputExists(f"{folder} exists and holds no demo; give another directory with -o")
        return fresh
    kept = read_object(folder / RECORD)
    if (kept.get("schema"), kept.get("versions")) != (SCHEMA, versions):
        raise OutputExists(
            f"{folder} holds a demo that other versions of ropext or its libraries began; give "
            "another directory with -o"
        )
    if not _is_record(kept):
        raise InputError(
            f"{folder / RECORD} is not as the demo left it; delete it with its directory, or give "
            "another directory with -o"
        )
    return kept


def _is_record(kept: Mapping[str, Any]) -> bool:
    """Whether a record holds, of every step that it names, what is read back of it."""
    try:
        spent = [*kept["unfinished"].values(), *(own["spent"] for own in kept["steps"].values())]
        counted = all({type(own["forward"]), type(own["trained"])} == {int} for own in spent)
        return counted and all(
            isinstance(own["command"], list)
            and set(KEPT.get(own["command"][1], ())) <= set(own["result"])
            for own in kept["steps"].values()
        )
    except (AttributeError, IndexError, KeyError, TypeError):
        return False


def _do(step: Step, folder: Path, hooks: Hooks, kept: dict[str, Any]) -> dict[str, Any]:
    """One step, counted. What a stopped one has cost so far is kept too."""
    before = kept["unfinished"].pop(step.name, {"forward": 0, "trained": 0})
    spent, show = Spent(before["forward"], before["trained"]), hooks.bar()

    def progress() -> None:
        if step.trains:
            show(min(spent.trained, step.trains), step.trains, step.name)

    try:
        with counted(spent, progress):
            result = _call(step, folder, show, hooks.stop)
    except BaseException as error:
        kept["unfinished"][step.name] = spent.to_json()
        rundir.write_json(folder / RECORD, kept)
        if isinstance(error, KeyboardInterrupt):  # of a training that has nothing to keep yet
            raise Stopped(_stopped(folder)) from None
        raise
    return {"spent": spent.to_json(), "result": result}


def _stopped(folder: Path) -> str:
    return f"interrupted; what is finished is kept in {folder}, and the same command goes on"


def _call(step: Step, folder: Path, show: Show, stop: Callable[[], bool]) -> dict[str, Any]:
    """The public function of the step's command, and what the end of the demo needs of its answer
    (an evaluation keeps its own numbers in its directory)."""
    subject, options = step.at(folder, step.subject), dict(step.options)
    output = folder / step.output if step.output else None
    answer: Mapping[str, Any] = {}
    if step.command == "eval":
        from ropext.evaluation import Hooks as EvaluationHooks

        told = EvaluationHooks(show=show, stop=stop)
        words = step.words(folder)
        ropext.evaluate(subject, output, force=True, command=words, hooks=told, **options)
    elif output is None:
        answer = getattr(ropext, step.command)(subject, **options).to_json()
    elif step.command == "extend":
        words = step.words(folder)
        answer = ropext.extend(subject, output, force=True, command=words, **options).to_json()
    else:  # fit or finetune
        data = options.pop("data")
        function = getattr(ropext, step.command)
        answer = function(subject, data, output, force=True, **options).to_json()
    return {name: answer[name] for name in KEPT.get(step.command, ())}
