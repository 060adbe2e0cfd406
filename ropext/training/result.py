"""What a training did, as its caller gets it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ropext.jsontext import Json, values_json
from ropext.planning import Plan
from ropext.results.measurement import Measurement
from ropext.results.overlap import Overlap
from ropext.results.values import Value
from ropext.training.judge import Numbers
from ropext.training.objective import Objective
from ropext.training.training import Training


def judged_steps(judgements: Mapping[int, float]) -> list[dict[str, float]]:
    """The judged steps of a fit as JSON."""
    return [{"step": step, "far_half_nll": loss} for step, loss in judgements.items()]


@dataclass(frozen=True)
class TrainingResult:
    """What a training did."""

    output: Path = field(metadata={"json": None})
    objective: Objective[Any] = field(repr=False, metadata={"json": None})
    # What the models read before and after, where any document was.
    measurement: Measurement | None = field(repr=False, metadata={"json": None})

    @property
    def training(self) -> Training:
        return self.objective.training

    def to_json(self) -> dict[str, Json]:
        content = {"output": str(self.output), self.objective.plan_key: self.objective.to_json()}
        for part in fields(self):
            if (write := part.metadata.get("json", values_json)) is not None:
                content[part.name] = write(getattr(self, part.name))
        return content


@dataclass(frozen=True)
class Finetuned(TrainingResult):
    """What a fine-tuning did."""

    steps: int
    kept_step: int  # whose weights are written
    stopped_early: bool
    losses: Sequence[dict[str, float]] = field(repr=False)
    evaluations: Sequence[dict[str, float]] = field(repr=False)
    numbers: Numbers = field(repr=False)
    overlap: Overlap | None = field(repr=False)  # of the documents that these are over
    control: dict[str, Json] | None = field(repr=False)
    notes: Sequence[str]

    @property
    def passes(self) -> float:
        """How often the text was read for the weights that are written."""
        training = self.training
        return training.rows.passes * self.kept_step / int(training.settings.steps.value)


@dataclass(frozen=True)
class Fitted(TrainingResult):
    """What a fit did."""

    plan: Plan = field(metadata={"json": None})  # the one that was written
    kept: str  # "fitted" or "start"
    reason: str  # why that one
    start: str  # the closed form that it begins at and has to beat
    step: int  # the step that was kept; 0 = the start
    tokens: int  # read with gradients until the end
    forward_tokens: int  # read without
    method: str
    pair_factors: tuple[float, ...]
    attention_factor: float
    change: Value | None = field(repr=False)  # far half, fitted minus start, nats a token
    numbers: Numbers = field(repr=False)  # of base, start and fitted
    losses: Sequence[dict[str, float]] = field(repr=False)
    # Far half, nats a token, of the closed forms, and by step.
    closed_forms: Mapping[str, float] = field(repr=False, metadata={"json": None})
    judgements: dict[int, float] = field(repr=False, metadata={"json": judged_steps})
    notes: Sequence[str]
