"""YaRN as its published code computes it (Peng et al. 2023, arXiv 2309.00071; jquesnelle/yarn)."""

import math
from dataclasses import dataclass, field
from itertools import pairwise

from ropext.base.errors import UsageError
from ropext.scaling.forms import BETA_FAST, BETA_SLOW, Params, linear_ramp, mscale, yarn_bounds
from ropext.scaling.method import Method, Scaling
from ropext.scaling.rope import Rope, turns


@dataclass(frozen=True)
class YarnKnobs:
    """The ramp's two ends, in turns inside the trained context."""

    beta_fast: float = field(
        default=BETA_FAST,
        metadata={
            "help": "pairs with more rotations in the context than this keep their frequency"
        },
    )
    beta_slow: float = field(
        default=BETA_SLOW,
        metadata={"help": "pairs with fewer rotations than this are interpolated"},
    )
    truncate: bool = field(
        default=True, metadata={"help": "round the ramp's ends to whole pairs, as the paper's code"}
    )


def _bounds_now(rope: Rope, knobs: YarnKnobs) -> tuple[float, float]:
    """Return YaRN's ramp ends as pair indices for a rotary embedding that is scaled already.

    The closed form does not hold there. An end is the index at which the *current* wavelengths make
    the wanted number of turns.
    """
    points = list[tuple[int, float]]()
    for i, count in enumerate(turns(rope.spectrum, rope.context)):
        if count:
            points.append((i, math.log(count)))
    step = 2 * math.log(rope.theta) / rope.dim
    low = _index_at(points, math.log(knobs.beta_fast), step)
    high = _index_at(points, math.log(knobs.beta_slow), step)
    if knobs.truncate:
        # 1e-9: an index that is a whole number must not fall to its neighbour by rounding.
        low = math.floor(low + 1e-9)
        high = math.ceil(high - 1e-9)
    return max(low, 0), min(high, rope.dim - 1)


def _index_at(points: list[tuple[int, float]], wanted: float, step: float) -> float:
    """Return the rotary pair's index, for YaRN's ramp, at which falling values cross `wanted`:
    linear between two pairs, like the closed form.

    Beyond the first and the last pair, extend the outer piece. If that piece does not fall, or if
    there is only one pair, use plain RoPE's `step` per pair.
    """
    for (i, a), (j, b) in pairwise(points):
        if a >= wanted >= b and a > b:
            return i + (j - i) * (a - wanted) / (a - b)
    outer = points[:2] if wanted > points[0][1] else points[-2:]
    i, a = outer[0]
    j, b = outer[-1]
    slope = step
    if a > b:
        slope = (a - b) / (j - i)
    return i + (a - wanted) / slope


def yarn(rope: Rope, target: int, knobs: YarnKnobs) -> Scaling:
    """Scale RoPE by YaRN: f' = f/s * ramp + f * (1 - ramp), with a ramp that is linear in the pair
    index.

    The paper's eq. 18 is linear in turns instead (that is --method by-parts). The paper's code,
    transformers, vLLM and llama.cpp compute the formula above.
    """
    if not 0 < knobs.beta_slow < knobs.beta_fast < math.inf:
        raise UsageError(
            f"--beta-slow must be above 0 and below --beta-fast, were {knobs.beta_slow:g} and "
            f"{knobs.beta_fast:g}"
        )
    if rope.theta <= 1:
        raise UsageError(
            f"--method yarn needs a theta above 1 (its ramp divides by ln theta), and the model's "
            f"is {rope.theta:g}; use --method pi"
        )
    s = target / rope.context
    if rope.is_geometric or not any(rope.spectrum.inv_freq):
        low, high = yarn_bounds(
            rope.dim, rope.theta, rope.context, knobs.beta_fast, knobs.beta_slow, knobs.truncate
        )
    else:
        low, high = _bounds_now(rope, knobs)
    factors = tuple(1 / (r / s + 1 - r) for r in linear_ramp(rope.dim // 2, low, high))
    native: Params = {
        "rope_type": "yarn",
        "rope_theta": rope.theta,
        "factor": s,
        "original_max_position_embeddings": rope.context,
    }
    if knobs.beta_fast != BETA_FAST or knobs.beta_slow != BETA_SLOW:
        native |= {"beta_fast": float(knobs.beta_fast), "beta_slow": float(knobs.beta_slow)}
    if not knobs.truncate:
        native["truncate"] = False
    # 0.1 ln(s) + 1 (eq. 22); for DeepSeek's pair the ratio that its configs require.
    attention = mscale(s)
    if rope.mscale and rope.mscale_all_dim:
        attention = mscale(s, rope.mscale) / mscale(s, rope.mscale_all_dim)
    return Scaling(factors, attention, native)


METHOD = Method(
    name="yarn",
    summary="YaRN: fast pairs kept, slow ones interpolated, with a temperature.",
    paper="Peng et al. 2023, arXiv 2309.00071",
    carried="yarn",
    scale=yarn,
    knobs=YarnKnobs,
    fits=("longrope", "yarn"),
    colour=2,
)
