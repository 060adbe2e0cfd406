"""What a rope dict makes stock transformers compute, in float64 instead of its float32."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeGuard

from ropext.errors import InputError
from ropext.rope import Rope, Spectrum, plain_inv_freq

Params = dict[str, Any]

BETA_FAST, BETA_SLOW = 32.0, 1.0


def mscale(factor: float, m: float = 1.0) -> float:
    """YaRN's sqrt(1/t) = 0.1 ln(s) + 1 (eq. 22), with DeepSeek's multiplier m on the logarithm."""
    return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0


def longrope_attention(factor: float, original: int) -> float:
    """LongRoPE's sqrt(1 + ln(s)/ln(L)), as its released code and stock longrope have it."""
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
    """0 = keep the frequency (below `low`), 1 = interpolate it fully (above `high`).

    Where the clamp leaves high < low, the published formula still holds and this follows it.
    """
    if low == high:
        high += 0.001  # the published code's guard against a division by zero
    return tuple(min(max((i - low) / (high - low), 0.0), 1.0) for i in range(pairs))


def llama3_pair_factors(
    inv_freq: Iterable[float], context: int, factor: float, low: float, high: float
) -> tuple[float, ...]:
    """The YaRN paper's NTK-by-parts (eq. 17-20), linear in turns r = L/lambda; also Llama 3's form.

    gamma = clamp((r - low)/(high - low), 0, 1) keeps, 1 - gamma interpolates.
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


def _decoded(value: Any) -> Any:
    """transformers writes an infinite float, which JSON lacks, as {"__float__": "Infinity"}."""
    return math.inf if value == {"__float__": "Infinity"} else value


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(params: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A finite number above 0; None counts as absent, as it does in stock."""
    value = params.get(key)
    if value is None and default is not None:
        return default
    if not _is_number(value) or not 0 < value < math.inf:
        raise InputError(
            f"config.json: {key} of the rope dict is {value!r}, but must be a number above 0"
        )
    return float(value)


def _numbers(params: Mapping[str, Any], key: str, dim: int) -> tuple[float, ...]:
    """One number above 0 per pair; infinity is a pair that does not turn."""
    values = params.get(key)
    if not isinstance(values, list | tuple):
        raise InputError(f"config.json: {key} of the rope dict must be a list, was {values!r}")
    numbers = [_decoded(v) for v in values]
    for i, value in enumerate(numbers):
        if not _is_number(value) or not value > 0:
            raise InputError(
                f"config.json: {key} of the rope dict must hold numbers above 0, but number {i} "
                f"is {value!r}"
            )
    if len(numbers) != dim // 2:
        raise InputError(
            f"config.json: {key} of the rope dict has {len(numbers)} numbers, but this model "
            f"rotates {dim // 2} pairs"
        )
    return tuple(float(v) for v in numbers)


def _original(params: Mapping[str, Any], context: int) -> int:
    """Stock fills an absent original length with max_position_embeddings."""
    return int(_number(params, "original_max_position_embeddings", context))


def _factor(params: Mapping[str, Any], context: int) -> float:
    """Stock derives a factor of None (absent, in longrope) from the two lengths."""
    return _number(params, "factor", context / _original(params, context))


