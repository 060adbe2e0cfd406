"""Prepare and run a fine-tuning: it trains a LoRA of an extended checkpoint, new rows of its
position table, or both."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import nn

from ropext.base.errors import UsageError
from ropext.base.narration import Show
from ropext.evaluation import corpus
from ropext.evaluation.corpus.selection import NO_LIMIT, REMEDY
from ropext.evaluation.reader import Models
from ropext.evaluation.variants import Variant, applied
from ropext.evaluation.workload import masked_tokens
from ropext.families.config import text_part
from ropext.files.checkpoint import Snapshot
from ropext.files.checkpoint.provenance import READ_FROM
from ropext.files.checkpoint.weights import read_header
from ropext.files.checkpoint.writing import WriteOptions
from ropext.models import processes
from ropext.models.tokenizer import load_tokenizer
from ropext.options.training import Finetune
from ropext.planning import InMemory
from ropext.results import BASE, CONTROL, EXTENDED, TUNED, UNTUNED, rules
from ropext.results.overlap import recorded_training
from ropext.training import (
    data,
    defaults,
    judge,
    models,
    report,
    trainer,
    tuned_report,
    tuned_writing,
)
from ropext.training.learning import NEXT_TOKEN_LEARNING, masked_learning
from ropext.training.new_rows import NewRows
from ropext.training.objective import COPIES, TrainedPart, TrainingObjective
from ropext.training.origin import Origin, open_origin
from ropext.training.result import Finetuned
from ropext.training.rows import (
    ControlRows,
    KeyRows,
    RowsWithShortWindows,
    TrainingRows,
    count_rows,
    join_documents,
    row_strategy,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STOPS = "stops when held-out documents no longer improve"


def prepare_finetune(model: str, source: str, options: Finetune) -> "FinetuneObjective":
    """Read the model, tokenizer and data of a fine-tuning, choose its settings, and return the
    objective."""
    origin = open_origin(model)
    record = origin.record
    trained = origin.trained(options)
    options = options.model_copy(update={"train": trained})
    size = defaults.ModelSize(_count_parameters(origin.snapshot), record.context, record.target)
    settings = defaults.finetune_settings(options, size)
    length = settings.row_tokens.value
    processes.check_rows(settings.rows.value, length, options.keep_short)
    processes.check_fsdp(options.qlora, trained)
    if options.keep_short and origin.two_sets_up_to:
        raise UsageError(
            f"--keep-short is not needed: {model} reads its original length with separate "
            "factors, which longer rows do not change; leave it out"
        )
    vocabulary = text_part(origin.snapshot.config, origin.path).get("vocab_size")
    encoder = corpus.DocumentEncoder(
        load_tokenizer(origin.snapshot, False), vocabulary, options.held_out_seed
    )
    learning = NEXT_TOKEN_LEARNING
    if origin.masked:
        learning = masked_learning(masked_tokens(encoder, model))
    strategy = row_strategy(options, length, record.target, origin.two_sets_up_to)
    most = settings.rows.value * settings.steps.value * length
    division = data.Division(
        wanted_tokens=most if options.epochs is None else NO_LIMIT,
        row=length,
        target=record.target,
        judging=options.eval_documents if options.evaluate is None else 0,
        before=recorded_training(record),
    )
    read = data.read_training_data(source, options, encoder, division)
    documents = list(read.documents)
    if options.packing == "glued":
        documents = join_documents(documents, encoder.tokenizer.eos_token_id, options.seed)
    judging = data.judging_documents(read, options, encoder, record.target)
    reads = None
    if judging and not processes.is_fsdp():
        lengths = (record.context, record.target)
        reads = data.judging_workload(
            judging, lengths, options.held_out_seed, prediction=learning.prediction
        )
    amount = defaults.DataAmount(
        count_rows(documents, strategy), processes.readers(), data.count_judging_tokens(reads)
    )
    settings = defaults.finetune_settings(options, size, amount)
    if trained == "new-rows":
        settings = replace(settings, rank=None, alpha=None)
    count = settings.rows.value * settings.steps.value
    share = options.retrieval_share
    questions = KeyRows(encoder, documents, share, options.seed) if share else None
    return FinetuneObjective(
        origin=origin,
        snapshot=origin.snapshot,
        record=record,
        options=options,
        context=record.context,
        target=record.target,
        settings=settings,
        data=read,
        encoder=encoder,
        rows=TrainingRows(documents, strategy, count, options.seed, questions),
        judge=reads,
        chooses_step=bool(settings.patience),
        learning=learning,
    )


def _count_parameters(snapshot: Snapshot) -> int:
    """Count the numbers in the tensors of a checkpoint that is fine-tuned."""
    count = 0
    for name in snapshot.weight_files:
        for tensor in read_header(snapshot.path(name)).tensors.values():
            count += prod(tensor.shape)
    return count


@dataclass(kw_only=True, eq=False, repr=False)
class FinetuneObjective(TrainingObjective[Finetuned]):
    """A training of a LoRA, of new rows, or of both. The held-out loss may choose the step; the
    result is merged."""

    options: Finetune
    origin: Origin

    command = "finetune"
    kind = Finetuned
    out_of_memory = (
        "out of memory; three options help most: --micro-rows 1, --strategy pose (memory does not "
        "depend on the target), and --dtype bfloat16 (on a GPU also --qlora). The last checkpoint "
        "is kept"
    )

    def __post_init__(self) -> None:
        """Set the title, the remarks, the new position rows and the empty history of a
        fine-tuning."""
        origin = self.origin
        options = self.options
        self.new_rows = None
        if origin.table is not None and options.train != "lora":
            self.new_rows = NewRows(origin.table)
        self.title = f"{origin.history}, strategy {options.strategy}, packing {options.packing}"
        self.remarks = list(self.data.notes)
        if self.why_no_judge:
            self.remarks.append(f"not evaluated: {self.why_no_judge}")
        if self.settings.is_open:
            self.remarks.append(f"at most {self.settings.steps.value} steps, {STOPS}")
        if options.retrieval_share:
            self.remarks.append(report.trained_to_retrieve_text(options.retrieval_share))
        self.tuned = trainer.TrainingHistory()
        self.control: trainer.TrainingHistory | None = None

    @property
    def forward_tokens(self) -> int:
        """Return the number of tokens that the evaluations of a fine-tuning read without
        gradients."""
        evaluations = -(-self.settings.steps.value // self.settings.between)
        # Also before and after; base and control read through the short window, which takes twice
        # as much.
        passes = evaluations + (6 if self.options.control else 4)
        return int(passes * data.count_judging_tokens(self.judge))

    @property
    def why_no_judge(self) -> str | None:
        """Return why no held-out document judges the fine-tuning, although the user did not turn
        the evaluation off; else None."""
        if self.judge is not None or not self.options.eval_documents:
            return None
        if processes.is_fsdp():
            return (
                "under FSDP no process holds all weights; after the training run ropext eval OUT "
                "--data DATA --device-map auto"
            )
        return (
            f"fewer than {data.LARGEST_SHARE} of its {self.data.read} documents reach the "
            f"target, too few to hold one out; name others with --eval, or {REMEDY}"
        )

    def trained_part(self, model: "PreTrainedModel") -> TrainedPart:
        """Return the layers that get a LoRA, and the new rows of a position table; refuse a
        device or a launch that cannot train them."""
        from accelerate import init_empty_weights

        device = models.training_device(self.options)
        if self.options.qlora:
            models.qlora_quantiser(device)
        if processes.is_fsdp() and device.type == "cpu":
            raise UsageError(
                "launched with FSDP on a CPU, and accelerate silently runs DDP there; use GPUs, or "
                "the config ddp of `ropext.training.launch`"
            )
        names = list[str]()
        if self.settings.rank is not None:
            names = models.lora_layer_names(model, self.options.targets)
        with init_empty_weights(include_buffers=False):
            joined = models.add_adapter(model, self.options, self.settings, self.new_rows)
        count = sum(p.numel() for p in joined.parameters() if p.requires_grad)
        fixed = self.new_rows.count_fixed(joined) if self.new_rows else {}
        count -= sum(fixed.values())
        return TrainedPart(
            targets=(*names, *fixed),
            moving=count,
            moving_bytes=COPIES * 4 * count,  # float32
            new_rows=tuple(fixed),
        )

    def variant(self, label: str, history: trainer.TrainingHistory | None = None) -> Variant:
        """Return a model to read, with the adapter that a fine-tuning left. The base and its
        control are read through the short window, with a position table's rows from before the
        extension."""
        adapter = None if history is None else str(history.best_checkpoint)
        if label not in (BASE, CONTROL):
            return Variant(label, EXTENDED, self.snapshot, adapter=adapter)
        config = self.origin.record.base["config"]
        table = self.origin.table
        beside = InMemory(None if table is None else table.undone())
        return Variant(label, label, self.snapshot, config, beside, adapter=adapter)

    def measure(self, pause: Show) -> None:
        """Print the notes on the fine-tuning; then read the base through its short window and
        the extended model as it is."""
        if self.why_no_judge:
            self.note(f"not evaluated: {self.why_no_judge}")
        if self.origin.record.more.get(READ_FROM):
            self.note(
                f"{self.snapshot.name} is {self.origin.history}: the base is these weights without "
                "that scaling"
            )
        for sentence in self.learning.notes + self.data.notes:
            self.note(sentence)
        if lineage := self.lineage(self.overlap_before):
            self.note(lineage)
        if self.rows.passes_over_data > 1 and not self.settings.is_open:
            self.note(report.passes_text(self.rows))
        said = f"evaluating on {self.judging_count} documents before the training"
        self._read([self.variant(UNTUNED), self.variant(BASE)], pause, said)

    def _read(self, variants: Sequence[Variant], pause: Show, sentence: str = "") -> None:
        """Have models read the held-out documents that judge the fine-tuning; do not repeat the
        readings of an earlier run."""
        if self.judge is None or not processes.is_main():
            return
        load = partial(self._load, sentence)
        self.models |= self.read(Models(load).computing, variants, pause)

    def _load(self, sentence: str = "", _: object = None) -> "PreTrainedModel":
        """Load the model to fine-tune, in evaluation mode; print the `sentence`, if there is
        one, first."""
        if sentence:
            self.say(sentence)
        gc.collect()  # frees the model before it
        torch.manual_seed(self.options.seed)
        return models.load_to_train(self.snapshot, self.options)

    def learn(self) -> None:
        """Train the adapter: a LoRA, new rows, or both. With --control, train one on the base with
        the same tokens too, for as many steps as the kept weights have."""
        model = self._load()
        rows = self.rows
        patience = self.settings.patience
        self.check_pose_jumps(model)
        learning = self.learning
        reason = learning.use_sliced_loss(model)
        if reason is not None:
            self.note(f"the loss needs whole logits: {reason}")
        evaluate = self._evaluate if self.judge else None
        self.tuned = self._train(TUNED, model, rows, trainer.Stopping(evaluate, patience))
        if not self.options.control:
            return
        pieces = ControlRows(rows, self.context)
        lowered = trainer.steps_without_gain(self.tuned.evaluations) if patience else ()
        as_tuned = trainer.Stopping(until=self.tuned.counted, lowered_after=lowered)
        with applied(self._load(), self.variant(BASE)) as model:
            learning.use_sliced_loss(model)
            self.control = self._train(CONTROL, model, pieces, as_tuned)

    def _train(
        self,
        label: str,
        model: "PreTrainedModel",
        rows: TrainingRows | ControlRows,
        stopping: trainer.Stopping,
    ) -> trainer.TrainingHistory:
        """Train an adapter of a model, and return the history of its steps."""
        settings = self.settings
        options = self.options
        torch.manual_seed(options.seed)
        joined = models.add_adapter(model, options, settings, self.new_rows)
        until = stopping.until
        tokens = f"of {settings.step_tokens} tokens"
        if settings.is_open and not until:
            tokens += f" at most, {STOPS}"
        self.say(f"training {label}: {until or settings.steps.value} steps {tokens}")
        documents = self.rows.documents
        long = settings.rows.value * rows.per_row
        mixed = RowsWithShortWindows(rows, long, documents, self.context, options)
        learned = self.learning.rows(mixed, self.encoder.tokenizer, options.seed)
        longest = self.context if label == CONTROL else self.target
        job = trainer.Optimisation(
            training=self,
            model=joined,
            rows=learned,
            folder=self.folder / label,
            recompute=self.needs.recompute,
            rows_per_step=mixed.per_step,
            row_tokens=min(settings.longest, longest),
            stopping=stopping,
            save_every=options.save_every,
        )
        return trainer.run_trainer(job, self.say)

    def _evaluate(self, model: nn.Module, step: int) -> tuple[float, float]:
        """Read the held-out documents with the adapter as it is after a step; return the losses of
        the far half and of the tail."""
        assert self.judge is not None
        model.eval()
        done = judge.read_in_training(model, self.variant(TUNED), self.judge, pause=self.show)
        # The tail alone has few tokens: more steps would look worse by chance.
        return rules.far_loss(done, TUNED), rules.tail_loss(done, TUNED)

    def choose(self, pause: Show) -> Finetuned:
        """Return the result of the fine-tuning: the best evaluated weights, or the last, and
        each model's reading of the same tokens."""
        tuned = self.tuned
        control = self.control
        trained = {TUNED: tuned} | ({CONTROL: control} if control else {})
        self._read([self.variant(label, history) for label, history in trained.items()], pause)
        measured = self.measured if self.judge else None
        done = Finetuned(
            output=self.output,
            counted=self.to_json(),
            work=self,
            measurement=measured,
            steps=tuned.steps,
            kept_step=tuned.counted,
            stopped_early=tuned.stopped_early,
            by_step=tuned.losses,
            evaluations=tuned.evaluations,
            numbers=judge.training_numbers(measured) if measured else {},
            overlap=self.overlap,
            control={"steps": control.steps, "losses": control.losses} if control else None,
            notes=self.notes,
        )
        if self.overlap is not None and self.overlap != self.overlap_before:
            self.note(self.overlap.sentence)
        if self.settings.is_open and done.passes > 1:
            warning = report.repeated_text_warning(done.passes)
            self.note(f"{done.passes:,.1f} passes over the text{warning}")
        return done

    def result_text(self, result: Finetuned) -> str:
        """Return the text that `finetune` prints at its end."""
        return tuned_report.finetune_result(result)

    def write(self, result: Finetuned, manner: WriteOptions) -> None:
        """Write OUT with the tuned weights, and the files of OUT/training."""
        # Files that --report-to tensorboard wrote.
        folder = self.folder / TUNED
        paths = sorted(path for path in folder.glob("runs/**/*") if path.is_file())
        trackers = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        files = tuned_report.finetune_files(result, self.kept_json(result))
        files |= trackers | self.first_steps_log()
        weights = tuned_writing.TunedWeights(
            origin=self.origin,
            new_rows=self.new_rows,
            adapter=self.tuned.best_checkpoint,
            control=None if self.control is None else self.control.best_checkpoint,
        )
        story = tuned_report.finetune_summary(result, self.part.new_rows)
        tuned_writing.write_tuned(result, weights, files, story, manner)
