"""A fine-tuning as it goes: a LoRA of an extended checkpoint, new rows of its position table, or
both."""

import gc
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from ropext.corpus.selection import REMEDY
from ropext.errors import UsageError
from ropext.evaluation.reader import Models
from ropext.evaluation.variants import Variant, applied
from ropext.models import processes
from ropext.narration import Show
from ropext.options.training import Finetune
from ropext.planning import InMemory
from ropext.results import BASE, CONTROL, EXTENDED, TUNED, UNTUNED, rules
from ropext.training import models, report, trainer, tuned_report
from ropext.training.counting import Moving
from ropext.training.data import LARGEST_SHARE
from ropext.training.judge import numbers_of, read_now, tokens_of
from ropext.training.objective import Objective
from ropext.training.origin import Origin
from ropext.training.result import Finetuned
from ropext.training.rows import ControlRows, Rows, WithShort
from ropext.training.trainable import Trainable
from ropext.training.training import Training
from ropext.training.tuned_writing import TunedWeights, write_tuned

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STOPS = "stops when held-out documents no longer improve"


class AdapterObjective(Objective[Finetuned]):
    """A LoRA and new rows move; the held-out loss may choose the step; they are merged."""

    command = "finetune"
    kind = Finetuned
    out_of_memory = (
        "out of memory; three options help most: --micro-rows 1, --strategy pose (memory does not "
        "depend on the target), and --dtype bfloat16 (on a GPU also --qlora). The last checkpoint "
        "is kept"
    )

    def __init__(
        self, training: Training, options: Finetune, origin: Origin, trainable: Trainable
    ) -> None:
        super().__init__(training)
        self.options = options
        self.origin = origin
        self.trainable = trainable
        self.title = f"{origin.history}, strategy {options.strategy}, packing {options.packing}"
        self.remarks = list(training.data.unread)
        if self.why_no_judge:
            self.remarks.append(f"not evaluated: {self.why_no_judge}")
        if self.settings.is_open:
            self.remarks.append(f"at most {self.settings.steps.value} steps, {STOPS}")
        self.remarks += report.asked_text(options.retrieval_share)
        self.tuned = trainer.History()
        self.control: trainer.History | None = None

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

    def moving(self, model: "PreTrainedModel") -> Moving:
        from accelerate import init_empty_weights

        device = models.device(self.options)
        if self.options.qlora:
            models.four_bits(device)
        if processes.is_fsdp() and device.type == "cpu":
            raise UsageError(
                "launched with FSDP on a CPU, and accelerate silently runs DDP there; use GPUs, or "
                "the config ddp of `ropext.training.launch`"
            )
        names = list[str]()
        if self.trainable.has_lora:
            names = models.target_names(model, self.options.targets)
        with init_empty_weights(include_buffers=False):
            joined = models.add_adapter(model, self.options, self.settings, self.trainable)
        count = sum(p.numel() for p in joined.parameters() if p.requires_grad)
        new_rows = self.trainable.new_rows(joined)
        for rows in new_rows:
            count -= rows.fixed
        return Moving(
            names=tuple(names),
            count=count,
            size=4 * count,  # float32
            new_rows=tuple(map(str, new_rows)),
        )

    def variant(self, label: str, history: trainer.History | None = None) -> Variant:
        """A model that is read, with the adapter that a training left: the base, and its control,
        with a position table's rows of before, through the short window."""
        adapter = None if history is None else str(history.best_checkpoint)
        if label not in (BASE, CONTROL):
            return Variant(label, EXTENDED, self.snapshot, adapter=adapter)
        config = self.origin.base_config()
        beside = InMemory(self.origin.positions.base_table)
        return Variant(label, label, self.snapshot, config, beside, adapter=adapter)

    def measure(self, pause: Show) -> None:
        """Read the base through its short window, and the extended model as it is; say before it
        what is known of the result."""
        training = self.training
        if self.why_no_judge:
            self.note(f"not evaluated: {self.why_no_judge}")
        if self.origin.is_read_from_config:
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
        said = f"evaluating on {self.training.judged} documents before the training"
        self._read([self.variant(BASE), self.variant(UNTUNED)], pause, said)

    def _read(self, variants: Sequence[Variant], pause: Show, sentence: str = "") -> None:
        """Have models read the documents that judge; what an earlier run read is not read again."""
        if self.judge is None or not processes.is_main():
            return

        def load(_: object) -> "PreTrainedModel":
            if sentence:
                self.say(sentence)
            model = self._load()
            model.eval()
            return model

        self.models |= self.read(Models(load).computing, variants, pause)

    def _load(self) -> "PreTrainedModel":
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
        self.tuned = self._train(TUNED, model, rows, trainer.Stopping(evaluate, patience))
        if not self.options.control:
            return
        pieces = ControlRows(rows, self.context)
        lowered = trainer.missed(self.tuned.evaluations) if patience else ()
        as_tuned = trainer.Stopping(until=self.tuned.counted, lowered_after=lowered)
        with applied(self._load(), self.variant(BASE)) as model:
            learning.use_sliced_loss(model)
            self.control = self._train(CONTROL, model, pieces, as_tuned)

    def _train(
        self,
        label: str,
        model: "PreTrainedModel",
        rows: Rows | ControlRows,
        stopping: trainer.Stopping,
    ) -> trainer.History:
        """Train an adapter of a model."""
        settings = self.settings
        options = self.options
        training = self.training
        torch.manual_seed(options.seed)
        joined = models.add_adapter(model, options, settings, self.trainable)
        until = stopping.until
        tokens = f"of {settings.step_tokens} tokens"
        if settings.is_open and not until:
            tokens += f" at most, {STOPS}"
        self.say(f"training {label}: {until or settings.steps.value} steps {tokens}")
        documents = training.rows.documents
        long = settings.rows.value * rows.per_row
        mixed = WithShort(rows, long, documents, self.context, options)
        learned = training.learning.rows(mixed, training.encoder.tokenizer, options.seed)
        longest = self.context if label == CONTROL else self.target
        job = trainer.Optimisation(
            training=training,
            model=joined,
            rows=learned,
            folder=self.folder / label,
            recompute=self.needs.recompute,
            rows_per_step=mixed.per_step,
            row_tokens=min(settings.longest, longest),
            stopping=stopping,
            save_every=options.save_every,
        )
        return trainer.train(job, self.say)

    def _evaluate(self, model: nn.Module, step: int) -> tuple[float, float]:
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
            counted=self.to_json(),
            work=self,
            measurement=measured,
            steps=tuned.steps,
            kept_step=tuned.counted,
            stopped_early=tuned.stopped_early,
            by_step=tuned.losses,
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
        weights = TunedWeights(
            origin=self.origin,
            trainable=self.trainable,
            adapter=self.tuned.best_checkpoint,
            control=None if self.control is None else self.control.best_checkpoint,
        )
        write_tuned(result, weights, files, tuned_report.finetune_story(result), show)
