"""Compute retrieval scores: shares with Wilson intervals by length and by depth, and how far they
hold.

Questions over one haystack are alike: a model that reads it well answers most of them. So the
haystack is the sampling unit.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from ropext.base.jsontext import NumberIfAny
from ropext.results import FOUND, RULER_CONTEXT
from ropext.results.values import (
    FEWEST_DOCUMENTS,
    Z95,
    Bootstrap,
    Value,
    difference_of_shares,
    effective_count,
    wilson_share,
)
from ropext.tasks import NAME, RULER, TASKS, THIRTEEN

# NoLiMa's rule: effective while the score is at least this share of the short-context score.
EFFECTIVE_SHARE = 0.85
RULERS_SHARE = 0.856  # RULER's: what Llama-2-7B has at 4k (Hsieh et al. 2024, section 4)
RULERS = "in ropext's words and texts: not comparable with published RULER scores"
CAN_DO = 0.1  # least share right inside the trained context, for a task in words
# The outcomes of a question to a server.
MISSED = "missed"
REFUSED = "refused"
TRUNCATED = "truncated"
NO_ANSWER = "no answer"
OUTCOMES = (FOUND, MISSED, REFUSED, TRUNCATED, NO_ANSWER)
# In these tasks each depth has a haystack of its own.
MANY_HAYSTACKS = frozenset(
    task.name for task in TASKS if not task.one_haystack and not task.in_words
)


@dataclass(frozen=True)
class ItemScore:
    """One answered question. `exact`: every answer token is the model's first choice."""

    task: Annotated[str, Field(pattern=f"^{NAME}$")]
    length: int
    depth: float | None
    index: int
    answer_nll: float | None  # nats per answer token, teacher-forced; None if not measured
    answer_tokens: int
    exact: bool
    prompt_hash: str
    answer: tuple[int, ...]
    predicted: tuple[int, ...]
    score: float | None = None  # share of the references named; None: exact decides
    said: str | None = None  # the text that was generated
    text_hash: str = ""  # hash of a question in words, before any tokenizer encodes it
    outcome: str | None = None  # outcome of a server's answer, from OUTCOMES

    @property
    def is_read(self) -> bool:
        """Return whether the answer shows how well the model read the text. A refused or cut prompt
        and a missing answer show nothing about it."""
        return self.outcome in (None, FOUND, MISSED)

    @property
    def points(self) -> float:
        """Return the points, from 0 to 1, of one answer behind a retrieval metric."""
        return float(self.exact) if self.score is None else self.score


def group_answers(items: Iterable[ItemScore], *names: str) -> dict[Any, list[ItemScore]]:
    """Return scored answers of retrieval tasks, grouped by some of their fields."""
    key = attrgetter(*names)
    groups = dict[Any, list[ItemScore]]()
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def retrieval_values(
    items: Sequence[ItemScore], context: int, bootstrap: Bootstrap
) -> dict[str, Value]:
    """Return `TASK@C` (share right), `TASK_nll@C` (nats per answer token),
    `effective_context.TASK`, and `ruler@C`, the mean of RULER's tasks that ran at every length."""
    values = dict[str, Value]()
    for task, answers in group_answers(items, "task").items():
        at = group_answers(answers, "length")
        for length in sorted(at):
            values[f"{task}@{length}"] = share_of_answers(at[length])
            losses = [item.answer_nll for item in at[length] if item.answer_nll is not None]
            if losses:
                values[f"{task}_nll@{length}"] = mean_over_haystacks(losses, at[length], bootstrap)
        values[f"effective_context.{task}"] = effective_retrieval(at, context)
    compared, _ = ruler_tasks(values)
    if means := ruler_means(values):
        shares = {int(name.partition("@")[2]): value.value for name, value in means.items()}
        values[f"effective_context.{RULER}"] = _effective_length(shares, context)
        if len(compared) == len(THIRTEEN):
            values[RULER_CONTEXT] = _effective_length(shares, 0, RULERS_SHARE)
    return values | means


