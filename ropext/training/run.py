"""The order of a fine-tuning: read, estimate, measure, train, (control,) measure again, write."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropext import corpus
from ropext.checkpoint import Snapshot
from ropext.checkpoint.provenance import digest, weights_digest
from ropext.checkpoint.staging import check_output, recover
from ropext.checkpoint.weights import read_header
from ropext.corpus.selection import REMEDY
from ropext.errors import UsageError
from ropext.evaluation import work
from ropext.evaluation.loading import silenced
from ropext.narration import Say, silent
from ropext.options.training import Finetune
from ropext.results.overlap import Overlap, Trained, as_json, overlap, trained_in
from ropext.training import data as training_data
from ropext.training import defaults, sharing
from ropext.training.data import LARGEST_SHARE, QuestionRows, TrainingData
from ropext.training.defaults import Settings
from ropext.training.estimates import TrainingEstimate
from ropext.training.origin import Origin, open_origin
from ropext.training.sequences import Full, Pose, Rows, TrainingDocument, glue, rows_in
from ropext.workdir import Workdir, release

if TYPE_CHECKING:
    from ropext.training.evaluating import Judge
    from ropext.training.fitting import PreparedFit as FitPrepared


def is_main() -> bool:
    """Whether this process tells and writes; the others of `accelerate launch` only train."""
    return int(os.environ.get("RANK", "0")) == 0


@dataclass(frozen=True)
class Prepared:
    """All that is known before a weight is loaded."""

    origin: Origin
    options: Finetune
    settings: Settings
    data: TrainingData
    rows: Rows
    padding: int
    encoder: corpus.DocumentEncoder
    judged: tuple[corpus.RawDocument, ...]  # of --eval

    @property
    def snapshot(self) -> Snapshot:
        """What is trained."""
        return self.origin.snapshot

    @property
    def evaluated(self) -> int:
        """Documents that are read before, during and after."""
        return len(self.judge.documents) if self.judge else 0

    @cached_property
    def judge(self) -> "Judge | None":
        """The documents of --eval that reach the target, or those held out of DATA; None where
        none is."""
        from ropext.training import evaluating

        options, lengths = self.options, (self.origin.context, self.origin.target)
        if not options.eval_documents or sharing.is_fsdp():
            return None
        if options.evaluate is not None:
            found = evaluating.named(self.judged, self.encoder, lengths[1], options.eval_documents)
        else:
            held = self.data.held_out[: options.eval_documents]
            found = tuple(own.cut(lengths[1]) for own in held)
        return evaluating.judge_of(found, lengths, options.seed) if found else None

    @cached_property
    def trained_on(self) -> Trained:
        """What the result will have been trained on, by its extension's record and this run."""
        before = trained_in(self.origin.record)
        return before.with_more(self.data.trained) if before else self.data.trained

    @cached_property
    def overlap(self) -> Overlap | None:
        """The documents of the evaluations that were trained on; None where there are none."""
        judged = self.judge.documents if self.judge else ()
        return overlap(self.trained_on, [own.known_by for own in judged])

    @property
    def is_unjudged(self) -> bool:
        """Whether there is nothing to evaluate on, although that was not asked for."""
        return self.judge is None and self.options.eval_documents > 0

    def why_no_judge(self) -> str:
        """Why no document is read."""
        if sharing.is_fsdp():
            return (
                "FSDP shares the weights, and reading needs all of them in one process; when it "
                "is done: ropext eval OUT --data DATA --device-map auto"
            )
        return (
            f"fewer than {LARGEST_SHARE} of its {self.data.read} documents reach the target, and "
            f"of fewer none is held out; name others with --eval, or {REMEDY}"
        )

    def check(self) -> None:
        """Documents that were named for the evaluations must reach the target."""
        _ = self.judge

    def manifest(self) -> dict[str, Any]:
        """What decides the numbers."""
        deciding = (
            "strategy", "packing", "dropout", "targets", "train_norms", "train_embeddings",
            "train_spectrum", "qlora", "retrieval_share", "seed", "dtype", "attn_implementation",
            "eval_every", "eval_documents", "patience",
        )  # fmt: skip
        options = dict(self.options)
        return {
            "config": digest(self.origin.snapshot.config),
            "weights": weights_digest(self.origin.snapshot),
            "data": self.data.digest(),
            "evaluation": [own.key for own in self.judge.documents] if self.judge else [],
            "settings": {k: v["value"] for k, v in self.settings.to_json().items()},
            "options": {name: options[name] for name in deciding},
        }


