"""Define the results of trainings, as a caller gets them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self, get_type_hints

from ropext.base.errors import InputError
from ropext.base.jsontext import (
    HIDDEN,
    Json,
    JsonObject,
    read_object,
    read_values,
    values_json,
)
from ropext.base.table import Table
from ropext.planning import Plan
from ropext.results import FITTED
from ropext.results.measurement import Measurement
from ropext.results.overlap import Overlap, read_overlap
from ropext.results.report.result import Result
from ropext.results.values import Value
from ropext.training.data import Training
from ropext.training.judge import Numbers
from ropext.training.tables import finetune_table, fit_table

RESULT = "result.json"  # in a folder of OUT: what decides the result, and the result
DECIDES = "decides"  # its key for everything that decides the files of OUT
CONTENT = "result"
# A step or an evaluation, its numbers by their names; in JSON a number that is not finite is null.
Logged = Mapping[str, Any]
# A field's metadata: "name", its key; "json", how it becomes JSON.


def judged_steps(judgements: Mapping[int, float]) -> list[dict[str, float]]:
    """Return the judged steps of a fit as JSON."""
    return [{"step": step, "far_half_nll": loss} for step, loss in judgements.items()]


@dataclass(frozen=True, repr=False, eq=False)
class TrainingResult(Result):
    """The record of a finished training. Reports are made of it, and OUT keeps it."""

    lists = (".by_step",)

    file: ClassVar[str]  # of OUT, which keeps it
    counted_as: ClassVar[str]  # the key of what its dry run counts

    output: Path = field(metadata=HIDDEN)
    counted: JsonObject = field(metadata=HIDDEN)
    work: Training | None = field(metadata=HIDDEN)  # None if OUT was opened
    # The models' readings before and after, if any document was read.
    measurement: Measurement | None = field(metadata=HIDDEN)

    @property
    def training(self) -> Training:
        """Return the training whose result this is; refuse if an earlier call did it."""
        if self.work is None:
            raise self._finished_before_error()
        return self.work

    def _finished_before_error(self) -> InputError:
        """Return the error that an earlier call did the fine-tuning or fit, so its models and
        documents are not in memory."""
        return InputError(
            f"{self.output} was finished before, and its models and documents are not in memory; "
            "force=True (--force) trains again"
        )

    @property
    def is_from_before(self) -> bool:
        """Return whether an earlier call did the training."""
        return self.work is None

    @property
    def context(self) -> int:
        """Return the number of tokens that the model was trained on before the extension."""
        return int(self.counted["context"])

    @property
    def target(self) -> int:
        """Return the number of tokens that the model was extended to."""
        return int(self.counted["target"])

    def to_json(self) -> dict[str, Json]:
        """Return the result of a fine-tuning or fit, as its --json prints it."""
        content = {"output": str(self.output), self.counted_as: values_json(self.counted)}
        for part in fields(self):
            if (write := part.metadata.get("json", values_json)) is not None:
                content[part.metadata.get("name", part.name)] = write(getattr(self, part.name))
        return content

    @classmethod
    def of(cls, output: Path, content: JsonObject) -> Self:
        """Read result.json that a training left in OUT: its JSON, without the name of OUT."""
        kinds = get_type_hints(cls)
        kept: dict[str, Any] = {"output": output, "counted": content[cls.counted_as]}
        for part in fields(cls):
            if part.metadata != HIDDEN:
                value = content[part.metadata.get("name", part.name)]
                kept[part.name] = read_values(kinds[part.name], value, output / cls.file)
            else:
                kept.setdefault(part.name, None)
        return cls(**kept)

    def _same_documents(self) -> None:
        """Return None: the readings of each held-out document are gone with OUT.run."""


@dataclass(frozen=True, repr=False, eq=False)
class Finetuned(TrainingResult):
    """The result of a fine-tuning."""

    file = f"training/{RESULT}"
    counted_as = "plan"

    steps: int
    kept_step: int  # whose weights are written
    stopped_early: bool
    by_step: Sequence[Logged] = field(metadata={"name": "losses"})
    evaluations: Sequence[Logged]
    numbers: Numbers
    # Overlap of the documents that the numbers are over.
    overlap: Overlap | None
    control: dict[str, Json] | None
    notes: Sequence[str]

    @property
    def passes(self) -> float:
        """Return how often the training text was read for the weights that are written."""
        passes = float(self.counted["passes"])
        return passes * self.kept_step / int(self.counted["steps"])

    @property
    def title(self) -> str:
        """Name the output of a fine-tuning, and how far it was trained."""
        return f"<Finetuned in {self.output}: {self.kept_step} of {self.steps} steps>"

    @property
    def tables(self) -> list[Table]:
        """Return the table of the readings before and after the fine-tuning."""
        table = finetune_table(self.numbers, self.target, self.overlap, "On held-out documents")
        return [] if table is None else [table]


@dataclass(frozen=True, repr=False, eq=False)
class Fitted(TrainingResult):
    """The result of a fit."""

    file = f"fit/{RESULT}"
    counted_as = "planned"

    written: Plan | None = field(metadata=HIDDEN)  # None if OUT was opened
    kept: str  # "fitted" or "start"
    reason: str  # why that one
    start: str  # the closed form that it begins at and has to beat
    step: int  # the step that was kept; 0 = the start
    tokens: int  # read with gradients until the end
    forward_tokens: int  # read without
    method: str
    pair_factors: tuple[float, ...]
    attention_factor: float
    # Far half, fitted minus start, nats per token.
    change: Value | None
    numbers: Numbers  # of base, start and fitted
    by_step: Sequence[Logged] = field(metadata={"name": "losses"})
    # Far half, nats per token, of the closed forms, and by step.
    closed_forms: Mapping[str, float] = field(metadata=HIDDEN)
    judgements: dict[int, float] = field(metadata={"json": judged_steps})
    notes: Sequence[str]

    @property
    def plan(self) -> Plan:
        """Return the plan that a fit wrote after its training; refuse if an earlier call did the
        training."""
        if self.written is None:
            raise self._finished_before_error()
        return self.written

    @property
    def title(self) -> str:
        """Name the output of a fit, and the reason for its spectrum."""
        return f"<Fitted in {self.output}: {self.reason}>"

    @property
    def tables(self) -> list[Table]:
        """Return the table of the readings of a fit on held-out documents."""
        lengths = (self.context, self.target)
        wrote_fitted = self.kept == FITTED
        table = fit_table(
            self.numbers, self.start, lengths, self.overlap, wrote_fitted=wrote_fitted
        )
        return [table]

    @property
    def overlap(self) -> Overlap | None:
        """Return the overlap of the documents that judge a fit with the documents that were
        trained on."""
        return read_overlap(self.counted["overlap"], self.output / self.file)

    @classmethod
    def of(cls, output: Path, content: JsonObject) -> Self:
        """Read result.json that a fit left in OUT; the closed forms are in a separate file."""
        judgements = dict[int, float]()
        for judged in content["judgements"]:
            judgements[judged["step"]] = judged["far_half_nll"]
        forms = read_object(output / "fit/numbers.json")["closed_forms"]
        result = super().of(output, {**content, "judgements": judgements})
        return replace(result, closed_forms=forms)


def read_training_result(output: Path) -> Finetuned | Fitted | None:
    """Read the result that a training left in its output, the last one of two; None if there is
    none."""
    kinds: tuple[type[Finetuned], type[Fitted]] = (Finetuned, Fitted)
    for kind in kinds:
        if not (output / kind.file).is_file():
            continue
        try:
            return kind.of(output, read_object(output / kind.file)[CONTENT])
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{output / kind.file} is damaged: {error!r}") from error
    return None
