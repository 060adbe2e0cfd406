"""Decide which of several readings of a model a server's answers match.

The answers of a server have noise: its kernels round differently. So each neighbour is judged by
the place of the answers on the way from the plan's reading (0) to the neighbour's (1), over all
prompts together, with an interval over the prompts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ropext.base.jsontext import JsonObject
from ropext.results.values import student_t

HALF = 0.5  # half of the way: beyond it the neighbour is nearer than the plan
LEAST = 1e-3  # nats: two readings that differ by less are one reading
RISK = 0.05
FEWEST = 4  # prompts for an interval

Numbers = Sequence[float]


@dataclass(frozen=True)
class Neighbour:
    """A reading next to the planned one; `config` is None if no config can express it."""

    name: str
    config: JsonObject | None
    decides: bool  # whether it must be excluded before a server counts as right


@dataclass(frozen=True)
class JudgedNeighbour:
    """The place of a server's answers on the way from the plan (0) to a neighbour (1)."""

    neighbour: Neighbour
    apart: float = 0.0  # nats between the two readings, root mean square
    at: float = 0.0
    margin: float = math.inf  # half the width of the 95 % interval

    @property
    def is_excluded(self) -> bool:
        """Return whether the server's answers are nearer to the plan, over the whole interval."""
        return self.apart >= LEAST and self.at + self.margin < HALF

    @property
    def is_nearer(self) -> bool:
        """Return whether the server's answers are nearer to the neighbour, over the whole
        interval."""
        return self.apart >= LEAST and self.at - self.margin > HALF

    @property
    def sentence(self) -> str:
        """Return whether the server's answers exclude the neighbour, as a sentence."""
        if self.neighbour.config is None:
            return f"{self.neighbour.name}: not excluded (no config says it)"
        if self.apart < LEAST:
            return f"{self.neighbour.name}: not excluded (it answers these prompts as the plan)"
        where = f"{self.at:.2f} ± {self.margin:.2f} of the way, {self.apart:.2g} nats"
        if self.is_nearer:
            return f"{self.neighbour.name}: the answers are nearer to it ({where})"
        if self.is_excluded:
            return f"{self.neighbour.name}: excluded ({where})"
        return f"{self.neighbour.name}: not excluded ({where})"


def judge_neighbour(
    neighbour: Neighbour,
    answers: Sequence[Numbers],
    plan: Sequence[Numbers],
    other: Sequence[Numbers],
) -> JudgedNeighbour:
    """Judge whether a server's answers match a neighbour of the plan, by the same candidates'
    log-probabilities after each prompt.

    The place is a regression through the origin; the jackknife over prompts gives its interval.
    With fewer than FEWEST prompts, or readings closer than LEAST nats, there is no interval.
    """
    tops = list[float]()
    bottoms = list[float]()
    count = 0
    for answered, planned, changed in zip(answers, plan, other, strict=True):
        top_here = 0.0
        bottom_here = 0.0
        for answer, right, wrong in zip(answered, planned, changed, strict=True):
            top_here += (wrong - right) * (answer - right)
            bottom_here += (wrong - right) ** 2
        tops.append(top_here)
        bottoms.append(bottom_here)
        count += len(answered)
    top = math.fsum(tops)
    bottom = math.fsum(bottoms)
    apart = math.sqrt(bottom / max(count, 1))
    prompts = len(tops)
    if apart < LEAST or prompts < FEWEST:
        return JudgedNeighbour(neighbour, apart)
    without = list[float]()
    for one_top, one_bottom in zip(tops, bottoms, strict=True):
        rest = bottom - one_bottom
        without.append((top - one_top) / rest if rest > 0 else 0.0)
    mean = math.fsum(without) / prompts
    spread = math.fsum((each - mean) ** 2 for each in without)
    error = math.sqrt((prompts - 1) / prompts * spread)
    return JudgedNeighbour(neighbour, apart, top / bottom, student_t(RISK / 2, prompts - 1) * error)
