"""Hold all facts of a training known before weights are loaded, except the objective's own."""

from dataclasses import dataclass, replace
from functools import cached_property

from ropext.evaluation.corpus import DocumentEncoder
from ropext.evaluation.workload import Workload
from ropext.files.checkpoint import Snapshot
from ropext.files.checkpoint.provenance import Record
from ropext.options.training import TrainingOptions
from ropext.results.overlap import NO_DOCUMENTS, Overlap, Trained, overlap, trained
from ropext.training.data import TrainingData
from ropext.training.defaults import Settings
from ropext.training.learning import NEXT_TOKEN_LEARNING, Learning
from ropext.training.rows import Rows


@dataclass(frozen=True)
class Training:
    """A training before its weights are loaded: documents read and divided, settings chosen."""

    snapshot: Snapshot  # the checkpoint that is trained
    record: Record | None  # how that was made
    options: TrainingOptions
    context: int
    target: int
    settings: Settings
    data: TrainingData
    encoder: DocumentEncoder
    rows: Rows
    judge: Workload | None  # None if no document is read
    chooses_step: bool  # the documents that judge choose the step that is written
    learning: Learning = NEXT_TOKEN_LEARNING

    @property
    def judged(self) -> int:
        """Count the documents that are read before, during and after."""
        return len(self.judge.documents) if self.judge else 0

    @property
    def padding(self) -> int:
        """Return the token that fills up rows."""
        return self.encoder.tokenizer.pad_token_id or 0

    @property
    def used(self) -> Trained:
        """Return the documents that the result will have been trained on, and the documents that
        chose its step."""
        if not self.chooses_step or self.judge is None:
            return self.data.trained
        chose = trained(document.known_by[1:] for document in self.judge.documents)
        return self.data.trained.with_more(replace(NO_DOCUMENTS, chose=chose))

    @cached_property
    def overlap_before(self) -> Overlap | None:
        """Return the overlap known before the training: how many judging documents are trained on,
        or chose something earlier. None if no document judges."""
        return self._overlap_with(self.data.trained)

    @cached_property
    def overlap(self) -> Overlap | None:
        """Return the overlap known after the training: some judging documents may have chosen the
        step."""
        return self._overlap_with(self.used if self.settings.patience else self.data.trained)

    def _overlap_with(self, known: Trained) -> Overlap | None:
        documents = self.judge.documents if self.judge else ()
        return overlap(known, [document.known_by for document in documents])

    def lineage(self, known: Overlap | None) -> str:
        """Return the sentences on the judging documents' `known` overlap, and on documents that are
        kept out."""
        sentences = list[str]()
        if known is not None and known.sentence:
            sentences.append(known.sentence)
        if self.data.kept_out:
            out = f"{self.data.kept_out} documents of the verdict are kept out of training"
            sentences.append(out)
        return "; ".join(sentences)
