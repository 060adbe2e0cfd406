"""Self-Extend (Jin et al. 2024, arXiv 2401.01325): distances are grouped, in memory alone."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ropext.base.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

NAME = "self-extend"
SUMMARY = "near keys keep their distances, far ones share positions"
# Ours alone; README.md and docs/methods.md say the same.
EXCEPTION = (
    "attention inside the trained context is unchanged, so its short tax is 0 by construction"
)
SPARE = 1.5  # times the smallest group: measured best
UNCARRIED = (
    "no checkpoint can store self-extend. Use the model in memory: ropext serve MODEL "
    "--method self-extend --factor N; ropext.patch(model, method='self-extend', factor=N) does it "
    "in Python, ropext eval MODEL --method self-extend --factor N --data TEXTS measures it. Do "
    "not use -gan and -gaw of llama.cpp (0c1e57098): they rotate keys the wrong way"
)
Positions = TypeVar("Positions", int, "Tensor")


@dataclass(frozen=True)
class Fold:
    """How queries beyond the context see keys: as trained if nearer than `window`, else grouped."""

    context: int
    window: int
    group: int  # 0: every far key has the window's position (ReRoPE)
    spectra: tuple[tuple[float, ...], ...]  # layers that see all text, in radians a token
    literal: bool = False  # the paper's rule: queries inside the context see groups too

    @property
    def begins(self) -> int:
        """Return, by the rule of the method Self-Extend, the first position whose query may see a
        grouped key."""
        return self.window if self.literal else self.context

    @property
    def knobs(self) -> dict[str, int]:
        """Return the settings of Self-Extend that a plan and the results list."""
        rule = {"literal": True} if self.literal else {}
        return {"window": self.window, "group": self.group} | rule

    def key_positions(self, positions: Positions) -> Positions:
        """Return k // G, the method Self-Extend's formula for the position of a grouped key, for a
        number or a tensor."""
        return positions // self.group if self.group else positions - positions

    def query_positions(self, positions: Positions) -> Positions:
        """Return p // G + W - W // G, the method Self-Extend's formula for the position of a query.
        A key at the window's edge keeps its distance."""
        window = self.window - self.key_positions(self.window)
        return self.key_positions(positions) + window


@dataclass(frozen=True)
class FoldOptions:
    """The window, the positions that far keys share, and the queries to which this applies.

    None means that the target decides.
    """

    window: int | None = None
    group: int | None = None
    literal: bool = False  # the paper's rule, for queries inside the trained context too

    @property
    def name(self) -> str:
        """Return the method Self-Extend with its given options: `self-extend-literal-w512-g8`."""
        parts = [NAME]
        if self.literal:
            parts.append("literal")
        if self.window is not None:
            parts.append(f"w{self.window}")
        if self.group is not None:
            parts.append(f"g{self.group}")
        return "-".join(parts)


def fold(
    context: int, target: int, options: FoldOptions, spectra: tuple[tuple[float, ...], ...]
) -> Fold:
    """Compute the method Self-Extend's window W and group G for a target, by formula if the user
    gives none.

    The default window is half of the context. The default group is half as much again as the
    smallest group that keeps every grouped distance within the context: target // G + W - W // G <=
    context (benchmarks/self_extend.py).
    """
    window = options.window
    group = options.group
    window = context // 2 if window is None else window
    if not 1 <= window < context:
        raise UsageError(f"window={window} must be from 1 to {context - 1} (below the context)")
    if group is None:
        group = math.ceil(SPARE * (target - window) / (context - window))
    if group < 0:
        raise UsageError(f"group={group} must be 0 (all far keys at the window) or more")
    return Fold(context, window, group, spectra, options.literal)
