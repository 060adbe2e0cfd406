"""Read the rope dicts of a text config, in every spelling, as one dict per rotary embedding.

The order of precedence is transformers 5's: legacy `rope_scaling` before `rope_parameters`, a
key inside the dict before the same at top level, then the class default. Spellings that disagree
are reported, not resolved.
"""

import difflib
import itertools
from collections.abc import Iterator
from typing import Any

from ropext.base.errors import ConfigError
from ropext.families.config import LONGEST_LIST, MOST, SMALLEST, Dict, named, shown
from ropext.families.geometry import TextConfig
from ropext.families.model import Problem
from ropext.families.table import LOGIT_SCALES, Family, Label
from ropext.scaling import forms
from ropext.scaling.forms import Params

# The keys that make a form; every other key of a rope dict is kept unchanged.
FORM_KEYS = frozenset(
    (
        "rope_type",
        "type",
        "rope_theta",
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "attn_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "short_factor",
        "long_factor",
        "low_freq_factor",
        "high_freq_factor",
        "short_mscale",
        "long_mscale",
        "alpha",
    )
)
# Keys that scale queries and belong to no form: a rope dict that loses one is another model.
QUERY_KEYS = tuple(s for s in LOGIT_SCALES if s.in_rope and s.key not in FORM_KEYS)
LENGTHS = ("original_max_position_embeddings",)
LISTS = ("short_factor", "long_factor")
NUMBERS = tuple(sorted(FORM_KEYS - {"rope_type", "type", "truncate", *LENGTHS, *LISTS}))
# A yarn whose ramp is moved beyond the last pair has these near 1/theta^2.
BETAS = ("beta_fast", "beta_slow")
SMALLEST_BETA = 1e-100
MAY_BE_ZERO = ("mscale", "mscale_all_dim", "beta_slow", "beta_fast", "alpha")
# Aliases of plain rotation; "su" and Phi-3's "yarn" were early names of longrope.
TYPE_NAMES = {"mrope": "default", "su": "longrope"}


def spelling_conflict(one: tuple[str, Any], two: tuple[str, Any]) -> Problem:
    """Return the problem of two spellings in config.json that differ, each a key and its value."""
    (a, x), (b, y) = one, two
    sentence = (
        f"config.json: {a} is {shown(x)} but {b} is {shown(y)}; loaders disagree on which they"
        " read, so make the two equal (or remove one)"
    )
    return Problem(a, sentence, disputed=True)


def checked_rope_dict(source: Dict, family: Family) -> Params:
    """Return a rope dict of config.json with checked values: one type key, floats as floats,
    lengths as integers."""
    kind = source.get("rope_type", str) or source.get("type", str) or "default"
    if "longrope" in family.forms and "yarn" not in family.forms and kind == "yarn":
        kind = "longrope"  # Phi-3's configuration class renames it
    out: Params = {"rope_type": TYPE_NAMES.get(kind, kind)}
    if out["rope_type"] == "yarn" and "factor" not in source.values:
        raise ConfigError(
            f"{source.where} is of type yarn and lacks factor, without which"
            " transformers cannot build the model"
        )
    for key, value in source.values.items():
        if key in ("type", "rope_type") or value is None:
            continue
        if key in LENGTHS:
            out[key] = source.integer(key)
        elif key in LISTS:
            out[key] = source.numbers(key)
        elif key in NUMBERS or key == "partial_rotary_factor":
            smallest = SMALLEST_BETA if key in BETAS else SMALLEST
            most = forms.LARGEST_THETA if key == "rope_theta" else MOST
            out[key] = source.number(key, zero=key in MAY_BE_ZERO, smallest=smallest, most=most)
        elif key == "truncate":
            out[key] = source.get(key, bool)
        else:
            _refuse_misspelt(key, source)
            out[key] = value
    if out["rope_type"] not in forms.NAMES:
        raise ConfigError(
            f"{source.where} has the rope type {shown(out['rope_type'])}, which"
            f" transformers does not compute; known are {', '.join(forms.NAMES)}"
        )
    return out