def _default(params: Mapping[str, Any], dim: int, context: int, nested: bool) -> tuple[float, ...]:
    return (1.0,) * (dim // 2)


def _linear(params: Mapping[str, Any], dim: int, context: int, nested: bool) -> tuple[float, ...]:
    return (_number(params, "factor"),) * (dim // 2)


def _dynamic(params: Mapping[str, Any], dim: int, context: int, nested: bool) -> tuple[float, ...]:
    # Stateful: within max_position_embeddings stock computes plain RoPE. HunYuan's `alpha` is a
    # static change of theta under the same name, theta * alpha^(d/(d-2)).
    if not params.get("alpha") or dim == 2:
        return (1.0,) * (dim // 2)
    alpha = _number(params, "alpha")
    return tuple(alpha ** (2 * i / (dim - 2)) for i in range(dim // 2))


def _yarn(params: Mapping[str, Any], dim: int, context: int, nested: bool) -> tuple[float, ...]:
    theta = _number(params, "rope_theta")
    if theta <= 1:
        raise InputError(
            f"config.json: rope_theta is {theta:g}, but a yarn dict needs one above 1 "
            "(its ramp divides by ln theta)"
        )
    factor = _factor(params, context)
    low, high = yarn_bounds(
        dim,
        theta,
        _original(params, context),
        _number(params, "beta_fast", BETA_FAST),
        _number(params, "beta_slow", BETA_SLOW),
        # Stock reads `truncate` from the outer dict, so a nested one never sees it.
        True if nested else bool(params.get("truncate", True)),
    )
    # f' = f/s * ramp + f * (1 - ramp), so the divisor is 1 / (ramp/s + 1 - ramp).
    return tuple(1 / (r / factor + 1 - r) for r in linear_ramp(dim // 2, low, high))


def _llama3(params: Mapping[str, Any], dim: int, context: int, nested: bool) -> tuple[float, ...]:
    return llama3_pair_factors(
        plain_inv_freq(dim, _number(params, "rope_theta")),
        _original(params, context),
        _number(params, "factor"),
        _number(params, "low_freq_factor"),
        _number(params, "high_freq_factor"),
    )


def _longrope(params: Mapping[str, Any], dim: int, context: int, nested: bool) -> tuple[float, ...]:
    return _numbers(params, "long_factor", dim)


def _proportional(
    params: Mapping[str, Any], dim: int, context: int, nested: bool
) -> tuple[float, ...]:
    """The first int(p * d // 2) pairs turn, at frequencies counted over all d; the rest stand."""
    rotating = int(_number(params, "partial_rotary_factor", 1.0) * dim // 2)
    factor = _number(params, "factor", 1.0)
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
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}


def read_pair_factors(
    params: Mapping[str, Any], dim: int, context: int, *, nested: bool = False
) -> tuple[float, ...]:
    """What a rope dict divides the plain frequencies theta^(-2i/dim) by; infinite = stands still.

    Of a longrope with two sets this is the one for inputs beyond the original length.
    """
    kind = params.get("rope_type", "default")
    if kind not in _PAIR_FACTORS:
        raise InputError(
            f"config.json: rope_type {kind!r} is not one that stock transformers computes; known "
            f"are {', '.join(NAMES)}"
        )
    missing = [key for key in REQUIRED.get(kind, ()) if key not in params]
    if missing:
        raise InputError(
            f"config.json: the rope dict of type {kind!r} lacks {', '.join(missing)}, without "
            "which stock transformers cannot build the model"
        )
    return _PAIR_FACTORS[kind](params, dim, context, nested)


def read_short_pair_factors(params: Mapping[str, Any], dim: int) -> tuple[float, ...]:
    """The second set of a longrope, for inputs within the original length; () = the same set."""
    if params.get("rope_type", "default") != "longrope":
        return ()
    short = _numbers(params, "short_factor", dim)
    return () if short == _numbers(params, "long_factor", dim) else short


def read_attention_factor(params: Mapping[str, Any], context: int) -> float:
    """What a rope dict multiplies into cos and sin."""
    kind = params.get("rope_type", "default")
    if kind not in ("yarn", "longrope"):
        return 1.0  # stock ignores the key in every other form
    if params.get("attention_factor") is not None:
        return _number(params, "attention_factor")
    filled = dict(params)
    filled["original_max_position_embeddings"] = _original(params, context)
    filled["factor"] = _factor(params, context)
    return default_attention(filled)


def softmax_factor(params: Mapping[str, Any]) -> float:
    """DeepSeek's softmax multiplier: mscale(factor, mscale_all_dim)^2 in every scaled form."""
    if not params.get("mscale_all_dim") or params.get("rope_type", "default") == "default":
        return 1.0
    return mscale(_number(params, "factor", 1.0), _number(params, "mscale_all_dim")) ** 2


def steepness(params: Mapping[str, Any]) -> float:
    """How much more than usual stock's float32 loses in a ramp whose ends lie close together.

    (x - low)/(high - low) magnifies the rounding of x by about high/(high - low). 1 where that
    stays within the usual bounds: the ends are whole numbers, or far apart.
    """
    kind = params.get("rope_type", "default")
    if kind == "llama3":
        low, high = _number(params, "low_freq_factor"), _number(params, "high_freq_factor")
        return max(1.0, high / (high - low) / 2) if high > low else 1.0
    if kind == "yarn" and params.get("truncate") is False:
        fast = _number(params, "beta_fast", BETA_FAST)
        slow = _number(params, "beta_slow", BETA_SLOW)
        # Of the indices dim(r), proportional to ln(L/(2 pi r)): dim and theta cancel.
        turns = _number(params, "original_max_position_embeddings") / (2 * math.pi * slow)
        return max(1.0, math.log(turns) / math.log(fast / slow)) if fast > slow else 1.0
    return 1.0


def read(params: Mapping[str, Any], rope: Rope, context: int) -> Spectrum:
    """The spectrum that stock transformers computes from a rope dict, in float64.

    `rope` gives what no dict changes (dim, nesting, whether the softmax reads mscale); `context` is
    max_position_embeddings.
    """
    plain = plain_inv_freq(rope.dim, _number(params, "rope_theta"))
    factors = read_pair_factors(params, rope.dim, context, nested=rope.nested)
    short = read_short_pair_factors(params, rope.dim)
    return Spectrum(
        tuple(f / p for f, p in zip(plain, factors, strict=True)),
        read_attention_factor(params, context),
        softmax_factor(params) if rope.softmax_mscale else 1.0,
        tuple(f / p for f, p in zip(plain, short, strict=True)) if short else None,
        _original(params, context) if short else 0,
    )
