"""The numbers of a server's answers: shares with intervals that count haystacks, how many became
what, and how far the text is read."""

from collections.abc import Mapping, Sequence
from typing import Any

from ropext.jsontext import values_json
from ropext.ports.answers import Answer
from ropext.results.retrieval import (
    FOUND,
    OUTCOMES,
    REFUSED,
    TRUNCATED,
    ItemScore,
    grouped,
    heat_map,
    ruler_means,
    share_of,
)
from ropext.results.values import Z95, Value

ENOUGH = 0.9  # of the answers are found where a length counts as read

Scores = Sequence[tuple[ItemScore, Answer]]


def port_results(scores: Scores, seed: int) -> dict[str, Any]:
    """All numbers of one row, as results.json has them."""
    items = [item for item, _ in scores]
    values = port_values(items)
    return {
        "metrics": values_json(values),
        "positions": [],
        "retrieval": values_json(heat_map([item for item in items if item.is_read])),
        "overlap": None,
        "outcomes": _outcomes(scores),
        "reached": reached(items, values),
        "verdicts": [],
    }


def port_values(items: Sequence[ItemScore]) -> dict[str, Value]:
    """`TASK@C` and `found@C`, over the questions whose answers say how the text was read."""
    read = [item for item in items if item.is_read]
    values = dict[str, Value]()
    for (task, length), group in sorted(grouped(read, "task", "length").items()):
        values[f"{task}@{length}"] = share_of(group)
    for length, group in sorted(grouped(read, "length").items()):
        values[f"{FOUND}@{length}"] = share_of(group)
    return values | ruler_means(values)


def _outcomes(scores: Scores) -> list[dict[str, Any]]:
    """Per length: how many became what, the tokens of the prompts, and the first reason of each
    kind."""
    rows = list[dict[str, Any]]()
    for length in sorted({item.length for item, _ in scores}):
        here = [(item, answer) for item, answer in scores if item.length == length]
        counts = {name: sum(item.outcome == name for item, _ in here) for name in OUTCOMES}
        used = [answer.tokens for _, answer in here if answer.tokens is not None]
        reasons = dict[str, str]()
        for item, answer in here:
            if answer.reason and item.outcome not in (None, *reasons):
                reasons[str(item.outcome)] = answer.reason
        rows.append(
            {
                "length": length,
                "counts": counts,
                "counted": [min(a.counted for _, a in here), max(a.counted for _, a in here)],
                "used": [min(used), max(used)] if used else None,
                "reasons": reasons,
            }
        )
    return rows


def reached(items: Sequence[ItemScore], values: Mapping[str, Value]) -> dict[str, Any]:
    """The longest length up to which at least 90 % are found: by the share itself, and by the lower
    end of its interval. A length of which something was refused or cut is not reached."""
    by_point = by_interval = 0
    point_holds = interval_holds = True
    for length, group in sorted(grouped(items, "length").items()):
        is_whole = not any(item.outcome in (REFUSED, TRUNCATED) for item in group)
        value = values.get(f"{FOUND}@{length}")
        point_holds = point_holds and is_whole and value is not None and value.value >= ENOUGH
        low = value.ci95[0] if value is not None and value.ci95 is not None else 0.0
        interval_holds = interval_holds and point_holds and low >= ENOUGH
        by_point = length if point_holds else by_point
        by_interval = length if interval_holds else by_interval
    return {"share": ENOUGH, "by_point": by_point, "by_interval": by_interval}


def deciding_questions() -> int:
    """How many questions, all of them found, put the lower end of the interval at 90 %: Wilson's is
    then n / (n + z²)."""
    z2 = Z95**2
    least = ENOUGH * z2 / (1 - ENOUGH)
    return int(least) + 1