def _refuse_misspelt(key: str, source: Dict) -> None:
    """Raise ConfigError with the rope key that was meant, if this key differs from it by one letter
    or two and nothing reads it."""
    near = difflib.get_close_matches(key, FORM_KEYS - source.values.keys(), 1, 0.9)
    if near:
        raise ConfigError(
            f"{source.where} has the key {named(key)}, which nothing reads; did you mean {near[0]}?"
        )


def keep_query_scales(old: Params, new: Params) -> Params:
    """Return the new rope dict with every key that the scaling of queries reads, as the old rope
    dict has it."""
    read = [key for s in QUERY_KEYS if s.key in old for key in (s.key, *s.beside)]
    return new | {key: old[key] for key in read if key in old}


# Read by some loaders only, or implied by their absence: missing on one side is no conflict.
_MAY_MISS = ("rope_theta", "partial_rotary_factor", "attn_factor", "short_mscale", "long_mscale")


def dict_conflicts(one: tuple[str, Params], other: tuple[str, Params]) -> Iterator[Problem]:
    """Yield the differences by which two rope dicts of a config for the same embedding, each with
    its name, would give different spectra."""
    (where, a), (elsewhere, b) = one, other
    scaling = {s.key for s in QUERY_KEYS} & (a.keys() | b.keys())
    keys = FORM_KEYS | {"partial_rotary_factor"} | scaling
    read = scaling | {key for s in QUERY_KEYS if s.key in scaling for key in s.beside}
    for key in sorted(keys & (a.keys() | b.keys())):
        x = a.get(key)
        y = b.get(key)
        one_sided = key not in a or key not in b
        unread = key in _MAY_MISS or (a["rope_type"] == "default" and key not in read)
        if one_sided and unread:
            continue
        if not forms.agree(x, y):
            yield spelling_conflict((f"{where}.{key}", x), (f"{elsewhere}.{key}", y))


def scalar_conflicts(
    key: str, given: list[tuple[str, Params]], beside: list[tuple[str, float]]
) -> Iterator[Problem]:
    """Yield each pair of places in config.json at which theta or the partial factor has different
    values: in the given rope dicts, and outside them."""
    inside = [(f"{where}.{key}", params[key]) for where, params in given if key in params]
    for one, two in itertools.pairwise(inside + beside):
        if not forms.agree(one[1], two[1]):
            yield spelling_conflict(one, two)


def follows_from_lengths(longrope: Params, target: int) -> bool:
    """Return whether config.json can lack a longrope's attention_factor: transformers then derives
    it from the two lengths."""
    wanted = longrope.get("attention_factor")
    if wanted is None or "short_mscale" in longrope:
        return wanted is None
    original = longrope["original_max_position_embeddings"]
    return forms.agree(wanted, forms.longrope_attention(target / original, original))


def _three_keys(text: TextConfig, short: Params, whole: Params) -> Params:
    """Return Phi-3's legacy rope dict of three keys, with transformers' derived value for each
    further key of `whole`."""
    original = text.integer("original_max_position_embeddings")
    original = original or text.defaults.get("original_max_position_embeddings")
    stated = text.integer("max_position_embeddings") or text.defaults["max_position_embeddings"]
    if not original or original < 2 or short["rope_type"] != "longrope":
        return short
    factor = stated / original
    derived = {
        "factor": factor,
        "original_max_position_embeddings": original,
        "attention_factor": forms.longrope_attention(factor, original),
    }
    return {key: value for key, value in derived.items() if key in whole} | short


def _stated_outside_dicts(text: TextConfig, paths: tuple[str, ...]) -> list[tuple[str, float]]:
    """Return the places in config.json outside the rope dicts that state a number, each with its
    value."""
    holders = [text.at(path) for path in paths]
    values = [(d.name(key), d.number(key, most=forms.LARGEST_THETA)) for d, key in holders]
    return [(place, value) for place, value in values if value is not None]


def _given_rope_dicts(text: TextConfig, *sources: Dict | None) -> list[tuple[str, Params]]:
    """Return the rope dicts of a config that hold something, each under its name."""
    return [
        (s.where, checked_rope_dict(s, text.row)) for s in sources if s is not None and s.values
    ]


