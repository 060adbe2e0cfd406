"""Which of several models `--method auto` takes, by rounds on more and more documents."""

from collections.abc import Mapping
from dataclasses import dataclass

from ropext.results.comparison import behind_lowest
from ropext.results.perplexity import Frame, Reading
from ropext.results.values import FEWEST_DOCUMENTS, Value

UNTOUCHED = "untouched"
# Documents read after each round, as far as there are so many.
ROUNDS = (4, 8, 16, 32)
# As shares of the lowest loss: who is not surely behind, and no further than this, ties with it;
# so small a difference is none, however sure it is.
TIE, NOTHING = 0.005, 0.001


@dataclass(frozen=True)
class Round:
    """What a round has shown: nats a token behind the lowest, the lowest first, and who stays."""

    documents: int
    behind: Mapping[str, Value]
    stay: tuple[str, ...]


def halve(frame: Frame, readings: Mapping[str, Reading]) -> Round:
    """Who goes into the next round: of few documents the better half, two at the least; where there
    is an interval, all that are not surely behind the lowest; and whoever is as good as equal."""
    behind = behind_lowest(frame, readings)
    order, lowest = list(behind), readings[next(iter(behind))]
    documents = len(lowest.sums(*frame.tail_span(frame.longest))[0])
    if documents < FEWEST_DOCUMENTS:
        going_on = order[: max(2, -(-len(order) // 2))]
    else:
        going_on = [label for label in order if not behind[label].excludes_zero]
    least = NOTHING * _loss(frame, lowest)
    stay = [own for own in order if own in going_on or behind[own].value <= least]
    return Round(documents, behind, tuple(stay))


def _loss(frame: Frame, reading: Reading) -> float:
    """Nats a token of the tail."""
    sums, counts = reading.sums(*frame.tail_span(frame.longest))
    return float(sums.sum() / counts.sum())


def tied(frame: Frame, last: Round, lowest: Reading) -> tuple[str, ...]:
    """Of those who stay, who is as good as the lowest for all that matters."""
    most = TIE * _loss(frame, lowest)
    return tuple(label for label in last.stay if last.behind[label].value <= most)
