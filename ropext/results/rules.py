"""Decide from losses on the same documents: which model is lowest, and how surely; which method
`--method auto` takes; which step of a fit is kept; and the numbers that `compare`
shows."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ropext.base.jsontext import Json, JsonObject, values_json
from ropext.base.lengths import length_text
from ropext.results import BASE, FITTED, TUNED, UNTOUCHED
from ropext.results.measurement import (
    MeasuredModel,
    Measurement,
    item_differences,
    join_measurements,
)
from ropext.results.overlap import marked_name
from ropext.results.perplexity import LossStatistics, Reading, Span
from ropext.results.values import FEWEST_DOCUMENTS, MARGIN, RISK, Value

# As shares of the lowest loss: who is not surely behind, and no further than this, ties with it;
# so small a difference is none, however sure it is.
TIE = 0.005
NEGLIGIBLE = 0.001
# Nats a token that two routes to the same spectrum may differ by.
ROUNDING = 1e-5


@dataclass(frozen=True)
class Standing:
    """Models by their loss over a span of the same documents, the lowest first."""

    documents: int
    loss: float  # the lowest model's, in nats per token
    behind: Mapping[str, Value]  # nats per token above the lowest
    # So much is the lowest below each other one at the least; None below eight documents.
    leads: Mapping[str, float | None]

    @property
    def lowest(self) -> str:
        """Return the label of the measured model with the lowest loss."""
        return next(iter(self.behind))

    @property
    def is_sure(self) -> bool:
        """Return whether the lowest measured loss is below every other one at 95 % confidence, with
        all comparisons allowed for."""
        return all(lead is not None and lead > 0 for lead in self.leads.values())

    @property
    def tied(self) -> tuple[str, ...]:
        """Return the measured models whose paired interval against the lowest holds zero, or which
        have no interval; the lowest is included."""
        return tuple(label for label, distance in self.behind.items() if not distance.sign)

    @property
    def alike(self) -> tuple[str, ...]:
        """Return the measured models that are practically as good as the lowest: close to it and
        not surely behind it, or so close that the difference does not matter."""
        labels = list[str]()
        for label, distance in self.behind.items():
            is_none = distance.value <= NEGLIGIBLE * self.loss
            is_small = distance.value <= TIE * self.loss and not distance.sign
            if is_none or is_small:
                labels.append(label)
        return tuple(labels)

    def take(self, among: Collection[str], preference: Sequence[str]) -> str:
        """Take the first in `preference` among the models that no other one surely beats. With few
        documents, take the lowest.

        The choice needs no certainty; only "surely the lowest" is a claim about all.
        """
        if self.documents >= FEWEST_DOCUMENTS:
            for label in preference:
                if label in among:
                    return label
        return self.lowest

    def to_json(self) -> dict[str, Json]:
        """Return the order of models by loss, with paired intervals, for choice.json."""
        return {
            "documents": self.documents,
            "behind": values_json(self.behind),
            "alike": list(self.alike),
        }


def loss_standing(measured: Measurement, span: Span | None = None) -> Standing:
    """Return measured models in the order of their losses on the same documents, with paired
    intervals, by default over the longest length's tail."""
    frame = measured.frame
    readings = measured.readings
    span = span or frame.tail_span(frame.longest)
    totals = dict[str, float]()
    documents = 0
    for label, reading in readings.items():
        sums, _ = reading.sums(*span)
        totals[label] = float(sums.sum())
        documents = len(sums)
    order = sorted(totals, key=lambda label: totals[label])
    lowest = readings[order[0]]
    behind = dict[str, Value]()
    leads = dict[str, float | None]()
    for label in order:
        behind[label] = measured.loss_difference(label, order[0], span)
        if label != order[0]:
            leads[label] = sure_lead(frame, lowest, readings[label], span, len(order) - 1)
    return Standing(documents, frame.mean(lowest, span), behind, leads)


def sure_lead(
    frame: LossStatistics, lowest: Reading, other: Reading, span: Span, comparisons: int
) -> float | None:
    """Return the least nats per token by which `lowest` is below `other`; None below eight
    documents.

    Several are compared, and the lowest is not known before. So the comparisons share the risk of
    one two-sided 95 % interval (Bonferroni). "Surely the lowest" is false only if the truly lowest
    one was beaten in a comparison, and there is one comparison fewer than contenders.
    """
    sums, counts = lowest.sums(*span)
    differences = sums - other.sums(*span)[0]
    highest = frame.bootstrap.upper(differences, counts, RISK / comparisons)
    return None if highest is None else -highest


