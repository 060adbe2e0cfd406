"""Which of several readings of the same documents is the best, and how sure that is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ropext.results.comparison import difference, lead
from ropext.results.perplexity import Frame
from ropext.results.readings import Reading
from ropext.results.values import FEWEST_DOCUMENTS, Value


@dataclass(frozen=True)
class Standing:
    """One contender's numbers at the longest length; `gain` and `short_tax` are against the base
    through its short window, and None where there was no base."""

    label: str
    tail: Value  # perplexity
    tail_nll: Value
    behind: Value  # nats a token against the lowest, on the same tokens
    at_least: float | None  # so far behind, all comparisons with the lowest allowed for
    share_lowest: float | None  # of the bootstrap's resamples; None without an interval
    gain: Value | None
    short_tax: Value | None


@dataclass(frozen=True)
class Ranking:
    """Contenders by their tail, the lowest first; `taken` is the one to use."""

    frame: Frame
    documents: int
    standings: tuple[Standing, ...]
    in_window: Value | None  # perplexity of the base through its short window, the same tokens
    tied: tuple[str, ...]  # whose own interval against the lowest holds zero, itself included
    taken: str

    @property
    def best(self) -> Standing:
        """The lowest tail."""
        return self.standings[0]

    @property
    def sure(self) -> bool:
        """Whether the lowest is below every other one, all comparisons allowed for."""
        leads = [own.at_least for own in self.standings[1:]]
        return all(lead is not None and lead > 0 for lead in leads)

    def to_json(self) -> dict[str, Any]:
        """As `ropext plan --measure --json` prints it."""
        return {
            "length": self.frame.longest,
            "context": self.frame.context,
            "tail_tokens": self.frame.tail,
            "documents": self.documents,
            "in_window": self.in_window and self.in_window.to_json(),
            "ranking": [_standing_json(own) for own in self.standings],
            "tied": list(self.tied),
            "sure": self.sure,
            "taken": self.taken,
        }


def _standing_json(own: Standing) -> dict[str, Any]:
    return {
        "method": own.label,
        "tail": own.tail.to_json(),
        "tail_nll": own.tail_nll.to_json(),
        "behind": own.behind.to_json(),
        "behind_at_least": own.at_least,
        "share_lowest": own.share_lowest,
        "gain": own.gain and own.gain.to_json(),
        "short_tax": own.short_tax and own.short_tax.to_json(),
    }


def rank_readings(
    frame: Frame,
    readings: Mapping[str, Reading],
    base: Reading | None = None,
    preference: Sequence[str] = (),
) -> Ranking:
    """Rank readings of the same documents by the tail before the longest length.

    Of those whose own interval against the lowest holds zero, the first in `preference` is taken:
    what is used is a choice, and only "surely the lowest" a claim about all of them. Below eight
    documents there is no interval: nothing is sure, and the lowest is taken.
    """
    span = frame.tail_span(frame.longest)
    totals = {label: float(reading.sums(*span)[0].sum()) for label, reading in readings.items()}
    order = sorted(readings, key=lambda label: totals[label])
    lowest = readings[order[0]]
    behind = {label: difference(frame, readings[label], lowest, span) for label in order}
    shares = _shares_lowest(frame, [readings[label] for label in order])
    documents = len(lowest.sums(*span)[0])
    leads: dict[str, float | None] = {
        label: lead(frame, lowest, readings[label], span, len(order) - 1) for label in order[1:]
    }
    tied = [label for label in order if label == order[0] or not behind[label].excludes_zero]
    taken = order[0]
    if documents >= FEWEST_DOCUMENTS:
        taken = next((label for label in preference if label in tied), taken)
    inside = (1, min(frame.context, frame.longest))
    standings = tuple(
        Standing(
            label,
            tail=frame.bootstrap.ratio(*readings[label].sums(*span), np.exp),
            tail_nll=frame.bootstrap.ratio(*readings[label].sums(*span)),
            behind=behind[label],
            at_least=leads.get(label),
            share_lowest=share,
            gain=difference(frame, base, readings[label], span) if base else None,
            short_tax=difference(frame, readings[label], base, inside) if base else None,
        )
        for label, share in zip(order, shares, strict=True)
    )
    in_window = frame.bootstrap.ratio(*base.sums(*span), np.exp) if base else None
    return Ranking(frame, documents, standings, in_window, tuple(tied), taken)


def _shares_lowest(frame: Frame, readings: Sequence[Reading]) -> list[float | None]:
    span = frame.tail_span(frame.longest)
    shares = frame.bootstrap.shares_lowest([reading.sums(*span)[0] for reading in readings])
    return [None] * len(readings) if shares is None else list(shares)
