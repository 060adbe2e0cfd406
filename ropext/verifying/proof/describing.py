"""Describe how transformers' code reads a model type.

child.py loads this file by path: it imports nothing of ropext. No fact comes from names alone. Each
test changes a key and builds the type's rotary embedding again; its numbers then show whether the
class reads the key.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

    from ropext.base.jsontext import Json, JsonObject
    from ropext.verifying.proof.answers import BuiltNumbers, Turning, TypeDescription

# Geometry, lengths and costs come from these keys.
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
# Keys that set the layers' types by an interval or a list; two values of each.
LAYERS_BY = {
    "sliding_window_pattern": (2, 4),
    "full_attention_interval": (2, 4),
    "layer_group_size": (2, 4),
    "global_attn_every_n_layers": (2, 4),
    "full_attn_idxs": ([1, 3], [0]),
    "attn_layer_indices": ([1, 3], [0]),
}
HEAD_KEY = re.compile(r"head_dim|head_size|rotary_dim")
WINDOWED = re.compile("sliding|chunked|local")
THETA_KEY = re.compile(r"theta|rotary_emb_base|rope_\w*base")
PARTIAL_KEYS = ("partial_rotary_factor", "rotary_pct")
ROPE_KEYS = ("rope_parameters", "rope_scaling")
NEIGHBOURS = re.compile(r", 0?::2\]|view_as_complex|view\(.*-1, 2\)|reshape\(.*-1, 2\)|d // 2, 2\)")
SHORT = (
    16  # tokens; with a longer original length, llama3 would not change the pairs of a small head
)
OTHER_THETA = 777.0  # no class default


def config_of_class(cls: type[PreTrainedConfig], **values: Json) -> PreTrainedConfig:
    """Return the config that a class of transformers builds from these keys in the child process
    of verify; all other keys have the defaults of the class."""
    return cls(**values)


def field_default(cls: type, key: str) -> int | float | str | None:
    """Return the default of a key in a config class of transformers, before the class derives it
    from other keys; for the child's description."""
    field = getattr(cls, "__dataclass_fields__", {}).get(key)
    if field is None or not isinstance(field.default, int | float | str):
        return None
    return field.default


def config_value(config: PreTrainedConfig, key: str) -> Json:
    """Return the value that transformers, in the child process, reads for a key of a config. Return
    None if the config lacks it or refuses."""
    try:
        return getattr(config, key, None)
    except Exception:  # heterogeneous configs refuse to name one value for all layers
        return None


def repeated_layer_types(layer_types: list[str]) -> list[str]:
    """Return the shortest run of layer types that repeats over transformers' default model, for the
    child's description."""
    for n in range(1, len(layer_types) - 1):
        if all(t == layer_types[i % n] for i, t in enumerate(layer_types[: len(layer_types) - 1])):
            return layer_types[:n]
    return layer_types


def last_layer_type(cls: type[PreTrainedConfig], run: list[str]) -> str | None:
    """Return for the child's description the type that a config class forces on the last layer,
    whatever the run. Return None if it forces none."""
    name = cls.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    if len(set(run)) == 1:
        return None
    counts = range(2 * len(run) + 1, 2 * len(run) + 7)
    try:
        made = [config_of_class(cls, **{name: layers}).layer_types[-1] for layers in counts]
    except Exception:  # classes that tie other lists to the number of layers
        return None
    by_run = [run[(layers - 1) % len(run)] for layers in counts]
    return made[0] if len(set(made)) == 1 and made != by_run else None


def keys_of_layer_types(cls: type[PreTrainedConfig]) -> dict[str, list[str]]:
    """Return for the child's description the keys of LAYERS_BY that a config class of transformers
    reads, each with its types of the first two layers."""
    name = cls.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    read = {}
    for key, values in LAYERS_BY.items():
        try:
            made = [config_of_class(cls, **{name: 4, key: value}) for value in values]
        except Exception:  # classes that tie other lists to the number of layers
            continue
        one, two = (
            config_value(m, "layer_types") or config_value(m, "layers_block_type") for m in made
        )
        if one != two and one[:2] == one[2:]:
            read[key] = one[:2]
    return read


