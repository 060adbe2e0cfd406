"""Track the documents that trained a checkpoint, chose it or judged it, by the hashes in its
record; and mark measured documents.

"Trained on" includes a fit. If a record says nothing, ropext claims nothing.
"""

import base64
import binascii
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ropext.base.errors import InputError
from ropext.base.jsontext import Json, JsonObject, fields_of, read_values
from ropext.base.table import Marked
from ropext.files.checkpoint.provenance import TRAINED_ON, Record, with_training

Hashes = npt.NDArray[np.uint64]

# A record keeps at most so many, two megabytes together: the lowest hashes.
MOST_DOCUMENTS = 2**16
MOST_PASSAGES = 2**16
# A document with fewer of its passages in common has a licence or a saying in common.
LEAST_SHARE = 1 / 8
LEAST_PASSAGES = 3
HASHES = "trained_on.json"  # next to an adapter, which has no record
SHOWN = 3  # names in a sentence


def unique_hashes(parts: Sequence[npt.ArrayLike]) -> Hashes:
    """Return the hashes of documents or passages from several lists, each once, the lowest first.
    The overlap of training and measured documents follows from them."""
    if not parts:
        return np.empty(0, np.uint64)
    return np.unique(np.concatenate([np.asarray(part, np.uint64) for part in parts]))


@dataclass(frozen=True)
class TrainingDocuments:
    """The documents that trained a checkpoint, chose its method or its step, or gave its verdict.
    Only this class holds them."""

    documents: Hashes
    passages: Hashes
    count: int  # documents, those included whose hashes are not kept
    not_recorded: tuple[str, ...] = ()  # trainings of which nothing is known
    chose: "TrainingDocuments | None" = None
    judged: "TrainingDocuments | None" = None  # kept out of every training

    @property
    def is_complete(self) -> bool:
        """Return whether the hashes of all training documents are known; if not, a result's mark
        says "at least"."""
        return not self.not_recorded and self.count == len(self.documents)

    def holds(self, contents: Sequence[int], passages: Hashes) -> bool:
        """Return whether a measured document is one of these documents, or has at least
        LEAST_PASSAGES and LEAST_SHARE of its passages in common with them."""
        if np.isin(np.asarray(contents, np.uint64), self.documents).any():
            return True
        if len(self.passages) == MOST_PASSAGES:
            passages = passages[passages <= self.passages[-1]]
        common = int(np.isin(passages, self.passages).sum())
        return common >= max(LEAST_PASSAGES, LEAST_SHARE * len(passages))

    def with_more(self, other: "TrainingDocuments") -> "TrainingDocuments":
        """Return the documents of two trainings together, for the overlap in later metrics."""
        documents = unique_hashes([self.documents, other.documents])
        passages = unique_hashes([self.passages, other.passages])[:MOST_PASSAGES]
        common = len(self.documents) + len(other.documents) - len(documents)
        not_recorded = dict.fromkeys(self.not_recorded + other.not_recorded)
        return TrainingDocuments(
            documents=documents[:MOST_DOCUMENTS],
            passages=passages,
            count=self.count + other.count - common,
            not_recorded=tuple(not_recorded),
            chose=joined_training(self.chose, other.chose),
            judged=joined_training(self.judged, other.judged),
        )

    def to_json(self) -> dict[str, Json]:
        """Return the hashes of training documents as ropext.json holds them, to mark the measured
        documents that overlap."""
        written: dict[str, Json] = {
            "documents": self.count,
            "document_hashes": _hashes_to_base64(self.documents),
            "passage_hashes": _hashes_to_base64(self.passages),
            "not_recorded": list(self.not_recorded),
        }
        if self.chose is not None:
            written["chose"] = self.chose.to_json()
        if self.judged is not None:
            written["judged"] = self.judged.to_json()
        return written


NO_DOCUMENTS = TrainingDocuments(np.empty(0, np.uint64), np.empty(0, np.uint64), 0)


def unrecorded_training(training: str) -> TrainingDocuments:
    """Return a training whose documents no record names: numbers get the mark "training data not
    recorded"."""
    return replace(NO_DOCUMENTS, not_recorded=(training,))


def training_documents(documents: Iterable[tuple[Sequence[int], Hashes]]) -> TrainingDocuments:
    """Return the hashes that mark these documents as trained on in later results, from the content
    and the passages of each."""
    known = list(documents)
    contents = unique_hashes([content for content, _ in known])
    passages = unique_hashes([passage for _, passage in known])
    return TrainingDocuments(contents[:MOST_DOCUMENTS], passages[:MOST_PASSAGES], len(contents))


def recorded_training(record: Record | None) -> TrainingDocuments | None:
    """Return the training documents in ropext.json, to mark the measured documents that overlap;
    None if nothing was trained."""
    data = None if record is None else with_training(record).get(TRAINED_ON)
    return None if data is None else read_training_documents(data)


