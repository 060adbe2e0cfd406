"""Compute the numbers of a server's answers: shares with intervals that count haystacks, outcomes,
and the length up to which it reads. List them in advance, for gates such as `found@32k < 0.9`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ropext.base.jsontext import Json
from ropext.endpoint.answers import Answer
from ropext.results import BASE, FOUND
from ropext.results.gates import GateMetrics
from ropext.results.numbers import ModelNumbers
from ropext.results.retrieval import (
    OUTCOMES,
    REFUSED,
    TRUNCATED,
    ItemScore,
    group_answers,
    heat_map_cells,
    ruler_means,
    share_of_answers,
)
from ropext.results.values import Z95, Value
from ropext.tasks import RULER, THIRTEEN

ENOUGH = 0.9  # the least share found at a length that counts as read

Scores = Sequence[tuple[ItemScore, Answer]]


@dataclass(frozen=True)
class ServerMetrics(GateMetrics):
    """The metrics that an evaluation of a server will have."""

    reads_text: bool = False

    def metrics(self, variant: str | None, run: str | None = None) -> tuple[list[str], list[str]]:
        """Return the metrics that `eval --endpoint` counts from a running server's answers at every
        length: the share of each task, and of all together."""
        tasks = self.options.tasks
        at = list[str]()
        whole = list[str]()
        if self.reads_text:
            self._text_metrics(variant, run, at, whole)
        if BASE in (variant, run):  # the base gets no questions
            return at, whole
        at += tasks
        at.append(FOUND)
        if len(set(tasks).intersection(THIRTEEN)) > 1:
            at.append(RULER)
        return at, whole


def numbers_of_answers(scores: Scores) -> ModelNumbers:
    """Return all numbers of a server's answers in one row."""
    items = [item for item, _ in scores]
    values = values_of_answers(items)
    return ModelNumbers(
        metrics=values,
        retrieval=heat_map_cells([item for item in items if item.is_read]),
        outcomes=_outcome_rows(scores),
        reached=reached(items, values),
    )


def values_of_answers(items: Sequence[ItemScore]) -> dict[str, Value]:
    """Return `TASK@C` and `found@C` of a server, over the questions whose prompts it read."""
    read = [item for item in items if item.is_read]
    values = dict[str, Value]()
    for (task, length), group in sorted(group_answers(read, "task", "length").items()):
        values[f"{task}@{length}"] = share_of_answers(group)
    for length, group in sorted(group_answers(read, "length").items()):
        values[f"{FOUND}@{length}"] = share_of_answers(group)
    return values | ruler_means(values)


def _outcome_rows(scores: Scores) -> list[dict[str, Json]]:
    """Return for each length the number of a server's answers by outcome, the tokens of the
    prompts, and the first reason of each kind."""
    lengths = sorted({item.length for item, _ in scores})
    return [_outcome_row(length, scores) for length in lengths]


def _outcome_row(length: int, scores: Scores) -> dict[str, Json]:
    """Return the outcomes of a server's answers at one length."""
    counts = dict.fromkeys(OUTCOMES, 0)
    counted = list[int]()
    used = list[int]()
    reasons = dict[str, str]()
    for item, answer in scores:
        if item.length != length:
            continue
        outcome = str(item.outcome)
        counts[outcome] += 1
        counted.append(answer.counted)
        if answer.tokens is not None:
            used.append(answer.tokens)
        if answer.reason:
            reasons.setdefault(outcome, answer.reason)
    return {
        "length": length,
        "counts": counts,
        "counted": _token_range(counted),
        "used": _token_range(used),
        "reasons": reasons,
    }


def _token_range(numbers: Sequence[int]) -> list[int] | None:
    """Return the smallest and the largest number of tokens in a server's prompts. Return None if
    there are none."""
    if not numbers:
        return None
    return [min(numbers), max(numbers)]


def reached(items: Sequence[ItemScore], values: Mapping[str, Value]) -> dict[str, Json]:
    """Return up to which length the running server of `eval --endpoint` finds at least 90 % of the
    needles: by the share itself, and by the lower end of its interval. It does not reach a length
    at which it refused or truncated a question."""
    by_point = 0
    by_interval = 0
    interval_holds = True
    for length, group in sorted(group_answers(items, "length").items()):
        is_whole = not any(item.outcome in (REFUSED, TRUNCATED) for item in group)
        value = values.get(f"{FOUND}@{length}")
        if not is_whole or value is None or value.value < ENOUGH:
            break
        by_point = length
        if value.ci95 is None or value.ci95[0] < ENOUGH:
            interval_holds = False
        if interval_holds:
            by_interval = length
    return {"share": ENOUGH, "by_point": by_point, "by_interval": by_interval}


def deciding_questions() -> int:
    """Return how many questions `eval --endpoint` must ask a running server, so that the lower end
    of the interval reaches 90 % if it finds all. Wilson's lower end is then n / (n + z²)."""
    z2 = Z95**2
    least = ENOUGH * z2 / (1 - ENOUGH)
    return int(least) + 1
