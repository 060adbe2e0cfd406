"""A config dict in, its rotary embeddings out."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ropext import forms
from ropext.errors import InputError, UnsupportedModel
from ropext.families import data
from ropext.families.describing import describe
from ropext.families.geometry import Sizes, attends, is_windowed, rotary_dim, sizes
from ropext.families.lengths import NAMED, Lengths, Told, lengths
from ropext.families.locating import locate, text_part
from ropext.families.model import Model, Site
from ropext.families.params import Conflict, Found, read_flat, read_nested
from ropext.families.table import Family, Label, family
from ropext.families.typed import Dict
from ropext.forms import Params
from ropext.rope import Rope

UNTOLD = Told()


def read(
    config: dict[str, Any], *, context: int | None = None, original: int | None = None
) -> Model:
    """What a config says about positions; `context` replaces a trained length that it misstates,
    `original` is the one before its scaling, where it does not say that."""
    model, conflicts = interpret(config, Told(context, original))
    if conflicts:
        raise InputError(conflicts[0].sentence())
    return model


def interpret(config: dict[str, Any], told: Told = UNTOLD) -> tuple[Model, tuple[Conflict, ...]]:
    """What stock transformers 5 makes of a config, and where its spellings contradict that."""
    model_type, text_type, path = locate(config)
    row, defaults = family(text_type), data.defaults(text_type)
    for part in (config, text_part(config, path)):
        Dict(part).object("quantization_config")  # decides how weights are carried and compared
    text = Dict(_with_added(model_type, text_part(config, path)), ".".join(path))
    _check_gate(text, text_type, row)
    _check_theta(text, text_type, row)
    sized = sizes(text, row, defaults, told.context)
    found = (read_nested if row.labels else read_flat)(text, row, defaults)
    sites = _sites(text, row, found, sized, defaults)
    if not any(site.scaled for site in sites):
        raise UnsupportedModel(f"{text_type!r} as configured rotates nothing that could be scaled")
    spans = [_lengths(site, text, row, sized.context, told) for site in sites]
    sites = tuple(
        replace(site, rope=replace(site.rope, context=span.now, original_context=span.original))
        for site, span in zip(sites, spans, strict=True)
    )
    notes = [span.note for span in spans if span.note]
    if config.get("auto_map"):
        notes.append(
            "auto_map names model code of its own; ropext speaks of the stock class of this type"
        )
    model = describe(model_type, text_type, path, sites, sized, text, row, defaults, notes)
    asks_context = next((span.asks_context for span in spans if span.asks_context), "")
    asks_original = next((span.asks_original for span in spans if span.asks_original), "")
    model = replace(model, asks_context=asks_context, asks_original=asks_original)
    return model, found.conflicts


def _lengths(site: Site, text: Dict, row: Family, stated: int, told: Told) -> Lengths:
    if site.scaled:
        return lengths(text, row, site.params, stated, site.rope.original_context, told)
    now = told.context or stated
    return Lengths(now, site.rope.original_context if site.params["rope_type"] in NAMED else now)


def _with_added(model_type: str, part: dict[str, Any]) -> dict[str, Any]:
    """The text config with what its composite adds; a theta in a rope dict comes before that."""
    added = data.added(model_type)
    dicts = [part.get("rope_parameters"), part.get("rope_scaling")]
    if any(isinstance(d, dict) and d for d in dicts):
        added = {key: value for key, value in added.items() if key != "rope_parameters"}
    if any(isinstance(d, dict) and d.get("rope_theta") is not None for d in dicts):
        added = {key: value for key, value in added.items() if key != "rope_theta"}
    return added | part


def _check_gate(text: Dict, text_type: str, row: Family) -> None:
    gate = row.gate
    if gate is None:
        return
    value = text.values.get(gate.key, False if isinstance(gate.value, bool) else None)
    if value != gate.value:
        raise UnsupportedModel(f"{text_type!r} {gate.sentence}, so there is nothing to scale")


def _check_theta(text: Dict, text_type: str, row: Family) -> None:
    """Where a theta of null means no rotation (everywhere else it means the class default)."""
    rope = text.object("rope_parameters")
    given = [holder for holder in (text, rope) if holder and "rope_theta" in holder.values]
    if row.null_theta_stops and given and not any(h.has("rope_theta") for h in given):
        raise UnsupportedModel(
            f"{text_type!r} rotates only where rope_theta is set; it is null, so there is nothing"
            " to scale"
        )


def _top_original(text: Dict, defaults: Mapping[str, Any]) -> int | None:
    """Phi-3's way: at top level, it overrides the dict's original length (a class field there)."""
    own = text.integer("original_max_position_embeddings")
    default: int | None = defaults.get("original_max_position_embeddings")
    return own if own is not None else default


def _rope(text: Dict, row: Family, dim: int, params: Params, sized: Sizes, nested: bool) -> Rope:
    stated = sized.context
    kind = params["rope_type"]
    factors = forms.read_pair_factors(params, dim, stated, nested=nested)
    attention = forms.read_attention_factor(params, stated)
    if row.mscale_keys and kind != "default" and "long_mscale" in params:
        attention = params["long_mscale"]
    scaled_softmax = row.softmax_mscale
    keeps_mscale = kind == "yarn" or scaled_softmax
    # Stock PhiMoE reads the short set at every length: an extension must write one set, the long.
    short = () if row.mscale_keys else forms.read_short_pair_factors(params, dim)
    return Rope(
        dim=dim,
        theta=params["rope_theta"],
        context=stated,
        original_context=params["original_max_position_embeddings"] if kind in NAMED else stated,
        pair_factors=() if kind == "default" else factors,
        short_pair_factors=short,
        attention_factor=attention,
        mscale=params.get("mscale", 0.0) if keeps_mscale else 0.0,
        mscale_all_dim=params.get("mscale_all_dim", 0.0) if keeps_mscale else 0.0,
        softmax_mscale=scaled_softmax,
        softmax_factor=forms.softmax_factor(params) if scaled_softmax else 1.0,
        nested=nested,
    )


def _complete(params: Params, text: Dict, defaults: Mapping[str, Any], stated: int) -> Params:
    """Fill in what stock fills in: the original length, and factors that follow from it."""
    kind = params["rope_type"]
    if kind not in NAMED:
        return params
    original = _top_original(text, defaults) or params.get("original_max_position_embeddings")
    out = params | {"original_max_position_embeddings": original or stated}
    if "factor" not in out and kind in ("yarn", "longrope"):
        out["factor"] = stated / out["original_max_position_embeddings"]
    return out


def _check_form(params: Params, dim: int) -> None:
    """What would divide by zero in the form's arithmetic."""
    kind = params["rope_type"]
    if params["rope_theta"] <= 1:
        raise InputError(f"config.json: rope_theta must be above 1, was {params['rope_theta']:g}")
    if kind == "longrope" and params["original_max_position_embeddings"] < 2:
        raise InputError(
            "config.json: original_max_position_embeddings of a longrope must be at least 2 (its"
            " logarithm divides)"
        )
    if kind == "dynamic" and params.get("alpha") and dim == 2:
        raise InputError("config.json: alpha changes theta, which a rotary dim of 2 does not have")


