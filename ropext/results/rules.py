"""What follows from losses on the same documents: who is lowest, and how surely; who goes on to the
next round, who is taken, and what `--method auto` says in the end."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ropext.lengths import length_text
from ropext.results.overlap import mark_of, marked
from ropext.results.perplexity import Frame, Reading, Span
from ropext.results.values import FEWEST_DOCUMENTS, MARGIN, RISK, Value, values_json

UNTOUCHED = "untouched"
# Documents read after each round, as far as there are so many.
ROUNDS = (4, 8, 16, 32)
# As shares of the lowest loss: who is not surely behind, and no further than this, ties with it;
# so small a difference is none, however sure it is.
TIE, NOTHING = 0.005, 0.001


def difference(frame: Frame, left: Reading, right: Reading, span: Span) -> Value:
    """Return the NLL of `left` minus NLL of `right` on the same tokens, in nats per token."""
    sums, counts = left.sums(*span)
    return frame.bootstrap.ratio(sums - right.sums(*span)[0], counts)


@dataclass(frozen=True)
class Standing:
    """Models by their loss over a span of the same documents, the lowest first."""

    documents: int
    loss: float  # of the lowest, nats a token
    behind: Mapping[str, Value]  # nats a token above the lowest
    # So much is the lowest below each other one at the least; None below eight documents.
    leads: Mapping[str, float | None]

    @property
    def lowest(self) -> str:
        return next(iter(self.behind))

    @property
    def is_sure(self) -> bool:
        """Whether the lowest is below every other one, all comparisons allowed for."""
        return all(lead is not None and lead > 0 for lead in self.leads.values())

    @property
    def tied(self) -> tuple[str, ...]:
        """Whose own interval against the lowest holds zero, itself included."""
        return tuple(own for own in self.behind if not self.behind[own].excludes_zero)

    @property
    def stay(self) -> tuple[str, ...]:
        """Who goes into the next round: of few documents the better half, two at the least; where
        there is an interval, all that are not surely behind; and whoever is as good as equal."""
        order = tuple(self.behind)
        half = order[: max(2, -(-len(order) // 2))]
        going_on = half if self.documents < FEWEST_DOCUMENTS else self.tied
        return tuple(
            own for own in order if own in going_on or self.behind[own].value <= NOTHING * self.loss
        )

    @property
    def alike(self) -> tuple[str, ...]:
        """Of those who stay, who is as good as the lowest for all that matters."""
        return tuple(own for own in self.stay if self.behind[own].value <= TIE * self.loss)

    def take(self, among: Collection[str], preference: Sequence[str]) -> str:
        """Take the first in `preference` of those `among` which none is surely better: what is used
        is a choice, and only "surely the lowest" a claim about all. Of few documents, the lowest.
        """
        known = self.documents >= FEWEST_DOCUMENTS
        return next((own for own in preference if known and own in among), self.lowest)

    def to_json(self) -> dict[str, Any]:
        """As choice.json has it."""
        found = {"documents": self.documents, "behind": self.behind, "stay": self.stay}
        return dict(values_json(found))


def standing(frame: Frame, readings: Mapping[str, Reading], span: Span | None = None) -> Standing:
    """Compare readings of the same documents over a span, by default the longest length's tail."""
    span = span or frame.tail_span(frame.longest)
    sums = {label: reading.sums(*span) for label, reading in readings.items()}
    order = sorted(sums, key=lambda label: float(sums[label][0].sum()))
    lowest, (losses, counts) = readings[order[0]], sums[order[0]]
    return Standing(
        len(losses),
        float(losses.sum() / counts.sum()),
        {label: difference(frame, readings[label], lowest, span) for label in order},
        {label: lead(frame, lowest, readings[label], span, len(order) - 1) for label in order[1:]},
    )


def lead(
    frame: Frame, lowest: Reading, other: Reading, span: Span, comparisons: int
) -> float | None:
    """Nats per token that `lowest` is below `other` at the least; None below eight documents.

    Several are compared, and the lowest of them is not known before: so many comparisons share the
    risk of one two-sided 95 % interval (Bonferroni). "Surely the lowest" is false only where the
    one that truly is was beaten in a comparison with it, and there are one fewer of these than
    contenders.
    """
    sums, counts = lowest.sums(*span)
    differences = sums - other.sums(*span)[0]
    highest = frame.bootstrap.upper(differences, counts, RISK / comparisons)
    return None if highest is None else -highest


