"""What `--method auto` chooses by."""

import re
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import model_validator

from ropext.errors import UsageError
from ropext.options.fields import Options, Place, wanted

AUTO = "auto"
# A token that is trained on costs its forward pass and two more backward.
TRAINED = 3
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Budget:
    """What may be spent: tokens read forward, seconds, or floating-point operations."""

    amount: float
    unit: str  # "tokens", "seconds" or "FLOPs"


def parse_budget(text: str) -> Budget:
    """30m, 2h, 20000000 (tokens) or 3e15flops."""
    found = re.fullmatch(r"([\d.]+(?:e\d+)?) *(s|m|h|tokens|flops)?", text.strip().lower())
    try:
        amount = float(found[1]) if found else 0.0
    except ValueError:
        amount = 0.0
    if not found or not amount > 0:
        raise UsageError(
            f"--budget {text[:40]}: write a time (30m, 2h), tokens (20000000), or 3e15flops"
        )
    unit = found[2] or "tokens"
    if unit in _UNITS:
        return Budget(amount * _UNITS[unit], "seconds")
    return Budget(amount, "FLOPs" if unit == "flops" else "tokens")


class Choosing(Options):
    """By what documents, and for how much work, a method is chosen."""

    data: Place | None = wanted(
        None, "--method auto: documents to choose by; some are kept apart for the verdict", "DATA"
    )
    budget: str | None = wanted(
        None,
        "--method auto: what it may take, as time (30m, 2h), tokens read (20000000) or 3e15flops",
    )
    within: Literal["longrope", "yarn", "ntk"] | None = wanted(
        None, "--method auto: what its fit may move [the widest that --for reads exactly]"
    )

    @model_validator(mode="after")
    def _budget(self) -> Self:
        if self.budget is not None:
            parse_budget(self.budget)
        return self
