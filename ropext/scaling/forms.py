"""The stock rope types: the spectrum and attention factor of a rope dict, and the dict of a wish.

A *form* is a `rope_type` with its keys in transformers-5 names. `completed` adds the lengths that a
dict leaves to the config; everything else here takes a complete dict. `read` repeats transformers'
arithmetic in float64 instead of its float32. `candidates` yields the dicts that `read` turns back
into the wanted spectrum. An export is exact or it raises.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, replace
from itertools import chain
from typing import Any

from ropext.base.errors import ConfigError
from ropext.scaling.rope import Params as Params
from ropext.scaling.rope import Rope, Spectrum, divisors, plain_inv_freq

NAMES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")
LENGTH_DEPENDENT = ("dynamic", "longrope", "su")  # the last is longrope's old name
ORIGINAL = "original_max_position_embeddings"
NAMED = ("yarn", "longrope", "llama3")  # types whose dict states the original length
# Keys without which stock transformers cannot build the form.
REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
# Stock raises theta to a power in float32, whose limit is 3.4e38; families refuses 1e30 and above.
LARGEST_THETA = 1e30
# Relative difference that counts as equal between two float64 routes to the same number.
EXACT = 1e-9
BETA_FAST = 32.0
BETA_SLOW = 1.0


def mscale(factor: float, m: float = 1.0) -> float:
    """Return YaRN's attention factor sqrt(1/t) = 0.1 ln(s) + 1 (eq. 22), with DeepSeek's multiplier
    m on the logarithm."""
    return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0


def longrope_attention(factor: float, original: int) -> float:
    """Return LongRoPE's attention factor sqrt(1 + ln(s)/ln(L)), as in its released code and in
    stock longrope."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def default_attention(params: Mapping[str, Any]) -> float:
    """Return the attention factor that stock multiplies into cos and sin if the rope dict states
    none."""
    match params["rope_type"]:
        case "yarn":
            factor = params["factor"]
            m = params.get("mscale")
            m_all = params.get("mscale_all_dim")
            if m and m_all:
                return mscale(factor, m) / mscale(factor, m_all)
            return mscale(factor)
        case "longrope":
            return longrope_attention(params["factor"], params[ORIGINAL])
    return 1.0


def yarn_bounds(
    dim: int, theta: float, context: int, beta_fast: float, beta_slow: float, truncate: bool
) -> tuple[float, float]:
    """Return the pair indices at which YaRN's ramp begins and ends: dim(r) = d ln(L/(2 pi r)) / (2
    ln b).

    They are clamped to [0, dim-1] as in the published code (dim, not dim/2).
    """

    low = dim * math.log(context / (beta_fast * 2 * math.pi)) / (2 * math.log(theta))
    high = dim * math.log(context / (beta_slow * 2 * math.pi)) / (2 * math.log(theta))
    if truncate:
        low = math.floor(low)
        high = math.ceil(high)
    return max(low, 0), min(high, dim - 1)


def linear_ramp(pairs: int, low: float, high: float) -> tuple[float, ...]:
    """Return YaRN's ramp over the rotary pairs: 0 keeps the frequency (below `low`), 1 interpolates
    fully (above `high`).

    If the clamp leaves high < low, the published formula still holds, and this function follows it.
    """
    if low == high:
        high += 0.001  # the published code's guard against a division by zero
    return tuple(min(max((i - low) / (high - low), 0.0), 1.0) for i in range(pairs))


def llama3_pair_factors(
    inv_freq: Iterable[float], context: int, factor: float, low: float, high: float
) -> tuple[float, ...]:
    """Return the pair factors of the YaRN paper's NTK-by-parts (eq. 17-20), linear in turns r =
    L/lambda.

    Llama 3's form is the same. gamma = clamp((r - low)/(high - low), 0, 1) keeps, 1 - gamma
    interpolates.
    """
    factors = []
    for f in inv_freq:
        r = context * f / (2 * math.pi)
        if high > low:
            gamma = min(max((r - low) / (high - low), 0.0), 1.0)
        else:  # stock's two comparisons then leave no ramp, only a step at `low`
            gamma = 1.0 if r >= low else 0.0
        factors.append(1 / ((1 - gamma) / factor + gamma))
    return tuple(factors)


