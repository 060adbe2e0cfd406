"""Retrieval scores: shares with Wilson intervals by length and by depth, and how far they hold.

Questions over one haystack are alike: where the model reads it well it answers most of them. So
the haystack is the sampling unit.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ropext.results.values import Bootstrap, Value, wilson, worth_of
from ropext.tasks import TASKS

# NoLiMa's rule: effective while the score is at least this share of the short-context score.
EFFECTIVE_SHARE = 0.85
ONE_HAYSTACK = frozenset(task.name for task in TASKS if task.one_haystack)


@dataclass(frozen=True)
class ItemScore:
    """One answered question. `exact`: every answer token is the model's first choice."""

    task: str
    length: int
    depth: float
    index: int
    answer_nll: float  # nats per answer token, teacher-forced
    answer_tokens: int
    exact: bool
    prompt_hash: str
    answer: tuple[int, ...]
    predicted: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """One line of items.jsonl."""
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> "ItemScore":
        """The inverse of `to_json`."""
        lists = {"answer": tuple(data["answer"]), "predicted": tuple(data["predicted"])}
        return ItemScore(**(data | lists))


def retrieval_values(
    items: Sequence[ItemScore], context: int, bootstrap: Bootstrap
) -> dict[str, Value]:
    """`TASK@C` (share exact), `TASK_nll@C` (nats per answer token), `effective_context.TASK`."""
    values = dict[str, Value]()
    for task in dict.fromkeys(item.task for item in items):
        own = [item for item in items if item.task == task]
        for length in sorted({item.length for item in own}):
            at = [item for item in own if item.length == length]
            values[f"{task}@{length}"] = share_of(at)
            losses = [item.answer_nll for item in at]
            values[f"{task}_nll@{length}"] = mean_of(losses, at, bootstrap)
        values[f"effective_context.{task}"] = effective_retrieval(own, context)
    return values


def _haystacks(items: Sequence[ItemScore]) -> npt.NDArray[np.intp]:
    """The number of each question's haystack."""
    numbers: dict[tuple[Any, ...], int] = {}
    keys = (
        (item.task, item.length, item.index) if item.task in ONE_HAYSTACK else (place,)
        for place, item in enumerate(items)
    )
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.intp)


def share_of(items: Sequence[ItemScore]) -> Value:
    """The share answered exactly, with a Wilson interval over what the questions are worth."""
    if not items:
        return wilson(0, 0)
    own, exact = _haystacks(items), [float(item.exact) for item in items]
    worth = worth_of(np.bincount(own, exact), np.bincount(own))
    return wilson(int(sum(exact)), len(items), worth)


def mean_of(numbers: Sequence[float], items: Sequence[ItemScore], bootstrap: Bootstrap) -> Value:
    """The mean of a number per question, whole haystacks resampled."""
    own = _haystacks(items)
    return bootstrap.ratio(np.bincount(own, numbers), np.bincount(own))


def effective_retrieval(items: Sequence[ItemScore], context: int) -> Value:
    """The longest length up to which a task keeps 85 % of its score inside the trained context.

    The short score is that over all items inside the context (of the shortest length, where none
    is), and a length among these that falls short before any has held is passed over. 0 = the task
    is not done even there. A step of the grid of lengths has no interval.
    """
    lengths = sorted({item.length for item in items})
    inside = [length for length in lengths if length <= context] or lengths[:1]
    short = _share([item for item in items if item.length in inside])
    reached = 0
    for length in lengths:
        share = _share([item for item in items if item.length == length])
        if short > 0 and share >= EFFECTIVE_SHARE * short:
            reached = length
        elif reached or length not in inside:
            break
    fewest = min(sum(item.length == length for item in items) for length in lengths)
    return Value(float(reached), None, None, fewest)


def _share(items: Sequence[ItemScore]) -> float:
    return sum(item.exact for item in items) / len(items)


def heat_map(items: Iterable[ItemScore]) -> dict[str, list[dict[str, Any]]]:
    """Per task one cell per (length, depth): share exact with its interval, and the answer NLL."""
    cells: dict[tuple[str, int, float], list[ItemScore]] = {}
    for item in items:
        cells.setdefault((item.task, item.length, item.depth), []).append(item)
    maps: dict[str, list[dict[str, Any]]] = {}
    for (task, length, depth), own in sorted(cells.items()):
        cell = {
            "length": length,
            "depth": depth,
            "exact": wilson(sum(item.exact for item in own), len(own)),
            "answer_nll": sum(item.answer_nll for item in own) / len(own),
        }
        maps.setdefault(task, []).append(cell)
    return maps
