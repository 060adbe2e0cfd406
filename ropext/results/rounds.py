"""Which of several models to take, by rounds on more and more documents; and the verdict on it, by
documents that took no part in choosing."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ropext.lengths import length_text
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


@dataclass(frozen=True)
class AutoVerdict:
    """What came of a choice: two numbers and a sentence."""

    gain: Value | None  # nats a token over the base's short window, at the target
    short_tax: Value | None  # nats a token lost inside the context
    sentence: str


def verdict(choice: Mapping[str, Any], results: Mapping[str, Any], final: str) -> AutoVerdict:
    """On the finished checkpoint, from an evaluation on documents that took no part in choosing."""
    metrics: Mapping[str, Any] = results["variants"][final]["metrics"]
    target = int(choice["target"])

    def number(name: str) -> Value | None:
        return Value.from_json(metrics[name]) if name in metrics else None

    gain, tax = number(f"gain@{target}"), number("short_tax")
    return AutoVerdict(gain, tax, _sentence(choice, gain, final, length_text(target)))


def _sentence(choice: Mapping[str, Any], gain: Value | None, final: str, length: str) -> str:
    taken = choice["taken"]
    if gain is None:
        return f"{taken} was taken; what it gains at {length} was not measured"
    if gain.ci95 is None:
        return (
            f"{taken} was taken; {gain.n} documents that took no part in choosing are too few to "
            f"say whether it gains anything over truncation ({FEWEST_DOCUMENTS} or more do)"
        )
    if gain.ci95[0] <= 0:
        how = "better" if gain.ci95[1] < 0 else "as well"
        return (
            f"extending gains nothing on these texts: truncation predicts the last tokens before "
            f"{length} {how}; written all the same"
        )
    if taken == UNTOUCHED:
        return (
            f"leave this model as it is: it reads {length} untouched as well as by any method "
            "tried; what was written raises the stated length alone"
        )
    later = {"fitted": ", then a fitted spectrum", "tuned": ", then trained"}.get(final, "")
    return f"extended by {taken}{later}: {choice['because']}"


def because(last: Round, taken: str) -> str:
    """Why one was taken, by the documents that chose."""
    lowest, count = next(iter(last.behind)), last.documents
    on = f"on {count} document{'s' if count > 1 else ''}"
    others = [label for label in last.behind if label != taken]
    if taken != lowest:
        return f"as low as {lowest} {on}, and the plainer form"
    if not others:
        return f"lowest loss at the target {on}"
    ahead = last.behind[others[0]].value
    return f"lowest loss at the target {on}, {ahead:.4f} nats a token below {others[0]}"
