"""Prepare a fit: open the model, read the documents, and settle which numbers move and where they
start."""

from ropext.base.errors import UnsupportedModel, UsageError
from ropext.evaluation import corpus
from ropext.files.checkpoint import open_snapshot, with_weights
from ropext.files.checkpoint.provenance import read_record
from ropext.files.inspecting import open_model
from ropext.models import processes
from ropext.models.tokenizer import load_tokenizer
from ropext.options.training import Fit
from ropext.planning import Plan
from ropext.results.overlap import recorded_training
from ropext.tasks import check_amount
from ropext.training import data, defaults
from ropext.training.data import TrainingData, judging_workload
from ropext.training.fit_objective import FitObjective
from ropext.training.judge import few_documents_warning
from ropext.training.rows import FitQuestions, FullRows, PoseRows, TrainingRows, row_strategy
from ropext.training.starts import check_geometry, choose_starts

FEWEST = 16  # fewest rows of the target's length that are read from a stream


def prepare_fit(
    model: str, source: str, options: Fit, revision: str | None = None, named: str = ""
) -> FitObjective:
    """Read the model, tokenizer and data of a fit; settle which numbers of the spectrum move,
    and their start. If `model` is a directory made of a GGUF, `named` is the user's name for the
    GGUF."""
    if processes.is_fsdp():
        raise UsageError(
            "fit trains a few numbers, so there is nothing to shard; launch it with DDP, not FSDP "
            "(the configs are in ropext.training.launch)"
        )
    snapshot = open_snapshot(model, revision=revision)
    if named not in ("", model):
        snapshot = open_model(named).stands_for(snapshot)
    within, starts = choose_starts(snapshot, options)
    plan = next(iter(starts.values()))
    if plan.model.masked_lm:
        raise UnsupportedModel(
            f"{model} is a masked language model ({plan.model.model_type}); fit reads causal ones"
        )
    plan.raise_if_refused()
    check_geometry(plan)
    snapshot = with_weights(snapshot)
    pairs = plan.main.rope.dim // 2
    settings = defaults.fit_settings(options, plan.context, plan.target, pairs)
    length = settings.row_tokens.value
    per_step = settings.rows.value
    processes.check_rows(per_step, length, options.keep_short)
    beyond = plan.main.rope.spectrum.short_context or 0
    strategy = row_strategy(options, length, plan.target, beyond)
    encoder = corpus.DocumentEncoder(
        load_tokenizer(snapshot, False), plan.model.vocab_size, options.held_out_seed
    )
    enough = max(options.steps * max(options.batch_tokens, plan.target), FEWEST * plan.target)
    record = read_record(snapshot.directory)
    read = data.read_fit_data(
        source, options, encoder, plan.target, enough, recorded_training(record)
    )
    questions, notes = _retrieval_questions(encoder, read, options, plan, strategy)
    notes += read.notes
    if warning := few_documents_warning(read.held_out):
        notes.append(warning)
    if options.packing == "glued":
        notes.append(
            f"documents were joined (--packing glued): intervals are over {len(read.held_out)} "
            "windows of joined held-out documents, no two of which share a document"
        )
    count = per_step * options.steps
    return FitObjective(
        snapshot=snapshot,
        record=record,
        options=options,
        context=plan.context,
        target=plan.target,
        settings=settings,
        data=read,
        encoder=encoder,
        rows=TrainingRows(read.documents, strategy, count, options.seed, questions, far_half=True),
        judge=judging_workload(
            read.held_out, (plan.context, plan.target), encoder.seed, encoder.bos
        ),
        chooses_step=True,
        within=within,
        starts=starts,
        remarks=notes,
    )


def _retrieval_questions(
    encoder: corpus.DocumentEncoder,
    read: TrainingData,
    options: Fit,
    plan: Plan,
    strategy: FullRows | PoseRows,
) -> tuple[FitQuestions | None, list[str]]:
    """Return the retrieval questions of a fit, None if none are wanted or none can be made; and the
    notes on why not."""
    share = options.retrieval_share
    count = options.retrieval_items
    if not share and not count:
        return None, []
    questions = FitQuestions(encoder, read.documents, strategy, options.seed, share)
    reason = questions.why_no_questions(min(plan.context, plan.target))
    if reason is not None:
        return None, [f"retrieval is left out: {reason}"]
    check_amount(count * (plan.context + plan.target), "give fewer --retrieval-items")
    return questions, []
