"""A series: steps, several of one kind, each of which has a command of the same words.

FOLDER/steps holds a record of every step, so that a series that was stopped goes on where it was: a
finished step whose output is there is not done again, and one that was stopped in the middle goes
on by its own means.

What the steps cost is counted: tokens that pass a model's embedding. A forward token counts 1 and a
trained token 3 (forward, and a backward pass of twice its work). A token counts as trained where
gradients are recorded. Layers that are run again in the backward pass do not read the embedding
again, so recomputing is not counted.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ropext
from ropext.checkpoint import provenance
from ropext.errors import Interrupted
from ropext.narration import Hooks
from ropext.options.fields import flag
from ropext.options.training import Fit
from ropext.pipeline.stages import Stage, is_done
from ropext.workdir import Flat, Ledger, Piece, Workdir

SCHEMA = 2
COUNTED = {"forward": int, "trained": int}
# Of each command's answer; an evaluation keeps its own in its directory.
KEPT = {
    "inspect": ("model_type", "context"),
    "plan": ("method", "target"),
    "extend": ("notes",),
    "fit": ("kept", "start", "step", "numbers", "pair_factors", "attention_factor", "notes"),
    "finetune": ("steps", "stopped_early", "numbers", "notes"),
    "verify": ("passed",),
}

TRAINED = 3  # forward tokens that a trained one is worth


@dataclass
class Spent:
    """Tokens read without and with gradients."""

    forward: int = 0
    trained: int = 0

    @property
    def equivalents(self) -> int:
        """In forward tokens."""
        return self.forward + TRAINED * self.trained

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(self.forward + other.forward, self.trained + other.trained)

    def to_json(self) -> dict[str, int]:
        return vars(self) | {"equivalents": self.equivalents}


@contextmanager
def counted(spent: Spent, seen: Callable[[], None] = lambda: None) -> Iterator[None]:
    """While this lasts, every token that any embedding reads is added to `spent`; `seen` is called
    after each addition."""
    import torch
    from torch.nn.modules.module import register_module_forward_pre_hook

    def on_forward(module: Any, inputs: tuple[Any, ...]) -> None:
        if not isinstance(module, torch.nn.Embedding) or inputs[0].is_meta:
            return
        if torch.is_grad_enabled():
            spent.trained += inputs[0].numel()
        else:
            spent.forward += inputs[0].numel()
        seen()

    handle = register_module_forward_pre_hook(on_forward)
    try:
        yield
    finally:
        handle.remove()


@dataclass(frozen=True)
class Step:
    """One step; `subject` and `output` are names in the series' directory, or bundled names."""

    name: str
    sentence: str
    command: str
    subject: str
    options: Mapping[str, Any] = field(default_factory=dict)
    output: str | None = None
    label: str = ""  # of the one model that it measures
    prefix: str = ""  # before the labels of the models that it measures beside each other
    needs: tuple[str, ...] = ()  # which runs it belongs to

    def at(self, folder: Path, name: str) -> str:
        """Where a name is, for somebody in the working directory."""
        return name if "://" in name else str(folder / name)

    def words(self, folder: Path) -> tuple[str, ...]:
        """The command line that does this step."""
        words = ["ropext", self.command, self.at(folder, self.subject)]
        for name, value in self.options.items():
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            words += [flag(name), *([] if value is True else [text])]
        return (*words, *(["-o", self.at(folder, self.output)] if self.output else []))

    @property
    def trains(self) -> int:
        """Tokens that it trains on."""
        if self.command not in ("finetune", "fit"):
            return 0
        tokens = self.options.get("batch_tokens", Fit.model_fields["batch_tokens"].default)
        return int(self.options["steps"]) * int(tokens) * (1 + bool(self.options.get("control")))


@dataclass(frozen=True)
class Done:
    """One finished step: its command, what it gave, what it cost."""

    step: Step
    words: tuple[str, ...]
    result: Mapping[str, Any]
    spent: Spent


def run_series(steps: Sequence[Step], folder: Path, hooks: Hooks) -> dict[str, Done]:
    """Do all steps and return them by name; those that are done already are read back."""
    ledger, found = Ledger(folder / "steps"), dict[str, Done]()
    deciding = {"schema": SCHEMA, "versions": provenance.versions()}
    with Workdir(folder, "demo", deciding).claimed(None):
        for number, step in enumerate(steps, 1):
            stage = _stage(step, folder, hooks, ledger)
            if is_done(ledger, stage) is None:
                if hooks.stop():
                    raise Interrupted(_stopped(folder))
                hooks.say(f"[{number}/{len(steps)}] {step.sentence}")
                for later in steps:  # what was made of or measured on the old output
                    if step.output is not None and later.subject == step.output:
                        ledger.forget(later.name)
                stage.do()
            record = ledger.read(step.name)
            assert record is not None
            assert record.outputs is not None
            spent = Spent(**record.about["spent"])
            found[step.name] = Done(step, step.words(folder), record.outputs, spent)
    return found


def _stage(step: Step, folder: Path, hooks: Hooks, ledger: Ledger) -> Stage:
    """A step, under the rule by which the stages of a run are skipped."""

    def inputs() -> Flat:
        return {"command": list(step.words(Path("DIR")))}  # the same from any working directory

    def look() -> Flat | None:
        """What it left; None also where its record was edited or its output is gone."""
        record, wanted = ledger.read(step.name), set(KEPT.get(step.command, ()))
        is_there = step.output is None or (folder / step.output).exists()
        if record is None or not is_there or not _is_counted(record):
            return None
        return record.outputs if wanted <= {*(record.outputs or ())} else None

    def do() -> None:
        """Do it, counted. What a stopped one has cost so far is kept too."""
        begun, result, spent = ledger.read(step.name), None, Spent()
        is_same = begun and begun.outputs is None and not begun.why_again(SCHEMA, inputs())
        if begun and is_same and _is_counted(begun):
            spent = Spent(**begun.about["spent"])

        def progress() -> None:
            if step.trains:
                hooks.show(min(spent.trained, step.trains), step.trains, step.name)

        try:
            with counted(spent, progress):
                result = _call(step, folder, hooks)
        except KeyboardInterrupt:  # of a training that has nothing to keep yet
            raise Interrupted(_stopped(folder)) from None
        finally:
            ledger.write(step.name, SCHEMA, inputs(), result, spent=vars(spent))

    return Stage(step.name, inputs, look, do, schema=SCHEMA)


def _is_counted(record: Piece) -> bool:
    spent = record.about.get("spent")
    return isinstance(spent, dict) and {k: type(v) for k, v in spent.items()} == COUNTED


def _stopped(folder: Path) -> str:
    return f"interrupted; what is finished is kept in {folder}, and the same command goes on"


def _call(step: Step, folder: Path, hooks: Hooks) -> Flat:
    """Call the public function of the step's command; return what is kept of its answer."""
    function = getattr(ropext, "evaluate" if step.command == "eval" else step.command)
    options, arguments = dict(step.options), [step.at(folder, step.subject)]
    if step.command in ("fit", "finetune"):
        arguments.append(options.pop("data"))
    if step.output is not None:
        arguments.append(str(folder / step.output))
        options["force"] = True
    if step.command in ("eval", "extend"):
        options["command"] = step.words(folder)
    if step.command == "eval":
        options["hooks"] = Hooks(show=hooks.show, stop=hooks.stop)
    answer = function(*arguments, **options)
    return {name: answer.to_json()[name] for name in KEPT.get(step.command, ())}
