"""What is wrong with the spellings of a config that somebody else wrote, and writing them anew."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ropext.errors import InputError, RopextError, UsageError
from ropext.families.config import named, text_part
from ropext.families.geometry import TextConfig
from ropext.families.lengths import LENGTH_KEYS, NAMED
from ropext.families.model import Model, Problem
from ropext.families.params import FORM_KEYS, LENGTHS
from ropext.families.reading import interpret
from ropext.families.table import family
from ropext.families.writing import write
from ropext.forms import Params

ROPE_KEYS = ("rope_scaling", "rope_parameters", "rope_theta")
# Forms whose code in transformers 5 fails on a head_dim of null.
NEED_HEAD_DIM = ("yarn", "dynamic", "longrope")


def as_read(config: dict[str, Any]) -> Model:
    """The model as stock transformers 5 reads it, also where other loaders would read another."""
    return interpret(config)[0]


def respell(
    config: dict[str, Any], params: Sequence[Params] = (), target: int | None = None
) -> dict[str, Any]:
    """The config with every spelling written anew: from `params`, one for each scaled embedding, or
    from what stock transformers 5 reads."""
    model = as_read(config)
    sites = model.scaled_sites
    target = target or model.context
    if len(params) not in (0, len(sites)):
        raise InputError(
            f"ropext.json has {len(params)} scaled rotary embeddings and config.json {len(sites)}:"
            " they belong to different models"
        )
    for key in ("rope_type", "rope_theta"):
        if not all(key in each for each in params):
            raise InputError(f"ropext.json: the parameters of a scaled embedding lack {key}")
    read = params or [site.params for site in sites]
    out = write(config, model, {s.label: p for s, p in zip(sites, read, strict=True)}, target)
    for holder in (out, text_part(out, model.path)):
        for key, _ in _short_lengths(holder, target):
            holder[key] = target
    return out


def trusting(config: dict[str, Any], spelling: str | None) -> dict[str, Any]:
    """The config with that one of its spellings in force, where two disagree: rope_parameters, or
    rope_scaling with the keys beside it, as older transformers read them."""
    model, conflicts = interpret(config)
    out = copy.deepcopy(config)
    text: dict[str, Any] = text_part(out, model.path)
    if not conflicts:
        return out
    if spelling is None:
        raise UsageError(
            f"{conflicts[0].sentence}; say which one --fix writes everywhere, with --trust"
            " rope_parameters or --trust rope_scaling"
        )
    if not text.get(spelling):
        raise UsageError(f"--trust {spelling}: config.json has no {spelling}")
    if spelling == "rope_parameters":
        text.pop("rope_scaling", None)
        return out
    for label in family(model.text_type).labels:  # of flat dicts, stock reads rope_scaling first
        inner = (text.get("rope_parameters") or {}).get(label.name)
        if isinstance(inner, dict) and label.theta and text.get(label.theta) is not None:
            inner.pop("rope_theta", None)
    return out


def check_spellings(config: dict[str, Any]) -> list[Problem]:
    """Everything that some loader reads differently, or not at all; fixable by `respell`."""
    try:
        model, conflicts = interpret(config)
    except RopextError as error:
        return [Problem("", str(error), fixable=False)]
    text = TextConfig(text_part(config, model.path), model.text_type)
    return [
        *conflicts,
        *_misplaced(config, model),
        *_lost_legacy(text, model),
        *_dict_types(text),
        *_originals(text, model),
        *_nulls(text, model),
        *_lengths(config, text, model),
    ]


def _misplaced(config: Mapping[str, Any], model: Model) -> Iterator[Problem]:
    """Rope keys beside a text part are read by nobody."""
    where = ".".join(model.path)
    for key in ROPE_KEYS if where else ():
        if config.get(key) is not None:
            said = f"{key} at top level of a {model.model_type} config is ignored"
            yield Problem(key, f"{said}; it belongs in {where}", fixable=False)


def _lost_legacy(text: TextConfig, model: Model) -> Iterator[Problem]:
    """A transformers 5 save drops what transformers 4, MLX-LM, TGI and others read."""
    row = text.row
    if not text.has("rope_parameters") or row.legacy == "absent":
        return
    site = model.scaled_sites[0]
    label = next((x for x in row.labels if x.name == site.label), None)
    name = (label.theta if label else row.theta[0]) or "rope_theta"
    if not text.has(name):
        yield Problem(
            name,
            f"{name} stands in rope_parameters alone (a transformers 5 save drops it): transformers"
            " 4, MLX-LM and others then run with their default theta",
            dropped=True,
        )
    kind = site.params["rope_type"]
    if kind != "default" and not text.values.get("rope_scaling") and row.legacy != "theta":
        yield Problem(
            "rope_scaling",
            f"the {kind} scaling stands in rope_parameters alone: transformers 4, MLX-LM and others"
            " then run without it",
            dropped=True,
        )


def _dicts(text: TextConfig) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every rope dict, nested ones one by one."""
    for key in ("rope_scaling", "rope_parameters"):
        rope = text.values.get(key)
        if isinstance(rope, dict):
            yield key, rope
            for label, inner in rope.items():
                if isinstance(inner, dict):
                    yield f"{key}.{named(label)}", inner


