"""The stock rope types: what a rope dict makes transformers compute, and which dict carries a wish.

A *form* is a `rope_type` with its keys in transformers-5 names. `read` transcribes transformers'
arithmetic in float64; `carry` looks for a form whose reading equals the wanted spectrum. An export
is exact or it raises.
"""

from ropext.forms.carrying import (
    EXACT,
    GENERAL,
    LARGEST_THETA,
    candidates,
    carry,
    longrope_form,
    same,
    with_attention,
)
from ropext.forms.reading import (
    BETA_FAST,
    BETA_SLOW,
    NAMES,
    REQUIRED,
    Params,
    default_attention,
    linear_ramp,
    llama3_pair_factors,
    longrope_attention,
    mscale,
    read,
    read_attention_factor,
    read_pair_factors,
    read_short_pair_factors,
    softmax_factor,
    steepness,
    yarn_attention,
    yarn_bounds,
)

__all__ = [
    "BETA_FAST",
    "BETA_SLOW",
    "EXACT",
    "GENERAL",
    "LARGEST_THETA",
    "NAMES",
    "REQUIRED",
    "Params",
    "candidates",
    "carry",
    "default_attention",
    "linear_ramp",
    "llama3_pair_factors",
    "longrope_attention",
    "longrope_form",
    "mscale",
    "read",
    "read_attention_factor",
    "read_pair_factors",
    "read_short_pair_factors",
    "same",
    "softmax_factor",
    "steepness",
    "with_attention",
    "yarn_attention",
    "yarn_bounds",
]
