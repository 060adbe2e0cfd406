"""Refuse an untrusted config that makes stock transformers load code, other files or another
library. Every part of a composite config is checked, because stock builds parts that ropext ignores
too."""

import re

from ropext.base.errors import InputError
from ropext.base.jsontext import Json, JsonObject
from ropext.families.config import Dict, flat, parts, shown
from ropext.options.fields import TRUSTED_KERNEL

IMPLEMENTATION = re.compile(r"_?(attn|experts)_implementation(_internal)?")
# Stock's own names; transformers 5 added the implementations of experts.
STOCK_NAMES = re.compile(
    r"(paged\|)?(eager|sdpa|flash_attention_[2-9]|flex_attention)"
    r"|(eager|sdpa)_paged|grouped_mm|batched_mm|deepgemm|sonicmoe"
)
WEIGHTS_KEY = "transformers_weights"  # stock loads this file in place of model.safetensors
# Keys that stock passes to timm, which opens the named files (a pickle, before timm 1.0.26) or
# fetches weights.
HANDED_ON = ("checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "backbone_kwargs")
FETCHES = ("use_pretrained_backbone",)
# Stock passes this to timm too. PerceptionLM needs it, so shapes are allowed and names refused.
SHAPES = "model_args"
ARCHITECTURE = "architecture"  # timm loads a folder or a repository if the name has a colon


def check_foreign_parts(config: JsonObject, where: str) -> None:
    """Raise InputError if a config.json loads code or files that do not belong to its
    checkpoint."""
    for part in parts(Dict(config)):
        for key, value in part.values.items():
            if IMPLEMENTATION.fullmatch(key):
                _check_implementation(value, f"{where}: {part.name(key)}")
            elif key == WEIGHTS_KEY and value is not None:
                raise InputError(
                    f"{where}: {part.name(key)} {shown(value)} has transformers load another file "
                    "than model.safetensors and its index; remove the key"
                )
            elif _hands_on(key, value):
                raise InputError(
                    f"{where}: {part.name(key)} {shown(value)} is handed on to another library "
                    "(timm), which may open files or fetch weights by it; remove the key"
                )


def _check_implementation(value: Json, key: str) -> None:
    """Raise InputError if a config's attention or experts implementation is neither stock's own nor
    a kernel of kernels-community. The value is a name, or a dict of names by part."""
    names = value.values() if isinstance(value, dict) else [value]
    for name in names:
        if not isinstance(name, str) or STOCK_NAMES.fullmatch(name) or TRUSTED_KERNEL.match(name):
            continue
        if "/" in name:
            raise InputError(
                f"{key} {shown(name)} names a kernel on the hub, which transformers would fetch "
                "and run; remove the key"
            )
        raise InputError(
            f"{key} {shown(name)} is no implementation of transformers' own; remove the key"
        )


def _hands_on(key: str, value: Json) -> bool:
    """Return True if stock passes this key of a config.json to timm, which may open files or fetch
    weights by its value."""
    if key in HANDED_ON:
        return bool(value)
    if key in FETCHES:
        return value is not None and value is not False
    if key == ARCHITECTURE:
        return isinstance(value, str) and ":" in value
    if key == SHAPES:
        return not _is_shape(value)
    return False


def _is_shape(arguments: Json) -> bool:
    """Return True if the model_args of a config.json are only numbers, booleans or empty values,
    and so name no file."""
    if arguments is None:
        return True
    if not isinstance(arguments, dict):
        return False
    values = [item for value in arguments.values() for item in flat(value)]
    return all(item in ("", None) or isinstance(item, int | float) for item in values)
