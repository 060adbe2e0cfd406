"""Paired comparison: the same tokens, the same questions, read by several models.

Documents are paired by the hash of their tokens up to the longest common length. A paired
difference has an error bar several times smaller than the difference of two unpaired numbers.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ropext.errors import InputError
from ropext.lengths import length_text
from ropext.results.perplexity import Documents, Frame, Reading, Span
from ropext.results.retrieval import ItemScore, mean_of, ruler_means
from ropext.results.rules import difference, standing
from ropext.results.values import Bootstrap, Value, values_json
from ropext.tasks import RULER, TASKS

_TASKS = frozenset((RULER, *(task.name for task in TASKS)))


@dataclass(frozen=True)
class Contender:
    """One model in a comparison: what it read and what it answered."""

    label: str
    frame: Frame
    documents: Documents | None
    reading: Reading | None
    items: tuple[ItemScore, ...] = ()
    # Of numbers over documents that it was trained on, and of answers to questions about them.
    mark: str = ""
    mark_of_questions: str = ""

    def mark_at(self, name: str) -> str:
        """Say what stands beside a number of a task, or of a perplexity."""
        return self.mark_of_questions if name in _TASKS else self.mark


@dataclass(frozen=True)
class LengthRow:
    """One length: each one's tail, each one's paired difference to the first, and the winner."""

    length: int
    tail: Mapping[str, Value]
    difference: Mapping[str, Value]  # nats, against the reference
    winner: str | None


@dataclass(frozen=True)
class Comparison:
    """Everything that `ropext compare` shows about text."""

    reference: str
    frame: Frame
    paired: int
    left_out: Mapping[str, int]
    rows: tuple[LengthRow, ...]
    # Per label: start, stop, and the difference to the reference in nats.
    positions: Mapping[str, Sequence[Mapping[str, Any]]]
    short: Mapping[str, Value]  # difference inside the trained context
    marks: Mapping[str, str]  # of those that were trained on these documents


def to_json(compared: Comparison) -> dict[str, Any]:
    """As `ropext compare --json` prints it."""
    found: dict[str, Any] = values_json(
        {
            "reference": compared.reference,
            "documents": compared.paired,
            "left_out": compared.left_out,
            "tail_tokens": compared.frame.tail,
            "lengths": compared.rows,
            "positions": compared.positions,
            "short": compared.short,
            "marks": compared.marks,
        }
    )
    return found


def pair(contenders: Sequence[Contender]) -> tuple[Frame, dict[str, Reading], dict[str, int]]:
    """Return the readings on the documents that all have in common, in one order.

    Runs on other tokens are refused: their numbers do not compare.
    """
    frames = [contender.frame for contender in contenders]
    common = set.intersection(*(set(frame.lengths) for frame in frames))
    if not common:
        lists = "; ".join(
            f"{c.label} {','.join(map(length_text, c.frame.lengths))}" for c in contenders
        )
        raise InputError(f"these runs have no length in common ({lists}); give both one --lengths")
    if len({own.mask_stride and (own.mask_stride, own.tail, own.longest) for own in frames}) > 1:
        raise InputError("pseudo-perplexities of other tokens: give both runs the same --lengths")
    longest = max(common)
    keys = [_keys(contender, longest) for contender in contenders]
    shared = [key for key in keys[0] if all(key in other for other in keys[1:])]
    if not shared:
        raise InputError(
            f"the runs {', '.join(c.label for c in contenders)} read other tokens (no document has "
            "the same token hash): their numbers do not compare; evaluate on the same --data with "
            "the same tokenizer"
        )
    # Hash order is the same whichever run comes first, so the seeded draws are too.
    shared.sort()
    readings, left_out = dict[str, Reading](), dict[str, int]()
    for contender, places in zip(contenders, keys, strict=True):
        if contender.reading is None:
            raise InputError(f"{contender.label} holds no perplexity to compare")
        readings[contender.label] = contender.reading.subset([places[key] for key in shared])
        left_out[contender.label] = len(places) - len(shared)
    frame = replace(
        frames[0],
        lengths=tuple(sorted(common)),
        tail=min(frame.tail for frame in frames),
        context=min(frame.context for frame in frames),
    )
    return frame, readings, left_out


def _keys(contender: Contender, length: int) -> dict[str, int]:
    documents = contender.documents
    if documents is None:
        raise InputError(f"{contender.label} holds no perplexity to compare")
    return {hashes[length]: k for k, hashes in enumerate(documents.prefix_hashes)}


def compare_text(contenders: Sequence[Contender]) -> Comparison:
    """Work out tails, differences to the first contender by length and position, and winners."""
    frame, readings, left_out = pair(contenders)
    reference = readings[contenders[0].label]
    others = {label: reading for label, reading in readings.items() if reading is not reference}
    rows = []
    for length in frame.lengths:
        span = frame.tail_span(length)
        tails = {
            label: frame.bootstrap.ratio(*reading.sums(*span), np.exp)
            for label, reading in readings.items()
        }
        rows.append(
            LengthRow(
                length,
                tails,
                {
                    label: difference(frame, reading, reference, span)
                    for label, reading in others.items()
                },
                _winner(frame, readings, span),
            )
        )
    return Comparison(
        reference=contenders[0].label,
        frame=frame,
        paired=len(reference.sums(1, 2)[0]),
        left_out=left_out,
        rows=tuple(rows),
        positions={
            label: [
                {"start": a, "stop": b, "difference": difference(frame, reading, reference, (a, b))}
                for a, b in frame.octaves(parts=4)
            ]
            for label, reading in others.items()
        },
        short={
            label: difference(frame, reading, reference, frame.inside)
            for label, reading in others.items()
        },
        marks={each.label: each.mark for each in contenders if each.mark},
    )


def _winner(frame: Frame, readings: Mapping[str, Reading], span: Span) -> str | None:
    """The lowest tail, if it is surely below every other one, all comparisons allowed for."""
    sums = [reading.sums(*span)[0] for reading in readings.values()]
    if len(sums) < 2 or not np.isfinite(sums).all():
        return None
    found = standing(frame, readings, span)
    return found.lowest if found.is_sure else None


def differences(left: Contender, right: Contender) -> dict[str, Value]:
    """Return every paired difference left - right by its metric, for `vs RUN` gates.

    Perplexities differ in nats per token, shares in points, answer NLL in nats.
    """
    values = dict[str, Value]()
    if left.reading is not None and right.reading is not None:
        frame, readings, _ = pair([left, replace(right, label=f"{right.label} (reference)")])
        first, second = readings.values()
        for length in frame.lengths:
            tail = difference(frame, first, second, frame.tail_span(length))
            values[f"tail@{length}"] = values[f"tail_nll@{length}"] = tail
            if not frame.mask_stride:
                values[f"cumulative@{length}"] = difference(frame, first, second, (1, length))
        values["short_tax"] = difference(frame, first, second, frame.inside)
    return values | item_differences(left.items, right.items, left.frame.bootstrap)


def item_differences(
    left: Sequence[ItemScore], right: Sequence[ItemScore], bootstrap: Bootstrap
) -> dict[str, Value]:
    """`TASK@C` and `TASK_nll@C` as differences over the questions that both answered."""
    other = {(item.prompt_hash, item.answer): item for item in right}
    pairs = [
        (item, other[key]) for item in left if (key := (item.prompt_hash, item.answer)) in other
    ]
    values = dict[str, Value]()
    pairs.sort(key=lambda both: (both[0].task, both[0].length))
    for (task, length), group in itertools.groupby(pairs, lambda b: (b[0].task, b[0].length)):
        both = list(group)
        points = [a.points - b.points for a, b in both]
        losses = [a.answer_nll - b.answer_nll for a, b in both]
        asked = [a for a, _ in both]
        values[f"{task}@{length}"] = mean_of(points, asked, bootstrap)
        values[f"{task}_nll@{length}"] = mean_of(losses, asked, bootstrap)
    return values | ruler_means(values)
