"""The plan for a model that rotates nothing: how far, by which rows of a table, which keys."""

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ropext import families
from ropext.base.errors import InputError, UnsupportedModel, UsageError
from ropext.base.table import Table
from ropext.files.checkpoint import Snapshot
from ropext.files.checkpoint.provenance import Record
from ropext.files.schemes.reading import read_positions, refusal
from ropext.files.schemes.warnings import PlannedTable, table_warnings
from ropext.options.extend import KNOBS, Extend, resolve_target
from ropext.options.fields import flag
from ropext.planning import ExtensionPlan
from ropext.scaling import tables
from ropext.scaling.rope import SCHEMES, Positions
from ropext.scaling.tables import Growth, growth


@dataclass(frozen=True, kw_only=True, repr=False)
class TablePlan(ExtensionPlan):
    """The plan for a model that rotates nothing: the new config, the rows and the warnings."""

    positions: Positions

    @property
    def uncarried(self) -> str:
        """Return the reason why no directory can store the plan, as for ALiBi; "" if one can."""
        return "" if self.positions.carried else refusal(self.positions)

    @property
    def growth(self) -> Growth:
        """Return how the position table grows to the target."""
        return growth(self.positions, self.method, self.target)

    @property
    def weights(self) -> str:
        """Return the sentence of the model card about the weights that stay as they were."""
        if self.positions.tensors:
            return "All other weights are those of the base."
        return "The weights are those of the base."

    def what_grows(self, base: str) -> str:
        """Return the beginning of the model card's first sentence: the position table or the
        distance that grew."""
        if self.positions.tensors:
            return f"The position table of {base} was lengthened"
        return f"The distance that {base} tells apart was raised"

    def compared(self) -> Table:
        """Return the table of the methods for position tables, with their kept and new rows. It is
        empty if the model has no table."""
        rows = []
        for method in tables.methods_for(self.positions).values():
            count = len(method.kept(self.context, self.target))
            mark = "*" if method.name == self.method else ""
            rows.append((method.name + mark, str(count), str(self.target - count), method.summary))
        shown = tuple(rows) if self.positions.tensors else ()
        return Table("", "", ("method", "rows kept", "new", ""), shown)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that `ropext plan --json` prints for a model without rotary
        embedding."""
        return {
            "model": self.name,
            "model_type": self.positions.model_type,
            "positions": asdict(self.positions),
            "method": self.method,
            "context": self.context,
            "target": self.target,
            "factor": self.factor,
            "rows_kept": len(growth(self.positions, self.method, self.target).kept),
            "short_tax": tables.METHODS[self.method].short_tax,
            "edits": [edit.to_json() for edit in self.edits],
            "warnings": list(self.warnings),
            "config": self.config,
        }


def make_table_plan(
    config: Mapping[str, Any], recipe: Extend, name: str = "MODEL", *, in_memory: bool = False
) -> TablePlan:
    """Build the plan for a config that rotates nothing.

    Raise if no config can carry the extension, except for ALiBi in a model `in_memory`.
    """
    positions = read_positions(dict(config))
    assert positions is not None  # the caller has asked whether it rotates
    if not (positions.carried or (in_memory and positions.kind == "alibi")):
        raise UnsupportedModel(refusal(positions))
    positions = _check_options(recipe, positions)
    target = resolve_target(recipe, positions.context)
    known = tables.methods_for(positions)
    method = recipe.method or next(iter(known))
    if method not in known:
        raise UsageError(
            f"--method {method} is for other models: {positions.text_type!r} has"
            f" {SCHEMES[positions.kind]}; known for that: {', '.join(known)}"
        )
    written = lengthened(config, positions, target)
    return TablePlan(
        name=name,
        positions=positions,
        recipe=recipe,
        method=method,
        knobs={},
        context=positions.context,
        target=target,
        sites=(),
        config=written,
        edits=tuple(families.diff(dict(config), written)),
        warnings=table_warnings(PlannedTable(positions, target, method)),
    )


def _check_options(recipe: Extend, positions: Positions) -> Positions:
    """Return the positions, for ALiBi with the context that the user gives. Raise UsageError if an
    option is for rotary embeddings."""
    rotary = ("original_context", "attention_factor", "temperature", "like", *KNOBS)
    if positions.kind == "alibi":
        positions = replace(positions, context=recipe.context or positions.context)
        if not positions.context:
            raise UsageError(
                "its config states no length; give --context N, the tokens it was trained on"
            )
    else:
        rotary += ("context",)
    given = [name for name in rotary if getattr(recipe, name) is not None]
    given += ["from_original"] * recipe.from_original + ["for_loaders"] * bool(recipe.for_loaders)
    given += ["length_only"] * recipe.length_only
    if given:
        it = "--for" if given[0] == "for_loaders" else flag(given[0])
        raise UsageError(f"{it} is for rotary embeddings; this model has {SCHEMES[positions.kind]}")
    return positions


def lengthened(config: Mapping[str, Any], positions: Positions, target: int) -> dict[str, Any]:
    """Return the config with the target in its length key.

    A second key that held the old length gets the target, too.
    """
    out = copy.deepcopy(dict(config))
    part = out
    over = None
    for key in positions.path:
        part, over = part[key], part.get(f"{key}_dict")
    stated = positions.rows - positions.beyond
    for key in (positions.key, "n_ctx"):
        if key and (key == positions.key or part.get(key) == stated):
            part[key] = target + stated - positions.context
    if isinstance(over, dict):  # in old CLIPs, with class defaults for absent keys
        over[positions.key] = part[positions.key]
    return out


def growth_of(snapshot: Snapshot, record: Record) -> Growth:
    """Return the growth that the recorded extension applied to a checkpoint's position tables."""
    before = read_positions(record.base["config"])
    if before is None or record.method not in tables.methods_for(before):
        raise InputError(f"{snapshot.name}: ropext.json holds no position table; see ropext verify")
    return growth(before, record.method, record.target)
