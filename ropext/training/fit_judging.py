"""What decides a fit: the loss over the far half of held-out documents, and questions answered."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ropext import corpus
from ropext.evaluation.reading import score_items
from ropext.files import write_json
from ropext.narration import Show
from ropext.results.comparison import difference
from ropext.results.perplexity import Frame, Reading
from ropext.results.retrieval import ItemScore
from ropext.results.values import FEWEST_DOCUMENTS, Value, wilson
from ropext.tasks import Item
from ropext.training import evaluating
from ropext.training.evaluating import Judge
from ropext.training.fit_data import MEASURED

# A base that answers fewer of the questions inside its own context has nothing to lose, and its
# wrong answers say nothing about distance.
ANSWERS = 0.1
# Nats a token that two routes to the same spectrum may differ by.
ROUNDING = 1e-5


@dataclass(frozen=True)
class Verdict:
    """Which spectrum is kept, and why."""

    kept: str  # "fitted" or "start"
    step: int  # 0 = the start
    reason: str


@dataclass(frozen=True)
class FitJudge:
    """Held-out documents, and questions at two lengths."""

    judge: Judge
    near: tuple[Item, ...]  # inside the context, for the base
    far: tuple[Item, ...]  # at the target
    bos: int | None

    @property
    def frame(self) -> Frame:
        return self.judge.frame

    @property
    def span(self) -> tuple[int, int]:
        """The far half: positions of which a fit's windows take their loss."""
        return self.frame.longest // 2, self.frame.longest

    def loss(self, reading: Reading) -> float:
        """Nats a token over the far half."""
        sums, counts = reading.sums(*self.span)
        return float(sums.sum() / counts.sum())

    def change(self, reading: Reading, start: Reading) -> Value:
        """The same tokens read by both: nats a token over the far half, negative = better."""
        return difference(self.frame, reading, start, self.span)

    def better(self, reading: Reading, start: Reading) -> bool:
        """Whether it beats the start by more than the paired interval; without an interval, whether
        it is lower at all."""
        change = self.change(reading, start)
        highest = change.value if change.ci95 is None else change.ci95[1]
        return highest < -ROUNDING

    def ask(self, model: Any, items: Sequence[Item], pause: Show) -> list[ItemScore]:
        """The questions, read by a model as it computes now."""
        if not items:
            return []
        scorer = self.judge.scorer(model)
        scores: list[ItemScore] = []
        total = sum(item.length for item in items)
        pause(0, total, "questions")
        for done, item in enumerate(items, 1):
            scores += score_items(scorer, [item], self.bos)
            pause(done * total // len(items), total, "questions")
        return scores

    def values(
        self, reading: Reading, base: Reading, scores: Sequence[ItemScore]
    ) -> dict[str, Any]:
        """The numbers of one spectrum as JSON."""
        found = evaluating.to_json(self.judge.values(reading, base))
        far = self.frame.bootstrap.ratio(*reading.sums(*self.span))
        found[f"far_half_nll@{self.frame.longest}"] = far.to_json()
        for length in sorted({score.length for score in scores}):
            own = [score.exact for score in scores if score.length == length]
            found[f"{MEASURED}@{self._whole(length)}"] = wilson(sum(own), len(own)).to_json()
        return found

    def _whole(self, length: int) -> int:
        """An item's length with its BOS."""
        return length + (0 if self.bos is None else 1)

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
    near: Sequence[Item],
    far: Sequence[Item],
    bos: int | None,
    lengths: tuple[int, int],
    seed: int,
) -> FitJudge:
    return FitJudge(evaluating.judge_of(documents, lengths, seed), tuple(near), tuple(far), bos)


def few(documents: Sequence[corpus.Document]) -> str | None:
    """The warning where there is no interval."""
    if len(documents) >= FEWEST_DOCUMENTS:
        return None
    return (
        f"only {len(documents)} held-out documents: no interval, so that the lowest loss is taken "
        f"as it is ({FEWEST_DOCUMENTS} give one; more or longer documents in --data)"
    )


class Steps:
    """What was judged on the way: each step's spectrum and reading, kept on the disk so that a run
    that goes on knows them, and so that every step can be written in the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def keep(self, step: int, knobs: Mapping[str, Any], reading: Reading) -> None:
        evaluating.keep(self.folder / str(step), reading)
        write_json(self.folder / str(step) / "knobs.json", dict(knobs))

    def found(self) -> dict[int, Reading]:
        """Every step that was kept whole, in order."""
        numbers = sorted(int(path.parent.name) for path in self.folder.glob("*/knobs.json"))
        kept = {step: evaluating.kept(self.folder / str(step), "step") for step in numbers}
        return {step: reading for step, reading in kept.items() if reading is not None}

    def knobs(self, step: int) -> dict[str, Any]:
        text = (self.folder / str(step) / "knobs.json").read_text(encoding="utf-8")
        found: dict[str, Any] = json.loads(text)
        return {k: tuple(v) if isinstance(v, list) else v for k, v in found.items()}


def keep_scores(path: Path, scores: Sequence[ItemScore]) -> None:
    write_json(path, [score.to_json() for score in scores])


def kept_scores(path: Path) -> list[ItemScore] | None:
    if not path.is_file():
        return None
    return [ItemScore.from_json(own) for own in json.loads(path.read_text(encoding="utf-8"))]


# Not inference_mode: buffers that a pinned embedding makes anew would be inference tensors, which
# the training that follows cannot share among processes.
@torch.no_grad()
def read_long(judge: FitJudge, model: Any, label: str, pause: Show) -> Reading:
    """One pass over every held-out document."""
    return judge.judge.read_long(model, label, pause)


def summed(reading: Reading) -> float:
    """All that a reading holds, to see whether two are the same."""
    return float(sum(np.nansum(own) for arrays in reading.passes.values() for own in arrays))
