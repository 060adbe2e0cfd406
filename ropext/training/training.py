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
    def overlap(self) -> Overlap | None:
        """The documents that judge and were trained on, or chose; None where there are none."""
        documents = self.judge.documents if self.judge else ()
        known = self.used if self.settings.patience else self.trained_on
        return overlap(known, [document.known_by for document in documents])

    @property
    def lineage(self) -> str:
        """What is said of documents that judge and were used before, and of those kept out."""
        sentences = [self.overlap.sentence] if self.overlap and self.overlap.sentence else []
        if self.data.kept_out:
            out = f"{self.data.kept_out} documents of the verdict are kept out of training"
            sentences.append(out)
        return "; ".join(sentences)
