"""Which kinds of rope dict there are: the rows of the loader table."""

import math
from collections.abc import Callable

from ropext import forms
from ropext.forms import Params


def close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=forms.EXACT)


def attention(params: Params) -> float:
    """The attention factor that transformers reads; 0 where the dict leaves it to a length."""
    if params.get("attention_factor") is not None:
        return float(params["attention_factor"])
    if params.get("factor") is None:
        return 0.0
    if params["rope_type"] == "longrope" and not params.get("original_max_position_embeddings"):
        return 0.0
    return forms.default_attention(params)


def _attn_factor_agrees(params: Params) -> bool:
    """attn_factor multiplies yarn's default where attention_factor replaces it."""
    attn = params.get("attn_factor")
    if not params.get("factor"):
        return attn in (None, 1)
    return close(
        (1.0 if attn is None else attn) * forms.mscale(params["factor"]), attention(params)
    )


def _mscales_agree(params: Params) -> bool:
    """short_mscale and long_mscale are there and equal the attention factor."""
    scales = (params.get("short_mscale"), params.get("long_mscale"))
    return all(s is not None and close(s, attention(params)) for s in scales)


NEEDS: dict[str, Callable[[Params], bool]] = {
    "attn_factor": _attn_factor_agrees,
    "mscales": _mscales_agree,
}


def kinds_of(
    params: Params, *, length: int | None = None, v5_only: bool = False
) -> tuple[str, ...]:
    """Every kind that a rope dict (transformers-5 spelling) is of, the main one first.

    `length` is max_position_embeddings; `v5_only` says that the config has rope_parameters alone.
    """
    match params.get("rope_type", "default"):
        case "default":
            kinds = ["theta"]
        case "dynamic":
            kinds = ["dynamic-alpha" if params.get("alpha") else "dynamic"]
        case "yarn":
            kinds = _yarn_kinds(params, length)
        case "longrope":
            kinds = _longrope_kinds(params)
        case "linear" | "llama3" | "proportional" as kind:
            kinds = [kind]
        case _:
            kinds = ["unknown"]
    return (*kinds, "v5-only") if v5_only else tuple(kinds)


def _yarn_kinds(params: Params, length: int | None) -> list[str]:
    betas = (params.get("beta_fast") or 32.0, params.get("beta_slow") or 1.0)
    factor = params.get("factor")
    explicit = params.get("attention_factor")
    default = forms.mscale(factor) if factor else None
    kinds = []
    if explicit is not None and (default is None or not close(explicit, default)):
        kinds.append("yarn-custom")
    elif params.get("mscale") and params.get("mscale_all_dim"):
        kinds.append("yarn-mscale")
    elif betas != (forms.BETA_FAST, forms.BETA_SLOW):
        kinds.append("yarn-betas")
    else:
        kinds.append("yarn")
    if not params.get("truncate", True):
        kinds.append("yarn-untruncated")
    original = params.get("original_max_position_embeddings")
    if not original:
        kinds.append("yarn-no-original")
    elif length is not None and length <= original:
        kinds.append("yarn-original-length")
    # The plain row was measured with both lengths right, and does not speak for such a dict.
    return kinds if len(kinds) == 1 else [kind for kind in kinds if kind != "yarn"]


def _longrope_kinds(params: Params) -> list[str]:
    kinds = ["longrope"]
    if params.get("short_factor") != params.get("long_factor"):
        kinds = ["longrope-two-sets"]
    if params.get("attention_factor") is None:
        return kinds
    default = attention({**params, "attention_factor": None})
    if not close(params["attention_factor"], default):
        kinds = [k for k in kinds if k != "longrope"] + ["longrope-custom"]
    return kinds


def kind_of(params: Params) -> str:
    """The row of the table that a rope dict belongs to."""
    return kinds_of(params)[0]
