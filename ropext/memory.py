"""`ropext.patch` and `ropext.save`: a loaded model, by the same plan as a directory."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from ropext import patching
from ropext.checkpoint.provenance import SAVED
from ropext.describing import record_of
from ropext.errors import UsageError
from ropext.options.extend import parse_extend
from ropext.planning import Plan, make_plan, require_help

Model = TypeVar("Model")
PLANNED = "_ropext_plan"  # attribute of a patched model: the plan it computes by


def plan_of(model: Any, **options: Any) -> Plan:
    """The plan for a loaded model, from the config it had before any patch."""
    live = patching.base_model(model)
    # As save_pretrained would write it: without what the library fills in.
    config = json.loads(patching.original_config(live).to_json_string())
    name = str(getattr(live.config, "_name_or_path", "")) or type(live).__name__
    return make_plan(config, parse_extend(options), name)


def patch(model: Model, **options: Any) -> Model:
    """Extend a loaded model in place; `options` are the fields of a Recipe (method, factor, ...).

    Its logits then equal those of the checkpoint that `ropext extend` writes with these options.
    A second call replaces the first; `ropext.patching.unpatch` takes it back.
    """
    made = plan_of(model, **options)
    require_help(made)
    patching.patch(model, made.config)
    setattr(patching.base_model(model), PLANNED, made)
    return model


def save(model: Any, directory: str | os.PathLike[str]) -> Path:
    """Write a patched model in stock format, with every spelling that loaders read, and its
    record."""
    live = patching.base_model(model)
    made = getattr(live, PLANNED, None)
    if made is None:
        raise UsageError("save wants a model that ropext.patch extended; call ropext.patch first")
    # What a trainer did to the weights since the patch is not known.
    record = replace(record_of(made, _base_of(live)), more={SAVED: True})
    return patching.save(model, directory, made.config, record)


def _base_of(live: Any) -> dict[str, Any]:
    """Where a loaded model came from, as transformers keeps it."""
    name = str(getattr(live.config, "_name_or_path", ""))
    is_here = not name or Path(name).is_dir()
    return {
        "name": name or type(live).__name__,
        "hub_id": None if is_here else name,
        "revision": None,
        "commit": None if is_here else getattr(live.config, "_commit_hash", None),
        "quantisation": None,
    }
