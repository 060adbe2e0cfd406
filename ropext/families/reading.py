"""Read the rotary embeddings of a config dict."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ropext.base.errors import ConfigError, InputError, UnsupportedModel
from ropext.families import config, table
from ropext.families.config import (
    REFUSALS,
    Dict,
    Located,
    census,
    defaults_of,
    locate,
    text_part,
)
from ropext.families.described import NO_FACTS, Described, Facts, Numbers, remembered_facts
from ropext.families.geometry import (
    TextConfig,
    attends,
    kv_layers,
    partial_factor,
    rotary_dim,
)
from ropext.families.model import (
    PREDICTS,
    Lengths,
    Model,
    Problem,
    allowed_forms,
    notes_on_logit_scales,
    notes_on_windows,
    rope_from,
    rotating_layers,
    scaled_alone,
    with_lengths,
)
from ropext.families.params import read_flat, read_nested
from ropext.families.table import Label
from ropext.scaling import forms
from ropext.scaling.forms import NAMED, ORIGINAL, Params
from ropext.scaling.rope import CONFIG, RopeSite

# How many layers predict further tokens, as DeepSeek, Qwen and MiniMax call it.
PREDICTING = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")

# For a number that stock computes in float32; the proof of an extension is stricter.
STOCK_BOUND = 1e-4


def rope_dicts(text: TextConfig) -> list[Dict | None]:
    """Return the two rope dicts of a text config, None for an absent one."""
    return [text.object("rope_scaling"), text.object("rope_parameters")]


def departures_from_stock(
    text: TextConfig, sites: tuple[RopeSite, ...]
) -> tuple[list[str], tuple[RopeSite, ...]]:
    """Return notes on the differences between stock transformers and the authors' own code, and the
    embeddings that stock computes."""
    out = []
    built = {site.label: site for site in sites}
    for site in sites:
        short = site.params.get("short_factor")
        long = site.params.get("long_factor")
        if text.row.mscale_keys and short != long:
            out.append(
                f"it reads the short factors at every length, their code the long ones "
                f"beyond {site.rope.original_context} tokens; ropext extends theirs"
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
                f"it ignores {unread} and runs the base at theta "
                f"{text.defaults['theta']:g}, their code has {sites[0].rope.theta:g}; ropext "
                "extends theirs"
            )
            theirs = {"rope_theta": text.defaults["theta"]}
            rope = replace(sites[0].rope, theta=theirs["rope_theta"])
            read_by_stock = replace(sites[0], params=sites[0].params | theirs)
            built[sites[0].label] = read_by_stock.of(rope)
    keyless = [label.name for label in text.row.labels if text.row.one_theta and not label.theta]
    for site in sites:
        if site.label in keyless and theta and site.rope.theta != theta:
            out.append(
                f"its {site.label} layers keep theta {site.rope.theta:g}, their code has "
                f"the one rope_theta of {theta:g} in all layers"
            )
    if out:
        stock = (
            f"[authors-code] transformers {config.census_version()} differs from the authors here"
        )
        out = [f"{stock}: {difference}" for difference in out]
    return out, tuple(built.values())


def read(
    config: dict[str, Any],
    context: int | None = None,
    original: int | None = None,
    source: str = CONFIG,
) -> Model:
    """Return the model that a config describes; raise InputError if its spellings conflict.

    `context` replaces a trained length that the config misstates. `original` is the length before
    its scaling, if the config does not state it. `source` is the config's name in sentences.
    """
    model = as_read(config, context, original, source)
    if model.conflicts:
        raise InputError(model.conflicts[0].sentence)
    return model


def as_read(
    config: dict[str, Any],
    context: int | None = None,
    original: int | None = None,
    source: str = CONFIG,
) -> Model:
    """Return the model of a config as stock transformers 5 reads it, also if other loaders read
    another. Its `conflicts` are the spellings that contradict it. `context`, `original` and
    `source` are as for `read`."""
    found = locate(config)
    model_type, text_type, path, scheme = found
    if scheme != "rotary":
        raise UnsupportedModel(f"{text_type!r} {REFUSALS[scheme]}")
    part = text_part(config, path)
    for holder in (config, part):
        Dict(holder).get(
            "quantization_config", dict
        )  # decides how weights are carried and compared
    listed = model_type in census() and text_type in census()
    facts = NO_FACTS if listed else remembered_facts(config)
    values = _with_added(model_type, part, facts)
    where = ".".join(path)
    text = TextConfig(values, text_type, facts, where, context, original)
    _check_rotates(text)
    text.sizes  # noqa: B018 - a wrong size is named before a wrong rope dict
    params, conflicts = (read_nested if text.row.labels else read_flat)(text)
    sites = _sites(text, params)
    if not any(site.scaled for site in sites):
        raise UnsupportedModel(f"{text_type!r} as configured rotates nothing that could be scaled")
    sites, lengths, length_notes = with_lengths(text, sites, source)
    notes = _note_on_described_type(model_type, text, config, sites) if facts else []
    notes += length_notes
    if any(text.integer(key, 0) for key in PREDICTING):
        notes.append(PREDICTS)
    if model_type != config["model_type"]:
        notes.append(
            f"[own-code] {config['model_type']} is {model_type} by class: ropext reads, plans and "
            "verifies it as that type; the code that auto_map names may know fewer rope types "
            "(DeepSeek's: linear, dynamic and yarn)"
        )
    elif config.get("auto_map"):
        notes.append(
            "[own-code] auto_map names model code of its own; ropext describes the class of this "
            "type in transformers"
        )
    return _model_of(found, text, sites, lengths, notes, conflicts)


def _model_of(
    found: Located,
    text: TextConfig,
    sites: tuple[RopeSite, ...],
    lengths: tuple[Lengths, ...],
    notes: list[str],
    conflicts: list[Problem],
) -> Model:
    """Return the model of these embeddings, each with its lengths. Further notes follow `notes`,
    about windows, departures of stock transformers and keys that scale logits."""
    row = text.row
    sizes = text.sizes
    departures, stock_sites = departures_from_stock(text, sites)
    context = max(site.rope.context for site in sites if site.scaled)
    more, obstacles, reach = notes_on_windows(text, context)
    notes = [*notes, *more, *departures, *notes_on_logit_scales(text, sites)]
    allowed = allowed_forms(row, sites, notes)
    whole = all(partial_factor(row, s.params) == 1 for s in sites) and row.dim == "head_dim"
    temperature = row.temperature
    if temperature == "rotated channels" and whole:
        temperature = "whole"
    rotating = sum(site.layers or 0 for site in sites)
    return Model(
        model_type=found.model_type,
        text_type=text.type,
        path=found.path,
        sites=sites,
        stock_sites=stock_sites,
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
        mrope=_is_mrope(text),
        forms=allowed,
        temperature=temperature,
        reach=reach,
        kv_layers=kv_layers(text),
        notes=tuple(dict.fromkeys(notes)),
        obstacles=tuple(obstacles),
        asks_context=next((span.asks_context for span in lengths if span.asks_context), ""),
        asks_original=next((span.asks_original for span in lengths if span.asks_original), ""),
        conflicts=tuple(conflicts),
        described=text.facts,
    )


def _is_mrope(text: TextConfig) -> bool:
    """Return whether images rotate by three axes: by the class of a config's model type, or by one
    of its rope dicts."""
    if text.type in table.MROPE or any(d and d.has("mrope_section") for d in rope_dicts(text)):
        return True
    about = text.facts.get(text.type)
    return about is not None and bool(about.row.get("mrope"))


def _note_on_described_type(
    model_type: str, text: TextConfig, config: Mapping[str, Any], sites: tuple[RopeSite, ...]
) -> list[str]:
    """Return a note if stock described a type that the census lacks: the type of the text part or
    of the composite around it. Raise UnsupportedModel if stock computes other numbers from the
    queried config than ropext does."""
    kind = text.type
    about = text.facts.get(text.type)
    if about is None:
        kind = model_type
        about = text.facts.get(model_type)
    if about is None:
        return []
    for module in about.numbers_of(config):
        if not any(_computes_module(site, module) for site in sites):
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
        f" KV cache is counted by {_basis_of_kv_cache(about)}{layers}"
    ]


def _basis_of_kv_cache(about: Described) -> str:
    """Return in words how the KV cache is read from a config of a type outside the census: by the
    sizes of its projections, or by the usual config keys."""
    if about.widths and None not in about.widths:
        return "the sizes of its projections"
    return "the usual keys, which may be others here"


def _computes_module(site: RopeSite, module: Numbers) -> bool:
    """Return whether a config's rotary embedding has the numbers of a module of transformers,
    except for float32's last bits."""
    spectrum = site.rope.spectrum
    if module.label not in ("", site.label) or len(module.inv_freq) != len(spectrum.inv_freq):
        return False
    # For a longrope of two sets, stock shows the set for the length that the config states.
    same = _all_close(module.inv_freq, spectrum.inv_freq)
    same = same or _all_close(module.inv_freq, spectrum.short_inv_freq or spectrum.inv_freq)
    return same and _all_close((module.attention_factor,), (spectrum.attention_factor,))


