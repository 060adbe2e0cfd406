"""A config dict in, what it says about positions out."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ropext import forms
from ropext.errors import InputError, UnsupportedModel
from ropext.families import data
from ropext.families.geometry import (
    Sizes,
    attends,
    is_windowed,
    kv_values,
    partial_factor,
    rotary_dim,
    sizes,
)
from ropext.families.model import Model, Site
from ropext.families.params import Found, read_flat, read_nested
from ropext.families.table import Family, Label, family
from ropext.families.typed import Dict, shown
from ropext.forms import Params
from ropext.rope import Rope


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
            f"config.json: model_type {kind!r} comes with code of its own (auto_map), which ropext"
            " cannot verify; only model types of stock transformers are extended"
        )
    return (
        f"config.json: model_type {kind!r} is not among the model types of transformers"
        f" {data.version()}; check the spelling, or extend it with a newer ropext"
    )


def text_part(config: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    part: dict[str, Any] = config
    for key in path:
        part = part[key]
    return part


def read(config: dict[str, Any], *, context: int | None = None) -> Model:
    """What a config says about positions; `context` replaces a trained length that it misstates."""
    model_type, text_type, path = locate(config)
    row, defaults = family(text_type), data.defaults(text_type)
    text = Dict(text_part(config, path), ".".join(path))
    _check_gate(text, text_type, row)
    sized = sizes(text, row, defaults, context)
    found = (read_nested if row.labels else read_flat)(text, row, defaults)
    if found.conflicts:
        raise InputError(found.conflicts[0].sentence())
    notes: list[str] = []
    sites = _sites(text, row, found, sized, defaults, notes)
    if not any(site.scaled for site in sites):
        raise UnsupportedModel(f"{text_type!r} as configured rotates nothing that could be scaled")
    sites = _with_context(sites, sized, context, notes)
    if config.get("auto_map"):
        notes.append(
            "auto_map names model code of its own; ropext speaks of the stock class of this type"
        )
    return _model(model_type, text_type, path, sites, sized, text, row, defaults, notes)


def _check_gate(text: Dict, text_type: str, row: Family) -> None:
    gate = row.gate
    if gate is None:
        return
    value = text.values.get(gate.key, False if isinstance(gate.value, bool) else None)
    if value != gate.value:
        raise UnsupportedModel(f"{text_type!r} {gate.sentence}, so there is nothing to scale")


def _top_original(text: Dict, defaults: Mapping[str, Any]) -> int | None:
    """Phi-3's way: at top level, it overrides the dict's original length (a class field there)."""
    own = text.integer("original_max_position_embeddings")
    default: int | None = defaults.get("original_max_position_embeddings")
    return own if own is not None else default


def _rope(text: Dict, row: Family, dim: int, params: Params, sized: Sizes, nested: bool) -> Rope:
    stated = sized.context
    original = params.get("original_max_position_embeddings") or stated
    kind = params["rope_type"]
    if kind == "linear":
        original = max(1, round(stated / params["factor"])) if "factor" in params else stated
    elif kind in ("default", "dynamic", "proportional"):
        original = stated
    attention = forms.read_attention_factor(params, stated)
    if row.mscale_keys and kind != "default" and "long_mscale" in params:
        attention = params["long_mscale"]
    scaled_softmax = row.softmax_mscale
    keeps_mscale = kind == "yarn" or scaled_softmax
    return Rope(
        dim=dim,
        theta=params["rope_theta"],
        context=stated,
        original_context=original,
        pair_factors=forms.read_pair_factors(params, dim, stated, nested=nested),
        short_pair_factors=forms.read_short_pair_factors(params, dim),
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
    if kind not in ("yarn", "longrope", "llama3"):
        return params
    original = _top_original(text, defaults) or params.get("original_max_position_embeddings")
    out = params | {"original_max_position_embeddings": original or stated}
    if "factor" not in out and kind in ("yarn", "longrope"):
        out["factor"] = stated / out["original_max_position_embeddings"]
    return out


def _check_form(params: Params, dim: int) -> None:
    """What would divide by zero or mismatch in the form's arithmetic."""
    kind = params["rope_type"]
    missing = [key for key in forms.REQUIRED.get(kind, ()) if key not in params]
    if missing:
        raise InputError(f"config.json: the rope dict of type {kind} lacks {', '.join(missing)}")
    if kind == "longrope":
        for key in ("short_factor", "long_factor"):
            if len(params[key]) != dim // 2:
                raise InputError(
                    f"config.json: {key} has {len(params[key])} numbers, but this model rotates"
                    f" {dim // 2} pairs"
                )
    if kind == "llama3" and params["low_freq_factor"] >= params["high_freq_factor"]:
        raise InputError("config.json: low_freq_factor must be below high_freq_factor")
    if params.get("original_max_position_embeddings", 2) < 2:
        raise InputError("config.json: original_max_position_embeddings must be at least 2")
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
    if params.get("rope_theta", 0) <= 1:
        raise InputError(
            f"config.json: rope_theta must be above 1, was {params.get('rope_theta')!r}"
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
        return sized.layers
    kinds = [kind for kind in sized.layer_types if attends(kind)]
    if row.rotates_only_windows:
        return sum(is_windowed(kind) for kind in kinds)
    return len(kinds)


def _sites(
    text: Dict,
    row: Family,
    found: Found,
    sized: Sizes,
    defaults: Mapping[str, Any],
    notes: list[str],
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
    if not thetas:
        raise UnsupportedModel("layer_rope_theta is 0 for every layer, so nothing rotates")
    sites = []
    for theta in thetas:
        site = _site(text, row, None, params | {"rope_theta": theta}, sized, defaults)
        label = "" if len(thetas) == 1 else f"theta {theta:g}"
        sites.append(replace(site, label=label, layers=sized.layer_thetas.count(theta)))
    return tuple(sites)


def _with_context(
    sites: tuple[Site, ...], sized: Sizes, context: int | None, notes: list[str]
) -> tuple[Site, ...]:
    """Settle how many tokens each scaled embedding reads now."""
    out = []
    for site in sites:
        now = context or (_context(site, sized.context, notes) if site.scaled else sized.context)
        original = site.rope.original_context
        if site.params["rope_type"] in ("default", "dynamic", "proportional"):
            original = now
        out.append(replace(site, rope=replace(site.rope, context=now, original_context=original)))
    return tuple(out)


def _context(site: Site, stated: int, notes: list[str]) -> int:
    kind, factor = site.params["rope_type"], site.params.get("factor") or 1.0
    if kind in ("yarn", "longrope", "llama3"):
        original = site.rope.original_context
        if stated == original and factor > 1:
            extended = round(original * factor)
            notes.append(
                f"max_position_embeddings is the original {original}; with its {kind} factor"
                f" {factor:g} the model reads {extended} tokens"
            )
            return extended
    if kind == "linear" or (kind == "dynamic" and not site.params.get("alpha")):
        notes.append(
            f"with {kind} scaling max_position_embeddings {stated} may be the length before or"
            " after it; it is taken as the context, --context says otherwise"
        )
    if kind == "dynamic":
        notes.append(
            "HunYuan's alpha is a fixed change of theta and is read as one"
            if site.params.get("alpha")
            else "dynamic scaling keeps state between calls; inside the context it is plain RoPE"
        )
    return stated


def _observations(
    text_type: str, row: Family, sized: Sizes, sites: tuple[Site, ...], context: int
) -> tuple[list[str], list[str], int | None]:
    """Notes, obstacles and the reach that windows leave."""
    notes: list[str] = []
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
        notes.append(f"{windowed} of {len(kinds)} attention layers see {sized.window} tokens only")
    if row.rotates_only_windows and (sized.window or row.labels):
        obstacles.append(
            f"{text_type} rotates in its windowed layers only and its full-attention layers have no"
            " positions; scaling would move trained local layers and lengthen nothing"
        )
    if any(s.rope.softmax_factor != 1 for s in sites):
        notes.append("its rope dict also scales the softmax (mscale_all_dim), which is kept")
    return notes, obstacles, reach


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


def _model(
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
    more, obstacles, reach = _observations(text_type, row, sized, sites, context)
    notes += more
    allowed = _forms(row, sites, notes)
    growing, windowed = kv_values(text, sized, defaults)
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
