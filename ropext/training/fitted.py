"""What a fit did."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropext.planning import Plan

if TYPE_CHECKING:
    from ropext.training.fitting import PlannedFit
    from ropext.training.searching import Trial

BASE, START, FITTED = "base", "start", "fitted"


@dataclass(frozen=True)
class Fitted:
    """What a fit did."""

    output: Path
    plan: Plan  # the one that was written
    kept: str  # "fitted" or "start"
    reason: str  # why that one
    start: str  # the closed form it began at
    steps: int  # the step that was kept; 0 = the start
    tokens: int  # read with gradients until the end
    numbers: dict[str, dict[str, Any]]  # base, start, fitted -> values as JSON
    change: dict[str, Any] | None  # far half, fitted minus start, nats a token
    pair_factors: tuple[float, ...]
    attention_factor: float
    notes: tuple[str, ...]
    planned: "PlannedFit"
    losses: tuple[dict[str, float], ...]
    judgements: dict[int, float]  # step -> far half, nats a token
    trials: "tuple[Trial, ...]"  # of --search

    def to_json(self) -> dict[str, Any]:
        return {
            "output": str(self.output),
            "planned": self.planned.to_json(),
            "kept": self.kept,
            "reason": self.reason,
            "start": self.start,
            "step": self.steps,
            "tokens": self.tokens,
            "method": self.plan.method,
            "pair_factors": list(self.pair_factors),
            "attention_factor": self.attention_factor,
            "change": self.change,
            "numbers": self.numbers,
            "losses": list(self.losses),
            "judgements": [{"step": k, "far_half_nll": v} for k, v in self.judgements.items()],
            "trials": [trial.to_json() for trial in self.trials],
            "notes": list(self.notes),
        }
