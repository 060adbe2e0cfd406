"""The facts that a user must know before relying on a plan for tables, buckets or slopes.

The list has the same format as in planning/warnings.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from ropext.scaling.rope import Positions
from ropext.scaling.tables import METHODS, alike


@dataclass(frozen=True)
class PlannedTable:
    """The planned extension of a model that rotates nothing."""

    positions: Positions
    target: int
    method: str


def short_tax(plan: PlannedTable) -> str:
    """Return the warning about the short tax of the plan's method for position tables."""
    return f"[short-tax] short tax of {plan.method}: {METHODS[plan.method].short_tax}"


def rows(plan: PlannedTable) -> str:
    """Return the warning that a linear position table keeps few of its old rows; "" if the target
    is a multiple of the context."""
    context = plan.positions.context
    if plan.method != "linear" or not plan.target % context:
        return ""
    kept = len(METHODS[plan.method].kept(context, plan.target))
    return (
        f"[rows] {plan.target} is no multiple of {context}: only {kept} of the old rows "
        "come out again, the others lie between two new positions"
    )


def windowed(plan: PlannedTable) -> str:
    """Return the warning that the attention windows of a position table's model do not grow."""
    if plan.positions.text_type not in ("longformer", "led", "big_bird", "bigbird_pegasus"):
        return ""
    return (
        "[windowed] its attention window stays as it is, so that far tokens are reached over layers"
    )


def look_alike(plan: PlannedTable) -> str:
    """Return the warning about the distance from which all tokens look alike."""
    positions = plan.positions
    if positions.kind == "alibi" or positions.tensors:
        return ""
    after = alike(replace(positions, context=plan.target))
    now = alike(positions)
    return f"[alike] tokens {now} or more apart look alike; after it those {after} or more"


def local_encoder(plan: PlannedTable) -> str:
    """Return the warning that the local encoder of LongT5 does not reach further."""
    if plan.positions.text_type != "longt5":
        return ""
    return (
        "[windowed] its encoder attends within local_radius, where only near distances change "
        "buckets"
    )


def untrained(plan: PlannedTable) -> str:
    """Return the warning that the new rows or distances of a model were never trained."""
    if plan.positions.kind == "alibi":
        return ""
    what = "distances"
    if plan.positions.tensors:
        what = "rows"
    return (
        f"[untrained] {what} that were never trained: what "
        "it does beyond the old length is to be measured, and some training is usual"
    )


# The cost on short inputs first.
TABLES: tuple[Callable[[PlannedTable], str], ...] = (
    short_tax,
    rows,
    windowed,
    look_alike,
    local_encoder,
    untrained,
)


def table_warnings(plan: PlannedTable) -> tuple[str, ...]:
    """Return the warnings of a plan for tables, buckets or slopes."""
    return tuple(filter(None, (warning(plan) for warning in TABLES)))
