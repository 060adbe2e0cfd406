"""The stock rope types: what a rope dict makes transformers compute, and which dict carries a wish.

A *form* is a `rope_type` with its keys in transformers-5 names. `read` transcribes transformers'
arithmetic in float64; `carry` looks for a form whose reading equals the wanted spectrum. An export
is exact or it raises.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ropext.errors import InputError, NotExpressible
from ropext.rope import Rope, Spectrum, plain_inv_freq

Params = dict[str, Any]

# Relative difference that counts as equal between two float64 routes to the same number.
EXACT = 1e-9

BETA_FAST, BETA_SLOW = 32.0, 1.0


def mscale(factor: float, m: float = 1.0) -> float:
    """YaRN's sqrt(1/t) = 0.1 ln(s) + 1 (eq. 22), with DeepSeek's multiplier m on the logarithm."""
    return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0


def longrope_attention(factor: float, original: int) -> float:
    """LongRoPE's sqrt(1 + ln(s)/ln(L)) (section 3.3), as stock longrope has it."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def yarn_attention(params: Mapping[str, Any]) -> float:
    """The attention factor of a yarn dict when it does not name one."""
    factor = params["factor"]
    m, m_all = params.get("mscale"), params.get("mscale_all_dim")
    if m and m_all:
        return mscale(factor, m) / mscale(factor, m_all)
    return mscale(factor)


def default_attention(params: Mapping[str, Any]) -> float:
    """What stock transformers multiplies into cos and sin when the dict names no factor."""
    match params.get("rope_type", "default"):
        case "yarn":
            return yarn_attention(params)
        case "longrope":
            factor, original = params["factor"], params["original_max_position_embeddings"]
            return longrope_attention(factor, original)
    return 1.0


def yarn_bounds(
    dim: int, theta: float, context: int, beta_fast: float, beta_slow: float, truncate: bool
) -> tuple[float, float]:
    """Pair indices at which the ramp begins and ends: dim(r) = d ln(L/(2 pi r)) / (2 ln b).

    Clamped to [0, dim-1] as the published code does (dim, not dim/2).
    """

    def index(rotations: float) -> float:
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index(beta_fast), index(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, dim - 1)


def linear_ramp(pairs: int, low: float, high: float) -> tuple[float, ...]:
    """0 = keep the frequency (below `low`), 1 = interpolate it fully (above `high`)."""
    if low == high:
        high += 0.001  # the published code's guard against a division by zero
    return tuple(min(max((i - low) / (high - low), 0.0), 1.0) for i in range(pairs))


