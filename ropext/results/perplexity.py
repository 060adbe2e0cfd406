"""The numbers of a reading: tail, cumulative, bits per byte, context gain, short tax, by position.

Names in results: `tail@C` and `in_window@C` are perplexities, `tail_nll@C`, `in_window_nll@C`,
`gain@C` and `short_tax` are nats per token, `cumulative@C` is a perplexity over all tokens before
C.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ropext.lengths import length_text, octaves
from ropext.results.readings import Documents, Reading
from ropext.results.values import FEWEST_DOCUMENTS, Bootstrap, Value

# A length counts as effective while the tail is at most this many nats above the in-window value.
EFFECTIVE_MARGIN = 0.02


@dataclass(frozen=True)
class Frame:
    """What all numbers of one evaluation share."""

    context: int
    lengths: tuple[int, ...]
    tail: int
    bootstrap: Bootstrap

    @property
    def longest(self) -> int:
        """Tokens of each document that are read."""
        return self.lengths[-1]

    def tail_span(self, length: int) -> tuple[int, int]:
        """Positions of the last N tokens before a length."""
        return max(1, length - self.tail), length


def text_values(
    frame: Frame, documents: Documents, reading: Reading, base: Reading | None
) -> dict[str, Value]:
    """Every number of one model on text, by its name."""
    boot, values = frame.bootstrap, dict[str, Value]()
    for length in frame.lengths:
        start, stop = frame.tail_span(length)
        sums, counts = reading.sums(start, stop)
        values[f"tail@{length}"] = boot.ratio(sums, counts, np.exp)
        values[f"tail_nll@{length}"] = boot.ratio(sums, counts)
        all_sums, all_counts = reading.sums(1, length)
        values[f"cumulative@{length}"] = boot.ratio(all_sums, all_counts, np.exp)
        values[f"yarn@{length}"] = boot.ratio(all_sums / all_counts, np.ones(len(sums)), np.exp)
        num_bytes = documents.bytes_before(length)
        values[f"bpb@{length}"] = boot.ratio(all_sums / math.log(2), num_bytes)
        if base is not None:
            base_sums, _ = base.sums(start, stop)
            values[f"in_window@{length}"] = boot.ratio(base_sums, counts, np.exp)
            values[f"in_window_nll@{length}"] = boot.ratio(base_sums, counts)
            values[f"gain@{length}"] = boot.ratio(base_sums - sums, counts)
    if base is not None:
        values |= _against_base(frame, reading, base)
    return values


def _against_base(frame: Frame, reading: Reading, base: Reading) -> dict[str, Value]:
    inside = min(frame.context, frame.longest)
    sums, counts = reading.sums(1, inside)
    base_sums, _ = base.sums(1, inside)
    return {
        "short_tax": frame.bootstrap.ratio(sums - base_sums, counts),
        "effective_context": effective_context(frame, reading, base),
    }


def effective_context(frame: Frame, reading: Reading, base: Reading) -> Value:
    """The longest length up to which, from the first length of at least the tail on, the tail stays
    within 0.02 nats of the in-window value.

    With eight documents or more the one-sided 95 % upper end of the paired difference must stay
    below; the answer is then certain to that degree and stands as its own interval. 0 = not even
    the first of these lengths.
    """
    reached, n = 0, len(reading.sums(1, 2)[0])
    whole = [length for length in frame.lengths if length >= frame.tail]
    for length in whole or frame.lengths:
        start, stop = frame.tail_span(length)
        sums, counts = reading.sums(start, stop)
        excess = sums - base.sums(start, stop)[0]
        worst = frame.bootstrap.upper(excess, counts)
        if worst is None:
            worst = float(excess.sum() / counts.sum())
        # `not <=` so that a not-a-number ends the climb.
        if not worst <= EFFECTIVE_MARGIN:
            break
        reached = length
    sure = n >= FEWEST_DOCUMENTS
    return Value(float(reached), None, (float(reached),) * 2 if sure else None, n)


def by_position(frame: Frame, reading: Reading, base: Reading | None) -> list[dict[str, Any]]:
    """NLL in each octave of positions, beside the base's through the short window."""
    rows = []
    for start, stop in octaves(frame.context, frame.longest):
        sums, counts = reading.sums(start, stop)
        row: dict[str, Any] = {"start": start, "stop": stop}
        row["nll"] = frame.bootstrap.ratio(sums, counts)
        if base is not None:
            base_sums, _ = base.sums(start, stop)
            row["base"] = frame.bootstrap.ratio(base_sums, counts)
            row["gain"] = frame.bootstrap.ratio(base_sums - sums, counts)
        rows.append(row)
    return rows


def strided_values(
    frame: Frame, windows: Mapping[int, tuple[Sequence[float], Sequence[float]]]
) -> dict[str, Value]:
    """`hf_stride@C` from each document's weighted sum and weight under the strided loop."""
    return {
        f"hf_stride@{length}": frame.bootstrap.ratio(
            np.asarray(sums, np.float64), np.asarray(weights, np.float64), np.exp
        )
        for length, (sums, weights) in windows.items()
    }


def verdicts(frame: Frame, values: dict[str, Value], label: str) -> list[str]:
    """What the numbers say in words; truncation that beats the extension is said first. Below
    eight documents they say nothing."""
    lines = []
    beyond = [length for length in frame.lengths if length > frame.context]
    losing = [c for c in beyond if f"gain@{c}" in values and _below(values[f"gain@{c}"])]
    if losing:
        worst = min(losing, key=lambda c: values[f"gain@{c}"].value)
        lines.append(
            f"Truncation beats {label} at {_lengths(losing)}: the base model that sees only its "
            f"last {length_text(frame.context)} tokens predicts the same tokens better, by "
            f"{-values[f'gain@{worst}'].value:.3f} nats at {length_text(worst)}."
        )
    winning = [c for c in beyond if f"gain@{c}" in values and _above(values[f"gain@{c}"])]
    if winning:
        lines.append(f"The longer context helps {label} at {_lengths(winning)}.")
    tax = values.get("short_tax")
    if tax is not None and _above(tax) and tax.value > 0.001:
        lines.append(
            f"Inside the trained context {label} pays a short tax of {tax.value:.4f} nats a token."
        )
    return lines


def _below(value: Value) -> bool:
    return value.ci95 is not None and value.ci95[1] < 0


def _above(value: Value) -> bool:
    return value.ci95 is not None and value.ci95[0] > 0


def _lengths(lengths: list[int]) -> str:
    return ", ".join(length_text(length) for length in lengths)
