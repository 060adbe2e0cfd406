"""NTK-by-parts as the YaRN paper writes it, and Llama 3's scaling, which is the same formula."""

import math
from dataclasses import dataclass, field

from ropext.base.errors import UsageError
from ropext.scaling.forms import llama3_pair_factors
from ropext.scaling.method import Method, Scaling
from ropext.scaling.rope import Rope


@dataclass(frozen=True)
class ByPartsKnobs:
    """The ramp's two ends, in turns inside the trained context (alpha and beta of eq. 18)."""

    beta_fast: float = field(
        default=32.0,
        metadata={
            "help": "pairs with more rotations in the context than this keep their frequency"
        },
    )
    beta_slow: float = field(
        default=1.0, metadata={"help": "pairs with fewer rotations than this are interpolated"}
    )


@dataclass(frozen=True)
class Llama3Knobs:
    """Llama 3's names for the same two ends."""

    low_freq_factor: float = field(
        default=1.0, metadata={"help": "pairs with fewer rotations than this are interpolated"}
    )
    high_freq_factor: float = field(
        default=4.0,
        metadata={
            "help": "pairs with more rotations in the context than this keep their frequency"
        },
    )


def _scale(rope: Rope, target: int, low: float, high: float, flags: tuple[str, str]) -> Scaling:
    """Return the scaling by NTK-by-parts between two bounds in turns, with a llama3 rope dict.
    Raise UsageError, which names `flags`, unless 0 < low < high."""
    if not 0 < low < high < math.inf:
        raise UsageError(
            f"{flags[0]} must be above 0 and below {flags[1]}, were {low:g} and {high:g}"
        )
    s = target / rope.context
    native = {
        "rope_type": "llama3",
        "rope_theta": rope.theta,
        "factor": s,
        "low_freq_factor": float(low),
        "high_freq_factor": float(high),
        "original_max_position_embeddings": rope.context,
    }
    factors = llama3_pair_factors(rope.spectrum.inv_freq, rope.context, s, low, high)
    return Scaling(factors, native=native)


def by_parts(rope: Rope, target: int, knobs: ByPartsKnobs) -> Scaling:
    """Scale RoPE by f' = (1-gamma) f/s + gamma f, gamma linear in turns (eq. 17-20), no
    temperature."""
    flags = ("--beta-slow", "--beta-fast")
    return _scale(rope, target, knobs.beta_slow, knobs.beta_fast, flags)


def llama3(rope: Rope, target: int, knobs: Llama3Knobs) -> Scaling:
    """Scale RoPE as NTK-by-parts does, with Llama 3.1's released bounds as defaults (1 and 4
    turns)."""
    flags = ("--low-freq-factor", "--high-freq-factor")
    return _scale(rope, target, knobs.low_freq_factor, knobs.high_freq_factor, flags)


METHODS = (
    Method(
        name="by-parts",
        summary="NTK-by-parts: YaRN's blend as its paper writes it, without the temperature.",
        paper="Peng et al. 2023, arXiv 2309.00071, eq. 17-20",
        carried="llama3",
        scale=by_parts,
        knobs=ByPartsKnobs,
        colour=3,
    ),
    Method(
        name="llama3",
        summary="Llama 3.1's scaling: by-parts with bounds of 1 and 4 rotations.",
        paper="Llama team 2024, arXiv 2407.21783; released code",
        carried="llama3",
        scale=llama3,
        knobs=Llama3Knobs,
        colour=4,
    ),
)