def read_flat(text: TextConfig) -> tuple[dict[str, Params | None], list[Problem]]:
    """Return the one rope dict of a flat model family, complete, and the conflicts between its
    spellings."""
    row = text.row
    defaults = text.defaults
    sources = [text.object("rope_scaling"), text.object("rope_parameters")]
    given = _given_rope_dicts(text, *sources)
    _refuse_nested([s for s in sources if s is not None])
    conflicts: list[Problem] = []
    if len(given) == 2:
        (winner, first), (other, second) = given
        if row.legacy == "three keys":
            first = _three_keys(text, first, second)
        conflicts += dict_conflicts((winner, first), (other, second))
    current = dict(given[0][1] if given else defaults.get("rope", {"rope_type": "default"}))
    usual: dict[str, Any] = {"rope_theta": defaults.get("theta", 10000.0)}
    usual["partial_rotary_factor"] = defaults.get("partial") if row.partial else None
    for key, paths in (("rope_theta", row.theta), ("partial_rotary_factor", row.partial)):
        beside = _stated_outside_dicts(text, paths)
        if key in row.partial and (share := _rotating_share(text)):
            beside.append((f"{text.name(row.rotary_dim)} / head_dim", share))
        conflicts += scalar_conflicts(key, given, beside)
        stated = any(key in params for _, params in given)
        if len(paths) > 1 and "." not in paths[1] and not text.has(paths[0]) and not stated:
            # GPT-NeoX: stock reads the family's own name alone.
            unsaid = (f"{paths[0]} (absent, so the class default)", usual[key])
            conflicts += scalar_conflicts(key, [], [unsaid, *beside])
        elif beside:
            current.setdefault(key, beside[0][1])
    if row.non_rotating_key:
        conflicts += _share_conflict(text, given, current)
    for key, value in usual.items():
        if value is not None:
            current.setdefault(key, value)
    if len(given) == 2 and not conflicts:
        conflicts += _lost_keys(text, given, current)
    return {"": current}, conflicts


def turning_share(text: TextConfig) -> float | None:
    """Return the share of a head that rotates, if the model's class counts the other channels by a
    config key of their own."""
    turning = text.size(text.row.dim)
    still = text.size(text.row.non_rotating_key)
    return turning / (turning + still) if turning and still else None


def _share_conflict(
    text: TextConfig, given: list[tuple[str, Params]], current: Params
) -> Iterator[Problem]:
    """Yield a problem if transformers would rotate another share of a head than the config's
    channels."""
    name = "partial_rotary_factor"
    share = turning_share(text)
    read = share if not given or given[0][0].endswith("rope_parameters") else 1.0
    read = current.get(name, text.number(name) or read)
    if current["rope_type"] == "default":
        name = "rope_type is default, so partial_rotary_factor"
        read = 1.0
    if not forms.agree(read, share):
        yield spelling_conflict((name, read), (f"{text.name(text.row.dim)} / head_dim", share))


def _lost_keys(
    text: TextConfig, given: list[tuple[str, Params]], current: Params
) -> Iterator[Problem]:
    """Yield a problem for each key that rope_parameters alone has while rope_scaling wins: stock
    reads the class default."""
    (winner, _), (loser, ignored) = given
    above = text.number("partial_rotary_factor") if text.row.non_rotating_key else None
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in ignored and not forms.agree(ignored[key], current.get(key, above or 1.0)):
            read = f"{key} beside {winner}, which is read instead,"
            yield spelling_conflict((f"{loser}.{key}", ignored[key]), (read, current.get(key)))


def _refuse_nested(sources: list[Dict]) -> None:
    """Raise ConfigError for a rope dict per layer type in a model that has one embedding for
    all."""
    for source in sources:
        inner = [key for key, value in source.values.items() if isinstance(value, dict)]
        if inner and len(inner) == len(source.values):
            raise ConfigError(
                f"{source.where} is nested ({', '.join(map(named, inner[:3]))}), but"
                " this model type has one rotary embedding for all layers and wants a flat dict"
            )


