"""What is wrong with the spellings of a config that somebody else wrote, and writing them anew."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ropext.errors import InputError, RopextError, UsageError
from ropext.families.config import defaults_of, named, text_part
from ropext.families.geometry import names_of
from ropext.families.lengths import LENGTH_KEYS, NAMED
from ropext.families.model import ABSENT, Model, Problem
from ropext.families.params import FORM_KEYS, LENGTHS, Conflict
from ropext.families.reading import interpret
from ropext.families.table import Family, family
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
    sites, target = model.scaled_sites, target or model.context
    if len(params) not in (0, len(sites)):
        raise InputError(
            f"ropext.json tells of {len(params)} scaled rotary embeddings, config.json has"
            f" {len(sites)}: they are not of one model"
        )
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
    if not conflicts or spelling is None:
        if conflicts:
            raise UsageError(
                f"{conflicts[0].sentence()}; --fix does not guess: --trust rope_parameters or"
                " --trust rope_scaling says which one it writes everywhere"
            )
        return out
    if not text.get(spelling):
        raise UsageError(f"--trust {spelling}: config.json has no {spelling}")
    if spelling == "rope_parameters":
        text.pop("rope_scaling", None)
        return out
    for label in family(model.text_type).labels:  # of flat dicts, stock reads rope_scaling first
        own = (text.get("rope_parameters") or {}).get(label.name)
        if isinstance(own, dict) and label.theta and text.get(label.theta) is not None:
            own.pop("rope_theta", None)
    return out


def check_spellings(config: dict[str, Any]) -> list[Problem]:
    """Everything that some loader reads differently, or not at all; fixable by `respell`."""
    try:
        model, conflicts = interpret(config)
    except RopextError as error:
        return [Problem("", ABSENT, ABSENT, str(error), False)]
    row, defaults = family(model.text_type), defaults_of(model.text_type)
    text = text_part(config, model.path)
    problems = [_conflict(conflict) for conflict in conflicts]
    problems += _misplaced(config, model)
    problems += _lost_legacy(text, model, row)
    problems += _dict_types(text, row)
    problems += _originals(text, model)
    problems += _nulls(text, model, row, defaults)
    problems += _lengths(config, text, model, defaults)
    return problems


def _conflict(conflict: Conflict) -> Problem:
    return Problem(
        conflict.keys[0],
        conflict.values[0],
        conflict.values[1],
        conflict.sentence(),
        True,
        disputed=True,
    )


def _misplaced(config: Mapping[str, Any], model: Model) -> Iterator[Problem]:
    """Rope keys beside a text part are read by nobody."""
    if not model.path:
        return
    where = ".".join(model.path)
    for key in ROPE_KEYS:
        if config.get(key) is not None:
            yield Problem(
                key,
                config[key],
                ABSENT,
                f"{key} at top level of a {model.model_type} config is ignored; it belongs in"
                f" {where}",
                False,
            )


def _lost_legacy(text: Mapping[str, Any], model: Model, row: Family) -> Iterator[Problem]:
    """A transformers 5 save drops what transformers 4, MLX-LM, TGI and others read."""
    if text.get("rope_parameters") is None or row.legacy == "absent":
        return
    site = model.scaled_sites[0]
    theta = site.params["rope_theta"]
    label = next((x for x in row.labels if x.name == site.label), None)
    name = (label.theta if label else row.theta[0]) or "rope_theta"
    if text.get(name) is None:
        yield Problem(
            name,
            text.get(name, ABSENT),
            theta,
            f"{name} stands in rope_parameters alone (a transformers 5 save drops it): transformers"
            " 4, MLX-LM and others then run with their default theta",
            True,
        )
    kind = site.params["rope_type"]
    if kind != "default" and not text.get("rope_scaling") and row.legacy != "theta":
        yield Problem(
            "rope_scaling",
            text.get("rope_scaling", ABSENT),
            kind,
            f"the {kind} scaling stands in rope_parameters alone: transformers 4, MLX-LM and others"
            " then run without it",
            True,
        )


def _dicts(text: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every rope dict, nested ones one by one."""
    for key in ("rope_scaling", "rope_parameters"):
        found = text.get(key)
        if isinstance(found, dict):
            yield key, found
            for label, inner in found.items():
                if isinstance(inner, dict):
                    yield f"{key}.{named(label)}", inner


