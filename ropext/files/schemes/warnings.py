"""The facts that a user must know before relying on a plan for tables, buckets or slopes.

The list has the same format as in planning/warnings.py.
"""

from collections.abc import Callable

from ropext.scaling.tables import METHODS, Growth, alike


def short_tax(growth: Growth) -> str:
    """Return the warning about the short tax of the method that grows a checkpoint's learned table
    or buckets, or slopes in memory."""
    return f"[short-tax] short tax of {growth.method}: {METHODS[growth.method].short_tax}"


def rows(growth: Growth) -> str:
    """Return the warning that the grown table in a written checkpoint has few old rows, by the
    method linear. Return "" if the target is a multiple of the context."""
    context = growth.positions.context
    if growth.method != "linear" or not growth.target % context:
        return ""
    return (
        f"[rows] {growth.target} is no multiple of {context}: only {len(growth.kept)} of the old "
        "rows come out again, the others lie between two new positions"
    )


def windowed(growth: Growth) -> str:
    """Return the warning that the attention windows of a checkpoint do not grow with the learned
    table in its weight file."""
    if growth.positions.text_type not in ("longformer", "led", "big_bird", "bigbird_pegasus"):
        return ""
    return (
        "[windowed] its attention window stays as it is, so that far tokens are reached over layers"
    )


def look_alike(growth: Growth) -> str:
    """Return the warning about the distance from which all tokens look alike to a checkpoint with
    buckets or relative positions, which does not rotate."""
    positions = growth.positions
    if positions.kind == "alibi" or positions.tensors:
        return ""
    after = alike(growth.extended)
    now = alike(positions)
    return f"[alike] tokens {now} or more apart look alike; after it those {after} or more"


def local_encoder(growth: Growth) -> str:
    """Return the warning that the local encoder of a LongT5 checkpoint, which has buckets and does
    not rotate, reaches no further."""
    if growth.positions.text_type != "longt5":
        return ""
    return (
        "[windowed] its encoder attends within local_radius, where only near distances change "
        "buckets"
    )


def untrained(growth: Growth) -> str:
    """Return the warning that the new rows of a learned table in a written checkpoint, or new
    relative distances, were never trained."""
    if growth.positions.kind == "alibi":
        return ""
    what = "distances"
    if growth.positions.tensors:
        what = "rows"
    return (
        f"[untrained] {what} that were never trained: what "
        "it does beyond the old length is to be measured, and some training is usual"
    )


# The cost on short inputs first.
TABLES: tuple[Callable[[Growth], str], ...] = (
    short_tax,
    rows,
    windowed,
    look_alike,
    local_encoder,
    untrained,
)


def table_warnings(growth: Growth) -> tuple[str, ...]:
    """Return the warnings about growing the learned table or buckets of a checkpoint that does not
    rotate, or slopes in memory."""
    return tuple(filter(None, (warning(growth) for warning in TABLES)))
