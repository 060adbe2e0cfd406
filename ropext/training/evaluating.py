"""The evaluations of a run: ropext's own evaluator on held-out documents, before, during, after."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ropext import corpus
from ropext.evaluation.forward import TokenNll, TokenScorer
from ropext.evaluation.ranking import DocumentReader, document_reader
from ropext.lengths import tail_tokens
from ropext.narration import Hooks, Show, unseen
from ropext.results import rundir
from ropext.results.perplexity import Documents, Frame, Reading, text_values
from ropext.results.values import Bootstrap, Value


@dataclass(frozen=True)
class Judge:
    """The documents that are read, and from where in them the numbers come."""

    documents: tuple[corpus.Document, ...]
    frame: Frame

    def read_long(self, model: Any, label: str, pause: Show = unseen) -> Reading:
        """Through windows of the target's length."""
        return self._reader(model, pause).whole(label, None)

    def read_short(self, model: Any, label: str, pause: Show = unseen) -> Reading:
        """Through the short window."""
        return self._reader(model, pause).short_window(label)

    def scorer(self, model: Any) -> TokenScorer:
        return self._reader(model).scorer

    def _reader(self, model: Any, pause: Show = unseen) -> DocumentReader:
        documents = [own.ids for own in self.documents]
        return document_reader(model, documents, self.frame, hooks=Hooks(show=pause))

    def values(self, reading: Reading, base: Reading | None) -> dict[str, Value]:
        names = tuple(document.name for document in self.documents)
        hashes = tuple(d.prefix_hashes(self.frame.lengths) for d in self.documents)
        counts = tuple(d.token_bytes.astype(np.int64) for d in self.documents)
        return text_values(self.frame, Documents(names, hashes, counts), reading, base)

    def tail(self, reading: Reading) -> float:
        """Nats per token of the last N tokens before the target; what early stopping watches."""
        sums, counts = reading.sums(*self.frame.tail_span(self.frame.longest))
        return float(sums.sum() / counts.sum())


def named(
    raw: Sequence[corpus.RawDocument], encoder: corpus.DocumentEncoder, target: int, count: int
) -> tuple[corpus.Document, ...]:
    """The documents of --eval that reach the target, cut to it; InputError where none does."""
    wanted = corpus.Wanted((target,), given=True, max_documents=count)
    return corpus.choose_documents(raw, encoder, wanted).documents


def judge_of(documents: Sequence[corpus.Document], lengths: tuple[int, int], seed: int) -> Judge:
    """Over documents of the target's length; `lengths` are the context and the target."""
    return Judge(
        tuple(documents), Frame(lengths[0], lengths, tail_tokens(lengths[0]), Bootstrap(seed))
    )


def keep(folder: Path, reading: Reading) -> None:
    """Write a reading, so that a run that goes on does not take it again. The mark comes last: a
    kill between two passes leaves none, and another process may look while this one writes."""
    for length, arrays in reading.passes.items():
        rundir.write_array(folder / f"{reading.label}-{length}.npy", np.stack(list(arrays)))
    (folder / f"{reading.label}.whole").touch()


def kept(folder: Path, label: str) -> Reading | None:
    """A reading that was kept whole, or None."""
    if not (folder / f"{label}.whole").is_file():
        return None
    found: dict[int, list[TokenNll]] = {}
    for path in sorted(folder.glob(f"{label}-*.npy")):
        found[int(path.stem.rpartition("-")[2])] = list(np.load(path, allow_pickle=False))
    return Reading(label, found)


def to_json(values: Mapping[str, Value]) -> dict[str, Any]:
    """The numbers that a fine-tuning reports, out of all that a reading gives."""
    wanted = ("tail@", "tail_nll@", "in_window@", "in_window_nll@", "gain@", "short_tax")
    return {k: v.to_json() for k, v in values.items() if k.startswith(wanted)}
