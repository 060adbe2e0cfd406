"""Which model type a config is of, and where its text part stands."""

from collections.abc import Mapping
from typing import Any

from ropext.errors import InputError, UnsupportedModel
from ropext.families import data
from ropext.families.typed import Dict, shown


def locate(config: dict[str, Any]) -> tuple[str, str, tuple[str, ...]]:
    """Model type, the type of its text part, and where that part stands."""
    if not isinstance(config, dict):
        raise InputError(f"config.json must hold an object, held {shown(config)}")
    top = Dict(config)
    model_type = top.text("model_type")
    if not model_type:
        raise InputError("config.json has no model_type, so its position scheme is unknown")
    path: tuple[str, ...] = ()
    kind, here = model_type, top
    for _ in range(4):  # the deepest composite has two levels
        known = data.census().get(kind)
        if known is None:
            raise InputError(_unknown(config, kind))
        if known.scheme == "rotary":
            return model_type, kind, path
        if known.scheme != "composite":
            raise UnsupportedModel(f"{kind!r} {data.REFUSALS[known.scheme]}")
        for key in known.path:
            inner = here.object(key)
            if inner is None:
                if known.path == ("text_config",) and here.has("hidden_size"):
                    inner, key = here, ""  # transformers 4 kept some text parts at top level
                else:
                    raise InputError(f"config.json: {here.name(key)} is missing")
            here, path = inner, (*path, key) if key else path
        named = here.text("model_type")
        kind = known.text if named is None or here is top or named == kind else named
    raise InputError(f"config.json: model types nest too deeply at {'.'.join(path)}")


def _unknown(config: Mapping[str, Any], kind: str) -> str:
    if config.get("auto_map"):
        return (
            f"config.json: model_type {shown(kind)} comes with code of its own (auto_map), which"
            " ropext cannot verify; only model types of stock transformers are extended"
        )
    return (
        f"config.json: model_type {shown(kind)} is not among the model types of transformers"
        f" {data.version()}; check the spelling, or extend it with a newer ropext"
    )


def text_part(config: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    part: dict[str, Any] = config
    for key in path:
        part = part[key]
    return part
