"""What differs between trainings, the order that they share, and what each did.

An objective is counted on a model without weights, and carried out in the folder OUT.run: measure,
learn, choose, write.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from ropext.checkpoint.digests import Digests
from ropext.checkpoint.provenance import digest, weights_digest
from ropext.errors import InputError, Stopped
from ropext.evaluation.reader import Progress, Reader
from ropext.evaluation.variants import Computing, Variant
from ropext.jsontext import values_json
from ropext.models import processes
from ropext.models.head import foretold_bend
from ropext.models.load import skeleton
from ropext.models.memory import free_memory, memory_errors
from ropext.narration import (
    Call,
    Hooks,
    Show,
    kept_after_interrupt,
    pausing,
    told,
    told_of_files,
    unseen,
)
from ropext.options.fields import NUMBERS
from ropext.planning import Plan
from ropext.results.measurement import MeasuredModel, Measurement, Store
from ropext.results.overlap import Overlap
from ropext.results.values import Value
from ropext.tasks import Item
from ropext.training import defaults, loss, models, trainer
from ropext.training.judge import Numbers
from ropext.training.rows import Row
from ropext.training.trainer import History, Optimisation
from ropext.training.training import Training
from ropext.workdir import USED, has_work

# Layers are run again in the backward pass unless what they keep for it takes less than this share
# of the free memory, which saves a quarter of the time. Kept are so many bytes for each token and
# hidden channel of a layer (Korthikanti et al. 2022, section 4.1, without the square of scores).
KEPT_BYTES = 34
PLENTY = 0.125
# Copies of each trained number: itself, its gradient, and AdamW's two moments.
COPIES = 4


@dataclass(frozen=True)
class Counts:
    """What a training takes, counted on a model without weights and adapter."""

    targets: tuple[str, ...]  # what is trained
    moving: int  # parameters in it
    moving_bytes: int  # with gradients and the optimiser's state
    weight_bytes: int  # of the model that is read, in all devices together
    recompute: bool  # layers are run again in the backward pass
    sliced: str | None  # why the loss is not sliced


class Objective(ABC):
    """Which parameters of a model move, what is measured of it, and how the winner is chosen and
    written. From `begin` on it holds the state of one process of the run."""

    command: ClassVar[str]
    plan_key: ClassVar[str]  # of the plan in the result's JSON
    out_of_memory: ClassVar[str]  # what helps
    title: str  # what is done, in a clause
    remarks: Sequence[str]  # what is said of it beforehand
    facts: Mapping[str, Any] = {}  # what --json says of this kind alone
    counts: Counts
    folder: Path
    finish: Callable[[Path], None] | None = None  # adds to a fit's OUT, before that has its name
    output: Path
    call: Call

    def __init__(self, training: Training) -> None:
        self.training = training
        self.judge = training.judge
        self.snapshot = training.snapshot
        self.settings = training.settings
        self.context = training.context
        self.target = training.target
        self.notes: list[str] = []
        self.models: dict[str, MeasuredModel] = {}  # what was measured, by its labels

    # What is known beforehand.

    @property
    @abstractmethod
    def forward_tokens(self) -> int:
        """Tokens read without gradients."""

    @abstractmethod
    def moving(self, model: Any) -> tuple[Sequence[str], int, int]:
        """What is trained of a model without weights: names, parameters and their bytes. What the
        device, or the launch, cannot do is refused."""

    def manifest(self, show: Show = unseen) -> dict[str, Any]:
        """What decides the numbers. Weights that are not remembered are read for it, which is
        shown."""
        chosen = {name: setting.value for name, setting in self.settings.named.items()}
        return {
            "config": digest(self.snapshot.config),
            "weights": weights_digest(self.snapshot, Digests(show)),
            "data": self.training.data.digest(),
            "judging": [document.key for document in self.judge.documents] if self.judge else [],
            **self.facts,
            "options": self.training.options.deciding(NUMBERS) | chosen,
        }

    @property
    def tokens(self) -> int:
        """Read with gradients."""
        return self.settings.tokens

    def count(self) -> None:
        """Count on a model without weights; what cannot be trained is refused."""
        training = self.training
        settings = self.settings
        options = training.options
        models.check_tracker(options.report_to)
        model = skeleton(self.snapshot)
        rows = defaults.micro_rows(
            options, settings.longest, settings.per_step // processes.readers()
        )
        config = model.config.get_text_config()
        size = models.dtype(options).itemsize
        # Of each row, what one process reads.
        tokens = rows * settings.longest // processes.of_each_row()
        activations = KEPT_BYTES * tokens * config.hidden_size * config.num_hidden_layers
        reason = foretold_bend(model)
        weight_bytes = size * sum(parameter.numel() for parameter in model.parameters())
        targets, moving, moving_bytes = self.moving(model)
        self.counts = Counts(
            targets=tuple(targets),
            moving=moving,
            moving_bytes=COPIES * moving_bytes,
            weight_bytes=weight_bytes,
            recompute=activations > PLENTY * free_memory(models.device(options)),
            sliced="a masked language model takes its own" if training.masking else reason,
        )

    def to_json(self) -> dict[str, Any]:
        """What `--dry-run --json` shows."""
        training = self.training
        settings = self.settings
        counts = self.counts
        options = training.options
        sliced = counts.sliced
        return {
            "model": self.snapshot.name,
            "context": self.context,
            "target": self.target,
            "strategy": options.strategy,
            "packing": options.packing,
            **self.facts,
            "targets": list(counts.targets),
            "moving": counts.moving,
            "settings": values_json(settings.named),
            "steps": settings.steps.value,
            "tokens": self.tokens,
            "forward_tokens": self.forward_tokens,
            "weight_bytes": counts.weight_bytes,
            "moving_bytes": counts.moving_bytes,
            "recompute": counts.recompute,
            "documents": len(training.rows.documents),
            "documents_too_short": training.rows.too_short,
            "judging_documents": training.judged,
            "passes": training.rows.passes,
            "overlap": values_json(training.overlap),
            "loss": "sliced" if sliced is None else f"whole logits: {sliced}",
            "notes": list(self.remarks),
        }

    # How it goes.

    @abstractmethod
    def measure(self, pause: Show) -> None:
        """Read what is to be known of the models before the training."""

    @abstractmethod
    def learn(self) -> None:
        """Train."""

    @abstractmethod
    def choose(self, pause: Show) -> "TrainingResult | None":
        """Read what was trained, and choose what is written."""

    @abstractmethod
    def write(self, result: Any, show: Show) -> None:
        """Write OUT as a whole or not at all."""

    def run(self, folder: Path, output: Path, call: Call) -> "TrainingResult | None":
        """Go the whole way, from what the folder has on."""
        self.folder = folder
        self.output = output
        self.call = call
        self.say = call.hooks.say
        self.show = told(self.say)
        after = f"what is finished is kept in {folder}; run the same command to resume"
        with kept_after_interrupt(after, lambda: has_work(folder)):
            with self._guarded(folder):
                with pausing(self.say, self.show) as pause:
                    self.measure(pause)
                self.learn()
                with pausing(self.say, self.show) as pause:
                    result = self.choose(pause)
            if result is not None and processes.is_main():
                with self._guarded(output):
                    self.say("writing, and proving what stock transformers builds from it")
                    self.write(result, told_of_files(self.say))
        return result

    @contextmanager
    def _guarded(self, folder: Path) -> Iterator[None]:
        """Out of memory, and a full or failing disk, become a sentence; the checkpoints before it
        are kept."""
        with memory_errors(self.out_of_memory), writing_errors(folder):
            yield

    def note(self, sentence: str) -> None:
        """Tell, now and in the result."""
        self.notes.append(sentence)
        self.say(sentence)

    @property
    def measured(self) -> Measurement:
        """All models that were read by what judges."""
        assert self.judge is not None
        return Measurement(self.judge.frame, self.models, self.judge.described)

    def read(
        self,
        computing: Computing,
        variants: Sequence[Variant],
        pause: Show,
        items: Sequence[Item] | None = None,
    ) -> Mapping[str, MeasuredModel]:
        """Have variants read what judges, or answer `items`, each by itself, in its place. It is
        kept, so that a run that goes on does not do it again."""
        assert self.judge is not None
        reads = self.judge
        folder = self.folder / "readings"
        if items is not None:
            reads = replace(reads, documents=(), questions=tuple((item,) for item in items))
        stores = {v.label: Store(folder / v.label, writes=processes.is_main()) for v in variants}
        progress = Progress(hooks=Hooks(show=pause))
        return Reader(computing).measure(variants, reads, stores, progress).models

    def check_jumps(self, model: Any) -> None:
        """Refuse short rows where their second chunk would not see the first."""
        if self.training.options.strategy != "pose":
            return
        jump = self.target - loss.PROBE
        if not processes.by_first(lambda: loss.chunks_are_joined(model, jump)):
            raise InputError(
                "--strategy pose: in this model's attention the second chunk of a row sees "
                "nothing of the first, so it would learn nothing; use --strategy full"
            )

    def first_steps(self) -> dict[str, bytes]:
        """The log of what first steps took, as a file of the result."""
        log = self.folder / USED
        return {USED: log.read_bytes()} if log.is_file() else {}

    def optimise(
        self, label: str, model: Any, rows: Sequence[Row], training: Training, **more: Any
    ) -> History:
        """Train what of a model can be trained, from the last checkpoint on."""
        place = self.folder / label
        recompute = self.counts.recompute
        return trainer.train(
            Optimisation(training, model, rows, place, recompute, **more), self.say
        )


@contextmanager
def writing_errors(folder: Path) -> Iterator[None]:
    """A full or failing disk becomes a sentence; the checkpoints before it are kept."""
    from safetensors import SafetensorError

    try:
        yield
    except OSError as error:
        if error.errno is None:  # transformers' own, about a model
            raise
        reason = error.strerror or type(error).__name__
    except (SafetensorError, RuntimeError) as error:
        # What safetensors (Rust) and torch.save (C++) make of an error of the file system.
        words = ("os error", "file write failed", "unexpected pos")
        if not any(known in str(error) for known in words):
            raise
        cause = re.search(r"[^:]*\(os error \d+\)", str(error))
        reason = cause[0].strip() if cause else "a file could not be written whole"
    else:
        return
    raise Stopped(
        f"{folder} cannot be written: {reason}; finished checkpoints are kept; run the same "
        "command to resume"
    )


def judged_steps(judgements: Mapping[int, float]) -> list[dict[str, float]]:
    """The judged steps of a fit as JSON."""
    return [{"step": step, "far_half_nll": loss} for step, loss in judgements.items()]


@dataclass(frozen=True)
class TrainingResult:
    """What a training did."""

    output: Path
    objective: Objective = field(repr=False)
    # What the models read before and after, where any document was.
    measurement: Measurement | None = field(repr=False, metadata={"json": None})

    @property
    def training(self) -> Training:
        return self.objective.training

    def to_json(self) -> dict[str, Any]:
        content = {"output": str(self.output), self.objective.plan_key: self.objective.to_json()}
        for part in fields(self)[2:]:
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
    control: dict[str, Any] | None = field(repr=False)
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
