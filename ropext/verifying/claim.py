"""Find the claim that a model is checked against: a saved plan, its record, its base, or its own
config."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from ropext import families
from ropext.base import bundled
from ropext.base.errors import InputError, UsageError
from ropext.base.jsontext import Json, JsonObject, read_redirected
from ropext.families import Model, stock
from ropext.files.checkpoint import Snapshot, check_foreign_parts, provenance, with_weights
from ropext.files.inspecting import open_model
from ropext.scaling import forms
from ropext.scaling.rope import CONFIG, Positions, Site


@dataclass(frozen=True)
class Claim:
    """The values that a directory is checked against."""

    context: int
    target: int
    sites: tuple[Site, ...]
    base: JsonObject | None  # the config before, if it is known
    edited: tuple[str, ...] = ()  # dotted keys of it that the extension writes


def claim_of(
    snapshot: Snapshot, model: Model, record: provenance.Record | None, against: str | None
) -> tuple[Claim, Snapshot | None]:
    """Return the claim to check a model against, and the base if `against` names one (a directory
    or hub id).

    It is the claim of a saved plan (a JSON file), of the record, or of the config as ropext reads
    it.
    """
    if against is not None and Path(against).is_file() and bundled.find_gguf(against) is None:
        path = Path(against)
        return planned_claim(read_plan(path), f"--against {path}"), None
    base = open_model(against) if against is not None else None
    if base is not None and base.kind != snapshot.kind:
        raise UsageError(
            f"--against {against} is {base.kind}, and {snapshot.name} is {snapshot.kind}; name one "
            "of its kind, or a saved plan"
        )
    if base is not None:
        base = with_weights(base)
    before = base.config if base is not None else None
    if record is not None:
        return _recorded_claim(record, before), base
    context = model.scaled_sites[0].rope.original_context
    edited = tuple[str, ...]()
    if before is not None and snapshot.carries(model).in_transformers:  # which reads these keys
        plain = families.as_read(before)
        params = {s.label: s.params for s in model.scaled_sites}
        written = families.write(dict(before), plain, params, model.context)
        edited = tuple(edit.key for edit in families.diff(before, written))
    return Claim(context, model.context, model.sites, before, edited), base


def table_claim(
    positions: Positions, record: provenance.Record | None, base: Snapshot | None
) -> Claim:
    """Return the claim to check a model without rotation against: of its record, else of its
    config."""
    before = base.config if base is not None else None
    if record is not None:
        return _recorded_claim(record, before)
    return Claim(positions.context, positions.context, (), before)


def _recorded_claim(record: provenance.Record, before: JsonObject | None) -> Claim:
    """Return the claim to check a model against from its ropext.json; `before` is the base's config
    if the base is at hand."""
    keys = list[str]()
    for link in provenance.lineage(record):
        for edit in provenance.edits_of(link):
            if edit.file == CONFIG:
                keys.append(edit.key)
    base = before or record.base["config"]
    return Claim(record.context, record.target, record.sites, base, tuple(keys))


def _saved_sites(plan: JsonObject) -> tuple[Site, ...]:
    """Return the sites of a saved plan to check a model against. Raise ValueError if a number is
    not finite or a rope dict is no plan's."""
    entries = []
    for site in plan["sites"]:
        wanted = {
            "inv_freq": site["inv_freq"],
            "attention_factor": site["attention_factor"],
            "softmax_factor": site["softmax_factor"],
            "short_inv_freq": site["short_inv_freq"],
        }
        entry = {"label": site["label"], "wanted": wanted, "params": site["rope"]}
        entries.append(entry | {"scaled": site["scaled"]})
    sites = TypeAdapter(tuple[Site, ...]).validate_json(json.dumps(entries), strict=True)
    for each in sites:
        numbers = [each.wanted.attention_factor, each.wanted.softmax_factor]
        numbers += each.wanted.inv_freq
        numbers += each.wanted.short_inv_freq or ()
        if not all(map(math.isfinite, numbers)):
            raise ValueError("its numbers are to be finite")
        if not isinstance(each.params.get("rope_type"), str):
            raise ValueError("its rope_type is to be a text")
        forms.steepness(each.params)  # refuses a dict that no plan has
    return sites


def read_plan(path: Path) -> dict[str, Json]:
    """Return the JSON of a saved plan to check a model against. Raise InputError if its config
    loads code or files from elsewhere."""
    plan = read_redirected(path)
    if isinstance(config := plan.get("config"), dict):
        check_foreign_parts(config, f"{path}, its config")
        stock.describe_unknown_types(config)
    return plan


def planned_claim(plan: JsonObject, name: str) -> Claim:
    """Return the claim of a saved plan to check a model against.

    Raise InputError if it is no plan, or if it is damaged; the message calls it `name`.
    """
    context = plan.get("context")
    target = plan.get("target")
    if type(context) is not int or type(target) is not int or type(plan.get("sites")) is not list:
        raise InputError(f"{name} is not a plan; `ropext plan --json` writes one")
    try:
        sites = _saved_sites(plan)
        if context < 1 or target < 1:
            raise ValueError("its lengths are below 1")
        if plan["factor"] != target / context:
            raise ValueError("its factor is not its target over its context")
        edits = provenance.edits_of(plan)
        base = provenance.undone(plan["config"], edits)
        stock.describe_unknown_types(base)
        edited = tuple(edit.key for edit in edits)
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{name}: the plan is damaged at its sites ({reason})") from None
    return Claim(context, target, sites, base, edited)