def _dict_types(text: Mapping[str, Any], row: Family) -> Iterator[Problem]:
    for where, rope in _dicts(text):
        for key, value in rope.items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            number = number and -1e30 < value < 1e30  # a dict that is not read may hold anything
            wanted: float
            if key in LENGTHS and number and isinstance(value, float):
                wanted, sentence = int(value), "must be a whole number"
            elif key in FORM_KEYS and key not in LENGTHS and number and isinstance(value, int):
                wanted, sentence = float(value), "should be a float: vLLM refuses an integer"
            else:
                continue
            name = f"{where}.{key}"
            yield Problem(name, value, wanted, f"{name} is {value} and {sentence}", True)
        if where == "rope_scaling" and "type" in rope and "rope_type" in rope:
            yield Problem(
                where,
                rope["type"],
                rope["rope_type"],
                "rope_scaling has both type and rope_type, which ExLlamaV2 and transformers up to"
                " 4.42 refuse",
                True,
            )
        if where == "rope_scaling" and row.legacy == "rope_type" and "rope_type" not in rope:
            yield Problem(
                where,
                rope.get("type"),
                rope.get("type"),
                "rope_scaling says type, but transformers 4.57 wants rope_type in this family",
                True,
            )


def _originals(text: Mapping[str, Any], model: Model) -> Iterator[Problem]:
    """The original length: in the dict, at top level for longrope, and in step with the factor."""
    for site in model.scaled_sites:
        kind = site.params["rope_type"]
        if kind not in NAMED:
            continue
        original = site.params["original_max_position_embeddings"]
        top = "original_max_position_embeddings" in text
        named = any("original_max_position_embeddings" in rope for _, rope in _dicts(text))
        if not named and not top:
            yield Problem(
                "original_max_position_embeddings",
                ABSENT,
                original,
                f"the {kind} dict lacks original_max_position_embeddings: transformers takes"
                f" max_position_embeddings ({original}) for it, llama.cpp and MLX-LM do not",
                True,
            )
        elif kind == "longrope" and not top:
            yield Problem(
                "original_max_position_embeddings",
                ABSENT,
                original,
                "longrope without original_max_position_embeddings at top level is read otherwise"
                " by transformers 4 and TGI",
                True,
            )
        yield from _factor(model, kind, site.params.get("factor"), original)


def _factor(model: Model, kind: str, factor: Any, original: int) -> Iterator[Problem]:
    if kind == "llama3" or not factor:
        return  # Llama 3.1 itself says 8 * 8192 beside 131072
    extended = round(original * factor)
    if extended == model.stated_context:
        return
    yield Problem(
        "max_position_embeddings",
        model.stated_context,
        extended,
        f"max_position_embeddings is {model.stated_context}, but {kind} with factor {factor:g} of"
        f" {original} reads {extended} tokens; transformers 4.51 to 4.55 and vLLM go by the former",
        model.context == extended,
    )


def _nulls(
    text: Mapping[str, Any], model: Model, row: Family, defaults: Mapping[str, Any]
) -> Iterator[Problem]:
    if row.legacy == "absent" and "rope_scaling" in text:
        yield Problem(
            "rope_scaling",
            text["rope_scaling"],
            ABSENT,
            "rope_scaling must be absent in this family: even null empties rope_parameters when"
            " transformers 5 reads it",
            True,
        )
    name = names_of("head_dim", defaults)[0]
    stays = defaults.get("head_dim_may_stay_null") and text.get(name) is None
    if stays and any(s.params["rope_type"] in NEED_HEAD_DIM for s in model.sites):
        yield Problem(
            name,
            text.get(name, ABSENT),
            model.head_dim,
            f"{name} is not given, with which transformers 5 fails to build this scaling",
            True,
        )


def _short_lengths(holder: Mapping[str, Any], context: int) -> list[tuple[str, int]]:
    """Length keys that would cap a loader below the context."""
    found = [(key, holder.get(key)) for key in LENGTH_KEYS]
    return [(k, v) for k, v in found if type(v) is int and v < context]


def _lengths(
    config: Mapping[str, Any], text: Mapping[str, Any], model: Model, defaults: Mapping[str, Any]
) -> Iterator[Problem]:
    own = names_of("max_position_embeddings", defaults)
    holders = (
        [("", config)] if text is config else [("", config), (".".join(model.path) + ".", text)]
    )
    for prefix, holder in holders:
        for key, value in _short_lengths(holder, model.stated_context):
            if holder is text and key in own:
                continue
            yield Problem(
                prefix + key,
                value,
                model.stated_context,
                f"{prefix}{key} of {value} caps loaders that take the smallest length (vLLM) below"
                f" {model.stated_context}",
                True,
            )
