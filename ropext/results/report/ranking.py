"""Write a ranking of methods as `ropext plan --measure` prints it."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ropext.base.lengths import length_text
from ropext.base.table import Table, as_text
from ropext.results import BASE
from ropext.results.overlap import marked_name
from ropext.results.report.cells import (
    Column,
    Values,
    fixed_digits,
    nats_cell,
    table_of_values,
    value_cell,
)
from ropext.results.rules import LossRanking, in_memory_sentence

if TYPE_CHECKING:
    from ropext.planning import Plan

COLUMNS = (
    Column("tail", "tail", value_cell),
    Column("behind", "behind", nats_cell),
    Column("context gain", "gain", nats_cell),
    Column("short tax", "short_tax", nats_cell),
)


def ranking_text(
    ranking: LossRanking, plans: Mapping[str, "Plan"], left_out: Mapping[str, str], mark: str = ""
) -> str:
    """Write `ropext plan --measure` as text; `mark` says how many of the documents were trained
    on."""
    lines = ranking_lines(ranking, left_out)
    command = plans[ranking.taken].command
    return f"{as_text([ranking_table(ranking, mark)], lines)}\n\nto extend with it:\n  {command}"


def ranking_lines(ranking: LossRanking, left_out: Mapping[str, str]) -> list[str]:
    """Write the verdict of `ropext plan --measure`, and the methods that are not in its table."""
    lines = [ranking_verdict(ranking)]
    lines += _truncation_verdict(ranking)
    for method, behind in ranking.beside.items():
        lines.append(in_memory_sentence(method, behind, ranking.best))
    for method, why in left_out.items():
        lines.append(f"not measured: {method}: {why}")
    return lines


def ranking_table(ranking: LossRanking, mark: str = "", *, starred: bool = True) -> Table:
    """Return the table of `ropext plan --measure` with a row per method, the lowest tail first, the
    base's short window at the end. A star marks the recommended method."""
    rows = list[tuple[str, Values]]()
    for method, behind in ranking.standing.behind.items():
        name = method
        if starred and method == ranking.taken:
            name += "*"
        shown_behind = None if method == ranking.best else behind
        rows.append((name, ranking.numbers(method, shown_behind)))
    for method, behind in ranking.beside.items():
        rows.append((method, ranking.numbers(method, behind)))
    if ranking.in_window is not None:
        rows.append((BASE, {"tail": ranking.in_window}))
    documents = marked_name(f"{ranking.standing.documents} documents", mark)
    table = table_of_values(
        f"Tail perplexity at {length_text(ranking.frame.longest)}: the last {ranking.frame.tail} "
        f"tokens, {documents}",
        "behind: loss above the lowest, in nats per token, paired by document; context gain: over "
        "the base on truncated text" + ("; *: the recommended method" if starred else ""),
        rows,
        COLUMNS,
    )
    return replace(table, header=("method", *table.header[1:]))


def ranking_verdict(ranking: LossRanking) -> str:
    """Say in `ropext plan --measure` which method to take, and how sure that is."""
    standing = ranking.standing
    best = ranking.best
    others = [method for method in standing.behind if method != best]
    if not others:
        return f"{best} is the only method that can be written with these options"
    if standing.behind[best].ci95 is None:
        distance = fixed_digits(standing.behind[others[0]].value, 4)
        return (
            f"take {best}: the lowest loss, by {distance} nats per token; "
            f"{standing.documents} documents are too few for an interval"
        )
    nearest = min(others, key=lambda method: _sure_lead(ranking, method))
    if standing.is_sure:
        return (
            f"take {best}: the lowest at 95 % confidence, {_distance_text(ranking, nearest)} below "
            f"{nearest}{_correction_remark(ranking)}"
        )
    if len(standing.tied) == 1:
        return (
            f"take {best}: the lowest, below each other method by more than its interval, but not "
            f"at 95 % confidence below {nearest}: "
            f"{_distance_text(ranking, nearest)}{_correction_remark(ranking)}"
        )
    alike = ", ".join(standing.tied)
    if ranking.taken == best:
        return (
            f"take {best}: the lowest; the data do not separate {alike}, and of these most engines "
            "compute it exactly, in the plainest rope type"
        )
    behind = standing.behind[ranking.taken]
    low, high = behind.ci95 or (behind.value, behind.value)
    interval = f"{fixed_digits(low, 4)} to {fixed_digits(high, 4)}"
    return (
        f"take {ranking.taken}: the data do not separate {alike} "
        f"({fixed_digits(behind.value, 4)} nats per token ({interval}) between it and the lowest), "
        "and more engines compute it exactly, or its rope type is plainer"
    )


def _sure_lead(ranking: LossRanking, method: str) -> float:
    """Return by how much the lowest of the ranked methods is surely below another."""
    lead = ranking.standing.leads[method]
    return -math.inf if lead is None else lead


def _distance_text(ranking: LossRanking, method: str) -> str:
    """Write how far a ranked method is behind the lowest, and how far at the least."""
    least = ranking.standing.leads[method]
    if least is None:
        least = math.nan
    value = ranking.standing.behind[method].value
    return f"{fixed_digits(value, 4)} nats per token ({fixed_digits(least, 4)} at least)"


def _correction_remark(ranking: LossRanking) -> str:
    """Return the remark of a ranking that its verdict is corrected for several comparisons; "" for
    one comparison."""
    count = len(ranking.standing.leads)
    return f", corrected for {count} comparisons" if count > 1 else ""


def _truncation_verdict(ranking: LossRanking) -> list[str]:
    """Say in `ropext plan --measure` how much better truncation is if it surely beats even the best
    method."""
    gain = ranking.gain(ranking.best)
    if gain is None or gain.ci95 is None or gain.ci95[1] >= 0:
        return []
    return [
        f"without training, truncating the text is better: the base on its last "
        f"{length_text(ranking.frame.context)} tokens has a loss {fixed_digits(-gain.value, 4)} "
        "nats per token lower; fine-tune (`ropext finetune`) before you rely on the long context"
    ]
