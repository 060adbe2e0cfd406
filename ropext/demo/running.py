"""Do the demo's steps, count what they cost, and keep what they gave.

DIR/steps holds a record of every step, so that a demo that was stopped goes on where it was: a
finished step whose output is there is not done again, and one that was stopped in the middle goes
on by its own means.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ropext
from ropext.checkpoint import provenance
from ropext.demo.counting import Spent, counted
from ropext.demo.steps import Step
from ropext.errors import Interrupted
from ropext.narration import Say, Show, silent, unseen
from ropext.workdir import Flat, Ledger, Piece, Workdir

SCHEMA = 2
COUNTED = {"forward": int, "trained": int}

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
    show: Show = unseen
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
    ledger = Ledger(folder / "steps")
    deciding = {"schema": SCHEMA, "versions": provenance.versions()}
    with Workdir(folder, "demo", deciding).claimed(None):
        found: dict[str, Done] = {}
        for number, step in enumerate(steps, 1):
            record = _record(ledger, step)
            is_gone = step.output is not None and not (folder / step.output).exists()
            if record is None or record.outputs is None or is_gone:
                if hooks.stop():
                    raise Interrupted(_stopped(folder))
                hooks.say(f"[{number}/{len(steps)}] {step.sentence}")
                for later in steps:  # what was made of or measured on the old output
                    if step.output is not None and later.subject == step.output:
                        ledger.forget(later.name)
                found[step.name] = _do(step, folder, hooks, ledger, record)
            else:
                found[step.name] = _done(step, folder, record.outputs, record.about["spent"])
        return found


def _done(step: Step, folder: Path, result: Flat, spent: Mapping[str, int]) -> Done:
    return Done(step, tuple(step.words(folder)), result, Spent(**spent))


def _inputs(step: Step) -> dict[str, Any]:
    return {"command": step.words(Path("DIR"))}  # the same from any working directory


def _record(ledger: Ledger, step: Step) -> Piece | None:
    """The record of this very step, begun or finished; None also for one that was edited."""
    found = ledger.read(step.name)
    if found is None or found.why_again(SCHEMA, _inputs(step)):
        return None
    spent, wanted = found.about.get("spent"), set(KEPT.get(step.command, ()))
    counted = isinstance(spent, dict) and {k: type(v) for k, v in spent.items()} == COUNTED
    return found if counted and (found.outputs is None or wanted <= {*found.outputs}) else None


def _do(step: Step, folder: Path, hooks: Hooks, ledger: Ledger, begun: Piece | None) -> Done:
    """One step, counted. What a stopped one has cost so far is kept too."""
    goes_on = begun is not None and begun.outputs is None
    spent = Spent(**begun.about["spent"]) if begun is not None and goes_on else Spent()
    show, result = hooks.show, None

    def progress() -> None:
        if step.trains:
            show(min(spent.trained, step.trains), step.trains, step.name)

    try:
        with counted(spent, progress):
            result = _call(step, folder, show, hooks.stop)
    except KeyboardInterrupt:  # of a training that has nothing to keep yet
        raise Interrupted(_stopped(folder)) from None
    finally:
        ledger.write(step.name, SCHEMA, _inputs(step), result, spent=vars(spent))
    return _done(step, folder, result, vars(spent))


def _stopped(folder: Path) -> str:
    return f"interrupted; what is finished is kept in {folder}, and the same command goes on"


def _call(step: Step, folder: Path, show: Show, stop: Callable[[], bool]) -> Flat:
    """The public function of the step's command, and what the end of the demo needs of its answer
    (an evaluation keeps its own numbers in its directory)."""
    subject, options = step.at(folder, step.subject), dict(step.options)
    output = folder / step.output if step.output else None
    answer: Mapping[str, Any] = {}
    if step.command == "eval":
        from ropext.narration import Hooks as EvaluationHooks

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
