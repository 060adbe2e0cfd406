"""A training: all that is known of it before a weight is loaded, but for its objective's own."""

from dataclasses import dataclass, replace
from functools import cached_property

from ropext.checkpoint import Snapshot
from ropext.checkpoint.provenance import read_record
from ropext.corpus import DocumentEncoder
from ropext.evaluation.reads import Reads
from ropext.options.training import TrainingOptions
from ropext.results.overlap import NO_DOCUMENTS, Overlap, Trained, overlap, trained, trained_in
from ropext.training.data import TrainingData
from ropext.training.defaults import Settings
from ropext.training.learning import NEXT_TOKEN_LEARNING, Learning
from ropext.training.rows import Rows


@dataclass(frozen=True)
class Training:
    """Documents read and divided, settings chosen."""

    snapshot: Snapshot  # of what is trained
    options: TrainingOptions
    context: int
    target: int
    settings: Settings
    data: TrainingData
    encoder: DocumentEncoder
    rows: Rows
    judge: Reads | None  # None where no document is read
    chooses_step: bool  # the documents that judge choose the step that is written
    learning: Learning = NEXT_TOKEN_LEARNING

    @property
    def judged(self) -> int:
        """Documents that are read before, during and after."""
        return len(self.judge.documents) if self.judge else 0

    @property
    def padding(self) -> int:
        """The token that fills up rows."""
        return self.encoder.tokenizer.pad_token_id or 0

    @cached_property
    def trained_on(self) -> Trained:
        """What the result will have been trained or fitted on, by the record and this run."""
        before = trained_in(read_record(self.snapshot.directory))
        return before.with_more(self.data.trained) if before else self.data.trained

    @property
    def used(self) -> Trained:
        """The same, and the documents that chose the step."""
        chooses = self.judge if self.chooses_step else None
        chose = (
            trained(document.known_by[1:] for document in chooses.documents) if chooses else None
        )
        return self.trained_on.with_more(replace(NO_DOCUMENTS, chose=chose))

    @cached_property
    def overlap_before(self) -> Overlap | None:
        """What is known before the training: the documents that judge and are trained on, or that
        chose something earlier; None where there are none."""
        return self._overlap_with(self.trained_on)

    @cached_property
    def overlap(self) -> Overlap | None:
        """What is known of the result: the same, and the documents that choose its step."""
        return self._overlap_with(self.used if self.settings.patience else self.trained_on)

    def _overlap_with(self, known: Trained) -> Overlap | None:
        documents = self.judge.documents if self.judge else ()
        return overlap(known, [document.known_by for document in documents])

    @property
    def lineage_before(self) -> str:
        """What is said before the training of documents that judge, and of those kept out."""
        return self._lineage(self.overlap_before)

    @property
    def lineage(self) -> str:
        """What is said of the result."""
        return self._lineage(self.overlap)

    def _lineage(self, known: Overlap | None) -> str:
        sentences = list[str]()
        if known is not None and known.sentence:
            sentences.append(known.sentence)
        if self.data.kept_out:
            out = f"{self.data.kept_out} documents of the verdict are kept out of training"
            sentences.append(out)
        return "; ".join(sentences)
