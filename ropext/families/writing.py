"""Write new rope dicts into a config dict, in every spelling."""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from ropext.base.errors import NotExpressible
from ropext.base.jsontext import tagged
from ropext.families.config import defaults_of, text_part
from ropext.families.described import remember_facts
from ropext.families.geometry import TextConfig
from ropext.families.model import LENGTH_KEYS, Model
from ropext.families.params import (
    FORM_KEYS,
    LENGTHS,
    LISTS,
    QUERY_KEYS,
    follows_from_lengths,
    keep_query_scales,
    turning_share,
)
from ropext.families.table import Family, Label, family
from ropext.scaling import forms
from ropext.scaling.forms import ORIGINAL, Params
from ropext.scaling.rope import Rope, RopeSite

# Keys that a save by another program or a user may change, because no verified value depends on
# them.
FREE_KEYS = frozenset(
    ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")
)


def _json_value(key: str, value: Any) -> Any:
    """Return a value as config.json holds it: floats as floats, lengths as integers (vLLM tests the
    types), infinity as transformers spells it."""
    if key in LENGTHS:
        return int(value)
    if key in LISTS:
        return tagged([float(v) for v in value])
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return float(value) if key in FORM_KEYS or key == "partial_rotary_factor" else value


def _merged(site: RopeSite, new: Params, model: Model) -> Params:
    """Return a config's rope dict in the spelling of its model family: the new form's keys, and
    every other key unchanged."""
    new = keep_query_scales(site.params, new)
    remaining = {key: value for key, value in site.params.items() if key not in FORM_KEYS}
    if site.params["rope_type"] == "proportional":
        # There the factor counts rotating pairs; in every other form it would cut the head.
        remaining["partial_rotary_factor"] = 1.0
    out = {"rope_type": new["rope_type"], "rope_theta": new["rope_theta"]}
    out |= {key: value for key, value in new.items() if key not in out} | {
        key: value for key, value in remaining.items() if key not in new
    }
    out = as_written(model, out, site.rope)
    return {key: _json_value(key, value) for key, value in out.items()}


def as_written(model: Model, params: Params, rope: Rope) -> Params:
    """Return a rope dict with the keys that readers of a model family want in it, default or not.
    PhiMoE's forward pass reads three in every scaled form, and vLLM reads gpt-oss's betas."""
    row = family(model.text_type, model.described)
    if row.betas and params["rope_type"] == "yarn":
        return params | {"beta_fast": forms.BETA_FAST, "beta_slow": forms.BETA_SLOW} | params
    if params["rope_type"] == "default" or not row.mscale_keys:
        return params
    attention = forms.read_attention_factor(params)
    original = {ORIGINAL: rope.original_context}
    return {"short_mscale": attention, "long_mscale": attention} | original | params


def _legacy(modern: Params, row: Family, current: Any, target: int) -> Params | None:
    """Return the rope_scaling in config.json that transformers 4 and its kin read; None if theta
    says everything."""
    kind = modern["rope_type"]
    body = {
        key: value
        for key, value in modern.items()
        if key not in ("rope_type", "rope_theta", "partial_rotary_factor")
    }
    spelling = "rope_type" if row.legacy == "rope_type" or kind == "llama3" else "type"
    if kind == "default":
        if not body and not row.legacy_dict_always:
            return None
        # mrope_section and its like are read from this dict in 4.x, so it stays, with its type.
        if isinstance(current, dict) and not row.legacy_dict_always:
            spelling = "type" if "type" in current and "rope_type" not in current else "rope_type"
            if current.get("rope_type", current.get("type")) in ("default", "mrope"):
                kind = current.get(spelling, kind)
    three_keys = row.legacy == "three keys" and kind == "longrope"
    if three_keys and follows_from_lengths(modern, target):
        body = {key: body[key] for key in LISTS}
    return {spelling: kind, **body}


