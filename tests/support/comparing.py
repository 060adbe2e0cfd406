"""Comparing spectra so that a failure names the worst pair and shows both values."""

import math
from collections.abc import Sequence


def worst_pair(ours: Sequence[float], truth: Sequence[float]) -> tuple[int, float]:
    """Return the pair with the largest relative difference, and that difference."""
    assert len(ours) == len(truth), f"{len(ours)} pairs, expected {len(truth)}"
    errors = [
        0.0 if a == b else (abs(a - b) / abs(b) if b and math.isfinite(a) else math.inf)
        for a, b in zip(ours, truth, strict=True)
    ]
    index = max(range(len(errors)), key=errors.__getitem__)
    return index, errors[index]


def assert_close(ours: Sequence[float], truth: Sequence[float], bound: float, what: str) -> None:
    index, error = worst_pair(ours, truth)
    assert error <= bound, (
        f"{what}: worst pair {index} of {len(truth)}: ours {ours[index]!r}, truth "
        f"{truth[index]!r}, relative difference {error:.3g} > {bound:.3g}"
    )


def assert_number(ours: float, truth: float, bound: float, what: str) -> None:
    assert abs(ours - truth) <= bound * abs(truth), f"{what}: ours {ours!r}, truth {truth!r}"
