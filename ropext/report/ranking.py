"""A ranking of methods, as `ropext plan --measure` prints it."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ropext.lengths import length_text
from ropext.report.cells import Column, Values, nats, number, shown, table_of
from ropext.report.text import extend_command
from ropext.results import BASE
from ropext.results.overlap import marked
from ropext.results.rules import Ranking, in_memory
from ropext.results.values import Value
from ropext.table import Table, as_text

if TYPE_CHECKING:
    from ropext.planning import Plan

COLUMNS = (
    Column("tail", "tail", shown),
    Column("behind", "behind", nats),
    Column("context gain", "gain", nats),
    Column("short tax", "short_tax", nats),
)


def ranking_text(
    ranking: Ranking, plans: Mapping[str, "Plan"], left_out: Mapping[str, str], mark: str = ""
) -> str:
    """Write `ropext plan --measure` as text; `mark` says how many of the documents were trained
    on."""
    lines = ranking_lines(ranking, left_out)
    command = extend_command(plans[ranking.taken])
    return f"{as_text([ranking_table(ranking, mark)], lines)}\n\nto extend with it\n  {command}"


def ranking_lines(ranking: Ranking, left_out: Mapping[str, str]) -> list[str]:
    """Say what the ranking shows, and which methods are not in it."""
    lines = [ranking_verdict(ranking)]
    lines += _against_base(ranking)
    for method, behind in ranking.beside.items():
        lines.append(in_memory(method, behind, ranking.best))
    for method, why in left_out.items():
        lines.append(f"not measured: {method}: {why}")
    return lines


def ranking_table(ranking: Ranking, mark: str = "", *, starred: bool = True) -> Table:
    """Lay out a row per method, the lowest tail first, the base's short window at the end; a star
    is at the one to take."""
    rows = list[tuple[str, Values]]()
    for method, behind in ranking.standing.behind.items():
        name = method
        if starred and method == ranking.taken:
            name += "*"
        shown_behind = None if method == ranking.best else behind
        rows.append((name, _row(ranking, method, shown_behind)))
    for method, behind in ranking.beside.items():
        rows.append((method, _row(ranking, method, behind)))
    if ranking.in_window is not None:
        rows.append((BASE, {"tail": ranking.in_window}))
    documents = marked(f"{ranking.standing.documents} documents", mark)
    table = table_of(
        f"Tail perplexity at {length_text(ranking.frame.longest)}: the last {ranking.frame.tail} "
        f"tokens, {documents}",
        "behind = nats a token above the lowest, paired by document, each interval for itself; "
        "gain = against the base through its short window",
        rows,
        COLUMNS,
    )
    return replace(table, header=("method", *table.header[1:]))


def _row(ranking: Ranking, method: str, behind: Value | None) -> Values:
    return {
        "tail": ranking.tail(method),
        "behind": behind,
        "gain": ranking.gain(method),
        "short_tax": ranking.short_tax(method),
    }


def ranking_verdict(ranking: Ranking) -> str:
    """Say which one to take, and how sure that is."""
    standing = ranking.standing
    best = ranking.best
    others = [method for method in standing.behind if method != best]
    if not others:
        return f"{best} is the only method that can be written as asked"
    if standing.behind[best].ci95 is None:
        distance = number(standing.behind[others[0]].value, 4)
        return (
            f"take {best}, the lowest by {distance} nats a token; "
            f"{standing.documents} documents are too few to say how sure that is"
        )
    nearest = min(others, key=lambda method: _lead(ranking, method))
    if standing.is_sure:
        return (
            f"take {best}: surely the lowest, {_distance(ranking, nearest)} below {nearest}"
            f"{_allowed_for(ranking)}"
        )
    if len(standing.tied) == 1:
        return (
            f"take {best}: the lowest, below each other one by more than its interval, but "
            f"not surely below {nearest}: {_distance(ranking, nearest)}{_allowed_for(ranking)}"
        )
    alike = ", ".join(standing.tied)
    if ranking.taken == best:
        return (
            f"take {best}: the lowest, and of those that cannot be told apart here ({alike})"
            " the one that most loaders read, in the plainest form"
        )
    behind = standing.behind[ranking.taken]
    low, high = behind.ci95 or (behind.value, behind.value)
    interval = f"{number(low, 4)} to {number(high, 4)}"
    return (
        f"take {ranking.taken}: {alike} cannot be told apart here ({number(behind.value, 4)} nats "
        f"a token ({interval}) between it and the lowest), and more loaders read it, or its form "
        "is plainer"
    )


def _lead(ranking: Ranking, method: str) -> float:
    """Return by how much the lowest is surely below a method."""
    lead = ranking.standing.leads[method]
    return -math.inf if lead is None else lead


def _distance(ranking: Ranking, method: str) -> str:
    """Write how far a method is behind the lowest, and how far at the least."""
    least = ranking.standing.leads[method]
    if least is None:
        least = math.nan
    value = ranking.standing.behind[method].value
    return f"{number(value, 4)} nats a token ({number(least, 4)} at least)"


def _allowed_for(ranking: Ranking) -> str:
    count = len(ranking.standing.leads)
    return f", {count} comparisons allowed for" if count > 1 else ""


def _against_base(ranking: Ranking) -> list[str]:
    """Say where truncation beats even the best method."""
    gain = ranking.gain(ranking.best)
    if gain is None or gain.ci95 is None or gain.ci95[1] >= 0:
        return []
    return [
        f"truncating beats it untrained: the base that sees only its last "
        f"{length_text(ranking.frame.context)} tokens is {number(-gain.value, 4)} nats a token "
        "lower; fine-tune it (`ropext finetune`) before relying on the long context"
    ]
