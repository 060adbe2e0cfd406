"""Write numbers as cells, and arrange them in columns: every table of measured values uses them."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ropext.base.lengths import length_text
from ropext.base.table import BLANK, Number, Table
from ropext.results.values import Value

SKEWED = 0.2  # an interval whose ends differ by more in their distance is printed by its ends
HALF = (
    "±: half of the 95 % interval over documents; [low, high]: an asymmetric interval; (low…high): "
    "the range, if there are too few for an interval"
)

Values = Mapping[str, Value | None]
Written = Callable[[Value | None], str]


@dataclass(frozen=True)
class Column:
    """A column of a table: its head, the name of the values in it, and how they are written."""

    head: str
    name: str
    written: Written


def fixed_digits(value: float, digits: int = 3) -> str:
    """Write a number of a result with fixed digits, or with an exponent if it is 10,000 or more (an
    exploded perplexity)."""
    if math.isnan(value):
        return "?"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    text = f"{value:.{digits}f}"
    if abs(value) >= 10000:
        text = f"{value:.2e}"
    is_zero = float(text) == 0
    return text.removeprefix("-") if is_zero else text


def value_cell(value: Value | None, digits: int = 3, sign: bool = False) -> str:
    """Write `8.412 ±0.103` with an interval, `8.412 [8.1, 8.9]` with a skewed interval, and `8.412
    (8.1…8.9)` with a range only."""
    if value is None or value.n == 0:
        return BLANK
    text = fixed_digits(value.value, digits)
    if sign and value.value > 0 and float(text):
        text = f"+{text}"
    if value.ci95 is not None:
        return text + _interval(value.value, value.ci95, digits)
    if value.range is not None and value.n > 1:
        low, high = value.range
        return f"{text} ({fixed_digits(low, digits)}…{fixed_digits(high, digits)})"
    return text


def _interval(value: float, ci95: tuple[float, float], digits: int) -> str:
    """Write the interval in a table's cell: ± and half of it, or its ends if it is visibly
    skewed."""
    low, high = ci95
    below = value - low
    above = high - value
    half = (below + above) / 2
    ends = [fixed_digits(low, digits), fixed_digits(high, digits)]
    even_ends = [fixed_digits(value - half, digits), fixed_digits(value + half, digits)]
    is_skewed = abs(above - below) > SKEWED * min(below, above)
    if is_skewed and ends != even_ends:
        return f" [{', '.join(ends)}]"
    return f" ±{fixed_digits(half, digits)}"


def nats_cell(value: Value | None) -> str:
    """Write a difference in nats per token as a table's cell, with its sign."""
    return value_cell(value, digits=4, sign=True)


def point_cell(value: Value | None) -> str:
    """Write a number as a table's cell without its interval."""
    return BLANK if value is None else fixed_digits(value.value)


def two_digit_point_cell(value: Value | None) -> str:
    """Write a number as a table's cell without its interval, with two digits."""
    return BLANK if value is None else fixed_digits(value.value, digits=2)


def length_cell(value: Value | None) -> str:
    """Write an effective context as a table's cell."""
    return BLANK if value is None else length_text(int(value.value))


def share_cell(value: Value | None) -> str:
    """Write a share of answers as a table's cell, with its interval."""
    if value is None or value.ci95 is None:
        return BLANK
    low, high = value.ci95
    return f"{value.value:.2f} [{low:.2f}, {high:.2f}]"


def columns_at_lengths(name: str, lengths: Iterable[int], written: Written) -> list[Column]:
    """Return the columns of a table for a metric, one at each length."""
    columns = list[Column]()
    for length in lengths:
        columns.append(Column(length_text(length), f"{name}@{length}", written))
    return columns


def table_of_values(
    title: str, note: str, rows: Iterable[tuple[str, Values]], columns: Sequence[Column]
) -> Table:
    """Return a table with a row for each model that has any of the columns' values."""
    cells = list[tuple[str, ...]]()
    for label, values in rows:
        if any(column.name in values for column in columns):
            row = [label]
            for column in columns:
                row.append(_cell(column, values.get(column.name)))
            cells.append(tuple(row))
    header = [""]
    for column in columns:
        header.append(column.head)
    return Table(title, note, tuple(header), tuple(cells))


def _cell(column: Column, value: Value | None) -> str:
    """Return the cell of a report's table as its column writes a measured value. The cell keeps the
    number and its interval if the value has one."""
    text = column.written(value)
    if value is None or value.n == 0:
        return text
    return Number(text, value.value, value.ci95)