def read_training_documents(raw: Json) -> TrainingDocuments:
    """Return the training documents that `to_json` wrote into ropext.json or trained_on.json, which
    may come from anyone; raise InputError if they are damaged."""
    try:
        return TrainingDocuments(
            documents=_hashes_from_base64(raw.get("document_hashes", "")),
            passages=_hashes_from_base64(raw.get("passage_hashes", "")),
            count=int(raw.get("documents", 0)),
            not_recorded=tuple(map(str, raw.get("not_recorded", ()))),
            chose=_read_role_documents(raw.get("chose")),
            judged=_read_role_documents(raw.get("judged")),
        )
    except (AttributeError, TypeError, ValueError, binascii.Error):
        raise InputError(
            f"the record is damaged: {TRAINED_ON} holds no hashes; copy ropext.json again "
            "from the source of the checkpoint, or remove it (then its training data are not known)"
        ) from None


def _read_role_documents(raw: Json) -> TrainingDocuments | None:
    """Return the documents that chose or judged a checkpoint, to find their overlap with measured
    ones. No other documents chose or judged these."""
    if not raw:
        return None
    return read_training_documents(raw | {"chose": None, "judged": None})


def _hashes_to_base64(hashes: Hashes) -> str:
    """Return hashes of documents or passages as base64, for ropext.json. The overlap of training
    and measured documents follows from them."""
    return base64.b64encode(hashes.astype("<u8").tobytes()).decode()


def _hashes_from_base64(text: str) -> Hashes:
    """Return hashes of documents or passages from the base64 in ropext.json. The overlap of
    training and measured documents follows from them."""
    return unique_hashes([np.frombuffer(base64.b64decode(text, validate=True), "<u8")])


@dataclass(frozen=True)
class Overlap:
    """The measured documents: how many of them trained the model, or else chose it."""

    documents: int
    trained_on: int
    chosen_on: int  # that were not trained on, and chose the method or the step
    names: tuple[str, ...]  # the first documents that were trained on
    complete: bool  # whether all that was trained on is known
    questions: bool | None = None  # whether the questions are about these documents

    @property
    def mark(self) -> str:
        """Return the mark next to every number over these documents, such as "3 of 8 trained
        on"."""
        parts = list[str]()
        if self.trained_on:
            parts.append(f"{self._count} trained on")
        elif not self.complete:
            parts.append("training data not recorded")
        if self.chosen_on:
            parts.append(f"{self.chosen_on} of {self.documents} chosen on")
        return ", ".join(parts)

    @property
    def of_documents(self) -> str:
        """Return the name of the data on a model card, with the documents' role in training."""
        if self.trained_on:
            return f"documents of which {self._count} were trained on"
        if self.chosen_on:
            return f"documents of which {self.chosen_on} of {self.documents} were chosen on"
        if self.complete:
            return "documents that were not trained on"
        return "documents (whether they were trained on is not recorded)"

    @property
    def sentence(self) -> str:
        """Return the warning of an evaluation that explains the mark; empty if there is no mark."""
        parts = list[str]()
        if self.trained_on:
            names = list(self.names)
            if self.trained_on > len(names):
                names.append("…")
            parts.append(
                f"{self._count} documents were trained on, whole or in part ({', '.join(names)}): "
                "numbers over them show what is remembered, not how new text is read"
            )
        elif not self.complete:
            parts.append(
                "what was trained on is not (fully) recorded, so these documents may have been "
                "among it"
            )
        if self.chosen_on:
            parts.append(
                f"{self.chosen_on} of {self.documents} documents chose the method or the step: "
                "numbers over them are better than over new text"
            )
        return "; ".join(parts)

    @property
    def _count(self) -> str:
        """Return how many measured documents were trained on: "3 of 8", or "at least 3 of 8"."""
        at_least = "" if self.complete else "at least "
        return f"{at_least}{self.trained_on} of {self.documents}"

    def to_json(self) -> dict[str, Json]:
        """Return the overlap as results.json and ropext.json hold it."""
        return fields_of(self) | {"mark": self.mark}


def overlap_of_documents(
    known: TrainingDocuments | None, documents: Sequence[tuple[str, Sequence[int], Hashes]]
) -> Overlap | None:
    """Return how many measured documents (name, content, passages) were trained on, and how many of
    the others chose the method or the step; None if nothing was trained or read."""
    if known is None or not documents:
        return None
    chose = known.chose or NO_DOCUMENTS
    names = list[str]()
    chosen = 0
    for name, content, passages in documents:
        if known.holds(content, passages):
            names.append(name)
        elif chose.holds(content, passages):
            chosen += 1
    return Overlap(len(documents), len(names), chosen, tuple(names[:SHOWN]), known.is_complete)


def joined_training(
    first: TrainingDocuments | None, second: TrainingDocuments | None
) -> TrainingDocuments | None:
    """Return the documents of two trainings, one after the other, for the overlap in later
    metrics."""
    if first is None or second is None:
        return first or second
    return first.with_more(second)


def read_overlap(data: JsonObject | None, place: object) -> Overlap | None:
    """Return the overlap in ropext.json or results.json; None if it holds none."""
    return read_values(Overlap, data, place) if data else None


def marked_name(text: str, mark: str) -> str:
    """Return the name of a model or of documents, or a verdict, with its mark, such as "tuned (3 of
    8 trained on)"; the text alone if there is no mark."""
    return Marked(text, mark) if mark else text