def _dict_types(text: TextConfig) -> Iterator[Problem]:
    for where, rope in _dicts(text):
        for key, value in rope.items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            number = number and -1e30 < value < 1e30  # a dict that is not read may hold anything
            if key in LENGTHS and number and isinstance(value, float):
                rule = "must be a whole number"
            elif key in FORM_KEYS and key not in LENGTHS and number and isinstance(value, int):
                rule = "should be a float: vLLM refuses an integer"
            else:
                continue
            name = f"{where}.{key}"
            yield Problem(name, f"{name} is {value} and {rule}")
        if where == "rope_scaling" and "type" in rope and "rope_type" in rope:
            yield Problem(
                where,
                "rope_scaling has both type and rope_type, which ExLlamaV2 and transformers up to"
                " 4.42 refuse",
            )
        if where == "rope_scaling" and text.row.legacy == "rope_type" and "rope_type" not in rope:
            yield Problem(
                where,
                "rope_scaling says type, but transformers 4.57 wants rope_type in this family",
            )


def _originals(text: TextConfig, model: Model) -> Iterator[Problem]:
    """The original length: in the dict, at top level for longrope, and in step with the factor."""
    key = "original_max_position_embeddings"
    for site in model.scaled_sites:
        kind = site.params["rope_type"]
        if kind not in NAMED:
            continue
        original = site.params[key]
        top = key in text.values
        if not top and not any(key in rope for _, rope in _dicts(text)):
            yield Problem(
                key,
                f"the {kind} dict lacks {key}: transformers takes max_position_embeddings"
                f" ({original}) for it, llama.cpp and MLX-LM do not",
            )
        elif kind == "longrope" and not top:
            yield Problem(
                key,
                f"longrope without {key} at top level is read otherwise by transformers 4 and TGI",
            )
        yield from _factor(model, kind, site.params.get("factor"), original)


def _factor(model: Model, kind: str, factor: Any, original: int) -> Iterator[Problem]:
    if kind == "llama3" or not factor:
        return  # Llama 3.1 itself says 8 * 8192 beside 131072
    extended = round(original * factor)
    if extended != model.stated_context:
        yield Problem(
            "max_position_embeddings",
            f"max_position_embeddings is {model.stated_context}, but {kind} with factor {factor:g}"
            f" of {original} reads {extended} tokens; transformers 4.51 to 4.55 and vLLM go by the"
            " former",
            fixable=model.context == extended,
        )


def _nulls(text: TextConfig, model: Model) -> Iterator[Problem]:
    if text.row.legacy == "absent" and "rope_scaling" in text.values:
        yield Problem(
            "rope_scaling",
            "rope_scaling must be absent in this family: even null empties rope_parameters when"
            " transformers 5 reads it",
        )
    name = text.names_of("head_dim")[0]
    stays = text.defaults.get("head_dim_may_stay_null") and not text.has(name)
    if stays and any(s.params["rope_type"] in NEED_HEAD_DIM for s in model.sites):
        yield Problem(
            name, f"{name} is not given, with which transformers 5 fails to build this scaling"
        )


def _short_lengths(holder: Mapping[str, Any], context: int) -> list[tuple[str, int]]:
    """Length keys that would cap a loader below the context."""
    lengths = [(key, holder.get(key)) for key in LENGTH_KEYS]
    return [(k, v) for k, v in lengths if type(v) is int and v < context]


def _lengths(config: Mapping[str, Any], text: TextConfig, model: Model) -> Iterator[Problem]:
    stated = model.stated_context
    for prefix, holder in {
        "": config,
        "".join(f"{key}." for key in model.path): text.values,
    }.items():
        for key, value in _short_lengths(holder, stated):
            if holder is text.values and key in text.names_of("max_position_embeddings"):
                continue
            yield Problem(
                prefix + key,
                f"{prefix}{key} of {value} caps loaders that take the smallest length (vLLM) below"
                f" {stated}",
            )
