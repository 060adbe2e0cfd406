"""What was asked of a run, and what became of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ropext.errors import GateFailed, Stopped, UsageError
from ropext.pipeline.job import STAGES, Job
from ropext.pipeline.outcome import Evidence
from ropext.pipeline.steps import EVALUATION
from ropext.results import contest


@dataclass(frozen=True)
class Choice:
    """Which stages: from one on, or one alone; None for all that are not done."""

    begin: str | None = None
    only: str | None = None

    def check(self, asked: Job) -> None:
        """Name a stage that the recipe has."""
        if self.begin and self.only:
            raise UsageError("--from and --only exclude each other; give one")
        for flag, name in (("--from", self.begin), ("--only", self.only)):
            if name is not None and name not in asked.stages:
                why = "the recipe has no such section" if name in STAGES else "no such stage"
                raise UsageError(
                    f"{flag} {name}: {why}; the stages of this run are {', '.join(asked.stages)}"
                )

    def again(self, name: str) -> bool:
        """Whether a stage is done even where nothing changed."""
        if self.only is not None:
            return name == self.only
        return self.begin is not None and STAGES.index(name) >= STAGES.index(self.begin)


@dataclass(frozen=True)
class CellRan:
    """What became of one cell."""

    name: str  # "" where there is no grid
    output: Path | None  # None where a gate failed, or not all stages were asked for
    folder: Path
    label: str  # of the finished checkpoint in the evaluation
    stages: Mapping[str, str]  # name -> done, skipped
    evidence: Evidence

    def to_json(self) -> dict[str, Any]:
        results = self.evidence.results
        return {
            "cell": self.name or None,
            "output": None if self.output is None else str(self.output),
            "folder": str(self.folder),
            "stages": dict(self.stages),
            "evaluation": results and {"variants": results["variants"]},
            "gates": [vars(gate) for gate in self.evidence.gates],
        }


@dataclass(frozen=True)
class Ran:
    """What a run did."""

    output: Path
    folder: Path
    cells: tuple[CellRan, ...]
    failed: Mapping[str, str] = field(default_factory=dict)  # cell -> why
    comparison: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "output": str(self.output),
            "folder": str(self.folder),
            "cells": [cell.to_json() for cell in self.cells],
            "failed": dict(self.failed),
            "comparison": self.comparison,
        }

    @property
    def is_whole(self) -> bool:
        """Whether the output has its name: no cell failed, no gate did, all stages were done."""
        return not self.failed and all(cell.output for cell in self.cells)

    @property
    def measured(self) -> tuple[str, ...]:
        """What was measured of the output, as `ropext push --results` takes it."""
        return tuple(
            f"{cell.folder / EVALUATION}:{cell.label}"
            for cell in self.cells
            if cell.evidence.results is not None
        )

    def raise_if_failed(self) -> None:
        """Stopped where a cell failed, GateFailed where a gate did."""
        if self.failed:
            reasons = "; ".join(f"{name}: {why}" for name, why in self.failed.items())
            if not self.cells:
                raise UsageError(f"all {len(self.failed)} cells failed ({reasons})")
            raise Stopped(
                f"{len(self.failed)} of {len(self.failed) + len(self.cells)} cells failed, the "
                f"others are kept ({reasons})"
            )
        try:
            contest.raise_if_failed([gate for cell in self.cells for gate in cell.evidence.gates])
        except GateFailed as error:
            kept = ", ".join(str(cell.folder) for cell in self.cells if not cell.evidence.passed)
            raise GateFailed(
                f"{error}; what did not pass is kept in {kept}, and not under the output's name"
            ) from None