@dataclass(frozen=True)
class Planned:
    """What `--dry-run` shows."""

    prepared: Prepared
    estimate: TrainingEstimate
    trained: int  # parameters
    targets: tuple[str, ...]
    sliced: str | None  # why the loss is not sliced
    tight: str | None = None  # why memory may not be enough

    def to_json(self) -> dict[str, Any]:
        prepared = self.prepared
        return {
            "model": prepared.origin.snapshot.name,
            "context": prepared.origin.context,
            "target": prepared.origin.target,
            "strategy": prepared.options.strategy,
            "packing": prepared.options.packing,
            "settings": prepared.settings.to_json(),
            "targets": list(self.targets),
            "trained_parameters": self.trained,
            "estimate": self.estimate.to_json(),
            "documents": len(prepared.rows.documents),
            "documents_too_short": prepared.rows.too_short,
            "passes": prepared.rows.passes,
            "evaluation_documents": prepared.evaluated,
            "overlap": as_json(prepared.overlap),
            "loss": "sliced" if self.sliced is None else f"whole logits: {self.sliced}",
            "memory_warning": self.tight,
        }


@dataclass(frozen=True)
class Finetuned:
    """What a run did."""

    output: Path
    planned: Planned
    steps: int
    stopped_early: bool
    losses: tuple[dict[str, float], ...]
    evaluations: tuple[dict[str, float], ...]
    numbers: dict[str, Any]  # label -> values as JSON
    overlap: dict[str, Any] | None  # of the documents that these are over
    control: dict[str, Any] | None
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "output": str(self.output),
            "plan": self.planned.to_json(),
            "steps": self.steps,
            "stopped_early": self.stopped_early,
            "losses": list(self.losses),
            "evaluations": list(self.evaluations),
            "numbers": self.numbers,
            "overlap": self.overlap,
            "control": self.control,
            "notes": list(self.notes),
        }


def finetune(
    model: str,
    source: str,
    output: Path,
    options: Finetune,
    say: Say,
    *,
    force: bool = False,
) -> Finetuned:
    """Everything, from the last checkpoint on where the same run was interrupted."""
    with silenced():
        prepared = prepare(model, source, options)
        prepared.check()
        if not is_main():
            say = silent
        place = workdir_of(prepared, "finetune", output, force, recovers=is_main())
        planned = plan(prepared)
        with place.claimed(force, *work.processes()):
            from ropext.training import session

            return session.Session(planned, place.folder, output, force, say).run()


def dry_run(
    model: str, source: str, options: Finetune, output: Path | None = None, force: bool = False
) -> Planned:
    """All but the training; what it would refuse is refused."""
    with silenced():
        prepared = prepare(model, source, options)
        prepared.check()
        if output is not None:
            workdir_of(prepared, "finetune", output, force).check(force)
        return plan(prepared)


def workdir_of(
    prepared: "Prepared | FitPrepared",
    command: str,
    output: Path,
    force: bool,
    recovers: bool = False,
) -> Workdir:
    """Where a run keeps what is not finished, beside an output that may be written. `recovers`
    first clears away what a kill left, which may have come when all was written."""
    place = Workdir(output, command, prepared.manifest())
    if recovers:
        recover(output)
        release(place.folder, output)
    check_output(output, force=force, inputs=[prepared.snapshot.directory])
    return place


