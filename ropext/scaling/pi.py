"""Position Interpolation (Chen et al. 2023, arXiv 2306.15595)."""

from ropext.scaling.method import Method, NoKnobs, Scaling
from ropext.scaling.rope import Rope


def pi(rope: Rope, target: int, knobs: NoKnobs) -> Scaling:
    """Scale RoPE by f'_i = f_i / s: positions m become m/s (section 3.2, eq. 4), so no phase is
    new."""
    s = target / rope.context
    native = {"rope_type": "linear", "rope_theta": rope.theta, "factor": s}
    return Scaling((s,) * (rope.dim // 2), native=native)


METHOD = Method(
    name="pi",
    summary="Position Interpolation: every pair slowed by the factor; needs fine-tuning.",
    paper="Chen et al. 2023, arXiv 2306.15595",
    carried="linear",
    scale=pi,
    colour=0,
)
