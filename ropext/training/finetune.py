"""A fine-tuning: a LoRA of an extended checkpoint, new rows of its position table, or both."""

import gc
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from ropext import corpus
from ropext.checkpoint.headers import read_header
from ropext.checkpoint.provenance import READ_FROM
from ropext.corpus.selection import NO_LIMIT, REMEDY
from ropext.errors import UsageError
from ropext.evaluation.documents import DocumentWords, read_corpus
from ropext.evaluation.prediction import masked_tokens
from ropext.evaluation.reader import Models
from ropext.evaluation.reads import Reads
from ropext.evaluation.variants import Variant, applied
from ropext.families.config import text_part
from ropext.models import processes
from ropext.models.tokenizer import load_tokenizer
from ropext.narration import Show
from ropext.options.evaluate import Evaluate
from ropext.options.training import Finetune
from ropext.planning import InMemory
from ropext.results import BASE, CONTROL, EXTENDED, TUNED, UNTUNED, rules
from ropext.results.overlap import kept_out_of
from ropext.training import data, defaults, models, report, trainer, tuned_report, writing
from ropext.training.data import LARGEST_SHARE
from ropext.training.judge import judge_of, numbers_of, read_now, tokens_of
from ropext.training.learning import NEXT_TOKEN_LEARNING, Learning, MaskedLearning
from ropext.training.objective import Objective
from ropext.training.origin import Origin, open_origin
from ropext.training.result import Finetuned
from ropext.training.rows import (
    ControlRows,
    KeyRows,
    Row,
    Rows,
    WithShort,
    glue,
    rows_in,
    strategy_of,
)
from ropext.training.trainer import History
from ropext.training.training import Training

STOPS = "stops when held-out documents no longer improve"


