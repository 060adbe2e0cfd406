"""The methods that move theta alone: NTK-aware, dynamic NTK frozen at the target, and ABF."""

from dataclasses import dataclass, field

from ropext.base.errors import UsageError
from ropext.scaling.forms import LARGEST_THETA
from ropext.scaling.method import Method, NoKnobs, Scaling
from ropext.scaling.rope import Rope


def _by_theta(rope: Rope, theta_ratio: float) -> Scaling:
    """Return the scaling that multiplies theta by a ratio, and so divides RoPE pair i by
    ratio^(2i/d)."""
    factors = tuple(theta_ratio ** (2 * i / rope.dim) for i in range(rope.dim // 2))
    native = {"rope_type": "default", "rope_theta": rope.theta * theta_ratio}
    return Scaling(factors, native=native)


def _needs_two_pairs(rope: Rope, method: str) -> None:
    """Raise UsageError if a rotary embedding has one pair alone, which methods that move theta
    cannot scale."""
    if rope.dim == 2:
        raise UsageError(
            f"--method {method} cannot scale a rotary dim of 2: theta does not enter its only "
            "pair; use --method pi"
        )


def ntk(rope: Rope, target: int, knobs: NoKnobs) -> Scaling:
    """Scale RoPE by theta' = theta * s^(d/(d-2)): the last pair is divided by s (YaRN, eq. 16)."""
    _needs_two_pairs(rope, "ntk")
    s = target / rope.context
    return _by_theta(rope, s ** (rope.dim / (rope.dim - 2)))


def dynamic(rope: Rope, target: int, knobs: NoKnobs) -> Scaling:
    """Scale RoPE by dynamic NTK frozen at the target: theta' = theta * (s*l/L - (s-1))^(d/(d-2)), l
    = s*L.

    It is frozen because the stock form keeps state between calls and every loader reads it
    differently.
    """
    _needs_two_pairs(rope, "dynamic")
    s = target / rope.context
    return _by_theta(rope, (s * s - (s - 1)) ** (rope.dim / (rope.dim - 2)))


@dataclass(frozen=True)
class AbfKnobs:
    """The knob of ABF: the new theta itself."""

    theta: float | None = field(
        default=None, metadata={"help": "the new rotary base, e.g. 1e6 (required by abf)"}
    )


def abf(rope: Rope, target: int, knobs: AbfKnobs) -> Scaling:
    """Scale RoPE to the theta that the user gives: adjusted base frequency (Xiong et al. 2023,
    section 4.1)."""
    _needs_two_pairs(rope, "abf")
    if knobs.theta is None:
        raise UsageError("--method abf needs --theta, the new rotary base (e.g. --theta 1e6)")
    if not rope.theta <= knobs.theta < LARGEST_THETA:
        raise UsageError(
            f"--theta {knobs.theta:g} must be below {LARGEST_THETA:g} and not below the model's "
            f"own {rope.theta:g}"
        )
    return _by_theta(rope, knobs.theta / rope.theta)


METHODS = (
    Method(
        name="ntk",
        summary="NTK-aware: a larger theta, so that fast pairs stay and the slowest is divided.",
        paper="bloc97 2023; Peng et al. 2023, arXiv 2309.00071, eq. 16",
        carried="theta",
        scale=ntk,
        fits=("longrope", "ntk"),
        colour=1,
    ),
    Method(
        name="dynamic",
        summary="Dynamic NTK as it stands at the target, written as a theta (static, portable).",
        paper="emozilla 2023; Peng et al. 2023, arXiv 2309.00071, section 3.3",
        carried="theta",
        scale=dynamic,
        fits=("longrope", "ntk"),
        colour=5,
    ),
    Method(
        name="abf",
        summary="Adjusted base frequency: a theta of your choice; made for continued training.",
        paper="Xiong et al. 2023, arXiv 2309.16039",
        carried="theta",
        scale=abf,
        knobs=AbfKnobs,
        needs="--theta",
        competes=False,
        fits=(),
        colour=6,
    ),
)
