"""What the two trainings share before and around their sessions: a preparation, a plan, the folder.

A training is prepared (read, divided, settled) before a weight is loaded, planned (what it takes)
from a model without weights, and then handed to its session (`session`), in the folder OUT.run.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from ropext import guard
from ropext.checkpoint import Snapshot
from ropext.checkpoint.provenance import read_record
from ropext.checkpoint.staging import check_output, settle_output
from ropext.corpus import DocumentEncoder
from ropext.evaluation import work
from ropext.evaluation.costs import Shape, Timed
from ropext.evaluation.loading import load_tokenizer, memory_errors, silenced, with_attention
from ropext.evaluation.reading import Masking
from ropext.narration import Say, silent
from ropext.options.training import Finetune, Training
from ropext.results.overlap import NOTHING, Overlap, Trained, overlap, trained, trained_in
from ropext.training import defaults, estimates, models, sharing
from ropext.training.data import TrainingData
from ropext.training.defaults import Settings
from ropext.training.estimates import TrainingEstimate, row_flops
from ropext.training.judge import Judge
from ropext.workdir import Workdir, beside, release


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
    judge: Judge | None  # None where no document is read
    masking: Masking | None = field(default=None, kw_only=True)  # of masked language models

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


@dataclass(frozen=True)
class PlannedTraining:
    """What `--dry-run` shows."""

    prepared: PreparedTraining
    estimate: TrainingEstimate
    moving: int  # parameters that are trained, or numbers of a spectrum
    sliced: str | None  # why the loss is not sliced
    tight: str | None  # why memory may not be enough
    time: Timed | None = field(default=None, kw_only=True)  # where it was asked for

    @property
    def trainings(self) -> int:
        """How often all of the estimate's FLOPs are done."""
        return 1

    @property
    def forward_tokens(self) -> int:
        """Tokens read without gradients."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """All but the time, as JSON."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        return self.facts() | ({} if self.time is None else {"time": asdict(self.time)})


Prepared = TypeVar("Prepared", bound=PreparedTraining)
Planned = TypeVar("Planned", bound=PlannedTraining)
Done = TypeVar("Done")


def encoder_of(snapshot: Snapshot, vocabulary: int | None, seed: int) -> DocumentEncoder:
    """The tokenizer beside a model, as documents need it."""
    return DocumentEncoder(load_tokenizer(snapshot, False), vocabulary, seed)


def taken(
    prepared: PreparedTraining, model: Any, moving: int
) -> tuple[TrainingEstimate, str | None, str | None]:
    """What a training takes, told from a model without weights; why its loss will need whole
    logits; and why memory may not be enough (which is refused where it surely is not)."""
    import torch

    from ropext.evaluation.costs import shape_of
    from ropext.evaluation.loading import free_memory

    options, settings = prepared.options, prepared.settings
    lora, four_bits = settings.lora is not None, isinstance(options, Finetune) and options.qlora
    device = models.device(options)
    shape = replace(
        shape_of(model),
        dtype_bytes=torch.empty((), dtype=models.dtype(options)).element_size(),
        eager=models.is_eager(model, options.attn_implementation),
        masks=options.attn_implementation in (None, "sdpa"),
    )
    share = settings.per_step // sharing.readers()
    micro = defaults.micro_rows(options, settings.longest, share)
    reason, free = models.caps_logits(model), free_memory(device)
    reason = reason if prepared.masking is None else "a masked language model takes its own"
    sliced = reason is None
    found = estimates.estimate(
        shape, settings, moving, micro, free=free, sliced=sliced, four_bits=four_bits, lora=lora
    )
    ignored = options.ignore_memory
    tight = estimates.check_fits(found, shape, free, sliced=sliced, lora=lora, ignored=ignored)
    return found, reason, tight


def train(
    prepare: Callable[[], Prepared],
    plan: Callable[[Prepared], Planned],
    session: Callable[[Planned, Path, Say], Done],
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
    plan: Callable[[Prepared], Planned],
    output: str | Path | None,
    force: bool,
    read: guard.Named,
    time: bool = False,
) -> Planned:
    """All but the training; what it would refuse is refused. With `time` a step is timed."""
    if output is not None:
        check_places(read, Path(output))
    with silenced():
        prepared = prepare()
        if output is not None:
            _workdir(prepared, Path(output), force).check(force)
        planned = plan(prepared)
        return replace(planned, time=_timed(planned)) if time else planned


def _timed(planned: PlannedTraining) -> Timed:
    """By one row, forward and backward."""
    import torch

    from ropext.evaluation import timing
    from ropext.training.loss import use_sliced_loss

    prepared, estimate = planned.prepared, planned.estimate
    options, target = prepared.options, prepared.target
    device, dtype = models.device(options), models.dtype(options)

    def work(shape: Shape) -> float:
        reading = planned.forward_tokens * shape.flops(target) / target
        return planned.trainings * estimate.flops + reading

    def prepare(model: Any) -> timing.Step:
        model.config.use_cache = False
        use_sliced_loss(model)
        if isinstance(options, Finetune) and prepared.settings.lora is not None:
            model = models.add_adapter(model, options, prepared.settings.lora)
        else:
            model.enable_input_require_grads()
        model.train()
        if estimate.recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})

        def step(_: Any, ids: torch.Tensor) -> None:
            with torch.autocast(device.type, dtype, enabled=dtype == torch.bfloat16):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()

        return step

    skeleton = with_attention(
        options.attn_implementation,
        lambda kind: models.skeleton(prepared.snapshot, kind, dtype=dtype),
    )
    said = "out of memory in the step that is timed; leave --time out, or give --dtype bfloat16"
    with memory_errors(said):
        return timing.timed(
            skeleton,
            device,
            dtype,
            prepared.settings.longest,
            work,
            partial(row_flops, recompute=estimate.recompute),
            prepare,
            "a row",
        )


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
