"""The families of the kit, in families.json.

It has the config keys at small sizes, and each family's differences from them; null leaves a key
out. No partial rotary factor is the default of its class, so that a reader that loses it is
noticed. The classes of ministral3 and gpt_oss are scaled by default, and their keys here undo it.
OLMo 3 has its class's theta, because another theta moves the windowed layers in transformers 4.
"""

import json
from pathlib import Path
from typing import Any

_DATA = json.loads(Path(__file__).with_name("families.json").read_text("utf-8"))
SIZES: dict[str, Any] = _DATA["sizes"]
FAMILIES: dict[str, dict[str, Any]] = _DATA["families"]


def keys_of(family: str, sizes: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a family's config; a composite's keys go around its text part's."""
    keys = FAMILIES.get(family, {})
    if "text_config" not in keys:
        return _filled(sizes | keys | own)
    text = keys["text_config"]
    inner = sizes | FAMILIES.get(text["model_type"], {}) | text | own
    made = keys | {"text_config": {"model_type": text["model_type"]} | _filled(inner)}
    if "out_hidden_size" in (vision := keys.get("vision_config") or {}):
        made["vision_config"] = vision | {"out_hidden_size": inner["hidden_size"]}
    return _filled(made)


def _filled(keys: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if value is not None}