def _site(
    text: Dict,
    row: Family,
    label: Label | None,
    params: Params,
    sized: Sizes,
    defaults: Mapping[str, Any],
) -> Site:
    params = _complete(params, text, defaults, sized.context)
    if "rope_theta" not in params:
        raise InputError(
            f"config.json: rope_theta of {label.name if label else 'the model'} is missing"
        )
    dim = rotary_dim(text, row, label, params, sized, defaults)
    _check_form(params, dim)
    rope = _rope(text, row, dim, params, sized, label is not None)
    layers = None
    if label is None:
        layers = _rotating_layers(row, sized)
    elif sized.layer_types:
        layers = sum(kind in (label.layer_types or (label.name,)) for kind in sized.layer_types)
    return Site(label.name if label else "", rope, params, layers, True)


def _rotating_layers(row: Family, sized: Sizes) -> int | None:
    if not sized.layer_types:
        return sized.layers and sized.layers - sized.nope_layers
    kinds = [kind for kind in sized.layer_types if attends(kind)]
    if row.rotates_only_windows and sized.window:
        return sum(is_windowed(kind) for kind in kinds)
    return len(kinds) - min(sized.nope_layers, len(kinds))


def _sites(
    text: Dict,
    row: Family,
    found: Found,
    sized: Sizes,
    defaults: Mapping[str, Any],
) -> tuple[Site, ...]:
    if not row.labels:
        params = found.params[""]
        assert params is not None  # a flat family always has a dict
        if row.layer_thetas and sized.layer_thetas:
            return _listed_sites(text, row, params, sized, defaults)
        return (_site(text, row, None, params, sized, defaults),)
    sites = []
    for label in row.labels:
        params = found.params[label.name]
        if params is None:
            continue
        site = _site(text, row, label, params, sized, defaults)
        if site.layers != 0 or label.layer_types:
            sites.append(replace(site, scaled=not label.windowed))
    if sites and not any(site.scaled for site in sites):
        return tuple(replace(site, scaled=True) for site in sites)
    return tuple(sites)


def _listed_sites(
    text: Dict, row: Family, params: Params, sized: Sizes, defaults: Mapping[str, Any]
) -> tuple[Site, ...]:
    """One embedding per theta in layer_rope_theta (0 = these layers do not rotate)."""
    thetas = sorted({theta for theta in sized.layer_thetas if theta})
    if thetas and thetas[-1] == math.inf:
        raise InputError("config.json: layer_rope_theta must hold finite numbers")
    if not thetas:
        raise UnsupportedModel("layer_rope_theta is 0 for every layer, so nothing rotates")
    sites = []
    for theta in thetas:
        site = _site(text, row, None, params | {"rope_theta": theta}, sized, defaults)
        label = "" if len(thetas) == 1 else f"theta {theta:g}"
        sites.append(replace(site, label=label, layers=sized.layer_thetas.count(theta)))
    return tuple(sites)
