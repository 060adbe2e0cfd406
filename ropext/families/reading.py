"""A config dict in, its rotary embeddings out."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ropext import forms
from ropext.errors import InputError, UnsupportedModel
from ropext.families import config
from ropext.families.config import Dict, added_by, facts_of, locate, shown, text_part
from ropext.families.described import Facts, Numbers
from ropext.families.geometry import (
    TextConfig,
    attends,
    is_windowed,
    kv_layers,
    partial_factor,
    rotary_dim,
)
from ropext.families.lengths import NAMED, Lengths, lengths
from ropext.families.model import Model, Problem
from ropext.families.params import read_flat, read_nested
from ropext.families.table import LOGIT_SCALES, Label, is_mrope
from ropext.forms import Params
from ropext.rope import Rope, RopeSite

# How many layers predict further tokens, as DeepSeek, Qwen and MiniMax call it.
PREDICTING = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")

# Of a number that stock computes in float32; the proof of an extension is stricter.
STOCK_BOUND = 1e-4


def observe(text: TextConfig, context: int) -> tuple[list[str], list[str], int | None]:
    """Say what windows mean for an extension: notes, obstacles, and the reach that they leave."""
    row = text.row
    sizes = text.sizes
    notes = [f"[family] {row.remark}"] if row.remark else []
    obstacles: list[str] = []
    kinds = [kind for kind in sizes.layer_types if attends(kind)]
    windowed = sum(is_windowed(kind) for kind in kinds)
    everywhere = row.every_layer_windowed or (bool(kinds) and windowed == len(kinds))
    reach = None
    if sizes.window and everywhere:
        layers = len(kinds) or sizes.layers or 1
        reach = layers * (sizes.window - 1) + 1
        sentence = (
            f"[windowed] every layer sees a window of {sizes.window} tokens, so the model reaches"
            f" {reach} tokens at most"
        )
        if sizes.window <= context:
            obstacles.append(
                f"{sentence}, and no distance beyond the window is ever rotated; scaling cannot"
                " help unless sliding_window is lifted"
            )
        else:
            notes.append(sentence)
    elif sizes.window and windowed:
        few = f"{windowed} of {len(kinds)} attention layers"
        sentence = f"[windowed] {few} see {sizes.window} tokens only"
        if not row.labels and not row.rotates_only_windows:
            sentence += "; they share one rotary embedding with the others and are scaled with them"
        notes.append(sentence)
    only_windows = bool(row.rotates_only_windows and (sizes.window or row.labels))
    if sizes.rotates and text.has("layer_rope_theta"):
        layers_that_rotate = zip(sizes.layer_types, sizes.rotates, strict=False)
        turning = [is_windowed(kind) for kind, turns in layers_that_rotate if turns]
        only_windows = bool(turning) and all(turning) and windowed < len(kinds)
    if only_windows:
        obstacles.append(
            f"[windowed] {text.type} rotates in its windowed layers only and its full-attention "
            "layers have no positions; scaling would move trained local layers and lengthen nothing"
        )
    return notes, obstacles, reach


def rope_dicts(text: TextConfig) -> list[Dict | None]:
    return [text.object("rope_scaling"), text.object("rope_parameters")]


def departures(
    text: TextConfig, sites: tuple[RopeSite, ...]
) -> tuple[list[str], tuple[RopeSite, ...]]:
    """Say where stock transformers computes another spectrum than the authors' own code, and give
    the embeddings that stock has where they are not the ones extended."""
    stock = f"[authors-code] stock transformers {config.version()} differs from the authors here"
    out = []
    built = {site.label: site for site in sites}
    for site in sites:
        short = site.params.get("short_factor")
        long = site.params.get("long_factor")
        if text.row.mscale_keys and short != long:
            out.append(
                f"{stock}: it reads the short factors at every length, their code the long ones "
                f"beyond {site.rope.original_context} tokens, which is what is extended"
            )
            # Its module holds both sets; its forward pass reads the short one.
            rope = replace(site.rope, short_pair_factors=tuple(short or ()))
            built[site.label] = site.of(rope)
    unread = next((path for path in text.row.theta if "." in path), "")
    listed = not (text.row.one_theta or unread)  # one theta for each layer, which all of them read
    theta = None if listed else text.number("rope_theta", most=forms.LARGEST_THETA)
    dicts = rope_dicts(text)
    if unread and theta is None and not any(d and d.has("rope_theta") for d in dicts):
        holder, key = text.at(unread)
        if holder.has(key):
            out.append(
                f"{stock}: it ignores {unread} and runs the base at theta "
                f"{text.defaults['theta']:g}, their code has {sites[0].rope.theta:g}, which is "
                "what is extended"
            )
            theirs = {"rope_theta": text.defaults["theta"]}
            rope = replace(sites[0].rope, theta=theirs["rope_theta"])
            read_by_stock = replace(sites[0], params=sites[0].params | theirs)
            built[sites[0].label] = read_by_stock.of(rope)
    keyless = [label.name for label in text.row.labels if text.row.one_theta and not label.theta]
    for site in sites:
        if site.label in keyless and theta and site.rope.theta != theta:
            out.append(
                f"{stock}: its {site.label} layers keep theta {site.rope.theta:g}, their code has "
                f"the one rope_theta of {theta:g} in all layers"
            )
    return out, tuple(built.values())


def logit_scales(text: TextConfig, sites: tuple[RopeSite, ...]) -> list[str]:
    """Note every key beside the spectrum that scales queries, logits or the softmax."""
    ropes: list[Mapping[str, Any]] = [site.params for site in sites if site.scaled]
    named = []
    for scale in LOGIT_SCALES:
        if scale.key == "mscale_all_dim" and not text.row.softmax_mscale:
            continue  # other families read the pair as a part of the attention factor
        holders = ropes if scale.in_rope else [text.values]
        values = next((held for held in holders if held.get(scale.key)), None)
        if values is not None:
            keys = [k for k in (scale.key, *scale.beside) if values.get(k) is not None]
            settings = ", ".join(f"{key} {shown(values[key])}" for key in keys)
            named.append(f"{settings} ({scale.does})")
    kept = f"[kept-keys] kept as it stands, beside the spectrum: {'; '.join(named)}"
    return [kept] if named else []


def _forms(text: TextConfig, sites: tuple[RopeSite, ...], notes: list[str]) -> tuple[str, ...]:
    """The rope types that this config may be written with."""
    row = text.row
    for site in sites:
        factor = site.params.get("partial_rotary_factor", 1.0)
        if not (row.partial or row.labels) and factor != 1:
            notes.append(
                f"[partial] partial_rotary_factor {factor:g} is ignored by this family in plain "
                "RoPE, but not in scaled types, so only theta can change"
            )
            return ("default",)
    return row.forms


def describe(
    text: TextConfig,
    model_type: str,
    path: tuple[str, ...],
    sites: tuple[RopeSite, ...],
    spans: list[Lengths],
    notes: list[str],
) -> Model:
    """The model of these embeddings, with what is to be said about it."""
    row = text.row
    sizes = text.sizes
    context = max(site.rope.context for site in sites if site.scaled)
    more, obstacles, reach = observe(text, context)
    departing, built = departures(text, sites)
    notes += more
    notes += departing
    notes += logit_scales(text, sites)
    allowed = _forms(text, sites, notes)
    whole = all(partial_factor(text, s.params) == 1 for s in sites) and row.dim == "head_dim"
    temperature = row.temperature
    if temperature == "rotated channels" and whole:
        temperature = "whole"
    rotating = sum(site.layers or 0 for site in sites)
    return Model(
        model_type=model_type,
        text_type=text.type,
        path=path,
        sites=sites,
        stock_sites=built,
        context=context,
        stated_context=sizes.context,
        layers=sizes.layers,
        hidden_size=sizes.hidden,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        vocab_size=sizes.vocab,
        layer_types=sizes.layer_types,
        sliding_window=sizes.window,
        nope_layers=max(0, sum(map(attends, sizes.layer_types)) - rotating),
        interleaved=row.interleaved,
        masked_lm=row.masked_lm,
        mrope=is_mrope(text.type, text.facts) or _has_sections(text),
        forms=allowed,
        temperature=temperature,
        reach=reach,
        kv_layers=kv_layers(text),
        notes=tuple(dict.fromkeys(notes)),
        obstacles=tuple(obstacles),
        asks_context=next((span.asks_context for span in spans if span.asks_context), ""),
        asks_original=next((span.asks_original for span in spans if span.asks_original), ""),
        described=text.facts,
    )


def read(
    config: dict[str, Any], *, context: int | None = None, original: int | None = None
) -> Model:
    """Read what a config says about positions; `context` replaces a trained length that it
    misstates, `original` is the one before its scaling, where it does not say that."""
    model, conflicts = interpret(config, context, original)
    if conflicts:
        raise InputError(conflicts[0].sentence)
    return model


def interpret(
    config: dict[str, Any], context: int | None = None, original: int | None = None
) -> tuple[Model, list[Problem]]:
    """What stock transformers 5 makes of a config, and where its spellings contradict that."""
    model_type, text_type, path = locate(config)
    part = text_part(config, path)
    for holder in (config, part):
        Dict(holder).object("quantization_config")  # decides how weights are carried and compared
    facts = facts_of(config, model_type, text_type)
    values = _with_added(model_type, part, facts)
    where = ".".join(path)
    text = TextConfig(values, text_type, where, context, original, facts)
    _check_gate(text)
    _check_theta(text)
    text.sizes  # noqa: B018 - a wrong size is named before a wrong rope dict
    params, conflicts = (read_nested if text.row.labels else read_flat)(text)
    sites = _sites(text, params)
    if not any(site.scaled for site in sites):
        raise UnsupportedModel(f"{text_type!r} as configured rotates nothing that could be scaled")
    spans = [lengths(text, site) for site in sites]
    sites = tuple(
        site.of(replace(site.rope, context=span.now, original_context=span.original))
        for site, span in zip(sites, spans, strict=True)
    )
    notes = _described(model_type, text, config, sites)
    notes += [f"[length] {span.note}" for span in spans if span.note]
    if any(text.integer(key, 0) for key in PREDICTING):
        notes.append(
            "[mtp] its layers that predict further tokens (multi-token prediction) follow the "
            "same rope keys and are extended with it"
        )
    if model_type != config["model_type"]:
        notes.append(
            f"[own-code] {config['model_type']} is {model_type} by class: it is read, planned and "
            "proved as that type; the code that auto_map names may know fewer rope types "
            "(DeepSeek's: linear, dynamic and yarn)"
        )
    elif config.get("auto_map"):
        notes.append(
            "[own-code] auto_map names model code of its own; ropext speaks of the stock class of "
            "this type"
        )
    return describe(text, model_type, path, sites, spans, notes), conflicts


def _has_sections(text: TextConfig) -> bool:
    """Whether one of its rope dicts says by how many channels each of three axes turns."""
    return any(source and source.has("mrope_section") for source in rope_dicts(text))


def _described(
    model_type: str, text: TextConfig, config: Mapping[str, Any], sites: tuple[RopeSite, ...]
) -> list[str]:
    """Note that stock described a type which the census lacks, the text part's or the composite's
    around it. UnsupportedModel where the config that it was asked about has, as read here, other
    numbers than stock computes."""
    kind = text.type
    about = text.facts.get(text.type)
    if about is None:
        kind = model_type
        about = text.facts.get(model_type)
    if about is None:
        return []
    for module in about.numbers_of(config):
        if not any(_computes(site, module) for site in sites):
            where = f" of {module.label}" if module.label else ""
            raise UnsupportedModel(
                f"{kind!r} is a model type that this ropext does not know, and transformers"
                f" {about.transformers} computes other frequencies{where} than its keys say as far"
                " as they are understood here; please report this config.json"
            )
    still = about.rotates.count(False)
    if about.unseen:
        layers = f"; whether every layer rotates was not seen ({about.unseen})"
    elif still:
        layers = f"; of its first {len(about.rotates)} layers {still} turn nothing"
    else:
        layers = ""
    return [
        f"[described] {kind} is not among the model types that this ropext knows: transformers"
        f" {about.transformers} was asked how it reads them. No loader was measured on it, and its"
        f" KV cache is reckoned by the usual keys{layers}"
    ]


def _computes(site: RopeSite, module: Numbers) -> bool:
    """Whether a site has a module's numbers, but for float32's last bits."""
    spectrum = site.rope.spectrum
    if module.label not in ("", site.label) or len(module.inv_freq) != len(spectrum.inv_freq):
        return False
    close = [
        math.isclose(one, other, rel_tol=STOCK_BOUND)
        for one, other in zip(module.inv_freq, spectrum.inv_freq, strict=True)
    ]
    return all(close) and math.isclose(
        module.attention_factor, spectrum.attention_factor, rel_tol=STOCK_BOUND
    )


def _with_added(model_type: str, part: dict[str, Any], facts: Facts) -> dict[str, Any]:
    """The text config with what its composite adds; a theta in a rope dict comes before that."""
    added = added_by(model_type, facts)
    dicts = [part.get("rope_parameters"), part.get("rope_scaling")]
    if any(isinstance(d, dict) and d for d in dicts):
        added = {key: value for key, value in added.items() if key != "rope_parameters"}
    if any(isinstance(d, dict) and d.get("rope_theta") is not None for d in dicts):
        added = {key: value for key, value in added.items() if key != "rope_theta"}
    return added | part


def _check_gate(text: TextConfig) -> None:
    if text.row.gate is None:
        return
    key, wanted, sentence = text.row.gate
    if text.values.get(key, False if isinstance(wanted, bool) else None) != wanted:
        raise UnsupportedModel(f"{text.type!r} {sentence}, so there is nothing to scale")


def _check_theta(text: TextConfig) -> None:
    """Refuse a theta of null where it means no rotation (elsewhere it means the class default)."""
    rope = text.object("rope_parameters")
    given = [holder for holder in (text, rope) if holder and "rope_theta" in holder.values]
    if text.row.null_theta_stops and given and not any(h.has("rope_theta") for h in given):
        raise UnsupportedModel(
            f"{text.type!r} rotates only where rope_theta is set; it is null, so there is nothing"
            " to scale"
        )


def _sites(text: TextConfig, params_by_label: Mapping[str, Params | None]) -> tuple[RopeSite, ...]:
    """Every rotary embedding; where all see windows, all are scaled."""
    row = text.row
    if not row.labels:
        params = params_by_label[""]
        assert params is not None  # a flat family always has a dict
        if row.layer_thetas and text.sizes.layer_thetas:
            return _listed_sites(text, params)
        return (_site(text, None, params),)
    sites = []
    for label in row.labels:
        params = params_by_label[label.name]
        if params is None:
            continue
        site = _site(text, label, params)
        if site.layers != 0 or label.layer_types:
            sites.append(replace(site, scaled=not label.windowed))
    if sites and not any(site.scaled for site in sites):
        return tuple(replace(site, scaled=True) for site in sites)
    return tuple(sites)


def _listed_sites(text: TextConfig, params: Params) -> tuple[RopeSite, ...]:
    """One embedding per theta in layer_rope_theta (0 = these layers do not rotate)."""
    listed = text.sizes.layer_thetas
    thetas = sorted({theta for theta in listed if theta})
    if not thetas:
        raise UnsupportedModel("layer_rope_theta is 0 for every layer, so nothing rotates")
    if thetas[-1] == math.inf:
        raise InputError("config.json: layer_rope_theta must hold finite numbers")
    sites = []
    for theta in thetas:
        site = _site(text, None, params | {"rope_theta": theta})
        label = "" if len(thetas) == 1 else f"theta {theta:g}"
        sites.append(replace(site, label=label, layers=listed.count(theta)))
    return tuple(sites)


def _site(text: TextConfig, label: Label | None, params: Params) -> RopeSite:
    params = _complete(params, text)
    if "rope_theta" not in params:
        raise InputError(
            f"config.json: rope_theta of {label.name if label else 'the model'} is missing"
        )
    dim = rotary_dim(text, label, params)
    _check_form(params, dim)
    rope = _rope(text, dim, params, nested=label is not None)
    if label is None:
        layers = _rotating_layers(text)
    else:
        kinds = text.sizes.layer_types
        layers = sum(kind in label.kinds for kind in kinds) if kinds else None
    name = "" if label is None else label.name
    return RopeSite(name, rope.spectrum, params, rope=rope, layers=layers)


def _complete(params: Params, text: TextConfig) -> Params:
    """Fill in what stock fills in: the original length, and factors that follow from it.

    Phi-3's way: at top level (or a class field there) it overrides the dict's original length.
    """
    kind = params["rope_type"]
    stated = text.sizes.context
    if kind not in NAMED:
        return params
    key = "original_max_position_embeddings"
    original = text.integer(key)
    original = text.defaults.get(key) if original is None else original
    out = params | {key: original or params.get(key) or stated}
    if "factor" not in out and kind in ("yarn", "longrope"):
        out["factor"] = stated / out[key]
    return out


def _check_form(params: Params, dim: int) -> None:
    """Refuse what would divide by zero in the form's arithmetic."""
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


def _rope(text: TextConfig, dim: int, params: Params, *, nested: bool) -> Rope:
    row = text.row
    stated = text.sizes.context
    kind = params["rope_type"]
    factors = forms.read_pair_factors(params, dim, stated, nested=nested)
    attention = forms.read_attention_factor(params, stated)
    if row.mscale_keys and kind != "default" and "long_mscale" in params:
        attention = params["long_mscale"]
    keeps_mscale = kind == "yarn" or row.softmax_mscale
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
        softmax_mscale=row.softmax_mscale,
        softmax_factor=forms.softmax_factor(params) if row.softmax_mscale else 1.0,
        nested=nested,
    )


def _rotating_layers(text: TextConfig) -> int | None:
    sizes = text.sizes
    if not sizes.layer_types:
        return sizes.layers and sizes.layers - sizes.rotates.count(False)
    kinds = [kind for kind in sizes.layer_types if attends(kind)]
    if text.row.rotates_only_windows and sizes.window and not sizes.rotates:
        return sum(map(is_windowed, kinds))
    return len(kinds) - min(sizes.rotates.count(False), len(kinds))