def read_nested(text: TextConfig) -> tuple[dict[str, Params | None], list[Problem]]:
    """Return one rope dict per layer type, complete (None: these layers do not rotate), and
    conflicts between spellings."""
    row = text.row
    legacy = text.object("rope_scaling")
    modern = text.object("rope_parameters")
    names = [label.name for label in row.labels]
    if modern is not None and modern.values and not any(n in modern.values for n in names):
        raise ConfigError(
            f"{modern.where} is flat, but this model type has one rotary embedding per"
            f" layer type and wants the keys {', '.join(names)} in it"
        )
    if legacy is not None and legacy.values and not row.flat_into:
        raise ConfigError(
            f"{legacy.where} is flat, but this model type keeps one dict per layer"
            f" type ({', '.join(names)}) in rope_parameters; move it there and remove it here"
        )
    params: dict[str, Params | None] = {}
    conflicts: list[Problem] = []
    defaults = _defaults_by_label(text)
    for label in row.labels:
        flat = legacy if label.name in row.flat_into else None
        current, clashes = _read_label(text, label, modern, flat, defaults.get(label.name) or {})
        if current and flat and row.flat_attention and current["rope_type"] == "yarn":
            current.setdefault("attention_factor", row.flat_attention)
        conflicts += clashes
        params[label.name] = current
    return params, conflicts


def _rotating_share(text: TextConfig) -> float | None:
    """Return the partial factor that follows from a number of rotating channels, if the config
    states it."""
    channels = text.integer(text.row.rotary_dim) if text.row.rotary_dim else None
    head = text.sizes.head_dim
    return channels / head if channels and head else None


def _defaults_by_label(text: TextConfig) -> dict[str, Params]:
    """Return, for each layer type, the keys that complete its rope dict. Top-level keys with one
    number for all layers, or one for each, come before class defaults."""
    row = text.row
    kinds = text.sizes.layer_types
    out: dict[str, Params] = dict(text.defaults.get("rope", {}))
    for label in row.labels if row.shared else ():
        plain = {"rope_type": "default", "rope_theta": 10000.0} | (out.get(label.name) or {})
        first = next((i for i, kind in enumerate(kinds) if kind in label.kinds), LONGEST_LIST)
        if share := _rotating_share(text):
            plain["partial_rotary_factor"] = share
        for key, name in row.shared.items():
            if isinstance(text.values.get(name), list):
                value = next(iter((text.numbers(name) or [])[first:]), None)
            else:
                value = text.number(name, most=forms.LARGEST_THETA)
            plain |= {key: value} if value is not None else {}
        out[label.name] = plain
    return out


def _refuse_unread_type(flat: Dict) -> None:
    """Raise ConfigError for a rope dict whose scaling only `type` names. transformers 5 merges a
    flat dict into a dict with the rope_type "default", so it never sees the scaling; transformers 4
    did."""
    kind = flat.values.get("type")
    if flat.values.get("rope_type") is None and kind not in (None, "default"):
        raise ConfigError(
            f"{flat.where}.type is {shown(kind)} and there is no rope_type, which is"
            " all that transformers 5 reads in this model type: loaders disagree; write rope_type"
        )


def _read_label(
    text: TextConfig, label: Label, modern: Dict | None, flat: Dict | None, class_default: Params
) -> tuple[Params | None, list[Problem]]:
    """Return the rope dict of a layer type, complete (None: these layers do not rotate), and
    conflicts between spellings."""
    inner = modern.object(label.name) if modern else None
    null = modern is not None and label.name in modern.values and inner is None
    if null and text.row.legacy == "absent":
        return None, []  # no rotation; the older families take null for the class default
    given = _given_rope_dicts(text, flat, inner)
    if not given and not class_default:
        return None, []
    alone = flat is not None and not (inner is not None and inner.values)
    if flat is not None and alone and not text.row.flat_attention:
        _refuse_unread_type(flat)
    conflicts: list[Problem] = []
    if len(given) == 2:
        conflicts += dict_conflicts(*given)
    beside = _stated_outside_dicts(text, (label.theta,) if label.theta else ())
    conflicts += scalar_conflicts("rope_theta", given, beside)
    theta = {"rope_theta": beside[0][1]} if beside else {}
    if not given:
        return class_default | theta, conflicts
    current: Params = {}
    for _, params in reversed(given):
        current |= params
    keys = ("rope_theta", "partial_rotary_factor")
    defaults = {key: class_default.get(key) for key in keys} | theta
    for key, value in defaults.items():
        if value is not None:
            current.setdefault(key, value)
    return current, conflicts