def far_loss(measured: Measurement, label: str) -> float:
    """Compute the mean loss of a model over the far half from its token losses, in nats per
    token."""
    return measured.frame.mean(measured.readings[label], measured.frame.far_half)


def tail_loss(measured: Measurement, label: str) -> float:
    """Compute the mean loss of a model over the last N tokens before the longest length. It follows
    from its token losses, in nats per token."""
    frame = measured.frame
    return frame.mean(measured.readings[label], frame.tail_span(frame.longest))


def fit_loss(measured: Measurement, label: str) -> float:
    """Compute the metric that a fit lowers: the measured loss over the far half and the tail, in
    equal parts."""
    return (far_loss(measured, label) + tail_loss(measured, label)) / 2


def far_change(measured: Measurement, label: str, start: str) -> Value:
    """Compute the paired change of the loss over the far half, with its interval. It is in nats per
    token on the same tokens; negative is better than the start."""
    return measured.loss_difference(label, start, measured.frame.far_half)


def is_better(measured: Measurement, label: str, start: str) -> bool:
    """Return whether the paired interval of `far_change` is below zero by more than ROUNDING.
    Return False without an interval."""
    change = far_change(measured, label, start)
    return change.ci95 is not None and change.ci95[1] < -ROUNDING


def best_fit_step(measured: Measurement, steps: Iterable[str], start: str) -> str:
    """Return the step of a fit that ranks first by `fit_loss`. If intervals show that steps surely
    beat the start, rank these alone."""
    steps = tuple(steps)
    sure = [step for step in steps if is_better(measured, step, start)]
    return min(sure or steps, key=lambda step: fit_loss(measured, step))


def lost_answers(measured: Measurement, label: str, start: str) -> Value | None:
    """Return the first change in a share of right retrieval answers whose interval is below zero;
    None if there is none."""
    models = measured.models
    bootstrap = measured.frame.bootstrap
    changes = item_differences(models[label].items, models[start].items, bootstrap)
    for name, change in changes.items():
        if "_nll@" not in name and change.sign < 0:
            return change
    return None


@dataclass(frozen=True)
class LossRanking:
    """Measured methods in the order of their token losses over the tail before the longest length,
    with the numbers of each."""

    frame: LossStatistics
    standing: Standing
    values: Mapping[str, Mapping[str, Value]]  # of every method
    taken: str  # the one to use
    # Not in any checkpoint: nats per token above the lowest of the others.
    beside: Mapping[str, Value] = field(default_factory=dict)

    @property
    def best(self) -> str:
        """Return the method with the lowest tail in a ranking of measured methods."""
        return self.standing.lowest

    @property
    def in_window(self) -> Value | None:
        """Return the measured perplexity of the base through its short window, on the same
        tokens."""
        return self.values[self.best].get(f"in_window@{self.frame.longest}")

    def tail(self, method: str) -> Value:
        """Return a ranked method's measured perplexity over the tail."""
        return self.values[method][f"tail@{self.frame.longest}"]

    def tail_nll(self, method: str) -> Value:
        """Return `tail_nll` of a ranked method: its mean token loss over the tail, in nats."""
        return self.values[method][f"tail_nll@{self.frame.longest}"]

    def gain(self, method: str) -> Value | None:
        """Return the measured gain of a ranked method over the base through its short window."""
        return self.values[method].get(f"gain@{self.frame.longest}")

    def short_tax(self, method: str) -> Value | None:
        """Return a ranked method's measured loss increase inside the trained context."""
        return self.values[method].get("short_tax")

    def numbers(self, method: str, behind: Value | None) -> dict[str, Value | None]:
        """Return the numbers of a method in the table of `ropext plan --measure`."""
        return {
            "tail": self.tail(method),
            "tail_nll": self.tail_nll(method),
            "behind": behind,
            "gain": self.gain(method),
            "short_tax": self.short_tax(method),
        }

    def to_json(self) -> dict[str, Json]:
        """Return the losses, perplexities and intervals of the ranked methods as JSON, under the
        keys that `plan --measure --json` prints."""
        return {
            "length": self.frame.longest,
            "context": self.frame.context,
            "tail_tokens": self.frame.tail,
            "documents": self.standing.documents,
            "in_window": values_json(self.in_window),
            "ranking": self._rows_json(self.standing.behind),
            "in_memory": self._rows_json(self.beside),
            "tied": list(self.standing.tied),
            "sure": self.standing.is_sure,
            "taken": self.taken,
        }

    def _rows_json(self, behind: Mapping[str, Value]) -> list[dict[str, Json]]:
        """Return the ranked methods as rows of the JSON of `ropext plan --measure`."""
        rows = list[dict[str, Json]]()
        for method, distance in behind.items():
            least = self.standing.leads.get(method)
            row = {"method": method, "behind_at_least": least} | self.numbers(method, distance)
            rows.append(values_json(row))
        return rows


