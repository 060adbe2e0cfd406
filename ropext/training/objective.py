"""What differs between trainings, and the order that they share.

An objective is counted on a model without weights, and carried out in the folder OUT.run: measure,
learn, choose, write.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Generic, Protocol, Self, TypeVar

from ropext import guard
from ropext.checkpoint.digests import Digests
from ropext.checkpoint.provenance import taken_digests, versions, weights_digest
from ropext.checkpoint.unchanged import check_unchanged
from ropext.errors import InputError, OutputExists
from ropext.evaluation.reader import Progress, Reader
from ropext.evaluation.reads import Reads
from ropext.evaluation.variants import Computing, Variant
from ropext.jsontext import Json, JsonObject, digest, read_object, values_json
from ropext.models import processes
from ropext.models.load import memory_errors
from ropext.narration import (
    SILENT,
    Call,
    Hooks,
    Show,
    kept_after_interrupt,
    pausing,
    told,
    told_of_files,
    unseen,
)
from ropext.options.fields import FILES, NUMBERS
from ropext.results.measurement import MeasuredModel, Measurement, Store
from ropext.tasks import Item
from ropext.training import loss
from ropext.training.counting import Moving, Needs, count_needs
from ropext.training.place import (
    check_output_of,
    say_versions,
    settle_done,
    settle_output_of,
    writing_errors,
)
from ropext.training.training import Training
from ropext.workdir import SCHEMA, USED, Workdir, differences, first_of, has_work

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# In the file that keeps a result.
DECIDES = "decides"  # what its files follow from
CONTENT = "result"
# Adds to what will be the output: its path, how the fit was called, and the directory where it lies
# finished but without its name.
Finish = Callable[[Path, Call, Path], None]


class KeptResult(Protocol):
    """What a training gives back, kept in its output."""

    file: ClassVar[str]  # of the output

    @classmethod
    def of(cls, output: Path, content: JsonObject) -> Self:
        """Read it."""


Done = TypeVar("Done", bound=KeptResult)


class Objective(ABC, Generic[Done]):
    """Which parameters of a model move, what is measured of it, and how the winner is chosen and
    written. From `run` on it holds the state of one process of the run."""

    command: ClassVar[str]
    kind: type[Done]  # of its result
    out_of_memory: ClassVar[str]  # what helps
    title: str  # what is done, in a clause
    remarks: Sequence[str]  # what is said of it beforehand
    facts: Mapping[str, Json] = {}  # what --json says of this kind alone
    needs: Needs
    folder: Path
    finish: Finish | None = None  # adds to a fit's OUT, before that has its name
    output: Path
    call: Call

    def __init__(self, training: Training) -> None:
        self.training = training
        self.judge = training.judge
        self.snapshot = training.snapshot
        self.settings = training.settings
        self.context = training.context
        self.target = training.target
        self.notes: list[str] = []
        self.models: dict[str, MeasuredModel] = {}  # what was measured, by its labels

    # What is known beforehand.

    @property
    @abstractmethod
    def forward_tokens(self) -> int:
        """Tokens read without gradients."""

    @abstractmethod
    def moving(self, model: "PreTrainedModel") -> Moving:
        """What is trained of a model without weights. What the device, or the launch, cannot do is
        refused."""

    def manifest(self, show: Show = unseen) -> dict[str, Json]:
        """What decides the numbers. Weights that are not remembered are read for it, which is
        shown."""
        chosen = {name: setting.value for name, setting in self.settings.named.items()}
        return {
            SCHEMA: self.training.options.key_schema,
            "config": digest(self.snapshot.config),
            "weights": weights_digest(self.snapshot, Digests(show)),
            "data": self.training.data.digest(),
            "judging": [document.key for document in self.judge.documents] if self.judge else [],
            **self.facts,
            "options": self.training.options.deciding(NUMBERS) | chosen,
        }

    @property
    def tokens(self) -> int:
        """Read with gradients."""
        return self.settings.tokens

    def counts(self) -> Self:
        """Count on a model without weights; what cannot be trained is refused."""
        self.needs = count_needs(self.training, self.moving)
        return self

    def decides(self, show: Show = unseen) -> dict[str, Json]:
        """Return all that decides what is written: also the number of files, and the files that the
        output takes from its base."""
        files = self.training.options.deciding(FILES)
        base = taken_digests(self.snapshot, Digests(show))
        return self.manifest(show) | {"files": files, "base": base}

    def done_before(self, output: Path, call: Call) -> Done | None:
        """Return the result that this very training left, where all files are as it wrote them;
        one of other options or files is refused. None where --force asks for it again."""
        file = output / self.kind.file
        if call.force or not file.is_file() or not guard.is_as_written(output):
            return None
        kept = read_object(file)
        names = differences(kept[DECIDES], self.decides(told_of_files(call.hooks.say)))
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
        """What `--dry-run --json` shows."""
        training = self.training
        settings = self.settings
        needs = self.needs
        options = training.options
        sliced = needs.sliced
        return {
            "model": self.snapshot.name,
            "context": self.context,
            "target": self.target,
            "strategy": options.strategy,
            "packing": options.packing,
            **self.facts,
            "targets": list(needs.targets),
            "moving": needs.moving,
            "settings": values_json(settings.named),
            "steps": settings.steps.value,
            "tokens": self.tokens,
            "forward_tokens": self.forward_tokens,
            "weight_bytes": needs.weight_bytes,
            "moving_bytes": needs.moving_bytes,
            "recompute": needs.recompute,
            "documents": len(training.rows.documents),
            "documents_too_short": training.rows.too_short,
            "judging_documents": training.judged,
            "passes": training.rows.passes,
            "overlap": values_json(training.overlap_before),
            "loss": "sliced" if sliced is None else f"whole logits: {sliced}",
            "notes": list(self.remarks),
        }

    # How it goes.

    @abstractmethod
    def measure(self, pause: Show) -> None:
        """Read what is to be known of the models before the training."""

    @abstractmethod
    def learn(self) -> None:
        """Train."""

    @abstractmethod
    def choose(self, pause: Show) -> Done | None:
        """Read what was trained, and choose what is written; a process but the first may have no
        result."""

    @abstractmethod
    def write(self, result: Done, show: Show) -> None:
        """Write OUT as a whole or not at all."""

    def check(self, output: Path, call: Call) -> None:
        """Refuse an output, or a folder of the run, that holds something else, or has no room; one
        that is done is neither."""
        if self.done_before(output, call) is not None:
            return
        check_output_of(self.training, output, call)  # before weights are hashed
        self._place(output, call).check(call.force)

    def make(self, output: Path, call: Call) -> Done | None:
        """Do everything, from the last checkpoint on where the same run was interrupted, or nothing
        where it is done. A fit's processes but the first have no result."""
        before = self.done_before(output, call)
        if before is not None:
            if processes.is_main():
                settle_done(output)
            return before
        place = self._place(output, call)
        if processes.is_main():
            settle_output_of(self.training, output, call)
        else:
            check_output_of(self.training, output, call)
        self.counts()
        rank, world = processes.rank_and_count()
        with place.claimed(call.force, rank, world, call.hooks.say):
            if rank != 0:
                call = replace(call, hooks=SILENT)
            return self.run(place.folder, output, call)

    def _place(self, output: Path, call: Call) -> Workdir:
        """Where a run keeps what is not finished."""
        say = call.hooks.say
        manifest = self.manifest(told_of_files(say))
        now = versions()
        place = Workdir(output, self.command, manifest, {"versions": now})
        if place.has_begun():
            say_versions(place.folder, now, say)
        return place

    def run(self, folder: Path, output: Path, call: Call) -> Done | None:
        """Go the whole way, from what the folder has on."""
        self.folder = folder
        self.output = output
        self.call = call
        self.say = call.hooks.say
        self.show = told(self.say)
        after = f"finished work is kept in {folder}; run the same command to resume"
        with kept_after_interrupt(after, lambda: has_work(folder)):
            with self._guarded(folder):
                with pausing(self.say, self.show) as pause:
                    self.measure(pause)
                self.learn()
                with pausing(self.say, self.show) as pause:
                    result = self.choose(pause)
            if result is not None and processes.is_main():
                check_unchanged(self.snapshot, "trained")  # its files become a part of OUT
                with self._guarded(output):
                    self.say("writing the checkpoint, then verifying it with transformers")
                    self.write(result, told_of_files(self.say))
        return result

    @contextmanager
    def _guarded(self, folder: Path) -> Iterator[None]:
        """Out of memory, and a full or failing disk, become a sentence; the checkpoints before it
        are kept."""
        with memory_errors(self.out_of_memory), writing_errors(folder):
            yield

    def note(self, sentence: str) -> None:
        """Tell, now and in the result."""
        self.notes.append(sentence)
        self.say(sentence)

    @property
    def measured(self) -> Measurement:
        """All models that were read by what judges."""
        judge = self.reads
        return Measurement(judge.frame, self.models, judge.described)

    @property
    def reads(self) -> Reads:
        """What judges, where there is something."""
        assert self.judge is not None
        return self.judge

    def read(
        self,
        computing: Computing,
        variants: Sequence[Variant],
        pause: Show,
        items: Sequence[Item] | None = None,
    ) -> Mapping[str, MeasuredModel]:
        """Have variants read what judges, or answer `items`, each by itself, in its place. It is
        kept, so that a run that goes on does not do it again."""
        reads = self.reads
        folder = self.folder / "readings"
        if items is not None:
            reads = replace(reads, documents=(), questions=tuple((item,) for item in items))
        stores = {v.label: Store(folder / v.label, writes=processes.is_main()) for v in variants}
        progress = Progress(hooks=Hooks(show=pause))
        return Reader(computing).measure(variants, reads, stores, progress).models

    def check_jumps(self, model: "PreTrainedModel") -> None:
        """Refuse short rows where their second chunk would not see the first."""
        if self.training.options.strategy != "pose":
            return
        jump = self.target - loss.PROBE
        if not processes.by_first(lambda: loss.chunks_are_joined(model, jump)):
            raise InputError(
                "--strategy pose: in this model's attention the second chunk of a row sees "
                "nothing of the first, so it would learn nothing; use --strategy full"
            )

    def first_steps(self) -> dict[str, bytes]:
        """The log of what first steps took, as a file of the result."""
        log = self.folder / USED
        return {USED: guard.signed_log(log.read_bytes())} if log.is_file() else {}
