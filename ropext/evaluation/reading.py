"""The units of work: one document under one regime, one question group under one variant."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ropext.corpus import Document
from ropext.evaluation.answers import score_items
from ropext.evaluation.forward import Ids, NanInLogits, TokenNll, TokenScorer
from ropext.evaluation.loading import memory_errors, out_of_memory
from ropext.evaluation.pinning import pinned
from ropext.evaluation.windows import Window, hf_stride, short_windows, strided_windows
from ropext.files import write_json
from ropext.results import rundir
from ropext.tasks import Item


@dataclass(frozen=True)
class Unit:
    """One piece of work whose result is one file."""

    path: Path
    what: str  # for messages
    tokens: int  # forward tokens it takes
    compute: Callable[[], None]


def read_windows(scorer: TokenScorer, ids: Ids, windows: Iterator[Window]) -> TokenNll:
    """NLL of every token, each scored by one window."""
    nll = np.full(len(ids), np.nan, np.float32)
    for window in windows:
        own = scorer.token_nll(ids[window.begin : window.end])
        nll[window.first : window.end] = own[window.first - window.begin :]
    return nll


def read_short(scorer: TokenScorer, model: Any, ids: Ids, context: int) -> TokenNll:
    """Through the short window; a length-dependent spectrum is that of the window's length."""
    with pinned(model, context):
        return read_windows(scorer, ids, short_windows(len(ids), context))


def read_pass(scorer: TokenScorer, model: Any, ids: Ids, length: int) -> TokenNll:
    """One pass over the first `length` tokens."""
    with pinned(model, length):
        return scorer.token_nll(ids[:length])


def read_strided(scorer: TokenScorer, model: Any, ids: Ids, size: int) -> tuple[float, float]:
    """Weighted sum and weight of the loop in the transformers documentation.

    The loop multiplies a window's mean NLL by one less than its number of scored labels, although
    only the first window loses a label to the shift; it is kept as it is.
    """
    total = weight = 0.0
    with pinned(model, size):
        for window in strided_windows(len(ids), size, hf_stride(size)):
            nll = scorer.token_nll(ids[window.begin : window.end]).astype(np.float64)
            scored = nll[window.first - window.begin :]
            # The first window's label 0 is among its targets, but has no prediction.
            labels = len(scored) + (1 if window.begin == 0 else 0)
            total += float(scored.mean()) * (labels - 1)
            weight += labels - 1
    return total, weight


class Reader:
    """Makes the units of one variant whose model is loaded and set."""

    def __init__(self, path: Path, label: str, model: Any, scorer: TokenScorer) -> None:
        self.path, self.label, self.model, self.scorer = path, label, model, scorer

    def _array_unit(
        self,
        document: Document,
        regime: str,
        tokens: int,
        compute: Callable[[], "np.ndarray[Any, Any]"],
    ) -> Unit:
        longest = len(document)
        name = document.prefix_hashes([longest])[longest]
        path = rundir.unit_path(self.path, self.label, regime, name)
        what = f"{document.name} ({self.label}, {regime})"
        return Unit(path, what, tokens, lambda: rundir.write_array(path, compute()))

    def short(self, document: Document, context: int) -> Unit:
        """The base's reading."""
        tokens = sum(w.end - w.begin for w in short_windows(len(document), context))
        return self._array_unit(
            document,
            "short",
            tokens,
            lambda: read_short(self.scorer, self.model, document.ids, context),
        )

    def whole(self, document: Document, length: int) -> Unit:
        """A pass of one length."""
        return self._array_unit(
            document,
            f"pass-{length}",
            length,
            lambda: read_pass(self.scorer, self.model, document.ids, length),
        )

    def strided(self, document: Document, size: int) -> Unit:
        """The strided loop with windows of one length."""
        windows = strided_windows(len(document), size, hf_stride(size))
        return self._array_unit(
            document,
            f"stride-{size}",
            sum(w.end - w.begin for w in windows),
            lambda: np.array(read_strided(self.scorer, self.model, document.ids, size)),
        )

    def questions(self, items: Sequence[Item], bos: int | None) -> Unit:
        """The items of one task, length and index."""
        first = items[0]
        length = first.length + (0 if bos is None else 1)
        name = f"{first.task}-{length}-{first.index}.json"
        path = self.path / "variants" / self.label / "items" / name

        def compute() -> None:
            with pinned(self.model, length):
                scores = score_items(self.scorer, items, bos)
            rows = [score.to_json() | {"length": length} for score in scores]
            write_json(path, rows)

        shared = first.shared if len(items) > 1 else 0
        tokens = shared + sum(item.length - shared for item in items)
        return Unit(path, f"{first.task} at {length} ({self.label})", tokens, compute)


def complete(unit: Unit) -> None:
    """Do one unit, with errors that say where it went wrong."""
    with memory_errors(out_of_memory(unit.what)):
        try:
            unit.compute()
        except NanInLogits as error:
            raise NanInLogits(f"{unit.what}: {error}") from error