def _number(params: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return a finite number above 0 of a rope dict; None counts as absent, as it does in stock."""
    value = params.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{key} of the rope dict is {value!r}, but must be a number above 0")
    return float(value)


def completed(params: Params, context: int) -> Params:
    """Return a rope dict with the original length and the factor that stock transformers takes for
    absent ones. These are `context` (max_position_embeddings) and the ratio of both lengths."""
    kind = params["rope_type"]
    if kind not in NAMED:
        return params
    lengths = {ORIGINAL: params.get(ORIGINAL) or context}
    if kind != "llama3" and params.get("factor") is None:
        lengths["factor"] = context / lengths[ORIGINAL]
    return params | lengths


def _listed_pair_factors(params: Params, key: str, dim: int) -> tuple[float, ...]:
    """Return a list of a longrope dict, which has one number per rotary pair; infinity is a pair
    that does not turn."""
    factors = params[key]
    if len(factors) != dim // 2:
        raise ConfigError(
            f"{key} of the rope dict has {len(factors)} numbers, but this model "
            f"rotates {dim // 2} pairs"
        )
    return tuple(factors)


def _yarn(params: Params, dim: int, nested: bool) -> tuple[float, ...]:
    """Return the pair factors of a yarn rope dict."""
    low, high = yarn_bounds(
        dim,
        params["rope_theta"],
        params[ORIGINAL],
        _number(params, "beta_fast", BETA_FAST),
        _number(params, "beta_slow", BETA_SLOW),
        # Stock reads `truncate` from the outer dict, so a nested one never sees it.
        truncate=nested or bool(params.get("truncate", True)),
    )
    # f' = f/s * ramp + f * (1 - ramp), so the divisor is 1 / (ramp/s + 1 - ramp).
    factor = params["factor"]
    return tuple(1 / (r / factor + 1 - r) for r in linear_ramp(dim // 2, low, high))


def read_pair_factors(params: Params, dim: int, *, nested: bool = False) -> tuple[float, ...]:
    """Return the factors by which a rope dict divides the plain frequencies theta^(-2i/dim).

    An infinite factor means that the pair does not turn. For a longrope with two sets, return the
    set for inputs beyond the original length.
    """
    kind = params["rope_type"]
    missing = [key for key in REQUIRED.get(kind, ()) if key not in params]
    if missing:
        raise ConfigError(
            f"the rope dict of type {kind!r} lacks {', '.join(missing)}, without "
            "which transformers cannot build the model"
        )
    pairs = dim // 2
    match kind:
        case "linear":
            return (params["factor"],) * pairs
        # Stateful: within max_position_embeddings stock computes plain RoPE. HunYuan's `alpha` is
        # a static change of theta under the same name, theta * alpha^(d/(d-2)).
        case "dynamic" if params.get("alpha") and dim > 2:
            return tuple(params["alpha"] ** (2 * i / (dim - 2)) for i in range(pairs))
        case "yarn":
            return _yarn(params, dim, nested)
        case "llama3":
            return llama3_pair_factors(
                plain_inv_freq(dim, params["rope_theta"]),
                params[ORIGINAL],
                params["factor"],
                params["low_freq_factor"],
                params["high_freq_factor"],
            )
        case "longrope":
            return _listed_pair_factors(params, "long_factor", dim)
        # The first int(p * d // 2) pairs turn, at frequencies counted over all d; the rest do not.
        case "proportional":
            turning = min(int(params.get("partial_rotary_factor", 1.0) * dim // 2), pairs)
            return (params.get("factor", 1.0),) * turning + (math.inf,) * (pairs - turning)
    return (1.0,) * pairs


def read_attention_factor(params: Params) -> float:
    """Return the attention factor of a rope dict, which stock multiplies into cos and sin."""
    if params["rope_type"] not in ("yarn", "longrope"):
        return 1.0  # stock ignores the key in every other form
    if params.get("attention_factor") is None:
        return default_attention(params)
    return float(params["attention_factor"])


def softmax_factor(params: Params) -> float:
    """Return the softmax multiplier of a rope form by DeepSeek's formula, mscale(factor,
    mscale_all_dim)^2 in every scaled form."""
    if not params.get("mscale_all_dim") or params["rope_type"] == "default":
        return 1.0
    return mscale(params.get("factor", 1.0), params["mscale_all_dim"]) ** 2


def steepness(params: Mapping[str, Any]) -> float:
    """Return how much more than usual the ramp of a yarn or llama3 form magnifies float32 rounding
    in stock.

    (x - low)/(high - low) magnifies the rounding of x by about high/(high - low). Return 1 if that
    stays within the usual bounds: the ends are whole numbers, or far apart.
    """
    kind = params.get("rope_type")
    if kind == "llama3":
        low = _number(params, "low_freq_factor")
        high = _number(params, "high_freq_factor")
        if high <= low:
            return 1.0
        return max(1.0, high / (high - low) / 2)
    if kind == "yarn" and params.get("truncate") is False:
        fast = _number(params, "beta_fast", BETA_FAST)
        slow = _number(params, "beta_slow", BETA_SLOW)
        if fast <= slow:
            return 1.0
        # The indices dim(r) are proportional to ln(L/(2 pi r)): dim and theta cancel.
        turns = _number(params, ORIGINAL) / (2 * math.pi * slow)
        return max(1.0, math.log(turns) / math.log(fast / slow))
    return 1.0


def read(params: Params, rope: Rope) -> Rope:
    """Return a rotary embedding with the theta, the original length and the scaling that stock
    transformers computes from a rope dict, in float64.

    `rope` gives the facts that no dict changes: dim, nesting, and whether the softmax reads mscale.
    """
    kind = params["rope_type"]
    theta = _number(params, "rope_theta")
    factors = read_pair_factors(params, rope.dim, nested=rope.nested)
    attention = read_attention_factor(params)
    short = tuple[float, ...]()
    if kind == "longrope":
        short = _listed_pair_factors(params, "short_factor", rope.dim)
    return replace(
        rope,
        theta=theta,
        original_context=params[ORIGINAL] if kind in NAMED else rope.context,
        pair_factors=() if kind == "default" else factors,
        short_pair_factors=() if short == factors else short,
        attention_factor=attention,
        softmax_factor=softmax_factor(params) if rope.softmax_mscale else 1.0,
    )


def agree(a: Any, b: Any) -> bool:
    """Return whether two values of rope dicts or spectra are equal up to float64 rounding.

    4 equals 4.0, a number equals its shorter print, and sequences are equal if all their values
    are.
    """
    if a == b:
        return True
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(agree, a, b))
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (a, b))
    return numbers and math.isclose(a, b, rel_tol=EXACT)


def same(a: Spectrum, b: Spectrum) -> bool:
    """Return whether two spectra of a rotary embedding are the same function, up to float64
    rounding."""
    return a.short_context == b.short_context and agree(astuple(a), astuple(b))


def _theta_shift(rope: Rope, factors: tuple[float, ...]) -> float | None:
    """Return the theta whose plain RoPE spectrum has these pair factors. Return None if there is
    none.

    theta' moves pair i by (theta'/theta)^(2i/d), and the last pair, 2i = d - 2, determines it:
    theta' = theta * p_last^(d/(d-2)).
    """
    if not 0 < factors[-1] < math.inf:
        return None
    if rope.dim == 2:
        if agree(factors[0], 1.0):
            return rope.theta
        return None
    theta = rope.theta * factors[-1] ** (rope.dim / (rope.dim - 2))
    theta = float(f"{theta:.14g}")  # 1e6, not 999999.9999999998
    expected = [factors[-1] ** (2 * i / (rope.dim - 2)) for i in range(rope.dim // 2)]
    if not agree(factors, expected):
        return None
    return theta


def _lengths(rope: Rope, target: int) -> Params:
    """Return the two keys of a rope dict for the factor and the original length."""
    return {
        "factor": target / rope.original_context,
        ORIGINAL: rope.original_context,
    }


def _mscale_pair(rope: Rope) -> Params:
    """Return DeepSeek's two mscale keys of a rope dict, as far as the embedding has them."""
    pair = {"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim}
    return {key: value for key, value in pair.items() if value}


def with_attention(params: Params, attention_factor: float) -> Params:
    """Add the attention factor to a rope dict under every name that a reader of its rope type looks
    at.

    vLLM reads only short_mscale/long_mscale of a longrope. Older versions and SGLang read only
    attn_factor of a yarn, which multiplies the default instead of replacing it.
    """
    default = default_attention(params)
    if params["rope_type"] == "longrope":
        # Always explicit: transformers 4.43 and 4.44 fail in validation without it.
        out = params | {"attention_factor": attention_factor}
        if not agree(default, attention_factor):
            out |= {"short_mscale": attention_factor, "long_mscale": attention_factor}
        return out
    if agree(default, attention_factor):
        return params
    ratio = attention_factor / default
    return params | {"attention_factor": attention_factor, "attn_factor": ratio}


# The divisor of each pair's plain frequency.
Factors = tuple[float, ...]


def theta_form(rope: Rope, factors: Factors, wanted: Spectrum, target: int) -> Params | None:
    """Return the rope dict of type `default` that changes theta alone. Return None if theta cannot
    express the factors."""
    theta = _theta_shift(rope, factors)
    if theta is None:
        return None
    return {"rope_type": "default", "rope_theta": theta}


def linear_form(rope: Rope, factors: Factors, wanted: Spectrum, target: int) -> Params | None:
    """Return a linear rope dict, which divides every pair by one number, over another theta if that
    fits; else None."""
    factor = factors[0]
    whole = target / rope.original_context
    if agree(factor, whole):
        factor = whole  # the ratio of the two lengths, without the rounding of the division
    theta = _theta_shift(rope, tuple(p / factor for p in factors))
    if theta is None:
        return None
    return {"rope_type": "linear", "rope_theta": theta, "factor": factor} | _mscale_pair(rope)


def _share(turning: int, dim: int) -> float:
    """Return the partial_rotary_factor of the form `proportional` that turns this many pairs. Stock
    computes int(p * d // 2)."""
    share = 2 * turning / dim
    if int(share * dim // 2) != turning:
        return math.nextafter(share, 2.0)
    return share


def proportional_form(rope: Rope, factors: Factors, wanted: Spectrum, target: int) -> Params | None:
    """Return a proportional rope dict, for models whose last pairs do not turn. Return None for any
    other model.

    No other model gets it: its partial_rotary_factor means something else there.
    """
    turning = [p for p in factors if p < math.inf]
    if not turning or len(turning) == len(factors):
        return None
    theta = rope.theta
    if len(turning) > 1:
        # (theta'/theta)^(2i/d) at the last pair that turns; d counts the other pairs, too.
        theta *= (turning[-1] / turning[0]) ** (rope.dim / (2 * (len(turning) - 1)))
    out = {
        "rope_type": "proportional",
        "rope_theta": theta,
        "partial_rotary_factor": _share(len(turning), rope.dim),
        "factor": turning[0],
    }
    return out | _mscale_pair(rope)


def yarn_theta_form(rope: Rope, factors: Factors, wanted: Spectrum, target: int) -> Params | None:
    """Return a yarn rope dict whose ramp begins beyond the last pair: theta with a temperature.
    Return None if none fits.

    The ramp starts at index d/2 + 1/2 (floored to d/2) and ends at d - 1, so that every pair keeps
    its frequency: beta(k) = L / (2 pi theta^(2k/d)).
    """
    theta = _theta_shift(rope, factors)
    if theta is None or theta <= 1:
        return None
    dim = rope.dim

    def beta(index: float) -> float:
        """Return the turns, inside the original context, of the rotary pair at an index: a beta of
        the yarn dict."""
        wavelength: float = 2 * math.pi * theta ** (2 * index / dim)
        return rope.original_context / wavelength

    out = {"rope_type": "yarn", "rope_theta": theta} | _lengths(rope, target)
    out |= {"beta_fast": beta(dim / 2 + 0.5), "beta_slow": beta(dim - 1)} | _mscale_pair(rope)
    return with_attention(out, wanted.attention_factor)


def longrope_form(rope: Rope, factors: Factors, wanted: Spectrum, target: int) -> Params | None:
    """Return a longrope dict for any pair and attention factors; short = long unless two sets are
    wanted. Return None for an original context of 1 token."""
    if rope.original_context < 2:  # stock divides by its logarithm
        return None
    short = list(factors)
    lengths = _lengths(rope, target)
    if wanted.short_inv_freq is not None:
        plain = plain_inv_freq(rope.dim, rope.theta)
        short = list(divisors(plain, wanted.short_inv_freq))
        # Stock switches sets at this length, and vLLM takes the factor from the two lengths.
        lengths[ORIGINAL] = wanted.short_context
        if not rope.mscale_all_dim:  # DeepSeek's softmax reads the whole factor
            lengths["factor"] = target / wanted.short_context
    out = {"rope_type": "longrope", "rope_theta": rope.theta} | lengths
    out |= {"short_factor": short, "long_factor": list(factors)} | _mscale_pair(rope)
    return with_attention(out, wanted.attention_factor)


# In the order in which most loaders read them; a method's own form comes before these.
GENERAL = (theta_form, linear_form, proportional_form, yarn_theta_form, longrope_form)


def candidates(
    rope: Rope, wanted: Spectrum, target: int, native: Params | None = None
) -> Iterator[Params]:
    """Yield every stock rope dict that reads back as exactly the wanted spectrum.

    The method's own dict comes first, then one dict of each form that can express the same, best
    form first.
    """
    factors = divisors(plain_inv_freq(rope.dim, rope.theta), wanted.inv_freq)
    if native is not None:
        if native["rope_type"] != "default":
            native = native | _mscale_pair(rope)
        if native["rope_type"] in ("yarn", "longrope"):
            native = with_attention(native, wanted.attention_factor)
    others = (build(rope, factors, wanted, target) for build in GENERAL)
    for params in chain([native], others):
        if params is None or params["rope_theta"] >= LARGEST_THETA:
            continue
        if same(read(params, rope).spectrum, wanted):
            yield params
