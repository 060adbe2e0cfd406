"""Write ropext/families/defaults.json: what an absent config key means, per model type.

Run with the transformers version whose defaults are wanted (a test holds the file against it):

    python scripts/make_defaults.py [FILE]
"""

import json
import sys
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING

TYPES = Path(__file__).parent.parent / "ropext" / "families" / "types.json"
DEFAULTS = TYPES.with_name("defaults.json")

# What the geometry, the lengths and the costs are computed from.
VALUES = (
    "max_position_embeddings",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "num_layers",
    "head_dim",
    "global_head_dim",
    "swa_head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "qk_nope_head_dim",
    "v_head_dim",
    "vocab_size",
    "sliding_window",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "use_sliding_window",
    "max_window_layers",
    "attention_chunk_size",
    "no_rope_layer_interval",
    "num_kv_shared_layers",
    "attention_k_eq_v",
    "H_cycles",
    "L_cycles",
)
# Keys that say by an interval or a list which layers are of which type; two values of each.
LAYERS_BY = {
    "sliding_window_pattern": (2, 4),
    "full_attention_interval": (2, 4),
    "layer_group_size": (2, 4),
    "global_attn_every_n_layers": (2, 4),
    "full_attn_idxs": ([1, 3], [0]),
    "attn_layer_indices": ([1, 3], [0]),
}


def field_default(cls: type, key: str) -> Any:
    """The value that a config without this key gets, before anything is derived from others."""
    field = getattr(cls, "__dataclass_fields__", {}).get(key)
    value = None if field is None else field.default
    return value if isinstance(value, int | float | str) else None


def attribute(config: Any, key: str) -> Any:
    try:
        return getattr(config, key, None)
    except Exception:  # heterogeneous configs refuse to name one value for all layers
        return None


def period(layer_types: list[str]) -> list[str]:
    """The shortest run of layer types that repeats over the default model."""
    for n in range(1, len(layer_types) - 1):
        if all(t == layer_types[i % n] for i, t in enumerate(layer_types[: len(layer_types) - 1])):
            return layer_types[:n]
    return layer_types


def last_layer_type(cls: type, run: list[str]) -> str | None:
    """The type that the last layer has whatever the run says (some classes force it)."""
    name = cls.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    if len(set(run)) == 1:
        return None
    counts = range(2 * len(run) + 1, 2 * len(run) + 7)
    try:
        made = [cls(**{name: layers}).layer_types[-1] for layers in counts]
    except Exception:  # classes that tie other lists to the number of layers
        return None
    by_run = [run[(layers - 1) % len(run)] for layers in counts]
    return made[0] if len(set(made)) == 1 and made != by_run else None


def layers_by(cls: type) -> dict[str, list[str]]:
    """Which of those keys the class reads, and the types of the first two layers by each."""
    name, found = cls.attribute_map.get("num_hidden_layers", "num_hidden_layers"), {}
    for key, values in LAYERS_BY.items():
        try:
            made = [cls(**{name: 4, key: value}) for value in values]
        except Exception:  # classes that tie other lists to the number of layers
            continue
        one, two = (attribute(m, "layer_types") or attribute(m, "layers_block_type") for m in made)
        if one != two and one[:2] == one[2:]:
            found[key] = one[:2]
    return found


def theta_when_scaled(cls: type) -> tuple[Any, Any]:
    """Theta and partial factor that a flat dict gets which names neither."""
    try:
        made = cls(rope_scaling={"rope_type": "linear", "factor": 2.0}).rope_parameters
    except Exception:  # types that accept other forms only
        made = cls().rope_parameters
    return made.get("rope_theta"), made.get("partial_rotary_factor")


