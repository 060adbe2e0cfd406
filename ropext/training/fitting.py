"""A fit before its training: read, divide, plan, estimate. The order of what follows is in
fit_session."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropext import corpus
from ropext.checkpoint import Snapshot, open_snapshot, with_weights
from ropext.checkpoint.provenance import digest, read_record, weights_digest
from ropext.errors import UnsupportedModel, UsageError
from ropext.evaluation import work
from ropext.evaluation.loading import silenced
from ropext.families import Model
from ropext.narration import Say, silent
from ropext.options.training import Finetune, Fit
from ropext.planning import Plan, require_help
from ropext.results.overlap import Overlap, Trained, as_json, overlap, trained_in
from ropext.tasks import check_amount
from ropext.training import defaults, fit_data, sharing
from ropext.training.defaults import Setting, Settings
from ropext.training.estimates import TrainingEstimate
from ropext.training.fit_data import FitDocuments, FitQuestions, FitRows
from ropext.training.fit_judging import FitJudge, few, judge_of
from ropext.training.fit_starts import check_geometry, choose_starts
from ropext.training.run import (
    is_main,
    workdir_of,
)
from ropext.training.searching import DOCUMENTS, most_tokens

if TYPE_CHECKING:
    from ropext.training.fit_writing import Fitted

# Measured on the bundled model (docs/fitting.md): the peak of a cosine after a short warm-up.
LEARNING_RATE = 0.02
BETAS = (0.9, 0.95)
MEASURED = "measured on the bundled model (docs/fitting.md)"
NOT_TRAINED = Setting(0, "no LoRA")


@dataclass(frozen=True)
class Base:
    """The model that is fitted."""

    snapshot: Snapshot
    model: Model


@dataclass(frozen=True)
class PreparedFit:
    """All that is known before a weight is loaded."""

    base: Base
    options: Fit
    within: str
    starts: Mapping[str, Plan]  # the closed forms to choose from
    settings: Settings
    documents: FitDocuments
    questions: FitQuestions | None
    rows: FitRows
    judge: FitJudge
    padding: int
    notes: tuple[str, ...]

    @property
    def snapshot(self) -> Snapshot:
        """What is fitted."""
        return self.base.snapshot

    @property
    def plan(self) -> Plan:
        """Any of the starts: what they share (context, target, geometry)."""
        return next(iter(self.starts.values()))

    @cached_property
    def trained_on(self) -> Trained:
        """What the result will have been trained or fitted on."""
        before = trained_in(read_record(self.base.snapshot.directory))
        own = self.documents.trained
        return before.with_more(own) if before else own

    @cached_property
    def overlap(self) -> Overlap | None:
        """The documents that judge and were trained on."""
        return overlap(self.trained_on, [own.known_by for own in self.documents.judging])

    @property
    def ceiling(self) -> float:
        """On every pair factor."""
        return self.options.ceiling * self.plan.factor

    def manifest(self) -> dict[str, Any]:
        """What decides the numbers."""
        snapshot = self.base.snapshot
        irrelevant = (
            "link", "device", "report_to", "micro_rows", "column", "split", "ignore_memory",
        )  # fmt: skip
        options = {k: v for k, v in dict(self.options).items() if k not in irrelevant}
        return {
            "config": digest(snapshot.config),
            "weights": weights_digest(snapshot),
            "fitted": digest([[int(t) for t in d.ids] for d in self.documents.fitted]),
            "judging": [own.key for own in self.documents.judging],
            "within": self.within,
            "starts": list(self.starts),
            "options": options,
        }


@dataclass(frozen=True)
class PlannedFit:
    """What `--dry-run` shows."""

    prepared: PreparedFit
    estimate: TrainingEstimate
    moving: int  # numbers
    forward_tokens: int  # read without gradients: starts, judgements, questions
    sliced: str | None

    @property
    def search(self) -> bool:
        """Whether knobs are tried by forward passes, in place of gradient steps."""
        return self.prepared.options.search

    @property
    def tokens(self) -> int:
        """Read with gradients."""
        return 0 if self.search else self.prepared.rows.tokens

    def to_json(self) -> dict[str, Any]:
        prepared = self.prepared
        return {
            "model": prepared.base.snapshot.name,
            "context": prepared.plan.context,
            "target": prepared.plan.target,
            "within": prepared.within,
            "starts": list(prepared.starts),
            "moving": self.moving,
            "settings": {
                name: {"value": own.value, "source": own.source}
                for name, own in vars(prepared.settings).items()
                if own is not NOT_TRAINED
            },
            "documents": len(prepared.rows.texts.documents),
            "documents_too_short": prepared.documents.too_short,
            "judging_documents": len(prepared.documents.judging),
            "overlap": as_json(prepared.overlap),
            "tokens": self.tokens,
            "forward_tokens": self.forward_tokens,
            "estimate": self.estimate.to_json(),
            "notes": list(prepared.notes),
        }


def prepare(model: str, source: str, options: Fit, revision: str | None) -> PreparedFit:
    """Read model, tokenizer and data; settle what moves and from where."""
    from ropext.evaluation.loading import load_tokenizer

    if sharing.is_fsdp():
        raise UsageError(
            "fit moves a few numbers and shards nothing: launch it with DDP, not with FSDP (the "
            "configs are in ropext.training.launch)"
        )
    snapshot = open_snapshot(model, revision=revision)
    within, starts = choose_starts(snapshot, model, options)
    plan = next(iter(starts.values()))
    if plan.model.masked_lm:
        raise UnsupportedModel(
            f"{model} is a masked language model ({plan.model.model_type}); fit reads causal ones"
        )
    require_help(plan)
    check_geometry(plan)
    snapshot = with_weights(snapshot)
    rows_per_step = fit_data.rows_per_step(options, plan.target)
    sharing.check_rows(rows_per_step, plan.target, options.keep_short)
    tokenizer = load_tokenizer(snapshot, False)
    encoder = corpus.DocumentEncoder(tokenizer, plan.model.vocab_size, options.seed)
    place = corpus.Source(source, options.column, options.split or "train", None)
    enough = options.steps * max(options.batch_tokens, plan.target)
    documents = fit_data.read(
        corpus.split_documents(
            corpus.read_documents(place), options.split_documents, encoder, plan.target
        ),
        encoder,
        options,
        plan.target,
        max(enough, DOCUMENTS * plan.target),
        streamed=place.is_streamed,
    )
    questions, notes = _questions(encoder, documents, options, plan)
    rows = FitRows(documents.fitted, questions, options, plan.context, plan.target)
    warning = few(documents.judging)
    padding = tokenizer.pad_token_id
    return PreparedFit(
        Base(snapshot, plan.model),
        options,
        within,
        starts,
        _settings(options, rows, plan.target),
        documents,
        questions,
        rows,
        _judge(documents, questions, options, plan, encoder.bos),
        0 if padding is None else padding,
        (*notes, *([warning] if warning else []), *_glued_note(options, documents)),
    )


def _glued_note(options: Fit, documents: FitDocuments) -> list[str]:
    if options.packing != "glued":
        return []
    return [
        f"documents were joined (--packing glued): intervals are over {len(documents.judging)} "
        "windows of joined held-out documents, no two of which share a document"
    ]


def _questions(
    encoder: corpus.DocumentEncoder, documents: FitDocuments, options: Fit, plan: Plan
) -> tuple[FitQuestions | None, list[str]]:
    if not options.retrieval_share and not options.retrieval_items:
        return None, []
    questions = FitQuestions(encoder, documents.fitted, plan.target, options.seed)
    reason = questions.why_none(min(plan.context, plan.target))
    if reason is not None:
        return None, [f"retrieval is left out: {reason}"]
    return questions, []


def _judge(
    documents: FitDocuments,
    questions: FitQuestions | None,
    options: Fit,
    plan: Plan,
    bos: int | None,
) -> FitJudge:
    count = options.retrieval_items if questions is not None else 0
    check_amount(count * (plan.context + plan.target), "give fewer --retrieval-items")
    near, far = (
        questions.measured(length, count) if questions is not None and count else []
        for length in (plan.context, plan.target)
    )
    lengths = (plan.context, plan.target)
    return judge_of(documents.judging, near, far, bos, lengths, options.seed)


def _settings(options: Fit, rows: FitRows, target: int) -> Settings:
    rate = options.learning_rate
    return Settings(
        row_tokens=Setting(target, "the target"),
        rows=Setting(rows.per_step, "--batch-tokens and --keep-short"),
        steps=Setting(options.steps, "--steps"),
        learning_rate=Setting(LEARNING_RATE, MEASURED)
        if rate is None
        else Setting(rate, defaults.ASKED),
        warmup=Setting(max(1, options.steps // 10), MEASURED),
        schedule=Setting("cosine", MEASURED),
        rank=NOT_TRAINED,
        alpha=NOT_TRAINED,
        betas=Setting(BETAS, MEASURED),
        weight_decay=Setting(0.0, "the start is no origin"),
        gradient_norm=Setting(defaults.GRADIENT_NORM, "usual"),
    )


def engine_options(options: Fit) -> Finetune:
    """What the engine of `finetune` asks of its own options."""
    return Finetune(
        micro_rows=options.micro_rows,
        eval_every=options.eval_every or max(1, options.steps // 8),
        eval_documents=options.held_out,
        patience=0,
        seed=options.seed,
        dtype=options.dtype,
        device=options.device,
        attn_implementation=options.attn_implementation,
        report_to=options.report_to,
    )


def plan_fit(prepared: PreparedFit) -> PlannedFit:
    """What it takes, from a model without weights."""
    import torch

    from ropext.evaluation.costs import shape_of
    from ropext.evaluation.loading import free_memory
    from ropext.training import estimates, loading, spectrum

    options, settings = engine_options(prepared.options), prepared.settings
    loading.check_tracker(options.report_to)
    device = loading.device(options)
    model = loading.skeleton(prepared.base.snapshot)
    width = torch.empty((), dtype=loading.dtype(options, device)).element_size()
    eager = loading.is_eager(model, options.attn_implementation)
    masks = options.attn_implementation in (None, "sdpa")
    shape = replace(shape_of(model), dtype_bytes=width, eager=eager, masks=masks)
    moving = spectrum.space_of(
        prepared.within, prepared.plan.main, prepared.plan.target, prepared.ceiling
    )
    count = sum(own.numel() for own in moving.parameters())
    share = settings.rows.value // sharing.readers()
    micro = defaults.micro_rows(options, settings.row_tokens.value, share)
    reason = loading.caps_logits(model)
    free = free_memory(device)
    found = estimates.estimate(
        shape, settings, count, micro, free=free, sliced=reason is None, lora=False
    )
    if not prepared.options.search:
        ignored = prepared.options.ignore_memory
        tight = estimates.check_fits(
            found, shape, free, sliced=reason is None, lora=False, ignored=ignored
        )
        prepared = replace(prepared, notes=(*prepared.notes, *([tight] if tight else [])))
    return PlannedFit(prepared, found, count, _forward_tokens(prepared, options), reason)


def _forward_tokens(prepared: PreparedFit, options: Finetune) -> int:
    """Tokens read without gradients."""
    target, context = prepared.plan.target, prepared.plan.context
    judged = len(prepared.documents.judging)
    judgements = -(-prepared.options.steps // (options.eval_every or 1))
    base = judged * context * (2 * target // context)
    questions = 2 * len(prepared.judge.far) * target + len(prepared.judge.near) * context
    searched = 0
    if prepared.options.search:
        searched, judgements = most_tokens(prepared.documents.fitted, target), 1
    passes = len(prepared.starts) + judgements + 1
    return passes * judged * target + base + questions + searched


def fit(
    model: str,
    source: str,
    output: Path,
    options: Fit,
    say: Say,
    *,
    revision: str | None = None,
    force: bool = False,
    command: Sequence[str] = (),
) -> "Fitted | None":
    """Everything, from the last checkpoint on where the same fit was interrupted."""
    with silenced():
        prepared = prepare(model, source, options, revision)
        if not is_main():
            say = silent
        place = workdir_of(prepared, "fit", output, force, recovers=is_main())
        planned = plan_fit(prepared)
        with place.claimed(force, *work.processes()):
            from ropext.training.fit_session import FitSession

            return FitSession(planned, place.folder, output, force, command, say).run()


def dry_run(
    model: str,
    source: str,
    options: Fit,
    revision: str | None,
    output: Path | None = None,
    force: bool = False,
) -> PlannedFit:
    """All but the training; what it would refuse is refused."""
    with silenced():
        prepared = prepare(model, source, options, revision)
        if output is not None:
            workdir_of(prepared, "fit", output, force).check(force)
        return plan_fit(prepared)
