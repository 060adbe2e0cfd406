"""A fine-tuning before it begins: the checkpoint is opened, documents are read, settings chosen."""

from dataclasses import replace
from math import prod

from ropext import corpus
from ropext.checkpoint import Snapshot
from ropext.checkpoint.headers import read_header
from ropext.corpus.selection import NO_LIMIT
from ropext.errors import UsageError
from ropext.evaluation.reads import Reads
from ropext.families.config import text_part
from ropext.models import processes
from ropext.models.tokenizer import load_tokenizer
from ropext.options.training import Finetune
from ropext.results.overlap import kept_out_of
from ropext.training import data, defaults
from ropext.training.adapter_objective import AdapterObjective
from ropext.training.defaults import Amount, Size
from ropext.training.judge import judge_of, tokens_of
from ropext.training.learning import Learning, learning_of
from ropext.training.origin import Origin, open_origin
from ropext.training.rows import KeyRows, Rows, glue, rows_in, strategy_of
from ropext.training.training import Training


def prepare(model: str, source: str, options: Finetune) -> AdapterObjective:
    """Read model, tokenizer and data; choose the settings."""
    origin = open_origin(model)
    positions = origin.positions
    trainable = positions.trainable(options, origin.snapshot.name)
    options = options.model_copy(update={"train": trainable.name})
    size = Size(_parameters(origin.snapshot), origin.context, origin.target)
    settings = defaults.settings(options, size)
    length = settings.row_tokens.value
    processes.check_rows(settings.rows.value, length, options.keep_short)
    processes.check_fsdp(options.qlora, trainable.name)
    if options.keep_short and positions.two_sets_up_to:
        raise UsageError(
            f"--keep-short is not needed: {model} reads its original length with separate "
            "factors, which longer rows do not change; leave it out"
        )
    vocabulary = text_part(origin.snapshot.config, positions.path).get("vocab_size")
    encoder = corpus.DocumentEncoder(
        load_tokenizer(origin.snapshot, False), vocabulary, options.seed
    )
    learning = learning_of(positions.masked, encoder, model)
    strategy = strategy_of(options, length, origin.target, positions.two_sets_up_to)
    most = settings.rows.value * settings.steps.value * length
    division = data.Division(
        wanted_tokens=most if options.epochs is None else NO_LIMIT,
        row=length,
        target=origin.target,
        judging=options.eval_documents if options.evaluate is None else 0,
        apart=kept_out_of(origin.record),
    )
    read = data.read(source, options, encoder, division)
    documents = list(read.documents)
    if options.packing == "glued":
        documents = glue(documents, encoder.tokenizer.eos_token_id, options.seed)
    judge = _judge(origin, options, read, encoder, learning)
    amount = Amount(rows_in(documents, strategy), processes.readers(), tokens_of(judge))
    settings = defaults.settings(options, size, amount)
    if not trainable.has_lora:
        settings = replace(settings, rank=None, alpha=None)
    count = settings.rows.value * settings.steps.value
    share = options.retrieval_share
    questions = KeyRows(encoder, documents, share, options.seed) if share else None
    training = Training(
        snapshot=origin.snapshot,
        options=options,
        context=origin.context,
        target=origin.target,
        settings=settings,
        data=read,
        encoder=encoder,
        rows=Rows(documents, strategy, count, options.seed, questions),
        judge=judge,
        chooses_step=bool(settings.patience),
        learning=learning,
    )
    return AdapterObjective(training, options, origin, trainable)


def _parameters(snapshot: Snapshot) -> int:
    """Count the numbers in a checkpoint's tensors."""
    count = 0
    for name in snapshot.weight_files:
        for tensor in read_header(snapshot.path(name)).tensors.values():
            count += prod(tensor.shape)
    return count


def _judge(
    origin: Origin,
    options: Finetune,
    read: data.TrainingData,
    encoder: corpus.DocumentEncoder,
    learning: Learning,
) -> Reads | None:
    """Read what judges; None where there is no document, or none is to be read."""
    judging = data.judging_documents(read, options, encoder, origin.target)
    if not judging or processes.is_fsdp():
        return None
    lengths = (origin.context, origin.target)
    return judge_of(judging, lengths, options.seed, prediction=learning.prediction)
