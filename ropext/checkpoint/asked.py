"""What a stranger's config may ask of stock transformers beside sizes: code, other files, another
library. All of it is walked, for stock builds every part of a composite, also those that nothing
here reads.
"""

import re

from ropext.errors import InputError
from ropext.families.config import Dict, flat, parts, shown
from ropext.jsontext import Json, JsonObject
from ropext.options.fields import TRUSTED_KERNEL

IMPLEMENTATION = re.compile(r"_?(attn|experts)_implementation(_internal)?")
# Stock's own names; those of experts are of transformers 5.
STOCK_NAMES = re.compile(
    r"(paged\|)?(eager|sdpa|flash_attention_[2-9]|flex_attention)"
    r"|(eager|sdpa)_paged|grouped_mm|batched_mm|deepgemm|sonicmoe"
)
WEIGHTS_KEY = "transformers_weights"  # stock loads this file in place of model.safetensors
# What stock hands on to timm, which opens the files that they name (a pickle, before timm 1.0.26)
# or fetches weights.
HANDED_ON = ("checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "backbone_kwargs")
FETCHES = ("use_pretrained_backbone",)
# The same, and PerceptionLM needs it: shapes are taken, names are not.
SHAPES = "model_args"
ARCHITECTURE = "architecture"  # timm reads a folder or a repository that is named with a colon


def check_asked(config: JsonObject, where: str) -> None:
    """Raise where a config asks for code or files that are not the checkpoint's own."""
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
    """Raise where a name, or one of those by part, is none of stock's own."""
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
    """Whether arguments are numbers, true or false, or empty, so that they name nothing."""
    if arguments is None:
        return True
    if not isinstance(arguments, dict):
        return False
    values = [item for value in arguments.values() for item in flat(value)]
    return all(item in ("", None) or isinstance(item, int | float) for item in values)
