"""The methods for models without rotary embeddings: how a learned table grows, and how far
distances stay distinct.

A method makes new rows from old rows. It sees only the rows that positions read; the rows in front
of the first position stay. Relative positions have no rows: the new key does everything.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ropext.scaling.rope import Positions

if TYPE_CHECKING:
    import numpy as np

    Rows = np.ndarray[Any, np.dtype[np.float64]]

NEAR = 1e-9  # tolerance for a border between distances that is a whole number except for rounding


@dataclass(frozen=True)
class PositionMethod:
    """One entry of the list of methods; everything a user sees about the method comes from here."""

    name: str
    summary: str
    paper: str
    short_tax: str  # its effect on inputs within the old length, in words
    grow: Callable[["Rows", int], "Rows"] = lambda rows, _: rows  # (old ones, how many are wanted)
    kept: Callable[[int, int], dict[int, int]] = lambda *_: {}  # (old, new count): new -> old row
    kinds: tuple[str, ...] = ("learned", "mixed")
    # (heads, factor): the multipliers of the slopes of ALiBi's heads, the steepest first
    slopes: Callable[[int, float], list[float]] | None = None


def grow_linear(rows: "Rows", target: int) -> "Rows":
    """Return the rows of an interpolated position table, r'_j = (1 - f) r_i + f r_(i+1) with j n/T
    = i + f (Zhu et al. 2024, section 3.1).

    Beyond the last old row, which position T/n (n - 1) reads, continue the line of the last two, as
    Long-CLIP does (Zhang et al. 2024): repeated copies of the last row would all be alike.
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
    """Return the old rows of a position table that stay: row i moves to i T/n if that is a whole
    number."""
    kept = dict[int, int]()
    for old in range(count):
        if old * target % count == 0:
            kept[old * target // count] = old
    return kept


def grow_copy(rows: "Rows", target: int) -> "Rows":
    """Return the rows of a repeated position table, r'_j = r_(j mod n) (Beltagy et al. 2020,
    section 5)."""
    import numpy as np

    return rows[np.arange(target) % len(rows)]


def ntk_slopes(heads: int, factor: float) -> list[float]:
    """Return NTK-ALiBi's multiplier s^(-(h-1)/(H-1)) of the slope of head h of H: near tokens keep
    their penalty, the farthest reach grows by s.

    Its source is github.com/keezen/ntk_alibi, which counts the heads in their given order.
    """
    return [factor ** (-head / max(heads - 1, 1)) for head in range(heads)]


LISTED = (
    PositionMethod(
        "linear",
        "Old row i moves to i times the factor, rows between are interpolated.",
        "Zhu et al. 2024, arXiv 2404.12096",
        "moves every position of a short input between old rows, so short inputs change until "
        "it is tuned (--method copy leaves them as they are)",
        grow_linear,
        kept_by_linear,
    ),
    PositionMethod(
        "copy",
        "The old table again and again: short inputs read what they read before.",
        "Beltagy et al. 2020, arXiv 2004.05150",
        "none: short inputs read the rows that they read before; positions one old length "
        "apart look alike until it is tuned (--method linear tells all apart)",
        grow_copy,
        lambda count, target: {new: new % count for new in range(target)},
    ),
    PositionMethod(
        "max-distance",
        "The buckets reach further, so that more distances are told apart.",
        "Raffel et al. 2020, arXiv 1910.10683; He et al. 2021, arXiv 2111.09543",
        "distances fall into nearer buckets than in training, so short inputs change as well",
        kinds=("buckets", "disentangled"),
    ),
    PositionMethod(
        "clamp",
        "Distances are clamped later: those in between were never trained.",
        "Yang et al. 2019, arXiv 1906.08237",
        "none: distances up to the old clamp are told as they were",
        kinds=("transformer-xl",),
    ),
    PositionMethod(
        "ntk-alibi",
        "The flatter ALiBi's slope, the more it is divided, in memory alone.",
        "github.com/keezen/ntk_alibi",
        "the penalties of all heads but the steepest shrink, so short inputs change",
        kinds=("alibi",),
        slopes=ntk_slopes,
    ),
    PositionMethod(
        "interpolated",
        "ALiBi's slopes are divided by the factor, in memory alone.",
        "Al-Khateeb et al. 2023, arXiv 2310.13017",
        "every penalty shrinks, so short inputs change",
        kinds=("alibi",),
        slopes=lambda heads, factor: [1 / factor] * heads,
    ),
)
METHODS = {method.name: method for method in LISTED}


def methods_for(positions: Positions) -> dict[str, PositionMethod]:
    """Return the methods for models with such a position scheme, the default first."""
    return {name: method for name, method in METHODS.items() if positions.kind in method.kinds}


@dataclass(frozen=True)
class Growth:
    """The change of every table of a checkpoint, or of the slopes of a model in memory."""

    positions: Positions
    target: int
    grow: Callable[["Rows", int], "Rows"]
    kept: Mapping[int, int]  # new row -> the old row that it equals, both counted from the offset
    # slopes for ALiBi, if the method scales them
    slopes: Callable[[int, float], list[float]] | None = None
    method: str = ""  # its name; "" for a growth that is undone

    @property
    def rows(self) -> int:
        """Return the number of rows of a position table after its growth."""
        return self.positions.offset + self.target

    @property
    def old_rows(self) -> dict[int, int]:
        """Return the place of each old row that a method keeps in the growing position table, the
        first place if there are several."""
        places = dict[int, int]()
        for new, old in self.kept.items():
            places.setdefault(old, new)
        return places

    @property
    def extended(self) -> Positions:
        """Return the position scheme with the new length."""
        return replace(self.positions, context=self.target)

    def undone(self) -> "Growth | None":
        """Return the growth of a position table back to its old rows. Return None if not all of
        them were kept."""
        count = self.positions.context
        old_rows = self.old_rows
        if len(old_rows) < count:
            return None
        places = [old_rows[row] for row in range(count)]
        return Growth(self.extended, count, lambda rows, _: rows[places], dict(enumerate(places)))


def growth(positions: Positions, method: str, target: int) -> Growth:
    """Return the growth of a model's position tables by a method."""
    entry = METHODS[method]
    kept = entry.kept(positions.context, target)
    return Growth(positions, target, entry.grow, kept, entry.slopes, method)


def starts(positions: Positions, *, causal: bool = False) -> Sequence[int]:
    """Return the first distance of each bucket of relative positions; beyond the last one all
    distances are alike.

    T5: b(d) = e + floor(log(d/e) / log(D/e) (n - e)) from e = n/2 on, at most n - 1 (Raffel et al.
    2020, section 2.1; n is half of the buckets if both sides are seen). DeBERTa: b(d) = e +
    ceil(log(d/e) / log((D-1)/e) (e - 1)) beyond e, at most n (He et al. 2021, arXiv 2111.09543).
    """
    far = positions.context
    count = positions.buckets
    if positions.kind == "transformer-xl":
        return range(far + 1)
    if positions.kind == "buckets":
        if not causal:
            count //= 2
        exact = count // 2
        distances = set(range(exact + 1))
        for k in range(count - exact):
            step = (far / exact) ** (k / (count - exact))
            distances.add(math.ceil(exact * step - NEAR))
        return sorted(distances)
    exact = count // 2
    distances = set(range(exact + 1))
    for k in range(count - exact):
        step = ((far - 1) / exact) ** (k / (exact - 1))
        distances.add(math.floor(exact * step + NEAR) + 1)
    return sorted(distances)


def alike(positions: Positions) -> str:
    """Return in words the distance from which on a model with relative positions cannot tell
    distances apart."""
    if positions.kind != "buckets":
        return f"{starts(positions)[-1]:,}"
    both = starts(positions)[-1]
    one = starts(positions, causal=True)[-1]
    return f"{both:,} (in a decoder {one:,})"
