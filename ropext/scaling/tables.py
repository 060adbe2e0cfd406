"""How a learned table of absolute positions grows: the methods for Rope's sister.

A method makes rows of rows. It sees those that positions read; rows in front of the first stay.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ropext.positions import Positions

if TYPE_CHECKING:
    import numpy as np

    Rows = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class TableMethod:
    """One entry of the list; what a user sees of it comes from here."""

    name: str
    summary: str
    paper: str
    short_tax: str  # what it does to inputs within the old length, in words
    grow: Callable[["Rows", int], "Rows"]  # (old rows, how many are wanted)
    kept: Callable[[int, int], dict[int, int]]  # (old count, new count): new row -> equal old row


def grow_linear(rows: "Rows", target: int) -> "Rows":
    """r'_j = (1 - f) r_i + f r_(i+1) with j n/T = i + f (Zhu et al. 2024, section 3.1).

    Beyond the last old row, which position T/n (n - 1) reads, the line of the last two goes on, as
    Long-CLIP continues it (Zhang et al. 2024): rows that were held would all be alike.
    """
    import numpy as np

    count = len(rows)
    if count == 1:
        return np.repeat(rows, target, axis=0)
    # Whole numbers, so that an old row comes out in every bit.
    left = np.minimum(np.arange(target) * count // target, count - 2)
    share = ((np.arange(target) * count - left * target) / target)[:, None]
    grown: Rows = rows[left] * (1 - share) + rows[left + 1] * share
    for new, old in kept_by_linear(count, target).items():
        grown[new] = rows[old]
    return grown


def kept_by_linear(count: int, target: int) -> dict[int, int]:
    """Old row i stands at i T/n wherever that is a whole number."""
    return {old * target // count: old for old in range(count) if old * target % count == 0}


def grow_copy(rows: "Rows", target: int) -> "Rows":
    """r'_j = r_(j mod n): the table again and again (Beltagy et al. 2020, section 5)."""
    import numpy as np

    return rows[np.arange(target) % len(rows)]


METHODS = {
    method.name: method
    for method in (
        TableMethod(
            "linear",
            "Old row i moves to i times the factor, rows between are interpolated.",
            "Zhu et al. 2024, arXiv 2404.12096",
            "moves every position of a short input between old rows, so short inputs change until "
            "it is tuned (--method copy leaves them as they are)",
            grow_linear,
            kept_by_linear,
        ),
        TableMethod(
            "copy",
            "The old table again and again: short inputs read what they read before.",
            "Beltagy et al. 2020, arXiv 2004.05150",
            "none: short inputs read the rows that they read before; positions one old length "
            "apart look alike until it is tuned (--method linear tells all apart)",
            grow_copy,
            lambda count, target: {new: new % count for new in range(target)},
        ),
    )
}


@dataclass(frozen=True)
class Growth:
    """What becomes of every table of a checkpoint."""

    positions: Positions
    target: int
    grow: Callable[["Rows", int], "Rows"]
    kept: Mapping[int, int]  # new row -> the old row that it equals, both counted from the offset

    @property
    def rows(self) -> int:
        return self.positions.offset + self.target

    @property
    def old_rows(self) -> dict[int, int]:
        """Where each old row that stays stands, the first time where it does so again."""
        return {old: new for new, old in reversed(list(self.kept.items()))}

    def undone(self) -> "Growth | None":
        """The way back to the old rows; None where not all of them were kept."""
        count, at = self.positions.context, self.old_rows
        if len(at) < count:
            return None
        grown = replace(self.positions, context=self.target)
        places = [at[row] for row in range(count)]
        return Growth(grown, count, lambda rows, _: rows[places], dict(enumerate(places)))


def growth(positions: Positions, method: str, target: int) -> Growth:
    """What a method makes of the tables of such a model."""
    how = METHODS[method]
    return Growth(positions, target, how.grow, how.kept(positions.context, target))