def rank_methods(
    measured: Measurement, preference: Sequence[str] = (), beside: Collection[str] = ()
) -> LossRanking:
    """Rank all models except the base and the models in `beside` by the tail before the longest
    length."""
    models = dict[str, MeasuredModel]()
    for label, model in measured.models.items():
        if model.kind != BASE and label not in beside:
            models[label] = model
    order = loss_standing(replace(measured, models=models))
    values = dict[str, Mapping[str, Value]]()
    for method in order.behind:
        values[method] = measured.values(method)
    above = dict[str, Value]()
    for method in beside:
        values[method] = measured.values(method)
        above[method] = tail_above(measured, method, order.lowest)
    taken = order.take(order.tied, preference)
    return LossRanking(measured.frame, order, values, taken, above)


def tail_above(measured: Measurement, label: str, lowest: str) -> Value:
    """Compute the paired difference of a model's tail loss to another's at the longest length, with
    its interval. It is in nats per token, and may be negative."""
    frame = measured.frame
    return measured.loss_difference(label, lowest, frame.tail_span(frame.longest))


def in_memory_sentence(label: str, behind: Value, lowest: str) -> str:
    """Say how far the loss of a method that no checkpoint can store is from the loss of the lowest
    other one, below a ranking or in a verdict of `--method auto`."""
    interval = ""
    if behind.ci95 is not None:
        low, high = behind.ci95
        interval = f" ({low:+.4f} to {high:+.4f})"
    return (
        f"{label} (only in memory): its loss differs by {behind.value:+.4f} nats per token"
        f"{interval} from that of {lowest}; no checkpoint can store it (ropext serve, ropext.patch)"
    )


@dataclass(frozen=True)
class AutoVerdict:
    """The result of a choice: two numbers and a sentence."""

    gain: Value | None  # nats per token over the base's short window, at the target
    short_tax: Value | None  # nats per token lost inside the context
    sentence: str
    mark: str = ""  # which of its documents were trained or chosen on


def auto_verdict(
    choice: JsonObject, measured: Measurement, final: str, *, fit_is_kept: bool = True
) -> AutoVerdict:
    """Judge the finished checkpoint of `--method auto` by the metric gain@C and its interval.
    Return both with the metric short_tax. Say which share of the documents trained or chose it. A
    fit that is not kept has written the form from which it began."""
    values = measured.values(final)
    target = int(choice["target"])
    gain = values.get(f"gain@{target}")
    mark = measured.models[final].mark()
    later = ""
    if final == TUNED:
        later = ", then trained"
    elif final == FITTED and fit_is_kept:
        later = ", then a fitted spectrum"
    first = _auto_sentence(choice, gain, later, length_text(target))
    sentence = "; ".join([first, *choice.get("in_memory", ())])
    if mark:
        sentence = marked_name(sentence, f"documents: {mark}")
    return AutoVerdict(gain, values.get("short_tax"), sentence, mark)


def _auto_sentence(choice: JsonObject, gain: Value | None, later: str, length: str) -> str:
    """Write the verdict of `--method auto` from the gain over truncation and its interval."""
    method = choice["taken"]
    if gain is None:
        return f"{method} was taken; its gain at {length} was not measured"
    if method == UNTOUCHED and gain.sign >= 0:
        return (
            f"leave this model as it is: without scaling it is as good at {length} as with any "
            "method tried; the output only raises the stated length"
        )
    extended = f"extended by {method}{later}: {choice['because']}"
    if gain.gains is None:
        return (
            f"not known whether extending gains anything over truncation at {length} "
            f"({gain.why_not_known}); {extended}"
        )
    if gain.gains:
        return extended
    how = "better" if gain.sign < 0 else f"as well, within {MARGIN} nats per token"
    return (
        f"extending gains nothing on these texts: on truncated text the base predicts the last "
        f"tokens before {length} {how}; ropext wrote the output anyway"
    )


