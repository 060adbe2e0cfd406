"""Lay out the numbers of a training: the models that were read before and after it."""

from collections.abc import Mapping
from dataclasses import replace

from ropext.base.lengths import length_text
from ropext.base.table import Table
from ropext.results import BASE, CONTROL, EXTENDED, FITTED, START, TUNED, UNTUNED
from ropext.results.overlap import Overlap, marked_name
from ropext.results.report.cells import Column, nats_cell, table_of_values
from ropext.results.values import Value
from ropext.training.judge import GAIN, Numbers
from ropext.training.rows import FIT_TASK

# The rows of the table.
TUNED_ROWS = {BASE: BASE, UNTUNED: EXTENDED, CONTROL: CONTROL, TUNED: TUNED}
BEHIND = "behind@"  # the same above the base


def _table_rows(names: Mapping[str, str], numbers: Numbers) -> list[tuple[str, dict[str, Value]]]:
    """Return a row for each model of a training, such as base and tuned, with each gain also as a
    loss above the base. The base gets no number that compares it with the base."""
    rows = list[tuple[str, dict[str, Value]]]()
    for label, name in names.items():
        if label not in numbers:
            continue
        values = dict(numbers[label])
        for metric, value in numbers[label].items():
            if label == BASE and metric.startswith((GAIN, "short_tax")):
                del values[metric]
            elif metric.startswith(GAIN):
                values[BEHIND + metric.removeprefix(GAIN)] = _negative(value)
        rows.append((name, values))
    return rows


def _training_loss_cell(value: Value | None) -> str:
    """Write the loss or perplexity in the table of a fine-tuning or a fit. It has no interval."""
    return "" if value is None else f"{value.value:.4f}"


def _short_tax_cell(value: Value | None) -> str:
    """Write the short tax of a fine-tuning or a fit, with its sign, as a cell of the training's
    table."""
    return "" if value is None else f"{value.value:+.4f}"


_SHORT_TAX = Column("short tax", "short_tax", _short_tax_cell)


def finetune_table(
    numbers: Numbers, target: int, overlap: Overlap | None, title: str
) -> Table | None:
    """Return the table of a fine-tuning: base, untuned, control and tuned; None if no document
    was read."""
    if not numbers:
        return None
    mark = "" if overlap is None else overlap.mark
    note = "base: on text truncated to its context"
    if CONTROL in numbers:
        note += "; so is the control, the base trained on the same tokens"
    names = dict(TUNED_ROWS)
    for label in (CONTROL, TUNED):
        names[label] = marked_name(label, mark)
    columns = [
        Column(f"tail loss at {length_text(target)}", f"tail_nll@{target}", _training_loss_cell),
        Column("against the base", f"{BEHIND}{target}", _above_base_cell),
        _SHORT_TAX,
    ]
    return table_of_values(title, note, _table_rows(names, numbers), columns)


def _negative(gain: Value) -> Value:
    """Turn the gain of a fine-tuned or fitted model into its loss above the base, in nats per token
    on the same tokens, paired by document."""
    ci95 = gain.ci95
    if ci95 is not None:
        low, high = ci95
        ci95 = (-high, -low)
    return replace(gain, value=-gain.value, ci95=ci95)


def _above_base_cell(value: Value | None) -> str:
    """Write the loss of a fine-tuning's model above its base, with the interval, as a cell of the
    training's table."""
    if value is None:
        return ""
    if value.ci95 is None:
        return f"{value.value:+.4f} ({value.n} documents)"
    return nats_cell(value)


def _fit_answers_cell(value: Value | None) -> str:
    """Write the share of right answers in the table that reports a fit."""
    return "" if value is None else f"{value.value:.2f} of {value.n}"


def fit_table(
    numbers: Numbers,
    start: str,
    lengths: tuple[int, int],
    overlap: Overlap | None,
    *,
    wrote_fitted: bool,
) -> Table:
    """Build the table that a fit shows after its training, on held-out documents: base, start and,
    if it was written, the fitted model. `lengths` are the context and the target."""
    context, target = lengths
    mark = "" if overlap is None else overlap.mark
    names = {BASE: BASE, START: start}
    if wrote_fitted:
        names[FITTED] = marked_name(FITTED, mark)
    rows = _table_rows(names, numbers)
    columns = [
        Column("tail perplexity", f"tail@{target}", _training_loss_cell),
        Column("tail loss", f"tail_nll@{target}", _training_loss_cell),
        Column("second half loss", f"far_half_nll@{target}", _training_loss_cell),
        _SHORT_TAX,
    ]
    for length in (context, target):  # the base answers inside its own context
        asked = f"{FIT_TASK}@{length}"
        if any(asked in values for _, values in rows):
            columns.append(Column(f"{FIT_TASK} at {length_text(length)}", asked, _fit_answers_cell))
    title = f"On held-out {marked_name('documents', mark)}, at {length_text(target)} tokens"
    return table_of_values(title, "", rows, columns)