class AdapterObjective(Objective[Finetuned]):
    """A LoRA and new rows move; the held-out loss may choose the step; they are merged."""

    command = "finetune"
    plan_key = "plan"
    out_of_memory = (
        "out of memory; three options help most: --micro-rows 1, --strategy pose (memory does not "
        "depend on the target), and --dtype bfloat16 (on a GPU also --qlora). The last checkpoint "
        "is kept"
    )

    def __init__(self, training: Training, options: Finetune, origin: Origin) -> None:
        super().__init__(training)
        self.options = options
        self.origin = origin
        self.title = f"{origin.history}, strategy {options.strategy}, packing {options.packing}"
        self.remarks = list(training.data.unread)
        if self.why_no_judge:
            self.remarks.append(f"not evaluated: {self.why_no_judge}")
        if self.settings.is_open:
            self.remarks.append(f"at most {self.settings.steps.value} steps, {STOPS}")
        self.remarks += report.asked_text(options.retrieval_share)
        self.tuned = History()
        self.control: History | None = None

    @property
    def forward_tokens(self) -> int:
        evaluations = -(-self.settings.steps.value // self.settings.between)
        # Before and after too; the base and the control through the short window, which is twice.
        passes = evaluations + (6 if self.options.control else 4)
        return int(passes * tokens_of(self.judge))

    @property
    def why_no_judge(self) -> str | None:
        """Why no document is read, although that was not asked for."""
        if self.judge is not None or not self.options.eval_documents:
            return None
        if processes.is_fsdp():
            return (
                "under FSDP no process holds all weights; after the training run ropext eval OUT "
                "--data DATA --device-map auto"
            )
        return (
            f"fewer than {LARGEST_SHARE} of its {self.training.data.read} documents reach the "
            f"target, too few to hold one out; name others with --eval, or {REMEDY}"
        )

    def moving(self, model: Any) -> tuple[Sequence[str], int, int]:
        from accelerate import init_empty_weights

        device = models.device(self.options)
        if self.options.qlora:
            models.four_bits(device)
        if processes.is_fsdp() and device.type == "cpu":
            raise UsageError(
                "launched with FSDP on a CPU, where accelerate silently runs DDP; use GPUs, or the "
                "config ddp of `ropext.training.launch`"
            )
        settings = self.settings
        table = self.origin.table
        names = [] if settings.rank is None else models.target_names(model, self.options.targets)
        with init_empty_weights(include_buffers=False):
            joined = models.add_adapter(model, self.options, settings, table)
        moving = sum(p.numel() for p in joined.parameters() if p.requires_grad)
        if table is not None:
            new = table.target - len(table.old_rows)
            for name, rows in models.trained_tables(joined, table):
                moving -= (len(rows) - new) * rows.shape[1]
                names.append(f"{new}{tuned_report.NEW_ROWS}{name}")
        return names, moving, 4 * moving  # float32

    def variant(self, label: str, history: History | None = None) -> Variant:
        """A model that is read, with the adapter that a training left: the base, and its control,
        with a position table's rows of before, through the short window."""
        adapter = None if history is None else str(history.best_checkpoint)
        if label not in (BASE, CONTROL):
            return Variant(label, EXTENDED, self.snapshot, adapter=adapter)
        table = self.origin.table
        rows = table.undone() if table else None
        config = self.origin.base_config()
        return Variant(label, label, self.snapshot, config, InMemory(rows), adapter=adapter)

    def measure(self, pause: Show) -> None:
        """Read the base through its short window, and the extended model as it is."""
        self._say_beforehand()
        said = f"reading {self.training.judged} documents before the training"
        self._read([self.variant(BASE), self.variant(UNTUNED)], pause, said)

    def _read(self, variants: Sequence[Variant], pause: Show, sentence: str = "") -> None:
        """Have models read the documents that judge; what an earlier run read is not read again."""
        if self.judge is None or not processes.is_main():
            return

        def load(_: Any) -> Any:
            if sentence:
                self.say(sentence)
            return self._load().eval()

        self.models |= self.read(Models(load).computing, variants, pause)

    def _say_beforehand(self) -> None:
        training = self.training
        if self.why_no_judge:
            self.note(f"not evaluated: {self.why_no_judge}")
        if self.origin.record.more.get(READ_FROM):
            self.note(
                f"{self.snapshot.name} is {self.origin.history}: the base is these weights without "
                "that scaling"
            )
        for sentence in training.learning.notes + training.data.unread:
            self.note(sentence)
        if training.lineage_before:
            self.note(training.lineage_before)
        if training.rows.passes > 1 and not self.settings.is_open:
            self.note(report.passes_text(training.rows))

    def _load(self) -> Any:
        gc.collect()  # of the model before it
        torch.manual_seed(self.options.seed)
        return models.load(self.snapshot, self.options)

    def learn(self) -> None:
        """Train the adapter, and with --control one of the base on the same tokens; after an early
        stop as many steps as are in the weights that count."""
        model = self._load()
        rows = self.training.rows
        patience = self.settings.patience
        self.check_jumps(model)
        learning = self.training.learning
        reason = learning.use_sliced_loss(model)
        if reason is not None:
            self.note(f"the loss needs whole logits: {reason}")
        evaluate = self._evaluate if self.judge else None
        self.tuned = self._train(TUNED, model, rows, 1, evaluate=evaluate, patience=patience)
        if not self.options.control:
            return
        pieces = ControlRows(rows, self.context)
        lowered = trainer.missed(self.tuned.evaluations) if patience else ()
        how = {"until": self.tuned.counted, "lowered_after": lowered}
        with applied(self._load(), self.variant(BASE)) as model:
            learning.use_sliced_loss(model)
            self.control = self._train(CONTROL, model, pieces, pieces.per_row, **how)

    def _train(
        self, label: str, model: Any, rows: Sequence[Row], pieces: int, **how: Any
    ) -> History:
        """Train an adapter of a model; a row is read in so many pieces."""
        settings = self.settings
        options = self.options
        training = self.training
        torch.manual_seed(options.seed)
        table = None if label == CONTROL else self.origin.table
        joined = models.add_adapter(model, options, settings, table)
        until = how.get("until")
        tokens = f"of {settings.step_tokens} tokens"
        if settings.is_open and not until:
            tokens += f" at most, {STOPS}"
        self.say(f"training {label}: {until or settings.steps.value} steps {tokens}")
        documents = training.rows.documents
        long = settings.rows.value * pieces
        mixed = WithShort(rows, long, documents, self.context, options)
        learned = training.learning.rows(mixed, training.encoder.tokenizer, options.seed)
        longest = min(settings.longest, self.context if label == CONTROL else self.target)
        how |= {"rows_per_step": mixed.per_step, "row_tokens": longest}
        return self.optimise(label, joined, learned, save_every=options.save_every, **how)

    def _evaluate(self, model: Any, step: int) -> tuple[float, float]:
        assert self.judge is not None
        model.eval()
        done = read_now(model, self.variant(TUNED), self.judge, pause=self.show)
        # The tail alone has few tokens: more steps would look worse by chance.
        return rules.far_loss(done, TUNED), rules.tail_loss(done, TUNED)

    def choose(self, pause: Show) -> Finetuned:
        """The best evaluated weights, or the last; what each model reads on the same tokens."""
        tuned = self.tuned
        control = self.control
        trained = {TUNED: tuned} | ({CONTROL: control} if control else {})
        self._read([self.variant(label, history) for label, history in trained.items()], pause)
        measured = self.measured if self.judge else None
        done = Finetuned(
            output=self.output,
            objective=self,
            measurement=measured,
            steps=tuned.steps,
            kept_step=tuned.counted,
            stopped_early=tuned.stopped_early,
            losses=tuned.losses,
            evaluations=tuned.evaluations,
            numbers=numbers_of(measured) if measured else {},
            overlap=self.training.overlap,
            control={"steps": control.steps, "losses": control.losses} if control else None,
            notes=self.notes,
        )
        overlap = self.training.overlap
        if overlap is not None and overlap != self.training.overlap_before:
            self.note(overlap.sentence)
        if self.settings.is_open and done.passes > 1:
            self.note(f"{done.passes:,.1f} passes over the text{report.too_often(done.passes)}")
        return done

    def write(self, result: Finetuned, show: Show) -> None:
        # What --report-to tensorboard wrote.
        folder = self.folder / TUNED
        paths = sorted(path for path in folder.glob("runs/**/*") if path.is_file())
        trackers = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        files = tuned_report.finetune_files(result) | trackers | self.first_steps()
        control = self.control.best_checkpoint if self.control else None
        weights = self.origin, self.tuned.best_checkpoint, control
        writing.write_tuned(result, *weights, files, tuned_report.finetune_story(result), show)


def prepare(model: str, source: str, options: Finetune) -> AdapterObjective:
    """Read model, tokenizer and data; choose the settings."""
    origin = open_origin(model)
    kind = origin.trains(options)
    options = options.model_copy(update={"train": kind})
    headers = (read_header(origin.snapshot.path(name)) for name in origin.snapshot.weight_files)
    tensors = (tensor for header in headers for tensor in header.tensors.values())
    sizes = sum(prod(tensor.shape) for tensor in tensors), origin.context, origin.target
    settings = defaults.settings(options, *sizes)
    length = settings.row_tokens.value
    processes.check_rows(settings.rows.value, length, options.keep_short)
    processes.check_fsdp(qlora=options.qlora, **{f"train {kind}": kind != "lora"})
    if options.keep_short and origin.two_sets_up_to:
        raise UsageError(
            f"--keep-short is not needed: {model} reads its original length with separate "
            "factors, which longer rows do not change; leave it out"
        )
    vocabulary = text_part(origin.snapshot.config, origin.path).get("vocab_size")
    encoder = corpus.DocumentEncoder(
        load_tokenizer(origin.snapshot, False), vocabulary, options.seed
    )
    learning: Learning = NEXT_TOKEN_LEARNING
    if origin.is_masked:
        learning = MaskedLearning(masked_tokens(encoder, model))
    strategy = strategy_of(options, length, origin.target, origin.two_sets_up_to)
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
    per_pass = rows_in(documents, strategy)
    settings = defaults.settings(options, *sizes, per_pass, processes.readers(), tokens_of(judge))
    settings = settings if kind != "new-rows" else replace(settings, rank=None, alpha=None)
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
    return AdapterObjective(training, options, origin)


def _judge(
    origin: Origin,
    options: Finetune,
    read: data.TrainingData,
    encoder: corpus.DocumentEncoder,
    learning: Learning,
) -> Reads | None:
    """Over the documents of --eval that reach the target, or those held out of DATA; None where
    there is none, or none is to be read."""
    count = options.eval_documents
    target = origin.target
    judging: Sequence[corpus.Document] = read.judging(count, target)
    if count and options.evaluate is not None:
        # A datasets id is evaluated on its test split, as `ropext eval` does.
        reading = Evaluate(
            data=options.evaluate,
            column=options.column,
            split_documents=options.split_documents,
            max_document_mib=options.max_document_mib,
        )
        wanted = corpus.Wanted((target,), given=True, max_documents=count)
        judging = read_corpus(reading, encoder, wanted, DocumentWords(data="--eval")).documents
    if not judging or processes.is_fsdp():
        return None
    return judge_of(judging, (origin.context, target), options.seed, prediction=learning.prediction)