def choice_reason(last: Standing, method: str) -> str:
    """Write why a ranking of measured losses gave `--method auto` its method. The losses are on the
    documents that chose."""
    lowest = last.lowest
    count = last.documents
    on = f"on {count} documents" if count > 1 else f"on {count} document"
    others = [label for label in last.behind if label != method]
    if method != lowest:
        return f"as low as {lowest} {on}, and the plainer rope type"
    if not others:
        return f"lowest loss at the target {on}"
    ahead = last.behind[others[0]].value
    return f"lowest loss at the target {on}, {ahead:.4f} nats per token below {others[0]}"


@dataclass(frozen=True)
class LengthRow:
    """One length: the tail of each model, its paired difference to the first, and the winner."""

    length: int
    tail: Mapping[str, Value]
    difference: Mapping[str, Value]  # nats, against the reference
    winner: str | None


@dataclass(frozen=True)
class OctaveDifference:
    """The NLL of one model minus its reference's at positions [start, stop)."""

    start: int
    stop: int
    difference: Value


@dataclass(frozen=True)
class Comparison:
    """Everything that `ropext compare` shows about text."""

    # On the documents in common.
    measured: Measurement = field(repr=False, metadata={"json": None})
    reference: str
    references: Mapping[str, str]  # by label: the model to which its differences are
    documents: int  # in common
    left_out: Mapping[str, int]
    tail_tokens: int
    lengths: tuple[LengthRow, ...]
    positions: Mapping[str, Sequence[OctaveDifference]]  # by label
    short: Mapping[str, Value]  # difference inside the trained context
    marks: Mapping[str, str]  # marks of models trained on these documents


def compare_text(parts: Sequence[Measurement]) -> Comparison:
    """Compute tails, differences by length and position, and winners.

    Differences are to the first model. If that is a base, and models of other bases are here,
    compare each with its own base.
    """
    both = join_measurements(parts)
    frame = both.frame
    readings = both.readings
    reference, *others = readings
    paired = len(both.documents or ())
    references = dict.fromkeys(others, reference)
    bases = _own_bases(parts)
    if bases[reference] == reference:
        extended = {label: base for label, base in bases.items() if base not in (label, "")}
        if set(extended.values()) - {reference}:
            references = extended
            reference = "each run's own base"

    rows = list[LengthRow]()
    for length in frame.lengths:
        span = frame.tail_span(length)
        tails = dict[str, Value]()
        differences = dict[str, Value]()
        for label, reading in readings.items():
            tails[label] = frame.perplexity(reading, span)
            if label in references:
                differences[label] = both.loss_difference(label, references[label], span)
        rows.append(LengthRow(length, tails, differences, _sure_winner(both, span)))
    positions = dict[str, Sequence[OctaveDifference]]()
    short = dict[str, Value]()
    for label, other in references.items():
        octaves = list[OctaveDifference]()
        for start, stop in frame.octaves(parts=4):
            change = both.loss_difference(label, other, (start, stop))
            octaves.append(OctaveDifference(start, stop, change))
        positions[label] = octaves
        short[label] = both.loss_difference(label, other, frame.inside)
    left_out = dict[str, int]()
    for part in parts:
        for label in part.models:
            left_out[label] = len(part.documents or ()) - paired
    marks = dict[str, str]()
    for label, model in both.models.items():
        mark = model.mark_at("tail")
        if mark:
            marks[label] = mark
    return Comparison(
        measured=both,
        reference=reference,
        references=references,
        documents=paired,
        left_out=left_out,
        tail_tokens=frame.tail,
        lengths=tuple(rows),
        positions=positions,
        short=short,
        marks=marks,
    )


def _own_bases(parts: Iterable[Measurement]) -> dict[str, str]:
    """Return the label of each compared model's own base; empty if it is not shown."""
    bases = dict[str, str]()
    for part in parts:
        for label in part.models:
            bases[label] = part.own_base
    return bases


def _sure_winner(both: Measurement, span: Span) -> str | None:
    """Return the compared model with the lowest tail, if it is surely below every other one, with
    all comparisons allowed for."""
    if len(both.readings) < 2:
        return None
    for reading in both.readings.values():
        sums, _ = reading.sums(*span)
        if not np.isfinite(sums).all():
            return None
    result = loss_standing(both, span)
    return result.lowest if result.is_sure else None
