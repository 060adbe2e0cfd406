"""A spectrum found without gradients: knobs tried one after another, by forward passes alone.

Pattern search (Hooke and Jeeves 1961) on a grid that halves: one knob at a time moves by a step in
either direction, and goes on while every move is better by more than its interval; where no knob
moves any more, the step is halved. For models through which no gradient flows. The interval is
paired over windows, of which a long document has several: it steers, and held-out documents judge.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ropext.errors import InputError
from ropext.evaluation.forward import Ids, NanInLogits, TokenScorer
from ropext.evaluation.reading import read_pass
from ropext.files import write_text
from ropext.narration import Say, Show
from ropext.results.values import Bootstrap, Floats, Value
from ropext.training.rows import Flags, TrainingDocument
from ropext.training.spectrum import Space

# In the units of a space's offsets: at first four pairs of a ramp's beginning, a factor of e on its
# width, 28 % of the attention factor, a factor of 55 on theta; at last a sixteenth of each.
STEPS = (1.0, 0.5, 0.25, 0.125, 0.0625)
# Windows that each trial reads, and how many trials at most.
DOCUMENTS = 16
TRIALS = 64
# Of the attention factor alone, after a fit in short rows: 13 % at first, at last 6 %; of the
# scored tokens of a trial, which are so many as a rule and so many at most.
ATTENTION_STEPS = (0.5, 0.25)
ATTENTION_TOKENS, ATTENTION_TRIALS, ATTENTION_MOST = 8192, 6, 12

Offsets = tuple[float, ...]
Knobs = Mapping[str, Any]
# Each document's loss over the far half with some knobs; None where the logits are not numbers.
Measure = Callable[[Knobs], Floats | None]


@dataclass(frozen=True)
class Trial:
    """One setting that was read; `change` is against the best before it (None at the start, and
    where the logits are not numbers)."""

    offsets: Offsets
    knobs: Knobs
    step: float
    change: Value | None
    taken: bool

    def to_json(self) -> dict[str, Any]:
        change = self.change and self.change.to_json()
        return {"knobs": dict(self.knobs), "step": self.step, "change": change, "taken": self.taken}


@dataclass(frozen=True)
class Passages:
    """Windows as they are tried, each with what is scored of its far half."""

    windows: tuple[tuple[Ids, Flags], ...]
    target: int

    @property
    def counts(self) -> Floats:
        return np.array([float(scored.sum()) for _, scored in self.windows])

    @property
    def tokens(self) -> int:
        """Of one trial."""
        return len(self.windows) * self.target


def passages(
    documents: Sequence[TrainingDocument], target: int, count: int = DOCUMENTS
) -> Passages:
    """The first window of the target's length of every document, then their second ones, and so on
    until there are enough."""
    begins = sorted(
        (begin, number)
        for number, own in enumerate(documents)
        for begin in range(0, len(own.ids) - target + 1, target)
    )[:count]
    cut = [(documents[number], slice(begin, begin + target)) for begin, number in begins]
    windows = [(own.ids[at], own.mask()[at][target // 2 :]) for own, at in cut]
    return Passages(tuple(windows), target)


def measuring(
    scorer: TokenScorer, apply: Callable[[Knobs], None], own: Passages, pause: Show
) -> Measure:
    """Reads all passages by a model that `apply` makes compute with some knobs."""

    def measure(knobs: Knobs) -> Floats | None:
        apply(knobs)
        sums = []
        pause(0, own.tokens, "a trial of the search")
        for ids, scored in own.windows:
            try:
                # Not inference_mode: a fit in short rows may go on after it.
                with torch.no_grad():
                    nll = read_pass(scorer, ids, own.target)
            except NanInLogits:
                return None
            sums.append(float(nll[-len(scored) :][scored].astype(np.float64).sum()))
            pause(own.target * len(sums), own.tokens, "a trial of the search")
        return np.array(sums)

    return measure


def attention_passages(documents: Sequence[TrainingDocument], target: int) -> Passages:
    """As few as tell one attention factor from another."""
    return passages(documents, target, max(2, ATTENTION_TOKENS // target))


@dataclass
class Search:
    """What was read is kept in `file`, so that an interrupted search goes on. Of the space all
    parameters move, or those that are `moving` alone, from where they are."""

    space: Space
    passages: Passages
    bootstrap: Bootstrap
    file: Path
    say: Say
    steps: Sequence[float] = STEPS
    most: int = TRIALS
    moving: Sequence[torch.nn.Parameter] = ()
    trials: list[Trial] = field(default_factory=list)
    known: dict[str, list[float] | None] = field(default_factory=dict)

    def run(self, measure: Measure) -> list[Trial]:
        """Every trial in order, the start first; the space is left at the best."""
        self.measure = measure
        self.moving = self.moving or tuple(self.space.parameters())
        self.say(
            f"searching on {len(self.passages.windows)} windows: {self.passages.tokens:,} forward "
            f"tokens a setting, {self.most} settings at most"
        )
        if self.file.is_file():
            self.known = json.loads(self.file.read_text(encoding="utf-8"))
        best = tuple(torch.nn.utils.parameters_to_vector(self.moving).tolist())
        start = self._losses(best)
        if start is None:
            raise InputError("the start's logits are not numbers; give another --start")
        self.lowest = start
        self.trials = [Trial(best, self.space.knobs(), 0.0, None, True)]
        for step in self.steps:
            while (moved := self._sweep(best, step)) != best and self._may_go_on():
                best = moved
            best = moved
        self._set(best)
        return self.trials

    def summary(self) -> str:
        """What it took."""
        tokens, count = len(self.trials) * self.passages.tokens, len(self.trials) - 1
        taken = sum(trial.taken for trial in self.trials) - 1
        return f"searched: {count} settings ({taken} better ones), {tokens:,} forward tokens"

    def _may_go_on(self) -> bool:
        return len(self.trials) < self.most

    def _sweep(self, best: Offsets, step: float) -> Offsets:
        """Every knob once, in both directions."""
        for knob in range(len(best)):
            for direction in (step, -step):
                moved = best
                while self._may_go_on():
                    trial = (*moved[:knob], moved[knob] + direction, *moved[knob + 1 :])
                    if not self._better(trial, step):
                        break
                    moved = trial
                if moved != best:
                    best = moved
                    break  # the way back was just left
        return best

    def _better(self, offsets: Offsets, step: float) -> bool:
        """Read a setting; whether it beats the best so far by more than its interval (without an
        interval, whether it is lower at all)."""
        if any(own.offsets == offsets for own in self.trials):
            return False
        self._set(offsets)
        if self.space.outside() is not None:
            return False
        losses = self._losses(offsets)
        if losses is None:
            self.trials.append(Trial(offsets, self.space.knobs(), step, None, False))
            return False
        change = self.bootstrap.ratio(losses - self.lowest, self.passages.counts)
        taken = change.value < 0 and (change.ci95 is None or change.ci95[1] < 0)
        self.trials.append(Trial(offsets, self.space.knobs(), step, change, taken))
        if taken:
            self.lowest = losses
            self.say(f"trial {len(self.trials) - 1}: {-change.value:.4f} nats a token lower")
        return taken

    def _set(self, offsets: Offsets) -> None:
        values = torch.tensor(offsets, dtype=torch.float64)
        torch.nn.utils.vector_to_parameters(values, self.moving)

    def _losses(self, offsets: Offsets) -> Floats | None:
        key = json.dumps(offsets)
        if key not in self.known:
            losses = self.measure(self.space.knobs())
            self.known[key] = None if losses is None else [float(own) for own in losses]
            write_text(self.file, json.dumps(self.known) + "\n")
        found = self.known[key]
        return None if found is None else np.array(found)
