"""What judges a training: ropext's own evaluator on held-out documents, before, during and after;
of a fit also questions."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ropext import corpus
from ropext.evaluation.forward import TokenNll, TokenScorer
from ropext.evaluation.ranking import DocumentReader, document_reader
from ropext.evaluation.reading import Masking, score_items
from ropext.files import write_json
from ropext.lengths import tail_tokens
from ropext.narration import Hooks, Show, unseen
from ropext.options.evaluate import DocumentOptions
from ropext.results import rundir
from ropext.results.comparison import difference
from ropext.results.perplexity import MASK_STRIDE, Documents, Frame, Reading, Span, text_values
from ropext.results.retrieval import ItemScore
from ropext.results.values import FEWEST_DOCUMENTS, Bootstrap, Value, wilson
from ropext.tasks import Item
from ropext.training.rows import MEASURED

# The numbers that a training reports, out of all that a reading gives.
REPORTED = ("tail@", "tail_nll@", "in_window@", "in_window_nll@", "gain@", "short_tax")
# A base that answers fewer of the questions inside its own context has nothing to lose, and its
# wrong answers say nothing about distance.
ANSWERS = 0.1
# Nats a token that two routes to the same spectrum may differ by.
ROUNDING = 1e-5


@dataclass(frozen=True)
class Judge:
    """The documents that are read, from where in them the numbers come, and a fit's questions."""

    documents: tuple[corpus.Document, ...]
    frame: Frame
    near: tuple[Item, ...] = ()  # inside the context, for the base
    far: tuple[Item, ...] = ()  # at the target
    bos: int | None = None
    masking: Masking | None = None  # of a masked language model

    @property
    def tokens(self) -> int:
        """Read through windows of the target's length."""
        return len(self.documents) * self.frame.longest * (self.frame.mask_stride or 1)

    # Not inference_mode: buffers that a pinned embedding makes anew would be inference tensors,
    # which the training that follows cannot share among processes.
    @torch.no_grad()
    def read_long(self, model: Any, label: str, pause: Show = unseen) -> Reading:
        """Through windows of the target's length."""
        return self._reader(model, pause).whole(label, None)

    @torch.no_grad()
    def read_short(self, model: Any, label: str, pause: Show = unseen) -> Reading:
        """Through the short window."""
        return self._reader(model, pause).short_window(label)

    def scorer(self, model: Any) -> TokenScorer:
        return self._reader(model).scorer

    def _reader(self, model: Any, pause: Show = unseen) -> DocumentReader:
        documents = [own.ids for own in self.documents]
        options = DocumentOptions(chunk=self.frame.longest) if self.masking else None
        show = Hooks(show=pause)
        return document_reader(model, documents, self.frame, options, show, self.masking)

    @torch.no_grad()
    def ask(self, model: Any, items: Sequence[Item], pause: Show) -> list[ItemScore]:
        """The questions, read by a model as it computes now."""
        if not items:
            return []
        scorer = self.scorer(model)
        scores: list[ItemScore] = []
        total = sum(item.length for item in items)
        pause(0, total, "questions")
        for done, item in enumerate(items, 1):
            scores += score_items(scorer, [item], self.bos)
            pause(done * total // len(items), total, "questions")
        return scores

    def numbers(self, reading: Reading, base: Reading | None) -> dict[str, Any]:
        """Those of one model as JSON."""
        names = tuple(document.name for document in self.documents)
        hashes = tuple(d.prefix_hashes(self.frame.lengths) for d in self.documents)
        counts = tuple(d.token_bytes.astype(np.int64) for d in self.documents)
        values = text_values(self.frame, Documents(names, hashes, counts), reading, base)
        return {k: v.to_json() for k, v in values.items() if k.startswith(REPORTED)}

    def tail(self, reading: Reading) -> float:
        """Nats per token of the last N tokens before the target."""
        return self._mean(reading, self.frame.tail_span(self.frame.longest))

    def _mean(self, reading: Reading, span: Span) -> float:
        sums, counts = reading.sums(*span)
        return float(sums.sum() / counts.sum())

    @property
    def far_half(self) -> tuple[int, int]:
        """Positions of which a fit's windows take their loss, and by which a fine-tuning stops."""
        return self.frame.longest // 2, self.frame.longest

    def loss(self, reading: Reading) -> float:
        """Nats a token over the far half."""
        return self._mean(reading, self.far_half)

    # Of a fit.

    def objective(self, reading: Reading) -> float:
        """What a fit lowers: the losses over the far half and over the tail, in equal parts."""
        return (self.loss(reading) + self.tail(reading)) / 2

    def change(self, reading: Reading, start: Reading) -> Value:
        """The same tokens read by both: nats a token over the far half, negative = better."""
        return difference(self.frame, reading, start, self.far_half)

    def lower(self, reading: Reading, start: Reading) -> bool:
        """Whether it lies below the start, in what a fit lowers and in what it is kept by."""
        return all(own(reading) < own(start) for own in (self.objective, self.loss))

    def better(self, reading: Reading, start: Reading) -> bool:
        """Whether it beats the start by more than the paired interval; never without one."""
        change = self.change(reading, start)
        return change.ci95 is not None and change.ci95[1] < -ROUNDING

    def fit_numbers(
        self, reading: Reading, base: Reading, scores: Sequence[ItemScore]
    ) -> dict[str, Any]:
        """Those of one spectrum as JSON."""
        found = self.numbers(reading, base)
        far = self.frame.bootstrap.ratio(*reading.sums(*self.far_half))
        found[f"far_half_nll@{self.frame.longest}"] = far.to_json()
        for length in sorted({score.length for score in scores}):
            own = [score.exact for score in scores if score.length == length]
            whole = length + (0 if self.bos is None else 1)  # with its BOS
            found[f"{MEASURED}@{whole}"] = wilson(sum(own), len(own)).to_json()
        return found

    def answers(self, scores: Sequence[ItemScore]) -> bool:
        """Whether a model answers often enough for questions to teach it anything."""
        return bool(scores) and sum(s.exact for s in scores) >= ANSWERS * len(scores)

    def lost(self, fitted: Sequence[ItemScore], start: Sequence[ItemScore]) -> Value | None:
        """The change in the share of right answers where it is surely a loss, else None."""
        if not fitted:
            return None
        pairs = zip(fitted, start, strict=True)
        change = self.frame.bootstrap.mean([float(a.exact) - float(b.exact) for a, b in pairs])
        return change if change.ci95 is not None and change.ci95[1] < 0 else None


def judge_of(
    documents: Sequence[corpus.Document],
    lengths: tuple[int, int],
    seed: int,
    near: Sequence[Item] = (),
    far: Sequence[Item] = (),
    bos: int | None = None,
    masking: Masking | None = None,
) -> Judge:
    """Over documents of the target's length; `lengths` are the context and the target."""
    stride = 0 if masking is None else MASK_STRIDE
    frame = Frame(lengths[0], lengths, tail_tokens(lengths[0]), Bootstrap(seed), stride)
    return Judge(tuple(documents), frame, tuple(near), tuple(far), bos, masking)


def few(documents: Sequence[corpus.Document]) -> str | None:
    """The warning where there is no interval."""
    if len(documents) >= FEWEST_DOCUMENTS:
        return None
    return (
        f"only {len(documents)} held-out documents give no interval, so that the start is written "
        f"whatever is found ({FEWEST_DOCUMENTS} give one; more or longer documents in --data)"
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


class JudgedSteps:
    """What was judged on the way: each step's spectrum and reading, kept on the disk so that a run
    that goes on knows them, and so that every step can be written in the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def keep(self, step: int, knobs: Mapping[str, Any], reading: Reading) -> None:
        keep(self.folder / str(step), reading)
        write_json(self.folder / str(step) / "knobs.json", dict(knobs))

    def found(self) -> dict[int, Reading]:
        """Every step that was kept whole, in order."""
        numbers = sorted(int(path.parent.name) for path in self.folder.glob("*/knobs.json"))
        readings = {step: kept(self.folder / str(step), "step") for step in numbers}
        return {step: reading for step, reading in readings.items() if reading is not None}

    def knobs(self, step: int) -> dict[str, Any]:
        text = (self.folder / str(step) / "knobs.json").read_text(encoding="utf-8")
        found: dict[str, Any] = json.loads(text)
        return {k: tuple(v) if isinstance(v, list) else v for k, v in found.items()}
