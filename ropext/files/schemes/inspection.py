"""Inspect a model that does not rotate, from its small files and weight headers."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropext.base.errors import UsageError
from ropext.base.jsontext import JsonObject
from ropext.families.schemes import refusal
from ropext.files.checkpoint import Snapshot
from ropext.files.checkpoint.weights import decoded, read_tensor
from ropext.files.schemes.growing import PositionTable, find_tables
from ropext.scaling.rope import Positions

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class PositionFacts:
    """The facts about a model without a rotary embedding, from small files and weight headers."""

    name: str
    positions: Positions
    limits: JsonObject
    tables: tuple[PositionTable, ...]
    directory: Path

    @property
    def advice(self) -> str:
        """The reason why nothing extends it; empty if something does."""
        return "" if self.positions.carried else refusal(self.positions)

    def rows(self) -> "np.ndarray[Any, Any]":
        """Return the rows of its first table that positions read."""
        if not self.tables:
            raise UsageError(f"--plot draws a table's rows, and {self.name} has none of them here")
        first = self.tables[0]
        data, tensor = read_tensor(self.directory / first.file, first.name)
        values = decoded(data, tensor.dtype).reshape(tensor.shape)
        return values[self.positions.offset :]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that `ropext inspect --json` prints for a model without rotary
        embedding."""
        facts = {"model": self.name, "positions": asdict(self.positions), "advice": self.advice}
        return facts | {"tables": [asdict(table) for table in self.tables], "limits": self.limits}


def inspect_scheme(
    snapshot: Snapshot, positions: Positions, name: str, limits: JsonObject
) -> PositionFacts:
    """Find the tables of a model that does not rotate, if its weights are present."""
    stored = tuple[PositionTable, ...]()
    if positions.tensors and snapshot.weight_files:
        stored = find_tables(snapshot, positions)
    return PositionFacts(name, positions, limits, stored, snapshot.directory)
