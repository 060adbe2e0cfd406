"""Define the order that all trainings share, and the parts in which they differ.

An objective is counted on a model without weights. It is carried out in the folder OUT.run:
measure, learn, choose, write.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Generic, Self, TypeVar

from ropext.base import guard
from ropext.base.atomic import reason_of
from ropext.base.errors import InputError, OutputExists, Stopped
from ropext.base.jsontext import Json, digest, read_object, values_json
from ropext.base.narration import (
    SILENT,
    Call,
    Hooks,
    Show,
    file_progress,
    kept_after_interrupt,
    no_progress,
    pausing,
    progress_lines,
)
from ropext.base.staging import (
    Output,
    check_output,
    check_space,
    recover,
    settle_output,
)
from ropext.base.workdir import SCHEMA, USED, Workdir, differences, first_of, has_work
from ropext.evaluation.reader import Progress, Reader
from ropext.evaluation.variants import Computing, Variant
from ropext.files.checkpoint import Snapshot
from ropext.files.checkpoint.digests import Digests, check_unchanged
from ropext.files.checkpoint.provenance import versions
from ropext.files.checkpoint.writing import WriteOptions
from ropext.models import processes
from ropext.models.head import PROBE, predicted_head_problem
from ropext.models.load import free_memory, memory_errors, model_without_weights
from ropext.options.fields import FILES, NUMBERS
from ropext.options.training import Finetune, TrainingOptions
from ropext.results.measurement import MeasuredModel, Measurement, Store
from ropext.tasks import Item
from ropext.training import defaults, loss, models
from ropext.training.data import Training
from ropext.training.result import CONTENT, DECIDES, TrainingResult

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Adds to the output. Arguments: the output's path, how the fit was called, and the directory that
# holds the finished output before it gets its name.
Finish = Callable[[Path, Call, Path], None]


# Layers are run again in the backward pass, unless their activations take less than the share
# PLENTY of the free memory. To keep the activations saves a quarter of the time. A layer keeps
# KEPT_BYTES for each token and hidden channel (Korthikanti et al. 2022, section 4.1, without the
# square of scores).
KEPT_BYTES = 34
PLENTY = 0.125
# Copies of each trained number: itself, its gradient, and AdamW's two moments.
COPIES = 4


@dataclass(frozen=True)
class TrainedPart:
    """The part of a model that a training moves."""

    targets: tuple[str, ...]  # layers that get a LoRA, new rows of tables; or the spectrum
    moving: int  # parameters in it
    moving_bytes: int  # with gradients and the optimiser's state
    new_rows: tuple[str, ...] = ()  # of position tables, in words


@dataclass(frozen=True)
class TrainingNeeds:
    """The needs of a training apart from the trained part."""

    weight_bytes: int  # weights of the model that is read, on all devices together
    recompute: bool  # layers are run again in the backward pass
    sliced: str | None  # why the loss is not sliced


Done = TypeVar("Done", bound=TrainingResult)


@dataclass(kw_only=True, eq=False, repr=False)
class TrainingObjective(Training, ABC, Generic[Done]):
    """A fine-tuning or a fit: the numbers that move, the measurements, and how the winner is
    chosen and written. From `run` on it holds the state of one process of the run."""

    command: ClassVar[str]
    kind: type[Done] = field(init=False)  # of its result
    out_of_memory: ClassVar[str]  # what helps
    title: str = ""  # names the training in a clause
    remarks: Sequence[str] = ()  # notes before the training
    # Values that --json shows for this kind alone.
    facts: Mapping[str, Json] = field(default_factory=dict)
    part: TrainedPart = field(init=False)
    needs: TrainingNeeds = field(init=False)
    folder: Path = field(init=False)
    output: Path = field(init=False)
    call: Call = field(init=False)
    notes: list[str] = field(default_factory=list)
    # The measured models, by their labels.
    models: dict[str, MeasuredModel] = field(default_factory=dict)

    # Known before the training.

    @property
    @abstractmethod
    def forward_tokens(self) -> int:
        """Return the number of tokens that the training reads without gradients."""

    @abstractmethod
    def trained_part(self, model: "PreTrainedModel") -> TrainedPart:
        """Return the trained part of a model without weights; refuse a device or a launch that
        cannot train it."""

    def decides(self, show: Show = no_progress, *, files: bool = False) -> dict[str, Json]:
        """Return all values that decide the numbers of a training. With `files`, add the options
        that decide only files, and the digests of the files that the output takes from its base.
        If no digest of the weights is remembered, ropext reads them, and `show` shows the
        progress."""
        options = self.options
        digests = Digests(show)
        chosen = {name: setting.value for name, setting in self.settings.named.items()}
        decides = {
            SCHEMA: options.key_schema,
            "config": digest(self.snapshot.config),
            "weights": digests.of_files(self.snapshot, self.snapshot.weight_files),
            "data": self.data.digest(),
            "judging": [document.key for document in self.judge.documents] if self.judge else [],
            **self.facts,
            "options": options.deciding(NUMBERS) | chosen,
        }
        if files:
            decides["files"] = options.deciding(FILES)
            decides["base"] = digests.of_taken(self.snapshot)
        return decides

    @property
    def tokens(self) -> int:
        """Return the number of tokens that the training reads with gradients."""
        return self.settings.tokens

    def counts(self) -> Self:
        """Count the memory and the parameters of a training on a model without weights, and
        return the objective; refuse a model that cannot be trained."""
        settings = self.settings
        options = self.options
        models.check_tracker(options.report_to)
        model = model_without_weights(self.snapshot)
        share = settings.per_step // processes.readers()
        rows = defaults.micro_rows(options, settings.longest, share)
        config = model.config.get_text_config()
        # The tokens of each row that one process reads.
        tokens = rows * settings.longest // processes.processes_of_each_row()
        activations = KEPT_BYTES * tokens * config.hidden_size * config.num_hidden_layers
        numbers = sum(parameter.numel() for parameter in model.parameters())
        self.part = self.trained_part(model)
        self.needs = TrainingNeeds(
            weight_bytes=models.training_dtype(options).itemsize * numbers,
            recompute=activations > PLENTY * free_memory(models.training_device(options)),
            sliced=self.learning.why_whole or predicted_head_problem(model),
        )
        return self

    def done_before(self, output: Path, call: Call) -> Done | None:
        """Return the result of this same training, if it is finished and all its files are
        unchanged; else None, also with --force. Refuse a finished training of other options or
        files."""
        file = output / self.kind.file
        if call.force or not file.is_file() or not guard.is_as_written(output):
            return None
        kept = read_object(file)
        names = differences(kept[DECIDES], self.decides(file_progress(call.hooks.say), files=True))
        if not names:
            return self.kind.of(output, kept[CONTENT])
        why = f"it differs in {first_of(names)}"
        if SCHEMA in names:
            why = "another version of ropext wrote it, whose results differ"
        raise OutputExists(
            f"{output} (--output) holds another finished {self.command} ({why}); give another -o, "
            "or --force to train again"
        )

    def to_json(self) -> dict[str, Json]:
        """Return the values that `finetune --dry-run --json` and `fit --dry-run --json` show."""
        settings = self.settings
        needs = self.needs
        options = self.options
        sliced = needs.sliced
        return {
            "model": self.snapshot.name,
            "context": self.context,
            "target": self.target,
            "strategy": options.strategy,
            "packing": options.packing,
            **self.facts,
            "targets": list(self.part.targets),
            "moving": self.part.moving,
            "settings": values_json(settings.named),
            "steps": settings.steps.value,
            "tokens": self.tokens,
            "forward_tokens": self.forward_tokens,
            "weight_bytes": needs.weight_bytes,
            "moving_bytes": self.part.moving_bytes,
            "recompute": needs.recompute,
            "documents": len(self.rows.documents),
            "documents_too_short": self.rows.too_short,
            "judging_documents": self.judging_count,
            "passes": self.rows.passes_over_data,
            "overlap": values_json(self.overlap_before),
            "loss": "sliced" if sliced is None else f"whole logits: {sliced}",
            "notes": list(self.remarks),
        }

    # How it goes.

    @abstractmethod
    def measure(self, pause: Show) -> None:
        """Measure the models before the training."""

    @abstractmethod
    def learn(self) -> None:
        """Train the model; `choose` then reads the trained models."""

    @abstractmethod
    def choose(self, pause: Show) -> Done | None:
        """Read the trained models, and choose the weights or spectrum to write; only the first
        process must return a result."""

    @abstractmethod
    def write(self, result: Done, manner: WriteOptions) -> None:
        """Write OUT of the training as a whole or not at all."""

    def check(self, output: Path, call: Call) -> None:
        """Refuse to fine-tune or fit into an output, or the folder of its run, that holds something
        else or has no room. Accept a finished result of this training."""
        if self.done_before(output, call) is None:
            self._settled_folder(output, call, changes=False).check(call.force)

    def make(self, output: Path, call: Call) -> Done | None:
        """Run the training, resume it from the last checkpoint, or return the result if it is
        finished. In a fit only the first process returns a result."""
        before = self.done_before(output, call)
        if before is not None:
            if processes.is_main():
                # Leftovers of a kill that came after the output was written and got its name.
                recover(output, refused=True)
            return before
        place = self._settled_folder(output, call, changes=processes.is_main())
        self.counts()
        rank, world = processes.rank_and_count()
        with place.claimed(call.force, rank, world, call.hooks.say):
            processes.wait_for_everyone()  # the first has deleted damaged pieces
            if rank != 0:
                call = replace(call, hooks=SILENT)
            return self.run(place.folder, output, call)

    def _settled_folder(self, output: Path, call: Call, *, changes: bool) -> Workdir:
        """Return the folder OUT.run of an unfinished training, and print which libraries changed
        since the run began. Before weights are hashed, refuse an output that holds something else,
        or has no room. If it may make `changes`, first clear away the leftovers of a kill."""
        record = self.record
        reads: list[Path | str] = [self.snapshot.directory]
        if record is not None:
            reads.append(str(record.base.get("name") or ""))
        place = Output(output, call.force, reads)
        if changes:
            settle_output(place)
        else:
            check_output(place)
        check_space(output, output_bytes(self.snapshot, self.options))
        say = call.hooks.say
        now = versions()
        run = Workdir(output, self.command, self.decides(file_progress(say)), {"versions": now})
        before = (run.begun_manifest() or {}).get("versions")
        if isinstance(before, dict) and (changed := differences(before, now)):
            then = list[str]()
            here = list[str]()
            for name in changed:
                then.append(f"{name} {before.get(name, 'absent')}")
                here.append(f"{name} {now.get(name, 'absent')}")
            say(f"{run.folder}: started with {', '.join(then)}, resumes with {', '.join(here)}")
        return run

    def run(self, folder: Path, output: Path, call: Call) -> Done | None:
        """Do all parts of a training that its folder does not hold yet, and return the result."""
        self.folder = folder
        self.output = output
        self.call = call
        self.say = call.hooks.say
        self.show = progress_lines(self.say)
        after = f"finished work is kept in {folder}; run the same command to resume"
        with kept_after_interrupt(after, lambda: has_work(folder)):
            with self._stop_on_full_memory_or_disk(folder):
                with pausing(self.say, self.show) as pause:
                    self.measure(pause)
                self.learn()
                with pausing(self.say, self.show) as pause:
                    result = self.choose(pause)
            if result is not None and processes.is_main():
                check_unchanged(self.snapshot, "trained")  # its files become a part of OUT
                with self._stop_on_full_memory_or_disk(output):
                    self.say("writing the checkpoint, then verifying it with transformers")
                    show = file_progress(self.say)
                    self.write(result, WriteOptions(self.options.link, call.force, show=show))
        return result

    @contextmanager
    def _stop_on_full_memory_or_disk(self, folder: Path) -> Iterator[None]:
        """Report in one sentence that memory, or the disk of a training's folder, is full or
        fails; earlier checkpoints are kept."""
        with memory_errors(self.out_of_memory):
            try:
                yield
                return
            except Exception as error:
                reason = reason_of(error)
                if reason is None:
                    raise
            raise Stopped(
                f"{folder} cannot be written: {reason}; finished checkpoints are kept; run the "
                "same command to resume"
            )

    def note(self, sentence: str) -> None:
        """Print a sentence on the training now, and keep it for the result."""
        self.notes.append(sentence)
        self.say(sentence)

    @property
    def measured(self) -> Measurement:
        """Return the measurement of all models that were read before and after the training."""
        assert self.judge is not None
        return Measurement(self.judge.frame, self.models, self.judge.described)

    def read(
        self,
        computing: Computing,
        variants: Sequence[Variant],
        pause: Show,
        items: Sequence[Item] | None = None,
    ) -> Mapping[str, MeasuredModel]:
        """Have variants read the documents that judge the training, or answer `items` instead,
        each by itself. Keep the readings, so that a resumed run does not repeat them."""
        reads = self.judge
        assert reads is not None
        folder = self.folder / "readings"
        if items is not None:
            reads = replace(reads, documents=(), questions=tuple((item,) for item in items))
        stores = {v.label: Store(folder / v.label, writes=processes.is_main()) for v in variants}
        progress = Progress(hooks=Hooks(show=pause))
        return Reader(computing).measure(variants, reads, stores, progress).models

    def check_pose_jumps(self, model: "PreTrainedModel") -> None:
        """Refuse to train on short rows (pose) if their second chunk would not see the first."""
        if self.options.strategy != "pose":
            return
        jump = self.target - PROBE
        if not processes.ask_first_process(lambda: loss.chunks_are_joined(model, jump)):
            raise InputError(
                "--strategy pose: in this model's attention the second chunk of a row sees "
                "nothing of the first, so it would learn nothing; use --strategy full"
            )

    def kept_json(self, result: Done) -> dict[str, Json]:
        """Return the content of result.json that a fine-tuning or fit keeps in OUT: its result, and
        the values that decide it. `done_before` reads it."""
        content = result.to_json()
        del content["output"]
        return {DECIDES: self.decides(files=True), CONTENT: content}

    @abstractmethod
    def result_text(self, result: Done) -> str:
        """Return the text that `finetune` or `fit` prints at its end."""

    def first_steps_log(self) -> dict[str, bytes]:
        """Return the log of the time and memory of the first optimiser steps, as a file of OUT."""
        log = self.folder / USED
        return {USED: guard.signed_log(log.read_bytes())} if log.is_file() else {}


def output_bytes(snapshot: Snapshot, options: TrainingOptions) -> int:
    """Count the bytes of weights in OUT of a training: the tuned ones, and the copies of the
    base's."""
    copies = 0
    is_slim = False
    if isinstance(options, Finetune):
        copies = 1
        is_slim = options.slim
    if options.link == "copy" and not is_slim:
        copies += 1
    return copies * sum(snapshot.files[name] for name in snapshot.weight_files)