def ruler_tasks(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Split RULER's tasks, by the metrics `TASK@C` of a model: tasks at every length that has any,
    and tasks at some lengths only. No mean over tasks may hold the latter, because lengths would
    then differ by their tasks."""
    lengths: dict[str, set[str]] = {}
    for name in names:
        task, _, length = name.partition("@")
        if task in THIRTEEN:
            lengths.setdefault(task, set()).add(length)
    every = set[str]()
    for asked_at in lengths.values():
        every |= asked_at
    compared = list[str]()
    partly = list[str]()
    for task, asked_at in lengths.items():
        if asked_at == every:
            compared.append(task)
        else:
            partly.append(task)
    return compared, partly


def ruler_means(values: Mapping[str, Value]) -> dict[str, Value]:
    """Return the mean `ruler@C` of RULER's measured tasks at every length, shortest first; nothing
    if fewer than two tasks are compared."""
    tasks, _ = ruler_tasks(values)
    if len(tasks) < 2:
        return {}
    lengths = set[int]()
    for name in values:
        task, _, length = name.partition("@")
        if task in tasks:
            lengths.add(int(length))
    means = dict[str, Value]()
    for at in sorted(lengths):
        means[f"{RULER}@{at}"] = mean_of_tasks([values[f"{task}@{at}"] for task in tasks])
    return means


def mean_of_tasks(values: Sequence[Value]) -> Value:
    """Return the mean value over retrieval tasks, each with the same weight. The squared distances
    of their intervals' ends add up, as for independent numbers (MOVER, Zou and Donner 2008)."""
    count = len(values)
    number = sum(value.value for value in values) / count
    total = sum(value.n for value in values)
    below = 0.0  # the squared distances of the lower ends, and of the upper ones
    above = 0.0
    for value in values:
        if value.ci95 is None:
            return Value(number, None, None, total)
        low, high = value.ci95
        below += (value.value - low) ** 2
        above += (value.value - high) ** 2
    low = math.sqrt(below) / count
    high = math.sqrt(above) / count
    return Value(number, (low + high) / (2 * Z95), (number - low, number + high), total)


def unmeasurable_tasks(items: Mapping[str, Sequence[ItemScore]], context: int) -> dict[str, str]:
    """Return the tasks in words that no model of a run can do inside the trained context, with the
    reason.

    Beyond that context their zeros would say nothing about length. The same is true of zeros at
    every length if a run has no question inside it, for example because no item of the task fits
    into the context.
    """
    reasons = dict[str, str]()
    answers = [group_answers(each, "task") for each in items.values()]
    for task in TASKS:
        if not task.in_words:
            continue
        everywhere = list[float]()  # the share of each model
        inside = list[float]()
        for by_task in answers:
            group = by_task.get(task.name, [])
            short = [item for item in group if item.length <= context]
            if group:
                everywhere.append(_mean_points(group))
            if short:
                inside.append(_mean_points(short))
        if inside and max(inside) < CAN_DO:
            reasons[task.name] = (
                f"{task.name} is not measurable here: inside its trained context the model gets "
                f"{max(inside):.0%} right, and below {CAN_DO:.0%} a longer length tells nothing"
            )
        elif everywhere and not inside and max(everywhere) < CAN_DO:
            reasons[task.name] = (
                f"{task.name} is not measurable here: no length inside the trained context of "
                f"{context} tokens was asked, and beyond it {max(everywhere):.0%} are right"
            )
    return reasons


def haystack_numbers(items: Sequence[ItemScore]) -> npt.NDArray[np.intp]:
    """Return the number of each answered question's haystack, for intervals over haystacks."""
    numbers = dict[object, int]()
    haystacks = list[int]()
    for place, item in enumerate(items):
        key: object = place
        if item.task not in MANY_HAYSTACKS:
            key = (item.task, item.length, item.index)
        haystacks.append(numbers.setdefault(key, len(numbers)))
    return np.array(haystacks, np.intp)


def share_of_answers(items: Sequence[ItemScore]) -> Value:
    """Return the share answered, with a Wilson interval for the effective number of questions. If
    an answer can be right in part, the interval is too wide, never too narrow."""
    if not items:
        return wilson_share(0, 0)
    return _share_of_points([item.points for item in items], haystack_numbers(items))


def _share_of_points(points: Sequence[float], haystacks: npt.NDArray[np.intp]) -> Value:
    """Return the share of points with its Wilson interval, for questions in these haystacks."""
    worth = effective_count(np.bincount(haystacks, points), np.bincount(haystacks))
    return wilson_share(sum(points), len(points), worth)


def difference_of_answers(
    gaps: Sequence[float], items: Sequence[ItemScore], bootstrap: Bootstrap
) -> Value:
    """Return the difference of two shares from the difference of the points of each question;
    without an interval below eight haystacks, see `mean_over_haystacks`."""
    haystacks = haystack_numbers(items)
    if len(np.unique(haystacks)) < FEWEST_DOCUMENTS:
        return mean_over_haystacks(gaps, items, bootstrap)
    more = _share_of_points([max(gap, 0.0) for gap in gaps], haystacks)
    fewer = _share_of_points([max(-gap, 0.0) for gap in gaps], haystacks)
    return difference_of_shares(more, fewer)


def mean_over_haystacks(
    numbers: Sequence[float], items: Sequence[ItemScore], bootstrap: Bootstrap
) -> Value:
    """Return the mean of a number per question with its interval: whole haystacks are resampled."""
    haystacks = haystack_numbers(items)
    return bootstrap.ratio(np.bincount(haystacks, numbers), np.bincount(haystacks))


def effective_retrieval(at: Mapping[int, Sequence[ItemScore]], context: int) -> Value:
    """Return the longest length up to which a task keeps 85 % of its score inside the trained
    context, by its answers at each length."""
    inside = [length for length in at if length <= context] or [min(at)]
    answered = list[ItemScore]()
    for length in inside:
        answered += at[length]
    shares = {length: _mean_points(answers) for length, answers in at.items()}
    reached = _effective_length(shares, context, None, _mean_points(answered))
    return replace(reached, n=min(map(len, at.values())))


def _effective_length(
    shares: Mapping[int, float],
    context: int,
    least: float | None = None,
    short: float | None = None,
) -> Value:
    """Return the longest length up to which a share is at least `least`, or 85 % of the short
    score.

    The short score is the score inside the context, or at the shortest length if no length is
    inside. A length inside that falls short before any length has held does not end the search. 0
    means that the model fails the task even there. A step of the grid of lengths has no interval.
    """
    lengths = sorted(shares)
    inside = [length for length in lengths if length <= context] or lengths[:1]
    if short is None:
        short = sum(shares[length] for length in inside) / len(inside)
    wanted = EFFECTIVE_SHARE * short if least is None else least
    reached = 0
    for length in lengths:
        if short > 0 and shares[length] >= wanted:
            reached = length
        elif reached or length not in inside:
            break
    return Value(float(reached), None, None, len(lengths))


def _mean_points(items: Sequence[ItemScore]) -> float:
    """Return the mean points of retrieval answers, without an interval."""
    return sum(item.points for item in items) / len(items)


@dataclass(frozen=True)
class HeatCell:
    """The questions of a task at a length and a depth."""

    length: int
    depth: float | None  # None: over the whole text
    share: Value  # answered
    answer_nll: NumberIfAny = None  # the mean, in nats per answer token


def heat_map_cells(items: Iterable[ItemScore]) -> dict[str, tuple[HeatCell, ...]]:
    """Return the cells of a heat map for each retrieval task, by length and depth."""
    maps = dict[str, list[HeatCell]]()
    groups = group_answers(items, "task", "length", "depth")
    for place in sorted(groups, key=_place_in_heat_map):
        task, length, depth = place
        answers = groups[place]
        losses = [item.answer_nll for item in answers if item.answer_nll is not None]
        mean_loss = None
        if losses:
            mean_loss = sum(losses) / len(losses)
        cell = HeatCell(length, depth, share_of_answers(answers), mean_loss)
        maps.setdefault(task, []).append(cell)
    return {task: tuple(cells) for task, cells in maps.items()}


def _place_in_heat_map(place: tuple[str, int, float | None]) -> tuple[str, int, float]:
    """Return the sort key of a cell in a report's heat map: task, length and depth; a question over
    the whole text comes first."""
    task, length, depth = place
    return task, length, depth or 0


def sign_test(more: int, fewer: int) -> float:
    """Return the exact two-sided probability of a split at least as uneven, if both sides are
    equally likely. On questions that two models answer differently this is McNemar's test."""
    n = more + fewer
    tail = sum(math.comb(n, k) for k in range(min(more, fewer) + 1))
    return min(1.0, float(2 * tail / 2**n))
