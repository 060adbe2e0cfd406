"""The stock rope types: what a rope dict makes transformers compute, and which dict carries a wish.

A *form* is a `rope_type` with its keys in transformers-5 names. `read` transcribes transformers'
arithmetic in float64; `carry` looks for a form whose reading equals the wanted spectrum. An export
is exact or it raises.
"""

from ropext.forms.carrying import (
    EXACT,
    LARGEST_THETA,
    candidates,
    carry,
    same,
)
from ropext.forms.reading import (
    BETA_FAST,
    BETA_SLOW,
    NAMES,
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
    yarn_bounds,
)

__all__ = [
    "BETA_FAST",
    "BETA_SLOW",
    "EXACT",
    "LARGEST_THETA",
    "NAMES",
    "Params",
    "candidates",
    "carry",
    "default_attention",
    "linear_ramp",
    "llama3_pair_factors",
    "longrope_attention",
    "mscale",
    "read",
    "read_attention_factor",
    "read_pair_factors",
    "read_short_pair_factors",
    "same",
    "softmax_factor",
    "steepness",
    "yarn_bounds",
]
