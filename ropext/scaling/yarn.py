"""YaRN as its published code computes it (Peng et al. 2023, arXiv 2309.00071; jquesnelle/yarn)."""

import math
from dataclasses import dataclass, field
from itertools import pairwise

from ropext.errors import UsageError
from ropext.forms import BETA_FAST, BETA_SLOW, Params, linear_ramp, mscale, yarn_bounds
from ropext.rope import Rope, turns
from ropext.scaling.method import Method, Scaling


@dataclass(frozen=True)
class YarnKnobs:
    """The ramp's two ends, in turns inside the trained context."""

    beta_fast: float = field(
        default=BETA_FAST, metadata={"help": "pairs with more turns than this are kept"}
    )
    beta_slow: float = field(
        default=BETA_SLOW, metadata={"help": "pairs with fewer turns than this are interpolated"}
    )
    truncate: bool = field(
        default=True, metadata={"help": "round the ramp's ends to whole pairs, as the paper's code"}
    )


def check_betas(knobs: YarnKnobs) -> None:
    """The ramp needs two ends in the right order."""
    if not 0 < knobs.beta_slow < knobs.beta_fast < math.inf:
        raise UsageError(
            f"--beta-slow must be above 0 and below --beta-fast, were {knobs.beta_slow:g} and "
            f"{knobs.beta_fast:g}"
        )


def _bounds(rope: Rope, knobs: YarnKnobs) -> tuple[float, float]:
    """The ramp's ends as pair indices.

    On an embedding that is scaled already the closed form does not hold: there the index at which
    the *current* wavelengths make the wanted number of turns is interpolated in the logarithm.
    """
    if not rope.is_scaled:
        return yarn_bounds(
            rope.dim, rope.theta, rope.context, knobs.beta_fast, knobs.beta_slow, knobs.truncate
        )
    logs = [math.log(r) for r in turns(rope.spectrum, rope.context) if r]
    low, high = (_index_at(logs, math.log(b)) for b in (knobs.beta_fast, knobs.beta_slow))
    if knobs.truncate:
        # 1e-9: an index that is a whole number must not fall to its neighbour by rounding.
        low, high = math.floor(low + 1e-9), math.ceil(high - 1e-9)
    return max(low, 0), min(high, rope.dim - 1)


def _index_at(logs: list[float], wanted: float) -> float:
    """Where a falling sequence crosses `wanted`; beyond its ends, along its mean slope."""
    if len(logs) < 2:
        return 0.0
    for i, (a, b) in enumerate(pairwise(logs)):
        if a >= wanted >= b and a > b:
            return i + (a - wanted) / (a - b)
    slope = (logs[0] - logs[-1]) / (len(logs) - 1)
    end = 0 if wanted > logs[0] else len(logs) - 1
    return end + (logs[end] - wanted) / slope if slope > 0 else float(end)


def _attention(rope: Rope, s: float) -> float:
    """0.1 ln(s) + 1 (eq. 22); for DeepSeek's pair the ratio that its configs ask for."""
    if rope.mscale and rope.mscale_all_dim:
        return mscale(s, rope.mscale) / mscale(s, rope.mscale_all_dim)
    return mscale(s)


def yarn(rope: Rope, target: int, knobs: YarnKnobs) -> Scaling:
    """f' = f/s * ramp + f * (1 - ramp), the ramp linear in the pair index.

    The paper's eq. 18 is linear in turns instead (that is --method by-parts); this is what its
    code, transformers, vLLM and llama.cpp compute.
    """
    check_betas(knobs)
    s = target / rope.context
    low, high = _bounds(rope, knobs)
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
    return Scaling(factors, _attention(rope, s), native)


METHOD = Method(
    name="yarn",
    summary="YaRN: fast pairs kept, slow ones interpolated, with a temperature; works untrained.",
    paper="Peng et al. 2023, arXiv 2309.00071",
    carried="yarn",
    scale=yarn,
    knobs=YarnKnobs,
)
