"""Measure every candidate of `--method auto` on the same documents, once."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ropext.base.errors import InputError
from ropext.base.lengths import length_text
from ropext.base.narration import Call
from ropext.evaluation import corpus
from ropext.evaluation.documents import read_corpus
from ropext.evaluation.forward import NanInLogits
from ropext.evaluation.reader import Progress, Reader
from ropext.evaluation.variants import Variant, applied
from ropext.evaluation.workload import Workload
from ropext.files.checkpoint import with_weights
from ropext.models.load import load_model, loading_of, memory_errors, out_of_memory, silenced
from ropext.pipeline.planned_choice import PlannedChoice
from ropext.results.measurement import Store
from ropext.results.overlap import TrainingDocuments, training_documents
from ropext.results.rules import Standing, in_memory_sentence, loss_standing, tail_above
from ropext.results.values import FEWEST_DOCUMENTS


@dataclass(frozen=True)
class CandidateResults:
    """The measurement of all candidates."""

    order: Standing
    chose: TrainingDocuments  # the documents
    in_memory: tuple[str, ...]  # a sentence for each method that no checkpoint holds
    not_finite: Mapping[str, str]  # candidate -> why its logits count for nothing
    tokens: int  # read forward


def choice_documents_path(folder: Path) -> Path:
    """Return the path of the documents for the choice."""
    return folder / "choosing.jsonl"


def measure_candidates(planned: PlannedChoice, folder: Path, call: Call) -> CandidateResults:
    """Measure every candidate on the documents for the choice; an interrupted choice resumes."""
    say = call.hooks.say
    say(
        f"choosing among {', '.join(planned.compared.plans)} at {length_text(planned.target)} on "
        f"{planned.documents} documents"
    )
    if planned.documents < FEWEST_DOCUMENTS:
        say(
            f"warning: [few-documents] only {planned.documents} documents to choose by: "
            "no intervals (eight or more give them); ropext takes the lowest"
        )
    said = out_of_memory(planned.recipe.model, "what was read is kept")
    with silenced(), memory_errors(said):
        return CandidateReader(planned, folder, call).read()


class CandidateReader:
    """A reader that loads one model and measures it with each candidate in turn."""

    def __init__(self, planned: PlannedChoice, folder: Path, call: Call) -> None:
        self.planned = planned
        self.call = call
        self.folder = folder
        self.stores = dict[str, Store]()
        for label in planned.compared.labels:
            self.stores[label] = Store(folder / "readings" / label)
        self.not_finite = dict[str, str]()
        self.tokens = 0

    def read(self) -> CandidateResults:
        """Measure the candidates that a checkpoint can hold, then compare the others with the
        lowest of them."""
        planned = self.planned
        values = planned.reading.unstored()
        values["data"] = str(choice_documents_path(self.folder))
        files = planned.reading.changed(**values)
        wanted = corpus.Wanted((planned.target,), True, files.max_docs)
        documents = read_corpus(files, planned.encoder, wanted).documents
        loading = loading_of(files, self.call.trust_remote_code)
        model = load_model(with_weights(planned.compared.snapshot), loading)
        reader = Reader(partial(applied, model), files)
        reads = Workload(planned.frame, documents)
        finite = self._read(reader, planned.compared.variants_of_plans, reads)
        if not finite:
            raise InputError(f"every method gives logits that are not finite: {self.not_finite}")
        order = loss_standing(reads.measured(finite, self.stores))
        (lowest,) = (variant for variant in finite if variant.label == order.lowest)
        sentences = list[str]()
        in_memory = planned.compared.readable(reader.computing).beside
        for variant in self._read(reader, in_memory, reads):
            both = reads.measured([lowest, variant], self.stores)
            above = tail_above(both, variant.label, lowest.label)
            sentences.append(in_memory_sentence(variant.label, above, lowest.label))
        chose = training_documents(document.known_by[1:] for document in documents)
        return CandidateResults(order, chose, tuple(sentences), self.not_finite, self.tokens)

    def _read(self, reader: Reader, variants: Iterable[Variant], reads: Workload) -> list[Variant]:
        """Measure the variants that were not measured before; return the variants with finite
        logits."""
        finite = list[Variant]()
        for variant in variants:
            self.tokens += reads.tokens(variant)
            progress = Progress(hooks=self.call.hooks, kept_in=self.folder)
            try:
                reader.measure([variant], reads, self.stores, progress)
            except NanInLogits as error:
                self.not_finite[variant.label] = str(error)
            else:
                finite.append(variant)
        return finite