@dataclass(frozen=True)
class Ranked:
    """One method's numbers at the longest length; `gain` and `short_tax` are against the base
    through its short window, and None where there was no base."""

    method: str
    tail: Value  # perplexity
    tail_nll: Value
    behind: Value  # nats a token against the lowest, on the same tokens
    behind_at_least: float | None  # so far behind, all comparisons with the lowest allowed for
    gain: Value | None
    short_tax: Value | None


@dataclass(frozen=True)
class Ranking:
    """Methods by their tail, the lowest first; `taken` is the one to use."""

    frame: Frame
    standing: Standing
    rows: tuple[Ranked, ...]
    in_window: Value | None  # perplexity of the base through its short window, the same tokens
    taken: str

    @property
    def best(self) -> Ranked:
        """The lowest tail."""
        return self.rows[0]

    def to_json(self) -> dict[str, Any]:
        """As `ropext plan --measure --json` prints it."""
        return {
            "length": self.frame.longest,
            "context": self.frame.context,
            "tail_tokens": self.frame.tail,
            "documents": self.standing.documents,
            "in_window": values_json(self.in_window),
            "ranking": values_json(self.rows),
            "tied": list(self.standing.tied),
            "sure": self.standing.is_sure,
            "taken": self.taken,
        }


def rank_readings(
    frame: Frame,
    readings: Mapping[str, Reading],
    base: Reading | None = None,
    preference: Sequence[str] = (),
) -> Ranking:
    """Rank readings of the same documents by the tail before the longest length."""
    span, boot, found = frame.tail_span(frame.longest), frame.bootstrap, standing(frame, readings)
    rows = tuple(
        Ranked(
            label,
            tail=boot.ratio(*readings[label].sums(*span), np.exp),
            tail_nll=boot.ratio(*readings[label].sums(*span)),
            behind=behind,
            behind_at_least=found.leads.get(label),
            gain=difference(frame, base, readings[label], span) if base else None,
            short_tax=difference(frame, readings[label], base, frame.inside) if base else None,
        )
        for label, behind in found.behind.items()
    )
    in_window = boot.ratio(*base.sums(*span), np.exp) if base else None
    return Ranking(frame, found, rows, in_window, found.take(found.tied, preference))


@dataclass(frozen=True)
class AutoVerdict:
    """What came of a choice: two numbers and a sentence."""

    gain: Value | None  # nats a token over the base's short window, at the target
    short_tax: Value | None  # nats a token lost inside the context
    sentence: str
    mark: str = ""  # which of its documents were trained or chosen on


def verdict(choice: Mapping[str, Any], results: Mapping[str, Any], final: str) -> AutoVerdict:
    """On the finished checkpoint, from an evaluation; the share of its documents that trained or
    chose it is said."""
    metrics: Mapping[str, Any] = results["variants"][final]["metrics"]
    target = int(choice["target"])

    def number(name: str) -> Value | None:
        return Value.from_json(metrics[name]) if name in metrics else None

    gain, tax = number(f"gain@{target}"), number("short_tax")
    mark = mark_of(results["variants"][final])
    said = marked(
        _sentence(choice, gain, final, length_text(target)), mark and f"documents: {mark}"
    )
    return AutoVerdict(gain, tax, said, mark)


def _sentence(choice: Mapping[str, Any], gain: Value | None, final: str, length: str) -> str:
    taken = choice["taken"]
    if gain is None:
        return f"{taken} was taken; what it gains at {length} was not measured"
    worse = gain.ci95 is not None and gain.ci95[1] < 0
    if taken == UNTOUCHED and not worse:
        return (
            f"leave this model as it is: it reads {length} untouched as well as by any method "
            "tried; what was written raises the stated length alone"
        )
    later = {"fitted": ", then a fitted spectrum", "tuned": ", then trained"}.get(final, "")
    extended = f"extended by {taken}{later}: {choice['because']}"
    if gain.gains is None:
        return (
            f"not known whether extending gains anything over truncation at {length} "
            f"({gain.why_not_known}); {extended}"
        )
    if gain.gains:
        return extended
    how = "better" if worse else f"as well, to within {MARGIN} nats a token"
    return (
        f"extending gains nothing on these texts: truncation predicts the last tokens before "
        f"{length} {how}; written all the same"
    )


def because(last: Standing, taken: str) -> str:
    """Why one was taken, by the documents that chose."""
    lowest, count = last.lowest, last.documents
    on = f"on {count} document{'s' if count > 1 else ''}"
    others = [label for label in last.behind if label != taken]
    if taken != lowest:
        return f"as low as {lowest} {on}, and the plainer form"
    if not others:
        return f"lowest loss at the target {on}"
    ahead = last.behind[others[0]].value
    return f"lowest loss at the target {on}, {ahead:.4f} nats a token below {others[0]}"