def theta_of_scaled_dict(cls: type[PreTrainedConfig]) -> tuple[Json, Json]:
    """Return the theta and the partial factor that a config class adds, in the child process, to a
    flat rope dict without them."""
    try:
        made = config_of_class(
            cls, rope_scaling={"rope_type": "linear", "factor": 2.0}
        ).rope_parameters
    except Exception:  # types that accept other forms only
        made = cls().rope_parameters
    return made.get("rope_theta"), made.get("partial_rotary_factor")


def keys_with_other_spelling(cls: type[PreTrainedConfig]) -> set[str]:
    """Return for the child's description the keys of the default rope dict that follow a top-level
    key of transformers' config if it has one."""
    keys = set()
    names = {
        "rope_theta": ("rope_theta", "rotary_emb_base"),
        "partial_rotary_factor": PARTIAL_KEYS,
    }
    for key, spellings in names.items():
        value = OTHER_THETA
        if "partial" in key:
            value = 0.5
        for name in spellings:
            try:
                rope = config_of_class(cls, **{name: value}).rope_parameters
            except Exception:  # a type that refuses this value
                continue
            if rope.get(key) in (0.5, OTHER_THETA):
                keys.add(key)
    return keys


def defaults_of(cls: type[PreTrainedConfig]) -> dict[str, Json]:
    """Return for the child's description the meaning of each absent key to a config class of
    transformers."""
    config = cls()
    out: dict[str, Json] = {}
    for key in VALUES:
        value = field_default(cls, key)
        if value is None:
            value = field_default(cls, cls.attribute_map.get(key, key))
        if value is not None:
            out[key] = value
    if "head_dim" not in out and "head_dim" in cls.__dataclass_fields__:
        # If it is None, three rope types of transformers fail with a TypeError.
        out["head_dim_may_stay_null"] = config_value(config, "head_dim") is None
    names = {key: cls.attribute_map[key] for key in VALUES if key in cls.attribute_map}
    if names:
        out["names"] = names
    rope = config_value(config, "rope_parameters")
    if rope:
        out["rope"] = {k: v for k, v in rope.items() if k not in keys_with_other_spelling(cls)}
    theta, partial = theta_of_scaled_dict(cls)
    if theta is not None:
        out["theta"] = theta
    if partial is not None:
        out["partial"] = partial
    layer_types = config_value(config, "layer_types")
    if isinstance(layer_types, list) and layer_types:
        run = repeated_layer_types(layer_types)
        out["layer_types"] = run
        if last := last_layer_type(cls, run):
            out["last_layer_type"] = last
    if by := keys_of_layer_types(cls):
        out["layers_by"] = by
    return out


def values_added_by(
    cls: type[PreTrainedConfig], key: str, text_type: str, bare: type[PreTrainedConfig]
) -> dict[str, Json]:
    """Return for the child's description the values that a composite config of transformers adds to
    a text config with absent keys.

    `bare` is the class of that text config. Values that `bare` has by default do not count.
    """
    spec = getattr(cls, "sub_configs_defaults", {}).get(key)
    offered = getattr(spec, "init_kwargs", None) or {}
    if not offered:
        return {}
    text = getattr(config_of_class(cls, **{key: {"model_type": text_type}}), key)
    theta = (config_value(text, "rope_parameters") or {}).get("rope_theta")
    out = {k: offered[k] for k in VALUES if k in offered and config_value(text, k) == offered[k]}
    out = {k: v for k, v in out.items() if field_default(bare, k) != v}
    if theta is not None and theta == offered.get("rope_theta"):
        out["rope_theta"] = theta
    if isinstance(offered.get("rope_parameters"), dict):  # hides a theta next to it
        out["rope_parameters"] = offered["rope_parameters"]
    # head_dim alone may agree because it is derived; these three are never derived.
    return out if {"hidden_size", "max_position_embeddings", "rope_theta"} & out.keys() else {}


