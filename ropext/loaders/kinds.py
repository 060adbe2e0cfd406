"""The kinds of rope dict that loaders are told apart by: the rows of the loader table."""

import math
from collections.abc import Callable

from ropext import forms
from ropext.forms import Params
from ropext.jsontext import untagged_float


def attention(params: Params) -> float:
    """Return the attention factor that transformers reads; 0 where it hangs on a length."""
    if params.get("attention_factor") is not None:
        return float(params["attention_factor"])
    if params.get("factor") is None:
        return 0.0
    if params["rope_type"] == "longrope" and not params.get("original_max_position_embeddings"):
        return 0.0
    return forms.default_attention(params)


def _attn_factor_agrees(params: Params) -> bool:
    """Whether attn_factor, which multiplies yarn's default, says what attention_factor says."""
    attn_factor = params.get("attn_factor")
    if not params.get("factor"):
        return attn_factor in (None, 1)
    if attn_factor is None:
        attn_factor = 1.0
    return forms.agree(attn_factor * forms.mscale(params["factor"]), attention(params))


def _mscales_agree(params: Params) -> bool:
    """Whether short_mscale and long_mscale are there and equal the attention factor."""
    for key in ("short_mscale", "long_mscale"):
        scale = params.get(key)
        if scale is None or not forms.agree(scale, attention(params)):
            return False
    return True


def _betas_are_there(params: Params) -> bool:
    return "beta_fast" in params and "beta_slow" in params


# What a verdict can hang on: whether a dict has it, and what to say where it lacks that.
NEEDS: dict[str, tuple[Callable[[Params], bool], str]] = {
    "attn_factor": (
        _attn_factor_agrees,
        "attn_factor should be there and agree with the attention factor",
    ),
    "mscales": (
        _mscales_agree,
        "short_mscale and long_mscale should be there and agree with the attention factor",
    ),
    "betas": (
        _betas_are_there,
        "beta_fast and beta_slow should be there, default or not",
    ),
}


def kinds_of(
    params: Params, *, length: int | None = None, v5_only: bool = False
) -> tuple[str, ...]:
    """Return every kind that a rope dict (transformers-5 spelling) is of, the main one first.

    `length` is max_position_embeddings; `v5_only` says that the config has rope_parameters alone.
    """
    match params.get("rope_type", "default"):
        case "default":
            kinds = ["theta"]
        case "dynamic" if params.get("alpha"):
            kinds = ["dynamic-alpha"]
        case "yarn":
            kinds = _yarn_kinds(params, length)
        case "longrope":
            kinds = _longrope_kinds(params)
        case "proportional" if params.get("factor") in (None, 1):
            kinds = ["theta"]  # Gemma 4's own layers, with another theta at the most
        case "dynamic" | "linear" | "llama3" | "proportional" as kind:
            kinds = [kind]
        case _:
            kinds = ["unknown"]
    if v5_only:
        kinds.append("v5-only")
    return tuple(kinds)


def _yarn_kinds(params: Params, length: int | None) -> list[str]:
    """Return the kinds of a yarn: by its attention factor or betas, and by what it lacks."""
    factor = params.get("factor")
    explicit = params.get("attention_factor")
    fast = params.get("beta_fast") or forms.BETA_FAST
    slow = params.get("beta_slow") or forms.BETA_SLOW
    main = "yarn"
    if explicit is not None and (not factor or not forms.agree(explicit, forms.mscale(factor))):
        main = "yarn-custom"
    elif params.get("mscale") and params.get("mscale_all_dim"):
        main = "yarn-mscale"
    elif fast != forms.BETA_FAST or slow != forms.BETA_SLOW:
        main = "yarn-betas"
    kinds = [main]
    if not params.get("truncate", True):
        kinds.append("yarn-untruncated")
    original = params.get("original_max_position_embeddings")
    if not original:
        kinds.append("yarn-no-original")
    elif length is not None and length <= original:
        kinds.append("yarn-original-length")
    # The plain row was measured with both lengths right, and does not speak for such a dict.
    if len(kinds) > 1 and main == "yarn":
        kinds = kinds[1:]
    return kinds


def _longrope_kinds(params: Params) -> list[str]:
    two_sets = params.get("short_factor") != params.get("long_factor")
    explicit = params.get("attention_factor")
    is_custom = False
    if explicit is not None:
        is_custom = not forms.agree(explicit, attention({**params, "attention_factor": None}))
    kinds = list[str]()
    if two_sets:
        kinds.append("longrope-two-sets")
    elif not is_custom:
        kinds.append("longrope")
    if _has_standing_pairs(params):
        kinds.append("longrope-standing")
    if is_custom:
        kinds.append("longrope-custom")
    return kinds


def _has_standing_pairs(params: Params) -> bool:
    for key in ("short_factor", "long_factor"):
        for factor in params.get(key) or ():
            if untagged_float(factor) == math.inf:
                return True
    return False


def kind_of(params: Params) -> str:
    """Return the row of the table that a rope dict belongs to."""
    return kinds_of(params)[0]