def followed(cls: type) -> set[str]:
    """Keys of the default dict that follow their top-level spelling, where a config has it."""
    found = set()
    names = {
        "rope_theta": ("rope_theta", "rotary_emb_base"),
        "partial_rotary_factor": ("partial_rotary_factor", "rotary_pct"),
    }
    for key, spellings in names.items():
        for name in spellings:
            try:
                rope = cls(**{name: 0.5 if "partial" in key else 777.0}).rope_parameters
            except Exception:  # a type that refuses this value
                continue
            if rope.get(key) in (0.5, 777.0):
                found.add(key)
    return found


def defaults_of(model_type: str) -> dict[str, Any]:
    cls = CONFIG_MAPPING[model_type]
    config = cls()
    out: dict[str, Any] = {}
    for key in VALUES:
        value = field_default(cls, key)
        if value is None:
            value = field_default(cls, cls.attribute_map.get(key, key))
        if value is not None:
            out[key] = value
    if "head_dim" not in out and "head_dim" in cls.__dataclass_fields__:
        # Left at None, three stock forms fail with a TypeError.
        out["head_dim_may_stay_null"] = attribute(config, "head_dim") is None
    names = {key: cls.attribute_map[key] for key in VALUES if key in cls.attribute_map}
    if names:
        out["names"] = names
    rope = attribute(config, "rope_parameters")
    if rope:
        out["rope"] = {k: v for k, v in rope.items() if k not in followed(cls)}
    theta, partial = theta_when_scaled(cls)
    if theta is not None:
        out["theta"] = theta
    if partial is not None:
        out["partial"] = partial
    layer_types = attribute(config, "layer_types")
    if isinstance(layer_types, list) and layer_types:
        out["layer_types"] = run = period(layer_types)
        if last := last_layer_type(cls, run):
            out["last_layer_type"] = last
    if by := layers_by(cls):
        out["layers_by"] = by
    return out


def added_by(model_type: str, key: str, text_type: str) -> dict[str, Any]:
    """What a composite adds to a text config that is there but leaves keys out."""
    cls, bare = CONFIG_MAPPING[model_type], CONFIG_MAPPING[text_type]
    spec = getattr(cls, "sub_configs_defaults", {}).get(key)
    offered = getattr(spec, "init_kwargs", None) or {}
    if not offered:
        return {}
    text = getattr(cls(**{key: {"model_type": text_type}}), key)
    theta = (attribute(text, "rope_parameters") or {}).get("rope_theta")
    out = {k: offered[k] for k in VALUES if k in offered and attribute(text, k) == offered[k]}
    out = {k: v for k, v in out.items() if field_default(bare, k) != v}
    if theta is not None and theta == offered.get("rope_theta"):
        out["rope_theta"] = theta
    if isinstance(offered.get("rope_parameters"), dict):  # hides a theta beside it
        out["rope_parameters"] = offered["rope_parameters"]
    # head_dim alone may agree because it is derived; these are given or they are not.
    return out if {"hidden_size", "max_position_embeddings", "rope_theta"} & out.keys() else {}


def lines_of(made: dict[str, Any]) -> str:
    return ",\n".join(
        f"  {json.dumps(t)}: {json.dumps(made[t], default=str)}" for t in sorted(made)
    )


def main() -> None:
    census = json.loads(TYPES.read_text())
    made, added = {}, {}
    for model_type in census["rotary"]:
        try:
            made[model_type] = defaults_of(model_type)
        except Exception as error:
            sys.exit(f"{model_type}: {type(error).__name__}: {error}")
    for model_type, (*path, text_type) in census["composite"].items():
        if text_type in census["rotary"] and len(path) == 1:
            try:
                found = added_by(model_type, path[0], text_type)
            except Exception:  # a composite that cannot be built without more keys adds none
                continue
            if found:
                added[model_type] = found
    place = Path(sys.argv[1]) if sys.argv[1:] else DEFAULTS
    place.write_text(
        f'{{\n "transformers": {json.dumps(transformers.__version__)},\n'
        f' "types": {{\n{lines_of(made)}\n }},\n "composites": {{\n{lines_of(added)}\n }}\n}}\n',
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