class ProbedEmbedding:
    """The rotary embedding of a type, built again from changed values of its text config."""

    def __init__(
        self,
        child: ModuleType,
        model: PreTrainedModel,
        text: PreTrainedConfig,
        values: JsonObject,
    ) -> None:
        """Find the rotary modules of a model that the child process built from these values, to
        test them with changed values."""
        self.child = child
        self.text = text
        self.given = dict(values)
        head = config_value(text, "hidden_size"), config_value(text, "num_attention_heads")
        if (
            "head_dim" in _declared_keys(text)
            and config_value(text, "head_dim") is None
            and all(head)
        ):
            # If it is null, three rope types of transformers fail; a config that ropext writes sets
            # it.
            self.given = dict(values) | {"head_dim": head[0] // head[1]}
        self.values = {key: self.given[key] for key in self.given if key not in ROPE_KEYS}
        self.modules: dict[str, type[nn.Module]] = {}
        self.is_stored = False  # whether a checkpoint holds the frequencies, and loading uses them
        modules = child.text_modules(model, text)
        for _, module in modules:
            names = {name for name in module._buffers if name.endswith("inv_freq")}
            if names and child.is_rotation(module):
                self.modules[type(module).__name__] = type(module)
                self.is_stored |= not names <= module._non_persistent_buffers_set
        self.built = child.rotary_numbers(modules)
        self.labels = sorted({one["label"] for one in self.built}, key=_order_of_label)
        self.rope = config_value(text, "rope_parameters") or {}

    def inverse_frequencies(self, values: JsonObject) -> dict[str, list[float]]:
        """Return by label the inverse frequencies that the child process computes with the type's
        rotary modules from other values. Return an empty dict if the class refuses them."""
        try:
            config = type(self.text).from_dict(copy.deepcopy(dict(values)))
            built = [(name, module(config)) for name, module in self.modules.items()]
            return {one["label"]: one["inv_freq"] for one in self.child.rotary_numbers(built)}
        except Exception:  # the class may refuse a type, a size, or a key
            return {}

    def values_with_rope(self, entry: JsonObject, labels: Sequence[str]) -> dict[str, Json]:
        """Return the values with which the child process tests this rope dict on the type's rotary
        modules; if the type has labels, plain dicts for all other labels."""
        plain: dict[str, Json] = {"rope_type": "default", "rope_theta": 10000.0}
        if self.labels == [""]:
            return self.values | {"rope_parameters": plain | dict(entry)}
        dicts: dict[str, Json] = {key: None for key in self.rope if self.rope[key] is None}
        for label in self.labels:
            dicts[label] = plain | dict(entry) if label in labels else dict(plain)
        return self.values | {"rope_parameters": dicts}

    def pairs_by_label(self, values: JsonObject) -> dict[str, int]:
        """Return by label how many pairs the type's rotary modules turn if the child process builds
        them from these values."""
        return {
            label: len(inv_freq) for label, inv_freq in self.inverse_frequencies(values).items()
        }


def _order_of_label(label: str) -> tuple[bool, str]:
    """Return the key by which the child process sorts the labels of the rotary modules that it
    built: labels of layers with windows come first."""
    return not WINDOWED.search(label), label


def rotation_size_keys(embedding: ProbedEmbedding) -> dict[str, str]:
    """Return by label the config key that sizes the rotation: the child process doubles it, and
    transformers turns another number of pairs."""
    keys = dict.fromkeys(embedding.labels, "head_dim")
    values = embedding.given
    if "long_factor" in embedding.rope:  # one number for each pair, so no other size is possible
        values = embedding.values_with_rope({}, embedding.labels)
    usual = embedding.pairs_by_label(values)
    sizes = dict.fromkeys((key for key in VALUES if HEAD_KEY.search(key)), 64)
    sizes |= embedding.text.to_dict()
    for key, value in sizes.items():
        if not HEAD_KEY.search(key) or type(value) is not int:
            continue
        doubled = embedding.pairs_by_label(values | {key: 2 * value})
        for label, pairs in doubled.items():
            derived = key == "head_dim" and keys[label] != key  # from the key found before
            if pairs != usual.get(label, pairs) and not derived:
                keys[label] = key
    return keys


def partial_factor_keys(embedding: ProbedEmbedding) -> list[str]:
    """Return for the child's description the config keys of the partial factor that transformers'
    plain rotation follows; the class's own first.

    They are top-level keys. If only the rope dict's key has an effect, return that one name; if it
    has none, return no name.
    """
    inside = embedding.pairs_by_label(
        embedding.values_with_rope({"partial_rotary_factor": 0.5}, embedding.labels)
    )
    whole = embedding.pairs_by_label(
        embedding.values_with_rope({"partial_rotary_factor": 1.0}, embedding.labels)
    )
    if not inside or inside == whole:
        return []
    names = []
    for name in PARTIAL_KEYS:
        half = embedding.pairs_by_label(embedding.values | {name: 0.5})
        full = embedding.pairs_by_label(embedding.values | {name: 1.0})
        if half and half != full:
            names.append(name)
    own_first = sorted(names, key=lambda name: name not in _declared_keys(embedding.text))
    return own_first or ["partial_rotary_factor"]


def _declared_keys(config: PreTrainedConfig) -> list[str]:
    """Return the keys that a config class of transformers itself declares, for the child's
    description."""
    return list(getattr(type(config), "__dataclass_fields__", {}))


def theta_keys(embedding: ProbedEmbedding) -> dict[str, list[str]]:
    """Return by label the keys outside the rope dicts that, in tests by the child process, change
    transformers' theta; the class's own first."""
    names: dict[str, list[str]] = {label: [] for label in embedding.labels}
    usual = embedding.inverse_frequencies(embedding.values)
    candidates = [key for key in _declared_keys(embedding.text) if THETA_KEY.search(key)]
    for key in dict.fromkeys((*candidates, "rotary_emb_base", "rope_theta")):
        built = embedding.inverse_frequencies(embedding.values | {key: OTHER_THETA})
        for label, inv_freq in built.items():
            if label in names and inv_freq != usual.get(label):
                names[label].append(key)
    return names


def scaled_rope_dicts(pairs: int) -> dict[str, dict[str, Json]]:
    """Return one rope dict of each scaled type, with which the child process tries to build rotary
    modules of a class of transformers."""
    original: dict[str, Json] = {"factor": 4.0, "original_max_position_embeddings": SHORT}
    return {
        "linear": {"factor": 4.0},
        "yarn": original,
        "llama3": original | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "longrope": original | {"short_factor": [2.0] * pairs, "long_factor": [2.0] * pairs},
    }


def scaling_rope_types(embedding: ProbedEmbedding, labels: list[str]) -> list[str]:
    """Return for the child's description `default` and the rope types that a class of transformers
    takes and that change its frequencies."""
    plain = embedding.inverse_frequencies(embedding.values_with_rope({}, labels))
    pairs = len(plain.get(labels[0], ())) if labels else 0
    taken = ["default"]
    for kind, keys in scaled_rope_dicts(pairs).items():
        built = embedding.inverse_frequencies(
            embedding.values_with_rope({"rope_type": kind} | keys, labels)
        )
        if built and all(built.get(label) != plain.get(label) for label in labels):
            taken.append(kind)
    entries = [embedding.rope, *embedding.rope.values()]
    dicts = [entry for entry in entries if isinstance(entry, dict)]
    if any(entry.get("rope_type") == "proportional" for entry in dicts):
        return ["default", "proportional"]  # other types use its partial factor differently
    return taken


def has_unscaled_rotary(
    child: ModuleType,
    config: PreTrainedConfig,
    cls: type[PreTrainedModel],
    embedding: ProbedEmbedding,
) -> bool:
    """Return whether a second rotary module of the same label keeps its frequencies when the child
    process builds a scaled config."""
    before = embedding.built
    flat = embedding.labels == [""]
    if not flat or len(before) < 2:
        return False
    pairs = len(before[0]["inv_freq"])
    for kind, keys in scaled_rope_dicts(pairs).items():
        scaled = copy.deepcopy(config)
        text = scaled.get_text_config()
        plain: dict[str, Json] = {"rope_theta": 10000.0}
        text.rope_parameters = plain | embedding.rope | {"rope_type": kind} | keys
        try:
            after = child.rotary_numbers(
                child.text_modules(child.model_without_weights(cls, scaled), text)
            )
        except Exception:  # the class takes another of the types
            continue
        same = [one["inv_freq"] == two["inv_freq"] for one, two in zip(before, after, strict=True)]
        if not all(same):
            return any(same)
    return False


def cache_widths(
    child: ModuleType, model: PreTrainedModel, text: PreTrainedConfig
) -> list[int | None]:
    """Return by layer how many numbers of keys and values the projections of a model that the child
    process built make for each token.

    A layer has None if it has no key projection, or more than one.
    """
    found: dict[int, int | None] = {}
    for name, module in child.text_modules(model, text):
        keys = getattr(module, "k_proj", None)
        values = getattr(module, "v_proj", keys) or keys  # without one, the keys are the values
        numbers = [int(part) for part in name.split(".") if part.isdigit()]
        if not numbers or keys is None:
            continue
        layer = numbers[0]
        made = [getattr(one, "out_features", 0) for one in (keys, values)]
        one_attention = layer not in found and all(made)
        found[layer] = sum(made) if one_attention else None
    count = config_value(text, "num_hidden_layers") or 0
    return [found.get(layer) for layer in range(count)]


def is_interleaved(code: ModuleType) -> bool:
    """Return for the child's description whether a pair is two neighbouring dimensions, by the
    source of transformers' functions that rotate."""
    for name, function in vars(code).items():
        if not re.search("rotate|rotary|rope", name) or not inspect.isfunction(function):
            continue
        if NEIGHBOURS.search(inspect.getsource(function)):
            return True
    return False


def rotates_only_windows(text: PreTrainedConfig, rotates: Sequence[bool | None]) -> bool:
    """Return for the child's description whether the layers with windows of a small model rotate
    and no other attention layer does."""
    kinds = config_value(text, "layer_types") or []
    seen = {(bool(WINDOWED.search(k)), turns) for k, turns in zip(kinds, rotates, strict=False)}
    return {(True, True), (False, False)} <= seen and (False, True) not in seen


def family_row(embedding: ProbedEmbedding, cls: type[PreTrainedModel]) -> dict[str, Json]:
    """Return the child's description of a rotary type, as the fields of a family's row: how
    transformers' code reads its keys."""
    text = embedding.text
    code = sys.modules[cls.__module__]
    source = inspect.getsource(code)
    sizes = rotation_size_keys(embedding)
    thetas = theta_keys(embedding)
    partial = partial_factor_keys(embedding)
    scaled = [label for label in embedding.labels if not WINDOWED.search(label)]
    row: dict[str, Json] = {
        "forms": scaling_rope_types(embedding, scaled or embedding.labels),
        "softmax_mscale": "mscale_all_dim" in source,
        "interleaved": is_interleaved(code),
        "masked_lm": auto_class(text) == "AutoModelForMaskedLM",
        "mrope": "mrope_section" in source,
    }
    turns_in_part = bool(partial) and "proportional" not in row["forms"]
    turns_in_part = turns_in_part or any("qk_rope" in key for key in sizes.values())
    row["temperature"] = "rotated channels" if turns_in_part else "whole"
    if embedding.labels != [""]:
        row["labels"] = []
        pairs = embedding.pairs_by_label(embedding.given)
        still = [key for key in embedding.rope if embedding.rope[key] is None]
        for label in still:
            entry = {"name": label, "windowed": bool(WINDOWED.search(label))}
            row["labels"].append(entry | {"theta": "", "rotation": "head_dim"})
        for label in embedding.labels:
            entry = {"name": label, "windowed": bool(WINDOWED.search(label))}
            entry |= {"theta": (thetas[label] or [""])[0], "rotation": sizes[label]}
            entry["default"] = None if sizes[label] in embedding.given else 2 * pairs[label]
            row["labels"].append(entry)
        return row
    windowed = config_value(
        text, "sliding_window"
    ) is not None or "sliding_window" in _declared_keys(text)
    row["every_layer_windowed"] = windowed and not config_value(text, "layer_types")
    return row | {"theta": thetas[""] or ["rope_theta"], "partial": partial, "dim": sizes[""]}


def auto_class(config: PreTrainedConfig) -> str:
    """Return the auto class of transformers that the child process finds to load a type. Return ""
    if none lists it."""
    import transformers

    names = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForImageTextToText")
    for name in (*names, "AutoModelForMultimodalLM", "AutoModelForSeq2SeqLM", "AutoModel"):
        auto = getattr(transformers, name, None)
        if auto is not None and type(config) in auto._model_mapping:
            return name
    return ""


def path_to_text_config(config: PreTrainedConfig, text: PreTrainedConfig) -> list[str] | None:
    """Return the keys that lead from a config of transformers to its text part, for the child's
    description. Return None if it has no such part."""
    if config is text:
        return []
    for key in getattr(config, "sub_configs", {}):
        part = getattr(config, key, None)
        deeper = None if part is None else path_to_text_config(part, text)
        if deeper is not None:
            return [key, *deeper]
    return None


def describe_type(
    child: ModuleType, directory: str, config: PreTrainedConfig, cls: type[PreTrainedModel]
) -> TypeDescription:
    """Return the child's description of a config's types: how transformers reads their keys, and
    the numbers of this config."""
    text = config.get_text_config()
    path = path_to_text_config(config, text)
    if path is None:
        raise ValueError("its text part has no key of its own")
    values = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))
    for key in path:
        values = values.get(key) or {}
    model = child.model_without_weights(cls, config)
    embedding = ProbedEmbedding(child, model, text, values)
    forward = child.sibling_module("forward")
    seen: Turning = child.sibling_module("turning").rotating_layers(child, forward, model, text)
    facts: dict[str, Json] = {"scheme": "not computed", "auto_class": auto_class(text)}
    if embedding.modules:
        owners = [m for m in model.modules() if type(getattr(m, "config", None)) is type(text)]
        owner = cls
        if owners and path:
            owner = type(owners[0])
        row = family_row(embedding, owner)
        if seen["cancelled"]:
            row["temperature"] = "cancelled"
        row["rotates_only_windows"] = rotates_only_windows(text, seen["rotates"])
        facts |= {"scheme": "rotary", "row": row}
        if embedding.is_stored:
            facts["scheme"] = "hard-coded"
        elif has_unscaled_rotary(child, config, cls, embedding):
            facts["scheme"] = "twin"
        if not row["masked_lm"]:
            facts["widths"] = cache_widths(child, model, text)
        facts |= {"unseen": seen["unseen"], "rotates": seen["rotates"]}
        facts["defaults"] = defaults_of(type(text))
    types = {text.model_type: facts}
    if path:
        added = {}
        if len(path) == 1:  # sub_configs_defaults covers only the parts directly below a class
            added = values_added_by(type(config), path[0], text.model_type, type(text))
        composite = {"scheme": "composite", "path": path, "text": text.model_type, "added": added}
        types[config.model_type] = composite | {"auto_class": auto_class(config)}
    computed: BuiltNumbers = child.module_numbers(model, path)
    return {**computed, "types": types}