def _set_everywhere(text: dict[str, Any], paths: tuple[str, ...], value: float) -> None:
    """Write a number under a config key and its other spellings: the first always, the others if
    the config has them."""
    first, *others = paths
    text[first] = value
    for path in others:
        *parents, key = path.split(".")
        holder: Any = text
        for parent in parents:
            holder = holder.get(parent) if isinstance(holder, dict) else None
        if isinstance(holder, dict) and key in holder:
            holder[key] = value


def _write_flat(
    text: dict[str, Any],
    model: Model,
    stated: TextConfig,
    dicts: Mapping[str, Params],
    target: int,
) -> Params:
    """Write rope_scaling, rope_parameters and the top-level names of a flat config; return the rope
    dict."""
    row = stated.row
    site = model.scaled_sites[0]
    modern = _merged(site, dicts[site.label], model)
    _set_everywhere(text, row.theta, modern["rope_theta"])
    if row.partial and "partial_rotary_factor" in modern:
        _set_everywhere(text, row.partial, modern["partial_rotary_factor"])
    text["rope_scaling"] = _legacy(modern, row, text.get("rope_scaling"), target)
    text["rope_parameters"] = modern
    if row.non_rotating_key:
        share = turning_share(stated)
        modern["partial_rotary_factor"] = text["partial_rotary_factor"] = share
    return modern


def _write_listed(text: dict[str, Any], model: Model, dicts: Mapping[str, Params]) -> None:
    """Write theta per layer into layer_rope_theta (Granite with sliding windows); 0 stays 0."""
    shared = [{**dicts[s.label], "rope_theta": 0.0} for s in model.scaled_sites]
    if any(one != shared[0] for one in shared):
        raise NotExpressible(
            f"{model.text_type} has one rope dict for {len(shared)} thetas, and this scaling would"
            " need one for each; use --method pi or ntk"
        )
    moved = {s.rope.theta: float(dicts[s.label]["rope_theta"]) for s in model.scaled_sites}
    thetas = text.get("layer_rope_theta")
    if thetas is None:
        thetas = [model.scaled_sites[0].rope.theta] * (model.layers or 0)
    text["layer_rope_theta"] = [moved.get(float(t), float(t)) if t else t for t in thetas]


def _write_nested(
    text: dict[str, Any], model: Model, row: Family, dicts: Mapping[str, Params], target: int
) -> Params:
    """Write the nested rope_parameters, and legacy keys for its full-attention entry if a 4.x
    reader exists; return that entry."""
    current = text.get("rope_parameters")
    nested: dict[str, Any] = {}
    if isinstance(current, dict):
        labels = {label.name for label in row.labels}
        nested = {k: v for k, v in current.items() if k in labels or isinstance(v, dict)}
    elif row.rotates_only_windows:
        nested = {label.name: None for label in row.labels}
    for site in model.sites:
        if site.scaled:
            nested[site.label] = _merged(site, dicts[site.label], model)
        else:
            nested[site.label] = {k: _json_value(k, v) for k, v in site.params.items()}
    text["rope_parameters"] = nested
    for label in row.labels:
        entry = nested.get(label.name) or {}
        # the entry of a layer type that the model lacks stays as it was, and may have no theta
        if label.theta and "rope_theta" in entry and _keeps_theta(text, row, label):
            text[label.theta] = entry["rope_theta"]
    if row.legacy == "rope_type":
        full = nested.get(row.flat_into[0]) or {"rope_type": "default"}
        text["rope_scaling"] = _legacy(full, row, text.get("rope_scaling"), target)
    else:
        text.pop("rope_scaling", None)
    thetas = text.get("rope_theta")
    kinds = text.get("layer_types") or model.layer_types
    if row.shared and isinstance(thetas, list):
        # layers that predict further tokens may be unlisted
        pairs = zip(thetas, kinds, strict=False)
        text["rope_theta"] = [(nested.get(k) or {}).get("rope_theta", t) for t, k in pairs]
    elif row.legacy == "absent" and not any(label.theta for label in row.labels):
        text.pop("rope_theta", None)
    written: Params = nested[model.scaled_sites[0].label]
    return written


