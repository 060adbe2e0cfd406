"""The points at which every method is compared with its independent truths."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import transcriptions as truth

from ropext import scaling
from ropext.scaling import forms
from ropext.scaling.rope import Rope, Spectrum

# 2, 4 and 6 have one, two and three pairs: odd ramps, ramp ends beyond dim/2. 20 and 24 are what
# partial rotation leaves of a head of 80 and 96; 96 and 192 are not powers of two.
DIMS = (2, 4, 6, 20, 24, 64, 96, 128, 192, 256)
THETAS = (100.0, 10_000.0, 500_000.0, 5.8e6, 1e9)
# 6 is below one turn of the fastest pair, 100 below 32 turns of it: the ramp starts at its clamp.
CONTEXTS = (6, 100, 2048, 8192, 131_072)
FACTORS = (1.5, 4.0, 32.0)


@dataclass(frozen=True)
class Case:
    """A method with knobs, and the literal transcription that it must equal."""

    method: str
    knobs: dict[str, Any] = field(default_factory=dict)

    def scaled(self, rope: Rope, target: int) -> tuple[Spectrum, forms.Params]:
        """Return our spectrum, and the stock dict that we export for it."""
        knobs = scaling.find(self.method).knobs(**self.knobs_for(rope))
        asked = scaling.scale(rope, self.method, target, knobs, None)
        wanted = scaling.compose(rope, asked, target)
        return wanted, next(forms.candidates(rope, wanted, target, scaling.native(rope, asked)))

    def knobs_for(self, rope: Rope) -> dict[str, Any]:
        if self.method == "longrope":
            return {"pair_factors": tuple(self._factors(rope.dim))}
        return self.knobs

    def _factors(self, dim: int) -> list[float]:
        """Return factors that rise, as searched ones do, except for one pair."""
        pairs = dim // 2
        return [1.0 + 7.3 * i / pairs - (0.4 if i == 2 else 0.0) for i in range(pairs)]

    def truth(self, dim: int, theta: float, context: int, target: int) -> truth.Result:
        at = (dim, theta, context, target)
        match self.method:
            case "pi":
                return truth.position_interpolation(*at)
            case "ntk":
                return truth.ntk_aware(*at)
            case "dynamic":
                return truth.dynamic_ntk(*at)
            case "abf":
                return truth.abf(dim, theta, self.knobs["theta"])
            case "by-parts":
                ends = self.knobs.get("beta_slow", 1.0), self.knobs.get("beta_fast", 32.0)
                return truth.ntk_by_parts(*at, *ends)
            case "llama3":
                return truth.llama3(
                    *at,
                    self.knobs.get("low_freq_factor", 1.0),
                    self.knobs.get("high_freq_factor", 4.0),
                )
            case "yarn":
                return truth.yarn(*at, **self.knobs)
            case "longrope":
                # the file says no attention factor, so that it is 1
                return truth.longrope(*at, self._factors(dim))[0], 1.0
        raise KeyError(
            f"no transcription of {self.method}: write one in tests/support/transcriptions.py"
        )


CASES = (
    Case("pi"),
    Case("ntk"),
    Case("dynamic"),
    Case("abf", {"theta": 2e9}),
    Case("by-parts"),
    Case("by-parts", {"beta_fast": 4.0, "beta_slow": 2.0}),
    Case("llama3"),
    Case("llama3", {"low_freq_factor": 2.0, "high_freq_factor": 128.0}),
    Case("yarn"),
    Case("yarn", {"truncate": False}),
    Case("yarn", {"beta_fast": 128.0, "beta_slow": 2.0}),
    Case("yarn", {"beta_fast": 1.5, "beta_slow": 0.01, "truncate": False}),
    Case("longrope"),
)


def case_id(case: Case) -> str:
    return "-".join([case.method, *(f"{k}={v:g}" for k, v in case.knobs.items())])


def points(case: Case) -> Iterator[tuple[int, float, int, int]]:
    """Yield (dim, theta, context, target); theta does not enter a single pair, so ntk refuses dim
    2."""
    for dim in DIMS:
        if dim == 2 and case.method in ("ntk", "dynamic", "abf"):
            continue
        for theta in THETAS:
            for context in CONTEXTS:
                for factor in FACTORS:
                    yield dim, theta, context, round(context * factor)
