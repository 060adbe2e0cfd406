"""LongRoPE's carrier: one factor per pair, from a file (Ding et al. 2024, arXiv 2402.13753)."""

from dataclasses import dataclass, field

from ropext.errors import UsageError
from ropext.forms import Params
from ropext.rope import Rope
from ropext.scaling.method import Method, Scaling


@dataclass(frozen=True)
class LongropeKnobs:
    """The factors; searched, fitted or taken from somebody's release."""

    pair_factors: tuple[float, ...] | None = field(
        default=None,
        metadata={
            "help": "FILE with one number per pair (JSON, CSV, or a config with long_factor)"
        },
    )
    short_pair_factors: tuple[float, ...] | None = field(
        default=None,
        metadata={
            "help": "a second set for inputs within the trained context (from the same file)"
        },
    )


def _checked(rope: Rope, factors: tuple[float, ...], which: str) -> tuple[float, ...]:
    pairs = rope.dim // 2
    if len(factors) != pairs:
        raise UsageError(
            f"--pair-factors gives {len(factors)} {which}numbers, but this model rotates {pairs} "
            f"pairs (dim {rope.dim}); 'ropext inspect' lists them"
        )
    for i, value in enumerate(factors):
        if not value > 0:  # infinity: this pair stands still
            raise UsageError(
                f"--pair-factors: {which}number {i} is {value:g}; each must be above 0, or inf"
            )
    return factors


def longrope(rope: Rope, target: int, knobs: LongropeKnobs) -> Scaling:
    """f'_i = f_i / lambda_i; the attention factor is 1 unless the file or a flag says one."""
    if knobs.pair_factors is None:
        raise UsageError(
            "--method longrope needs --pair-factors FILE, one number per pair; `ropext plan` shows "
            "the methods that need none"
        )
    if rope.context < 2:
        raise UsageError(
            "--method longrope divides by the logarithm of the context, which is 1 token here; "
            "--context N says otherwise"
        )
    long = _checked(rope, knobs.pair_factors, "")
    short = knobs.short_pair_factors
    native: Params = {
        "rope_type": "longrope",
        "rope_theta": rope.theta,
        "factor": target / rope.context,
        "original_max_position_embeddings": rope.context,
        "short_factor": list(_checked(rope, short, "short ") if short else long),
        "long_factor": list(long),
    }
    return Scaling(long, 1.0, native, short)


METHOD = Method(
    name="longrope",
    summary="One factor per pair from a file: searched, fitted or released by somebody.",
    paper="Ding et al. 2024, arXiv 2402.13753",
    carried="longrope",
    scale=longrope,
    knobs=LongropeKnobs,
)
