"""What the two trainings share before and around their sessions: a preparation, a plan, the folder.

A training is prepared (read, divided, settled) before a weight is loaded, planned (what it takes)
from a model without weights, and then handed to its session (`session`), in the folder OUT.run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from ropext import guard
from ropext.checkpoint import Snapshot
from ropext.checkpoint.provenance import read_record
from ropext.checkpoint.staging import check_output, settle_output
from ropext.corpus import DocumentEncoder
from ropext.evaluation import work
from ropext.evaluation.loading import free_memory, load_tokenizer, silenced
from ropext.evaluation.reading import Masking
from ropext.narration import Say, silent
from ropext.options.training import Training
from ropext.results.overlap import NOTHING, Overlap, Trained, overlap, trained, trained_in
from ropext.results.values import values_json
from ropext.training import defaults, models, sharing
from ropext.training.data import TrainingData
from ropext.training.defaults import Settings
from ropext.training.judge import Judge
from ropext.training.rows import Rows
from ropext.workdir import Workdir, beside, release

# Layers are run again in the backward pass unless what they keep for it takes less than this share
# of the free memory, which saves a quarter of the time. Kept are so many bytes for each token and
# hidden channel of a layer (Korthikanti et al. 2022, section 4.1, without the square of scores).
KEPT_BYTES, PLENTY = 34, 0.125
# Copies of each trained number: itself, its gradient, and AdamW's two moments.
COPIES = 4


@dataclass(frozen=True)
class PreparedTraining:
    """All that is known of a training before a weight is loaded."""

    command: ClassVar[str]
    snapshot: Snapshot  # of what is trained
    options: Training
    context: int
    target: int
    settings: Settings
    data: TrainingData
    encoder: DocumentEncoder
    rows: Rows
    judge: Judge | None  # None where no document is read
    masking: Masking | None = field(default=None, kw_only=True)  # of masked language models

    @property
    def title(self) -> str:
        """What is done, in a clause."""
        raise NotImplementedError

    @property
    def remarks(self) -> Sequence[str]:
        """What is said of it beforehand."""
        raise NotImplementedError

    @property
    def forward_tokens(self) -> int:
        """Tokens read without gradients."""
        raise NotImplementedError

    @property
    def judged(self) -> int:
        """Documents that are read before, during and after."""
        return len(self.judge.documents) if self.judge else 0

    def facts(self) -> dict[str, Any]:
        """What --json says of this kind of training alone."""
        return {}

    @property
    def padding(self) -> int:
        """The token that fills up rows."""
        return self.encoder.tokenizer.pad_token_id or 0

    @cached_property
    def trained_on(self) -> Trained:
        """What the result will have been trained or fitted on, by the record and this run."""
        before = trained_in(read_record(self.snapshot.directory))
        return before.with_more(self.data.trained) if before else self.data.trained

    @property
    def used(self) -> Trained:
        """The same, and the documents that chose the step."""
        chooses = self.judge if self.command == "fit" or self.settings.patience else None
        chose = trained(own.known_by[1:] for own in chooses.documents) if chooses else None
        return self.trained_on.with_more(replace(NOTHING, chose=chose))

    @cached_property
    def overlap(self) -> Overlap | None:
        """The documents that judge and were trained on, or chose; None where there are none."""
        judged = self.judge.documents if self.judge else ()
        known = self.used if self.settings.patience else self.trained_on
        return overlap(known, [own.known_by for own in judged])

    @property
    def lineage(self) -> str:
        """What is said of documents that judge and were used before, and of those kept out."""
        said = [self.overlap.sentence] if self.overlap and self.overlap.sentence else []
        if self.data.kept_out:
            said.append(f"{self.data.kept_out} documents of the verdict are kept out of training")
        return "; ".join(said)

    def manifest(self) -> dict[str, Any]:
        """What decides the numbers."""
        raise NotImplementedError


Prepared = TypeVar("Prepared", bound=PreparedTraining)
Done = TypeVar("Done")


@dataclass(frozen=True)
class Planned(Generic[Prepared]):
    """What `--dry-run` shows."""

    prepared: Prepared
    targets: tuple[str, ...]  # what is trained
    moving: int  # parameters in it
    moving_bytes: int  # with gradients and the optimiser's state
    weight_bytes: int  # of the model that is read, in all devices together
    recompute: bool  # layers are run again in the backward pass
    sliced: str | None  # why the loss is not sliced

    @property
    def tokens(self) -> int:
        """Read with gradients."""
        return self.prepared.settings.tokens

    def to_json(self) -> dict[str, Any]:
        prepared, rows = self.prepared, self.prepared.rows
        options, settings = prepared.options, prepared.settings
        return {
            "model": prepared.snapshot.name,
            "context": prepared.context,
            "target": prepared.target,
            "strategy": options.strategy,
            "packing": options.packing,
            **prepared.facts(),
            "targets": list(self.targets),
            "moving": self.moving,
            "settings": settings.to_json(),
            "steps": settings.steps.value,
            "tokens": self.tokens,
            "forward_tokens": prepared.forward_tokens,
            "weight_bytes": self.weight_bytes,
            "moving_bytes": self.moving_bytes,
            "recompute": self.recompute,
            "documents": len(rows.documents),
            "documents_too_short": rows.too_short,
            "judging_documents": prepared.judged,
            "passes": rows.passes,
            "overlap": values_json(prepared.overlap),
            "loss": "sliced" if self.sliced is None else f"whole logits: {self.sliced}",
            "notes": list(prepared.remarks),
        }


def encoder_of(snapshot: Snapshot, vocabulary: int | None, seed: int) -> DocumentEncoder:
    """The tokenizer beside a model, as documents need it."""
    return DocumentEncoder(load_tokenizer(snapshot, False), vocabulary, seed)


def counted(prepared: PreparedTraining, model: Any) -> dict[str, Any]:
    """Fields of a plan that follow from the model, which has no weights and no adapter yet."""
    options, settings = prepared.options, prepared.settings
    share = settings.per_step // sharing.readers()
    rows = defaults.micro_rows(options, settings.longest, share)
    config, size = model.config.get_text_config(), models.dtype(options).itemsize
    # Of each row, what one process reads.
    tokens = rows * settings.longest // sharing.of_each_row()
    kept = KEPT_BYTES * tokens * config.hidden_size * config.num_hidden_layers
    reason = models.caps_logits(model)
    return {
        "weight_bytes": size * sum(own.numel() for own in model.parameters()),
        "recompute": kept > PLENTY * free_memory(models.device(options)),
        "sliced": reason if prepared.masking is None else "a masked language model takes its own",
    }


def train(
    prepare: Callable[[], Prepared],
    plan: Callable[[Prepared], Planned[Prepared]],
    session: Callable[[Planned[Prepared], Path, Say], Done],
    output: Path,
    say: Say,
    force: bool,
    read: guard.Named,
) -> Done:
    """Everything, from the last checkpoint on where the same run was interrupted. `read` names what
    is read, by flag."""
    check_places(read, output)
    with silenced():
        prepared = prepare()
        place = _workdir(prepared, output, force, recovers=sharing.is_main())
        planned = plan(prepared)
        with place.claimed(force, *work.processes(), say):
            return session(planned, place.folder, say if sharing.is_main() else silent)


def check_places(read: guard.Named, output: Path) -> None:
    """Refuse to write over, into or around what is read."""
    guard.check(read, {"--output": output, "where the run works": beside(output)})


def dry_run(
    prepare: Callable[[], Prepared],
    plan: Callable[[Prepared], Planned[Prepared]],
    output: str | Path | None,
    force: bool,
    read: guard.Named,
) -> Planned[Prepared]:
    """All but the training; what it would refuse is refused."""
    if output is not None:
        check_places(read, Path(output))
    with silenced():
        prepared = prepare()
        if output is not None:
            _workdir(prepared, Path(output), force).check(force)
        return plan(prepared)


def _workdir(
    prepared: PreparedTraining, output: Path, force: bool, recovers: bool = False
) -> Workdir:
    """Where a run keeps what is not finished, beside an output that may be written. `recovers`
    first clears away what a kill left, which may have come when all was written."""
    place = Workdir(output, prepared.command, prepared.manifest())
    settle, snapshot = settle_output if recovers else check_output, prepared.snapshot
    record = read_record(snapshot.directory)
    base = [str(record.base.get("name") or "")] if record else []
    try:
        settle(output, force=force, inputs=[snapshot.directory, *base])
    finally:
        if recovers:
            release(place.folder, output)
    return place