def _default(params: Mapping[str, Any], dim: int, context: int, nested: bool) -> tuple[float, ...]:
    return (1.0,) * (dim // 2)


def _linear(params: Mapping[str, Any], dim: int, context: int, nested: bool) -> tuple[float, ...]:
    return (float(params["factor"]),) * (dim // 2)


def _dynamic(params: Mapping[str, Any], dim: int, context: int, nested: bool) -> tuple[float, ...]:
    # Stateful: within max_position_embeddings stock computes plain RoPE. HunYuan's `alpha` is a
    # static change of theta under the same name.
    alpha = params.get("alpha")
    if not alpha:
        return (1.0,) * (dim // 2)
    return tuple(alpha ** (2 * i / (dim - 2)) for i in range(dim // 2))


def _yarn(params: Mapping[str, Any], dim: int, context: int, nested: bool) -> tuple[float, ...]:
    original = params.get("original_max_position_embeddings") or context
    factor = params.get("factor") or context / original
    low, high = yarn_bounds(
        dim,
        params["rope_theta"],
        original,
        params.get("beta_fast") or BETA_FAST,
        params.get("beta_slow") or BETA_SLOW,
        # Stock reads `truncate` from the outer dict, so a nested one never sees it.
        True if nested else params.get("truncate", True),
    )
    # f' = f/s * ramp + f * (1 - ramp), so the divisor is 1 / (ramp/s + 1 - ramp).
    return tuple(1 / (r / factor + 1 - r) for r in linear_ramp(dim // 2, low, high))


def llama3_pair_factors(
    inv_freq: Iterable[float], context: int, factor: float, low: float, high: float
) -> tuple[float, ...]:
    """The YaRN paper's NTK-by-parts (eq. 17-20), linear in turns r = L/lambda; also Llama 3's form.

    gamma = clamp((r - low)/(high - low), 0, 1) keeps, 1 - gamma interpolates.
    """
    factors = []
    for f in inv_freq:
        r = context * f / (2 * math.pi)
        gamma = min(max((r - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - gamma) / factor + gamma))
    return tuple(factors)


def _llama3(params: Mapping[str, Any], dim: int, context: int, nested: bool) -> tuple[float, ...]:
    return llama3_pair_factors(
        plain_inv_freq(dim, params["rope_theta"]),
        params.get("original_max_position_embeddings") or context,
        params["factor"],
        params["low_freq_factor"],
        params["high_freq_factor"],
    )


def _longrope(params: Mapping[str, Any], dim: int, context: int, nested: bool) -> tuple[float, ...]:
    factors = tuple(float(f) for f in params["long_factor"])
    if len(factors) != dim // 2:
        raise InputError(
            f"rope dict: long_factor has {len(factors)} numbers, but this model rotates "
            f"{dim // 2} pairs"
        )
    return factors


def _proportional(
    params: Mapping[str, Any], dim: int, context: int, nested: bool
) -> tuple[float, ...]:
    rotating = int(params.get("partial_rotary_factor", 1.0) * dim // 2)
    factor = float(params.get("factor") or 1.0)
    return tuple(factor if i < rotating else math.inf for i in range(dim // 2))


_PAIR_FACTORS: dict[str, Callable[[Mapping[str, Any], int, int, bool], tuple[float, ...]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "proportional": _proportional,
}

NAMES = tuple(_PAIR_FACTORS)

# Keys without which stock transformers cannot build the form.
REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
    ),
    "longrope": ("short_factor", "long_factor"),
}


def read_pair_factors(
    params: Mapping[str, Any], dim: int, context: int, *, nested: bool = False
) -> tuple[float, ...]:
    """What a rope dict divides the plain frequencies theta^(-2i/dim) by."""
    kind = params.get("rope_type", "default")
    if kind not in _PAIR_FACTORS:
        raise InputError(
            f"rope_type {kind!r} is not one that stock transformers computes; known are "
            f"{', '.join(NAMES)}"
        )
    missing = [key for key in REQUIRED.get(kind, ()) if key not in params]
    if missing:
        raise InputError(f"rope dict of type {kind!r} lacks {', '.join(missing)}")
    return _PAIR_FACTORS[kind](params, dim, context, nested)


def read_attention_factor(params: Mapping[str, Any], context: int) -> float:
    """What a rope dict multiplies into cos and sin."""
    kind = params.get("rope_type", "default")
    if kind not in ("yarn", "longrope"):
        return 1.0  # stock ignores the key in every other form
    if params.get("attention_factor") is not None:
        return float(params["attention_factor"])
    filled = dict(params)
    filled.setdefault("original_max_position_embeddings", context)
    if filled.get("factor") is None:
        filled["factor"] = context / filled["original_max_position_embeddings"]
    return default_attention(filled)


def softmax_factor(params: Mapping[str, Any]) -> float:
    """DeepSeek's softmax multiplier: mscale(factor, mscale_all_dim)^2 in every scaled form."""
    m_all = params.get("mscale_all_dim")
    if not m_all or params.get("rope_type", "default") == "default":
        return 1.0
    factor: float = params.get("factor", 1.0)
    return mscale(factor, m_all) ** 2


def read(params: Mapping[str, Any], rope: Rope, context: int) -> Spectrum:
    """The spectrum that stock transformers computes from a rope dict in float64.

    `rope` gives what no dict changes (dim, nesting, whether the softmax reads mscale); `context` is
    max_position_embeddings.
    """
    dim = rope.dim
    plain = plain_inv_freq(dim, params["rope_theta"])
    factors = read_pair_factors(params, dim, context, nested=rope.nested)
    short = None
    if params.get("rope_type") == "longrope" and params["short_factor"] != params["long_factor"]:
        short = tuple(f / s for f, s in zip(plain, params["short_factor"], strict=True))
    return Spectrum(
        tuple(f / p for f, p in zip(plain, factors, strict=True)),
        read_attention_factor(params, context),
        softmax_factor(params) if rope.softmax_mscale else 1.0,
        short,
    )


def _close(a: float, b: float) -> bool:
    return a == b or math.isclose(a, b, rel_tol=EXACT)


def same(a: Spectrum, b: Spectrum) -> bool:
    """Whether two spectra are the same function, up to float64 rounding."""
    if (a.short_inv_freq is None) != (b.short_inv_freq is None):
        return False
    one = [*a.inv_freq, a.attention_factor, a.softmax_factor, *(a.short_inv_freq or ())]
    two = [*b.inv_freq, b.attention_factor, b.softmax_factor, *(b.short_inv_freq or ())]
    return len(one) == len(two) and all(_close(x, y) for x, y in zip(one, two, strict=True))


def _theta_shift(rope: Rope, factors: tuple[float, ...]) -> float | None:
    """The theta whose plain spectrum has these pair factors, if there is one.

    f_i / theta'^(2i/d) constant: theta' = theta * p_last^(d/(d-2)) when the last pair sets it.
    """
    if rope.dim == 2:
        return rope.theta if _close(factors[0], 1.0) else None
    theta = rope.theta * factors[-1] ** (rope.dim / (rope.dim - 2))
    if not math.isfinite(theta) or theta <= 0:
        return None
    expected = (factors[-1] ** (2 * i / (rope.dim - 2)) for i in range(rope.dim // 2))
    return theta if all(_close(p, e) for p, e in zip(factors, expected, strict=True)) else None


def _lengths(rope: Rope, target: int) -> Params:
    return {
        "factor": target / rope.original_context,
        "original_max_position_embeddings": rope.original_context,
    }


def _mscale_pair(rope: Rope) -> Params:
    pair = {"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim}
    return {key: value for key, value in pair.items() if value}


def with_attention(params: Params, attention_factor: float) -> Params:
    """Write the attention factor under every name that a reader of this form looks at.

    vLLM reads only short_mscale/long_mscale of a longrope, older ones and SGLang only attn_factor
    of a yarn, which multiplies the default instead of replacing it.
    """
    default = default_attention(params)
    if params["rope_type"] == "longrope":
        # Always explicit: transformers 4.43 and 4.44 fail in validation without it.
        out = params | {"attention_factor": attention_factor}
        if not _close(default, attention_factor):
            out |= {"short_mscale": attention_factor, "long_mscale": attention_factor}
        return out
    if _close(default, attention_factor):
        return params
    ratio = attention_factor / mscale(params["factor"])
    return params | {"attention_factor": attention_factor, "attn_factor": ratio}


def theta_form(rope: Rope, factors: tuple[float, ...], wanted: Spectrum, target: int) -> Params:
    theta = _theta_shift(rope, factors)
    if theta is None:
        raise NotExpressible("theta alone moves the pairs by (theta'/theta)^(2i/d) only")
    return {"rope_type": "default", "rope_theta": theta}


def linear_form(rope: Rope, factors: tuple[float, ...], wanted: Spectrum, target: int) -> Params:
    theta = _theta_shift(rope, tuple(p / factors[0] for p in factors))
    if theta is None:
        raise NotExpressible("linear divides every pair by one number only")
    out = {"rope_type": "linear", "rope_theta": theta, "factor": factors[0]}
    return out | _mscale_pair(rope)


def proportional_form(
    rope: Rope, factors: tuple[float, ...], wanted: Spectrum, target: int
) -> Params:
    rotating = [p for p in factors if p < math.inf]
    if not rotating:
        raise NotExpressible("no pair turns")
    uniform = tuple(p / rotating[0] for p in rotating)
    theta = rope.theta
    if len(rotating) > 1:
        # The exponent counts over all pairs of the head, also those that stand still.
        theta *= uniform[-1] ** (rope.dim / (2 * (len(rotating) - 1)))
    return {
        "rope_type": "proportional",
        "rope_theta": theta,
        "partial_rotary_factor": 2 * len(rotating) / rope.dim,
        "factor": rotating[0],
    }


def yarn_theta_form(
    rope: Rope, factors: tuple[float, ...], wanted: Spectrum, target: int
) -> Params:
    """A yarn whose ramp begins beyond the last pair: theta with a temperature.

    The ramp starts at index d/2 + 1/2 (floored to d/2) and ends at d - 1, so that every pair keeps
    its frequency: beta(k) = L / (2 pi theta^(2k/d)).
    """
    theta = _theta_shift(rope, factors)
    if theta is None or theta <= 1:
        raise NotExpressible("theta alone moves the pairs by (theta'/theta)^(2i/d) only")
    dim = rope.dim

    def beta(index: float) -> float:
        return rope.original_context / (2 * math.pi * theta ** (2 * index / dim))

    out = {"rope_type": "yarn", "rope_theta": theta} | _lengths(rope, target)
    out |= {"beta_fast": beta(dim / 2 + 0.5), "beta_slow": beta(dim - 1)} | _mscale_pair(rope)
    return with_attention(out, wanted.attention_factor)


def longrope_form(rope: Rope, factors: tuple[float, ...], wanted: Spectrum, target: int) -> Params:
    """Any pair factors and any attention factor, with short = long unless two sets are wanted."""
    short = list(factors)
    lengths = _lengths(rope, target)
    if wanted.short_inv_freq is not None:
        plain = plain_inv_freq(rope.dim, rope.theta)
        short = [f / w for f, w in zip(plain, wanted.short_inv_freq, strict=True)]
        # Stock switches sets at the dict's original length: the context the short set was made for.
        lengths = {
            "factor": target / rope.context,
            "original_max_position_embeddings": rope.context,
        }
    out = {"rope_type": "longrope", "rope_theta": rope.theta} | lengths
    out |= {"short_factor": short, "long_factor": list(factors)} | _mscale_pair(rope)
    return with_attention(out, wanted.attention_factor)


Builder = Callable[[Rope, tuple[float, ...], Spectrum, int], Params]

# In the order in which most loaders read them; a method's own form comes before these.
GENERAL: dict[str, Builder] = {
    "default": theta_form,
    "linear": linear_form,
    "proportional": proportional_form,
    "yarn": yarn_theta_form,
    "longrope": longrope_form,
}


def candidates(
    rope: Rope, wanted: Spectrum, target: int, native: Params | None = None
) -> Iterator[Params]:
    """Every stock dict that reads back as exactly the wanted spectrum, best form first."""
    plain = plain_inv_freq(rope.dim, rope.theta)
    factors = tuple(f / w if w else math.inf for f, w in zip(plain, wanted.inv_freq, strict=True))
    offers: list[Params] = []
    if native is not None:
        if native["rope_type"] != "default":
            native = native | _mscale_pair(rope)
        if native["rope_type"] in ("yarn", "longrope"):
            native = with_attention(native, wanted.attention_factor)
        offers.append(native)
    for build in GENERAL.values():
        try:
            offers.append(build(rope, factors, wanted, target))
        except NotExpressible:
            continue
    for params in offers:
        if same(read(params, rope, target), wanted):
            yield params


def carry(
    rope: Rope,
    wanted: Spectrum,
    target: int,
    native: Params | None = None,
    accept: Callable[[Params], bool] = lambda params: True,
) -> Params:
    """The first stock dict that carries `wanted` exactly and that `accept` agrees to."""
    for params in candidates(rope, wanted, target, native):
        if accept(params):
            return params
    raise NotExpressible("no stock rope type that is allowed here carries this spectrum exactly")
