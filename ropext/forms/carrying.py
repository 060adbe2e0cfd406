"""Which stock rope dict carries a wanted spectrum, exactly."""

import math
from collections.abc import Callable, Iterator

from ropext.errors import NotExpressible
from ropext.forms.reading import (
    Params,
    default_attention,
    read,
)
from ropext.rope import Rope, Spectrum, plain_inv_freq

# Relative difference that counts as equal between two float64 routes to the same number.
EXACT = 1e-9

# Stock raises theta to a power in float32, which ends at 3.4e38; families reads none from 1e30 on.
LARGEST_THETA = 1e30


def _close(a: float, b: float) -> bool:
    return a == b or math.isclose(a, b, rel_tol=EXACT)


def same(a: Spectrum, b: Spectrum) -> bool:
    """Whether two spectra are the same function, up to float64 rounding."""
    if (a.short_inv_freq is None) != (b.short_inv_freq is None):
        return False
    if a.short_context != b.short_context:
        return False
    one = [*a.inv_freq, a.attention_factor, a.softmax_factor, *(a.short_inv_freq or ())]
    two = [*b.inv_freq, b.attention_factor, b.softmax_factor, *(b.short_inv_freq or ())]
    return len(one) == len(two) and all(_close(x, y) for x, y in zip(one, two, strict=True))


def _theta_shift(rope: Rope, factors: tuple[float, ...]) -> float | None:
    """The theta whose plain spectrum has these pair factors, if there is one.

    theta' moves pair i by (theta'/theta)^(2i/d), and the last pair, 2i = d - 2, tells theta':
    theta' = theta * p_last^(d/(d-2)).
    """
    if not 0 < factors[-1] < math.inf:
        return None
    if rope.dim == 2:
        return rope.theta if _close(factors[0], 1.0) else None
    theta = rope.theta * factors[-1] ** (rope.dim / (rope.dim - 2))
    theta = float(f"{theta:.14g}")  # 1e6, not 999999.9999999998
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

    vLLM reads only short_mscale/long_mscale of a longrope; older ones and SGLang read only
    attn_factor of a yarn, which multiplies the default instead of replacing it.
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
    ratio = attention_factor / default
    return params | {"attention_factor": attention_factor, "attn_factor": ratio}


def theta_form(rope: Rope, factors: tuple[float, ...], wanted: Spectrum, target: int) -> Params:
    """Another theta, nothing else."""
    theta = _theta_shift(rope, factors)
    if theta is None:
        raise NotExpressible("theta alone moves the pairs by (theta'/theta)^(2i/d) only")
    return {"rope_type": "default", "rope_theta": theta}


def linear_form(rope: Rope, factors: tuple[float, ...], wanted: Spectrum, target: int) -> Params:
    """Every pair divided by one number, over another theta where that fits."""
    factor, whole = factors[0], target / rope.original_context
    if _close(factor, whole):
        factor = whole  # the ratio of the two lengths, without the rounding of the division
    theta = _theta_shift(rope, tuple(p / factor for p in factors))
    if theta is None:
        raise NotExpressible("linear divides every pair by one number only")
    return {"rope_type": "linear", "rope_theta": theta, "factor": factor} | _mscale_pair(rope)


def _share(turning: int, dim: int) -> float:
    """The partial factor that stock's int(p * d // 2) takes back to this many pairs."""
    share = 2 * turning / dim
    return share if int(share * dim // 2) == turning else math.nextafter(share, 2.0)


def proportional_form(
    rope: Rope, factors: tuple[float, ...], wanted: Spectrum, target: int
) -> Params:
    """The form of the models whose last pairs stand still.

    Offered to no other: its partial_rotary_factor means something else there.
    """
    turning = [p for p in factors if p < math.inf]
    if not turning or len(turning) == len(factors):
        raise NotExpressible("proportional is for models whose last pairs stand still")
    theta = rope.theta
    if len(turning) > 1:
        # (theta'/theta)^(2i/d) at the last pair that turns; d counts those that stand, too.
        theta *= (turning[-1] / turning[0]) ** (rope.dim / (2 * (len(turning) - 1)))
    out = {
        "rope_type": "proportional",
        "rope_theta": theta,
        "partial_rotary_factor": _share(len(turning), rope.dim),
        "factor": turning[0],
    }
    return out | _mscale_pair(rope)


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
        wavelength: float = 2 * math.pi * theta ** (2 * index / dim)
        return rope.original_context / wavelength

    out = {"rope_type": "yarn", "rope_theta": theta} | _lengths(rope, target)
    out |= {"beta_fast": beta(dim / 2 + 0.5), "beta_slow": beta(dim - 1)} | _mscale_pair(rope)
    return with_attention(out, wanted.attention_factor)


def longrope_form(rope: Rope, factors: tuple[float, ...], wanted: Spectrum, target: int) -> Params:
    """Any pair factors and any attention factor, with short = long unless two sets are wanted."""
    if rope.original_context < 2:
        raise NotExpressible("stock longrope divides by the logarithm of the original length")
    short, lengths = list(factors), _lengths(rope, target)
    if wanted.short_inv_freq is not None:
        plain = plain_inv_freq(rope.dim, rope.theta)
        short = [
            f / w if w else math.inf for f, w in zip(plain, wanted.short_inv_freq, strict=True)
        ]
        # Stock switches sets at this length, and vLLM takes the factor from the two lengths.
        lengths["original_max_position_embeddings"] = wanted.short_context
        if not rope.mscale_all_dim:  # DeepSeek's softmax reads the whole factor
            lengths["factor"] = target / wanted.short_context
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
        if params["rope_theta"] < LARGEST_THETA and same(read(params, rope, target), wanted):
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