def _keeps_theta(text: Mapping[str, Any], row: Family, label: Label) -> bool:
    """Return whether the theta key of a layer type is written to config.json. 4.x names are if a
    4.x reader exists, class fields only if the config has them."""
    if row.legacy == "absent":
        return label.theta in text
    others = [x for x in row.labels if x.theta == label.theta]
    return label is others[-1]  # one name for both (OLMo 3): the full-attention entry holds it


def _write_sizes(text: dict[str, Any], model: Model, stated: TextConfig) -> None:
    """Write the key for the size of the rotation (head_dim, or the family's own) to config.json, if
    the config leaves it to a class."""
    row = stated.row
    name = stated.names_of(row.dim)[0]
    if stated.stated(row.dim) is not None or row.head_multiple:
        return
    added = defaults_of(model.model_type, model.described, composite=True)
    value = TextConfig(added | text, model.text_type, model.described).size(row.dim)
    if row.dim == "head_dim":
        hidden = stated.stated("hidden_size")
        heads = stated.stated("num_attention_heads")
        derived = hidden // heads if hidden and heads else None
        may_be_null = stated.defaults.get("head_dim_may_stay_null") or row.write_head_dim
        if value is None and not may_be_null and name not in text and derived == model.head_dim:
            return  # every version derives it from keys of the config
        value = model.head_dim
    if value is not None:
        text[name] = value


def write(
    config: dict[str, Any], model: Model, params: Mapping[str, Params], target: int
) -> dict[str, Any]:
    """Return a new config that gives `params` for the scaled embeddings and reads `target` tokens.

    `params` maps a site's label to a stock dict of form keys; every other key of the config stays.
    """
    out = copy.deepcopy(config)
    text = text_part(out, model.path)
    stated = TextConfig(text, model.text_type, model.described)
    row = stated.row
    if row.labels:
        modern = _write_nested(text, model, row, params, target)
    else:
        modern = _write_flat(text, model, stated, params, target)
        if row.layer_thetas:
            _write_listed(text, model, params)
    original = modern.get(ORIGINAL)
    if original is not None and (
        modern["rope_type"] == "longrope" or ORIGINAL in text or ORIGINAL in stated.defaults
    ):
        # Longrope's readers want it at top level; if it is there, it must agree.
        text[ORIGINAL] = original
    _write_sizes(text, model, stated)
    # The target under the class's name for it, and in every key with the old length.
    names = stated.names_of("max_position_embeddings")
    text[next((name for name in names if name in text), names[0])] = target
    old = (model.context, model.stated_context)
    for holder in (text, out):
        for key in LENGTH_KEYS:
            if type(holder.get(key)) is int and holder[key] in old:
                holder[key] = target
    if model.described:
        remember_facts(out, model.described)
    return out


def unexpected_changes(model: Model, changed: Iterable[str]) -> list[str]:
    """Return the keys among `changed` that an extension never writes to this family's config.
    transformers reads them differently from the base's. They scale queries or logits, name the
    rotating layers, or are sizes."""
    row = family(model.text_type, model.described)
    names = {*FORM_KEYS, *LENGTH_KEYS, *FREE_KEYS, *row.partial, row.dim}
    names |= {"partial_rotary_factor", "head_dim", "rope_scaling", "layer_rope_theta"}
    names |= {path.rpartition(".")[2] for path in row.theta}
    names |= {label.theta for label in row.labels}
    names |= {label.name for label in row.labels}  # a dict that was left to the class
    own = TextConfig({}, model.text_type, model.described)
    for key in ("max_position_embeddings", "head_dim"):
        names |= set(own.names_of(key))
    kept = set[str]()
    for site in model.sites:
        for scale in QUERY_KEYS:
            if site.params.get(scale.key):
                kept |= {scale.key, *scale.beside}
    unexpected = []
    for key in changed:
        holder, _, name = key.rpartition(".")
        if name not in names or ("rope_parameters" in holder.split(".") and name in kept):
            unexpected.append(key)
    return unexpected