def _all_close(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether ropext reads from a config the numbers that transformers does, within
    float32's bounds."""
    pairs = zip(one, other, strict=True)
    return all(math.isclose(a, b, rel_tol=STOCK_BOUND) for a, b in pairs)


def _with_added(model_type: str, part: dict[str, Any], facts: Facts) -> dict[str, Any]:
    """Return the text config with the keys that its composite model type adds; a theta in a rope
    dict has precedence."""
    added = defaults_of(model_type, facts, composite=True)
    dicts = [part.get("rope_parameters"), part.get("rope_scaling")]
    if any(isinstance(d, dict) and d for d in dicts):
        added = {key: value for key, value in added.items() if key != "rope_parameters"}
    if any(isinstance(d, dict) and d.get("rope_theta") is not None for d in dicts):
        added = {key: value for key, value in added.items() if key != "rope_theta"}
    return added | part


def _check_rotates(text: TextConfig) -> None:
    """Raise UnsupportedModel if the keys of a config switch rotation off. A gate does, or a theta
    of null (which means the class default in most families)."""
    if text.row.gate is not None:
        key, wanted, sentence = text.row.gate
        if text.values.get(key, False if isinstance(wanted, bool) else None) != wanted:
            raise UnsupportedModel(f"{text.type!r} {sentence}, so there is nothing to scale")
    rope = text.object("rope_parameters")
    given = [holder for holder in (text, rope) if holder and "rope_theta" in holder.values]
    if text.row.null_theta_stops and given and not any(h.has("rope_theta") for h in given):
        raise UnsupportedModel(
            f"{text.type!r} rotates only where rope_theta is set; it is null, so there is nothing"
            " to scale"
        )


def _sites(text: TextConfig, params_by_label: Mapping[str, Params | None]) -> tuple[RopeSite, ...]:
    """Return every rotary embedding of a config; if all layers see windows, all are scaled."""
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
            sites.append(site)
    return scaled_alone(sites, {label.name: label.windowed for label in row.labels})


def _listed_sites(text: TextConfig, params: Params) -> tuple[RopeSite, ...]:
    """Return a rotary embedding per theta in layer_rope_theta (0: these layers do not rotate)."""
    listed = text.sizes.layer_thetas
    thetas = sorted({theta for theta in listed if theta})
    if not thetas:
        raise UnsupportedModel("layer_rope_theta is 0 for every layer, so nothing rotates")
    if thetas[-1] == math.inf:
        raise ConfigError("layer_rope_theta must hold finite numbers")
    sites = []
    for theta in thetas:
        site = _site(text, None, params | {"rope_theta": theta})
        label = "" if len(thetas) == 1 else f"theta {theta:g}"
        sites.append(replace(site, label=label, layers=listed.count(theta)))
    return tuple(sites)


def _site(text: TextConfig, label: Label | None, params: Params) -> RopeSite:
    """Return the rotary embedding of a label, its rope dict completed as transformers completes
    it."""
    if params["rope_type"] in NAMED:
        # Phi-3's way: at top level (or a class field there) it overrides the dict's.
        original = text.integer(ORIGINAL) or text.defaults.get(ORIGINAL)
        if original:
            params = params | {ORIGINAL: original}
    params = forms.completed(params, text.sizes.context)
    if "rope_theta" not in params:
        raise ConfigError(f"rope_theta of {label.name if label else 'the model'} is missing")
    dim = rotary_dim(text, label, params)
    rope = rope_from(text.row, params, dim, text.sizes.context, nested=label is not None)
    if label is None:
        layers = rotating_layers(text.row, text.sizes)
    else:
        kinds = text.sizes.layer_types
        layers = sum(kind in label.kinds for kind in kinds) if kinds else None
    name = "" if label is None else label.name
    return RopeSite(name, rope.spectrum, params, rope=rope, layers=layers)
