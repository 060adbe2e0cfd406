"""A config dict in, its rotary embeddings out."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ropext import forms
from ropext.errors import InputError, UnsupportedModel
from ropext.families import config
from ropext.families.config import Dict, added_by, defaults_of, locate, shown, text_part
from ropext.families.geometry import (
    Sizes,
    attends,
    is_windowed,
    kv_values,
    partial_factor,
    rotary_dim,
    sizes,
)
from ropext.families.lengths import NAMED, Lengths, Told, lengths
from ropext.families.model import Model, Site
from ropext.families.params import Conflict, Found, read_flat, read_nested
from ropext.families.table import LOGIT_SCALES, Family, Label, family
from ropext.forms import Params
from ropext.rope import Rope


def observe(
    text_type: str, row: Family, sized: Sizes, sites: tuple[Site, ...], context: int
) -> tuple[list[str], list[str], int | None]:
    """Notes, obstacles and the reach that windows leave."""
    notes = [row.remark] if row.remark else []
    obstacles: list[str] = []
    kinds = [kind for kind in sized.layer_types if attends(kind)]
    windowed = sum(is_windowed(kind) for kind in kinds)
    everywhere = row.every_layer_windowed or (bool(kinds) and windowed == len(kinds))
    reach = None
    if sized.window and everywhere:
        layers = len(kinds) or sized.layers or 1
        reach = layers * (sized.window - 1) + 1
        sentence = (
            f"every layer sees a window of {sized.window} tokens, so the model reaches"
            f" {reach} tokens at most"
        )
        if sized.window <= context:
            obstacles.append(
                f"{sentence}, and no distance beyond the window is ever rotated; scaling cannot"
                " help unless sliding_window is lifted"
            )
        else:
            notes.append(sentence)
    elif sized.window and windowed:
        sentence = f"{windowed} of {len(kinds)} attention layers see {sized.window} tokens only"
        if not row.labels and not row.rotates_only_windows:
            sentence += "; they share one rotary embedding with the others and are scaled with them"
        notes.append(sentence)
    if row.rotates_only_windows and (sized.window or row.labels):
        obstacles.append(
            f"{text_type} rotates in its windowed layers only and its full-attention layers have no"
            " positions; scaling would move trained local layers and lengthen nothing"
        )
    return notes, obstacles, reach


def departures(row: Family, text: Dict, sites: tuple[Site, ...]) -> list[str]:
    """Where stock transformers computes another spectrum than the authors' own code."""
    stock = f"stock transformers {config.version()} differs from the authors here"
    out = []
    for site in sites:
        short, long = site.params.get("short_factor"), site.params.get("long_factor")
        if row.mscale_keys and short != long:
            out.append(
                f"{stock}: it reads the short factors at every length, their code the long ones "
                f"beyond {site.rope.original_context} tokens, which is what is extended"
            )
    theta = text.number("rope_theta", most=forms.LARGEST_THETA)
    for label, site in ((label, s) for label in row.labels for s in sites if s.label == label.name):
        if row.one_theta and not label.theta and theta and site.rope.theta != theta:
            out.append(
                f"{stock}: its {site.label} layers keep theta {site.rope.theta:g}, their code has "
                f"the one rope_theta of {theta:g} in all layers"
            )
    return out


def logit_scales(text: Dict, row: Family, sites: tuple[Site, ...]) -> list[str]:
    """One note of every key beside the spectrum that scales queries, logits or the softmax."""
    ropes: list[Mapping[str, Any]] = [site.params for site in sites if site.scaled]
    named = []
    for scale in LOGIT_SCALES:
        if scale.key == "mscale_all_dim" and not row.softmax_mscale:
            continue  # other families read the pair as a part of the attention factor
        holders = ropes if scale.in_rope else [text.values]
        values = next((held for held in holders if held.get(scale.key)), None)
        if values is not None:
            own = [k for k in (scale.key, *scale.beside) if values.get(k) is not None]
            said = ", ".join(f"{key} {shown(values[key])}" for key in own)
            named.append(f"{said} ({scale.does})")
    return [f"kept as it stands, beside the spectrum: {'; '.join(named)}"] if named else []


def _forms(row: Family, sites: tuple[Site, ...], notes: list[str]) -> tuple[str, ...]:
    """The rope types that this config may be written with."""
    for site in sites:
        asked = site.params.get("partial_rotary_factor", 1.0)
        if not (row.partial or row.labels) and asked != 1:
            notes.append(
                f"partial_rotary_factor {asked:g} is ignored by this family in plain RoPE, but not"
                " in scaled types, so only theta can change"
            )
            return ("default",)
    return row.forms


def describe(
    model_type: str,
    text_type: str,
    path: tuple[str, ...],
    sites: tuple[Site, ...],
    sized: Sizes,
    text: Dict,
    row: Family,
    defaults: Mapping[str, Any],
    notes: list[str],
) -> Model:
    context = max(site.rope.context for site in sites if site.scaled)
    more, obstacles, reach = observe(text_type, row, sized, sites, context)
    notes += [*more, *departures(row, text, sites), *logit_scales(text, row, sites)]
    allowed = _forms(row, sites, notes)
    growing, windowed = kv_values(text, row, sized, defaults)
    whole = all(partial_factor(row, s.params) == 1 for s in sites) and row.dim == "head_dim"
    temperature = row.temperature
    if temperature == "rotated channels" and whole:
        temperature = "whole"
    kinds = [kind for kind in sized.layer_types if attends(kind)]
    rotating = sum(site.layers or 0 for site in sites)
    return Model(
        model_type=model_type,
        text_type=text_type,
        path=path,
        sites=sites,
        context=context,
        stated_context=sized.context,
        layers=sized.layers,
        hidden_size=sized.hidden,
        heads=sized.heads,
        kv_heads=sized.kv_heads,
        head_dim=sized.head_dim,
        vocab_size=sized.vocab,
        layer_types=sized.layer_types,
        sliding_window=sized.window,
        nope_layers=max(0, len(kinds) - rotating),
        interleaved=row.interleaved,
        masked_lm=row.masked_lm,
        forms=allowed,
        temperature=temperature,
        reach=reach,
        kv_values_per_token=growing,
        kv_values_windowed=windowed,
        notes=tuple(dict.fromkeys(notes)),
        obstacles=tuple(obstacles),
    )


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
    row, defaults = family(text_type), defaults_of(text_type)
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
    added = added_by(model_type)
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