def prepare(model: str, source: str, options: Finetune) -> Prepared:
    """Read model, tokenizer and data; settle the settings."""
    origin = open_origin(model)
    parameters = stored_parameters(origin.snapshot)
    sizes = parameters, origin.context, origin.target
    settings = defaults.settings(options, *sizes)
    sharing.check_rows(settings.rows.value, settings.row_tokens.value)
    sharing.check_fsdp(qlora=options.qlora, train_spectrum=options.train_spectrum)
    tokenizer = _tokenizer(origin)
    vocabulary = origin.model.vocab_size
    encoder = corpus.DocumentEncoder(tokenizer, vocabulary, options.seed)
    strategy = _strategy(origin, options, settings)
    place = corpus.Source(source, options.column, options.split or "train", None)
    most = settings.rows.value * settings.steps.value * strategy.length
    glued = options.packing == "glued"
    data = training_data.read(
        corpus.split_documents(
            corpus.read_documents(place), options.split_documents, encoder, origin.target
        ),
        encoder,
        wanted_tokens=most if options.epochs is None else training_data.NO_LIMIT,
        row=1 if glued else strategy.length,
        target=origin.target,
        judging=options.eval_documents if options.evaluate is None else 0,
        streamed=place.is_streamed,
    )
    documents = list(data.documents)
    if glued:
        documents = glue(documents, tokenizer.eos_token_id, options.seed)
    settings = defaults.settings(options, *sizes, rows_in(documents, strategy), sharing.readers())
    count = settings.rows.value * settings.steps.value
    rows = Rows(documents, strategy, count, options.seed, _questions(options, encoder, documents))
    judged: tuple[corpus.RawDocument, ...] = ()
    if options.eval_documents and options.evaluate is not None:
        # A datasets id is evaluated on its test split, as `ropext eval` does.
        raw = corpus.read_documents(corpus.Source(options.evaluate, options.column))
        judged = tuple(corpus.split_documents(raw, options.split_documents, encoder, origin.target))
    padding = tokenizer.pad_token_id
    return Prepared(
        origin, options, settings, data, rows, 0 if padding is None else padding, encoder, judged
    )


def _questions(
    options: Finetune, encoder: corpus.DocumentEncoder, documents: Sequence[TrainingDocument]
) -> QuestionRows | None:
    if not options.retrieval_share:
        return None
    return QuestionRows(encoder, documents, options.retrieval_share, options.seed)


def _strategy(origin: Origin, options: Finetune, settings: Settings) -> Full | Pose:
    length = settings.row_tokens.value
    if options.strategy == "full":
        return Full(length)
    return Pose(length, origin.target, origin.two_sets_up_to)


def stored_parameters(snapshot: Snapshot) -> int:
    """As stored, from the headers."""
    total = 0
    for name in snapshot.weight_files:
        for tensor in read_header(snapshot.path(name)).tensors.values():
            size = 1
            for side in tensor.shape:
                size *= side
            total += size
    return total


def _tokenizer(origin: Origin) -> Any:
    from ropext.evaluation.loading import load_tokenizer

    return load_tokenizer(origin.snapshot, False)


def plan(prepared: Prepared) -> Planned:
    """Which layers are trained and what that takes, from a model without weights."""
    import torch
    from accelerate import init_empty_weights

    from ropext.evaluation.costs import shape_of
    from ropext.evaluation.loading import free_memory
    from ropext.training import adapters, estimates, loading

    options, settings = prepared.options, prepared.settings
    loading.check_tracker(options.report_to)
    device = loading.device(options)
    if options.qlora:
        loading.four_bits(device)
    if sharing.is_fsdp() and device.type == "cpu":
        raise UsageError(
            "launched with FSDP, but on a CPU, where accelerate makes DDP of it without a word: "
            "use GPUs, or the config that `ropext.training.launch` calls ddp"
        )
    model = loading.skeleton(prepared.origin.snapshot)
    names = adapters.target_names(model, options.targets)
    with init_empty_weights(include_buffers=False):
        joined = adapters.add_adapter(model, options, settings)
    base = joined.get_base_model()
    trained = sum(p.numel() for p in joined.parameters() if p.requires_grad)
    width = torch.empty((), dtype=loading.dtype(options, device)).element_size()
    eager = loading.is_eager(base, options.attn_implementation)
    masks = options.attn_implementation in (None, "sdpa")
    shape = replace(shape_of(base), dtype_bytes=width, eager=eager, masks=masks)
    share = settings.rows.value // sharing.readers()
    micro = defaults.micro_rows(options, settings.row_tokens.value, share)
    reason = loading.caps_logits(base)
    free = free_memory(device)
    found = estimates.estimate(
        shape, settings, trained, micro, free=free, sliced=reason is None, four_bits=options.qlora
    )
    tight = estimates.check_fits(
        found, shape, free, sliced=reason is None, ignored=options.ignore_memory
    )
    return Planned(prepared, found, trained, tuple(names), reason, tight)
