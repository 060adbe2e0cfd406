"""From embeddings and sizes to the whole description: reach, notes, obstacles, cache."""

from collections.abc import Mapping
from typing import Any

from ropext import forms
from ropext.families import data
from ropext.families.geometry import Sizes, attends, is_windowed, kv_values, partial_factor
from ropext.families.model import Model, Site
from ropext.families.table import LOGIT_SCALES, Family
from ropext.families.typed import Dict, shown


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
    stock = f"stock transformers {data.version()} differs from the authors here"
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
