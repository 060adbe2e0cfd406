"""Every method over the grid against the literal float64 transcription of its source."""

import pytest
from comparing import assert_close, assert_number
from grid import CASES, Case, case_id, points

from ropext import scaling
from ropext.scaling.rope import Rope

BOUND = 1e-12


def test_every_method_has_a_case() -> None:
    assert {case.method for case in CASES} == set(scaling.METHODS)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_spectrum_equals_the_transcription(case: Case) -> None:
    count = 0
    for dim, theta, context, target in points(case):
        spectrum, _ = case.scaled(Rope(dim, theta, context), target)
        inv_freq, attention = case.truth(dim, theta, context, target)
        what = f"{case_id(case)} dim {dim} theta {theta:g} {context} -> {target}"
        assert_close(spectrum.inv_freq, inv_freq, BOUND, what)
        assert_number(spectrum.attention_factor, attention, BOUND, f"{what}: attention factor")
        count += 1
    assert count >= 144
