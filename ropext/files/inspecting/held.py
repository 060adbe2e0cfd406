"""Open a config that Python holds, alone or in a model in memory, as if it were on disk."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from ropext.base.errors import UsageError, class_name
from ropext.base.inputs import not_a_model
from ropext.base.jsontext import CONFIG_DEPTH_LIMIT, JsonObject, dump, parse_object
from ropext.families import stock
from ropext.files.checkpoint import Snapshot

ORIGINAL = "_ropext_original"  # attribute of a patched model: its config before the first patch
# An empty place: for a model in memory, neither a record nor weights are read.
NOWHERE = Path(os.devnull, "in-memory")


@runtime_checkable
class Config(Protocol):
    """A config object of transformers."""

    def to_json_string(self) -> str:
        """Return the config as the text of a checkpoint's config.json."""


@runtime_checkable
class HasConfig(Protocol):
    """A model of transformers, or of PEFT around one."""

    config: object


def in_memory_snapshot(given: object, *, before_patch: bool = False) -> Snapshot:
    """Return the snapshot through which ropext inspects a config or a model in memory like a
    checkpoint on the disk. With `before_patch`, open the model before `ropext.patch`."""
    config = _config_held(given, before_patch)
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise UsageError("this config has no model_type, so it is no config of transformers")
    stock.describe_unknown_types(config)
    name = str(config.get("_name_or_path") or "") or kind
    return Snapshot(name=name, directory=NOWHERE, config=dict(config))


def _config_held(given: object, before_patch: bool) -> JsonObject:
    """Return a config that Python holds as if ropext had opened a checkpoint's config.json on the
    disk, to inspect it."""
    if isinstance(given, Mapping):
        try:
            text = dump(given)
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"this config cannot be written as JSON: {error}") from None
        return parse_object(text, "this config", levels=CONFIG_DEPTH_LIMIT)
    if isinstance(given, Config) and not isinstance(given, type):
        named = {"_name_or_path": getattr(given, "_name_or_path", "")}
        return {**_config_held(json.loads(given.to_json_string()), before_patch), **named}
    live = given
    if hasattr(given, "get_base_model"):
        live = given.get_base_model()
    if not isinstance(live, HasConfig) or isinstance(live, type):
        wanted = (
            "a model is named by its directory, its file or its hub id, or is a model or a config "
            "of transformers"
        )
        raise not_a_model(wanted, given)
    held = live.config
    if before_patch:
        held = getattr(live, ORIGINAL, held)
    if not isinstance(held, Config):
        raise UsageError(f"{class_name(given)} has no config of transformers")
    return _config_held(held, before_patch)
