"""A measured ranking of methods: the table, what follows from it, and the command that does it."""

import math
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ropext.lengths import length_text
from ropext.options.extend import Extend
from ropext.options.fields import flag, keys
from ropext.report.measured import NOTHING, Table, as_text, number, shown
from ropext.results.overlap import marked
from ropext.results.ranking import Ranking, Standing

if TYPE_CHECKING:
    from ropext.planning import Plan


def text(
    ranking: Ranking, plans: "Mapping[str, Plan]", left_out: Mapping[str, str], mark: str = ""
) -> str:
    """`ropext plan --measure` as text; `mark` says how many of the documents were trained on."""
    lines = [verdict(ranking), *_against_base(ranking)]
    lines += [f"not measured: {method}: {why}" for method, why in left_out.items()]
    command = extend_command(plans[ranking.taken])
    return f"{as_text([table(ranking, mark)], lines)}\n\nto extend with it\n  {command}"


def table(ranking: Ranking, mark: str = "") -> Table:
    """A row per method, the lowest tail first, the base's short window at the end."""
    rows = [
        (
            own.label + ("*" if own.label == ranking.taken else ""),
            shown(own.tail),
            NOTHING if own is ranking.best else shown(own.behind, 4, sign=True),
            NOTHING if own.share_lowest is None else f"{own.share_lowest:.0%}",
            shown(own.gain, 4, sign=True),
            shown(own.short_tax, 4, sign=True),
        )
        for own in ranking.standings
    ]
    if ranking.in_window is not None:
        rows.append(("base", shown(ranking.in_window), *(NOTHING,) * 4))
    return Table(
        f"Tail perplexity at {length_text(ranking.frame.longest)}: the last {ranking.frame.tail} "
        f"tokens, {marked(f'{ranking.documents} documents', mark)}",
        "behind = nats a token above the lowest, paired by document, each interval for itself; "
        "lowest in = share of the bootstrap's resamples; gain = against the base through its short "
        "window",
        ("method", "tail", "behind", "lowest in", "context gain", "short tax"),
        tuple(rows),
    )


def verdict(ranking: Ranking) -> str:
    """Which one to take, and how sure that is."""
    best, others = ranking.best, ranking.standings[1:]
    if not others:
        return f"{best.label} is the only method that can be written as asked"
    second = min(others, key=lambda own: -math.inf if own.at_least is None else own.at_least)
    if best.behind.ci95 is None:
        return (
            f"take {best.label}, the lowest by {number(second.behind.value, 4)} nats a token: how "
            f"sure that is cannot be said of {ranking.documents} documents"
        )
    if ranking.sure:
        return (
            f"take {best.label}: surely the lowest, {_least(second)} below {second.label}"
            f"{_allowed_for(ranking)}"
        )
    if len(ranking.tied) == 1:
        return (
            f"take {best.label}: the lowest, below each other one by more than its interval, but "
            f"not surely below {second.label}: {_least(second)}{_allowed_for(ranking)}"
        )
    alike = ", ".join(ranking.tied)
    if ranking.taken == best.label:
        return (
            f"take {best.label}: the lowest, and of those that cannot be told apart here ({alike}) "
            "the one that most loaders read, in the plainest form"
        )
    taken = next(own for own in others if own.label == ranking.taken)
    return (
        f"take {taken.label}: {alike} cannot be told apart here ({_distance(taken)} between it and "
        f"the lowest), and more loaders read it, or its form is plainer"
    )


def _distance(own: Standing) -> str:
    low, high = own.behind.ci95 or (own.behind.value,) * 2
    return f"{number(own.behind.value, 4)} nats a token ({number(low, 4)} to {number(high, 4)})"


def _least(own: Standing) -> str:
    least = math.nan if own.at_least is None else own.at_least
    return f"{number(own.behind.value, 4)} nats a token ({number(least, 4)} at least)"


def _allowed_for(ranking: Ranking) -> str:
    count = len(ranking.standings) - 1
    return f", {count} comparisons allowed for" if count > 1 else ""


def _against_base(ranking: Ranking) -> list[str]:
    """Truncation that beats even the best method is said."""
    gain = ranking.best.gain
    if gain is None or gain.ci95 is None or gain.ci95[1] >= 0:
        return []
    return [
        f"truncating beats it untrained: the base that sees only its last "
        f"{length_text(ranking.frame.context)} tokens is {number(-gain.value, 4)} nats a token "
        "lower; fine-tune it (`ropext finetune`) before relying on the long context"
    ]


def extend_command(made: "Plan") -> str:
    """The command line that writes this plan."""
    words = ["ropext", "extend", made.name, "--method", made.method]
    for key in keys(Extend):
        value = getattr(made.recipe, key.field)
        if key.field in ("method", "short_pair_factors") or value in (None, False, ()):
            if value is False and key.default is None:
                words.append(f"--no-{flag(key.field).removeprefix('--')}")
            continue
        words.append(flag(key.field))
        if key.field == "pair_factors":
            words.append("FILE")
        elif isinstance(value, tuple):
            words.append(",".join(map(str, value)))
        elif value is not True:
            words.append(f"{value:.15g}" if isinstance(value, float) else str(value))
    return shlex.join([*words, "-o", "OUT"])
