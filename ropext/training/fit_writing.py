"""What a fit leaves: an extended checkpoint as `extend` writes it, the factors, the evidence.

OUT/                    the base's weights, the new config, record and card
OUT/pair-factors.json   what --method longrope --pair-factors reads
OUT/fit/                numbers.json, losses.json, pair-factors.png, positions.png
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropext import proof
from ropext.checkpoint import provenance
from ropext.checkpoint.card import Card
from ropext.checkpoint.provenance import TRAINED_ON
from ropext.checkpoint.writing import Written, write_checkpoint
from ropext.inspecting import card_of, record_of
from ropext.narration import Show
from ropext.planning import Plan
from ropext.training import fit_showing

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


FOLDER = "fit"


def _sections(done: "Fitted") -> dict[str, Any]:
    return {
        "fit": fit_showing.section(done),
        TRAINED_ON: done.planned.prepared.trained_on.to_json(),
    }


def write(
    done: "Fitted",
    extras: Mapping[str, bytes],
    command: Sequence[str],
    *,
    force: bool,
    show: Show,
) -> Written:
    """Write OUT as a whole or not at all, and prove it."""
    prepared, made = done.planned.prepared, done.plan
    snapshot = prepared.base.snapshot

    def prove(directory: Path) -> dict[str, Any]:
        (directory / FOLDER).mkdir()
        for name, content in extras.items():
            (directory / name).write_bytes(content)
        return proof.prove(
            directory,
            proof.expected(made.sites, made.factor),
            forward=proof.Forward(made.context, made.target, snapshot.config),
            text_path=made.model.path,
        ).to_json()

    def card(proved: Mapping[str, Any] | None) -> Card:
        plain = card_of(made, snapshot, done.output.name, proved)
        return replace(
            plain,
            summary=(*plain.summary, *fit_showing.summary(done)),
            numbers=fit_showing.tables(done),
        )

    record = record_of(made, provenance.base_of(snapshot), command)
    return write_checkpoint(
        snapshot,
        done.output,
        config=made.config,
        record=replace(record, more=dict(record.more) | _sections(done)),
        card=card,
        link=prepared.options.link,
        force=force,
        prove=prove,
        show=show,
    )
