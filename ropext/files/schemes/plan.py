"""The plan for a model that rotates nothing: how far, by which rows of a table, which keys."""

import copy
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from ropext import families
from ropext.base.errors import InputError, UnsupportedModel, UsageError
from ropext.base.table import Table
from ropext.families.schemes import read_positions, refusal
from ropext.files.checkpoint import Snapshot
from ropext.files.checkpoint.provenance import Record
from ropext.files.schemes.warnings import table_warnings
from ropext.options.extend import KNOBS, Extend, resolve_target
from ropext.options.fields import flag
from ropext.planning import ExtensionPlan
from ropext.scaling import tables
from ropext.scaling.rope import SCHEMES, Positions
from ropext.scaling.tables import Growth, growth

# For a plan's model card: the beginning of the first sentence, and the one about the weights.
GROWN_TABLE = "The position table of {} was lengthened"
GROWN_DISTANCE = "The distance that {} tells apart was raised"
OTHER_WEIGHTS = "All other weights are those of the base."
SAME_WEIGHTS = "The weights are those of the base."


def make_table_plan(
    config: Mapping[str, Any], recipe: Extend, name: str = "MODEL", *, in_memory: bool = False
) -> ExtensionPlan:
    """Inspect the learned table, buckets or slopes of a checkpoint that does not rotate, and build
    the plan to grow them.

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
    grown = growth(positions, method, target)
    return ExtensionPlan(
        name=name,
        recipe=recipe,
        method=method,
        knobs={},
        context=positions.context,
        target=target,
        sites=(),
        config=written,
        edits=tuple(families.diff(dict(config), written)),
        warnings=table_warnings(grown),
        growth=grown,
        uncarried="" if positions.carried else refusal(positions),
        grown=GROWN_TABLE if positions.tensors else GROWN_DISTANCE,
        weights=OTHER_WEIGHTS if positions.tensors else SAME_WEIGHTS,
        methods_table=_compare_methods(grown),
        facts_json={
            "model_type": positions.model_type,
            "positions": asdict(positions),
            "rows_kept": len(grown.kept),
            "short_tax": tables.METHODS[method].short_tax,
        },
    )


def _compare_methods(chosen: Growth) -> Table:
    """Return the table of methods for a model that does not rotate, with their kept and new rows.
    It is empty if the model has no table. `chosen` is the plan's growth."""
    positions = chosen.positions
    target = chosen.target
    rows = []
    for method in tables.methods_for(positions).values():
        count = len(method.kept(positions.context, target))
        mark = "*" if method.name == chosen.method else ""
        rows.append((method.name + mark, str(count), str(target - count), method.summary))
    shown = tuple(rows) if positions.tensors else ()
    return Table("", "", ("method", "rows kept", "new", ""), shown)


def _check_options(recipe: Extend, positions: Positions) -> Positions:
    """Return the learned table, buckets or slopes of a checkpoint that does not rotate. For ALiBi,
    set the context that the user gives. Raise UsageError if an option is for rotary embeddings."""
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
    """Return the config.json of a checkpoint with a learned table, buckets or slopes: its length
    key holds the target.

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
