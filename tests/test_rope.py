"""The rotary embedding, and the two numbers that explain a method's effect on it."""

import math

import pytest
from comparing import assert_close, assert_number

from ropext.scaling.rope import (
    Rope,
    Spectrum,
    divisors,
    explain,
    phase_ratio,
    plain_inv_freq,
    turns,
)


def test_plain_inv_freq_equals_the_papers_formula() -> None:
    """RoFormer eq. 15 at dim 6, theta 1000: 1, 1000^(-1/3) = 0.1, 0.01."""
    assert_close(plain_inv_freq(6, 1000.0), [1.0, 0.1, 0.01], 1e-14, "plain")


def test_wavelengths_and_turns_equal_those_worked_by_hand() -> None:
    spectrum = Rope(4, 100.0, 628).spectrum
    assert_close(spectrum.wavelengths, [2 * math.pi, 20 * math.pi], 1e-14, "wavelengths")
    # 628 tokens hold 99.949 turns of 2 pi tokens, and a tenth of as many turns of the slower pair.
    assert_close(turns(spectrum, 628), [99.9493042617102709, 9.99493042617102709], 1e-14, "turns")


def test_a_pair_with_frequency_zero_has_an_infinite_wavelength() -> None:
    assert Spectrum((1.0, 0.0)).wavelengths == (2 * math.pi, math.inf)


def test_the_spectrum_of_a_scaled_rope_divides_by_the_pair_factors() -> None:
    rope = Rope(
        4, 100.0, 4096, original_context=1024, pair_factors=(1.0, 4.0), attention_factor=1.1
    )
    assert_close(rope.spectrum.inv_freq, [1.0, 0.025], 1e-14, "scaled")
    assert rope.spectrum.attention_factor == 1.1
    assert rope.is_scaled
    assert not rope.is_geometric


def test_original_forgets_scaling_temperature_and_softmax() -> None:
    rope = Rope(
        4,
        100.0,
        4096,
        original_context=1024,
        pair_factors=(1.0, 4.0),
        short_pair_factors=(1.0, 1.5),
        attention_factor=1.1,
        mscale=1.0,
        mscale_all_dim=1.0,
        softmax_mscale=True,
        softmax_factor=1.3,
    )
    original = rope.original()
    assert original == Rope(4, 100.0, 1024, mscale=1.0, mscale_all_dim=1.0, softmax_mscale=True)
    assert not original.is_scaled


def test_pairs_of_frequency_zero_are_no_scaling_and_stay_in_the_original() -> None:
    """Gemma 4 rotates a quarter of its pairs: to read the rest as plain would turn them on."""
    rope = Rope(8, 1e6, 4096, pair_factors=(1.0, math.inf, math.inf, math.inf))
    assert not rope.is_scaled
    assert rope.has_non_rotating_pairs
    shipped = Rope(
        8, 1e6, 32_768, original_context=4096, pair_factors=(8.0, math.inf, math.inf, math.inf)
    )
    assert shipped.is_scaled
    assert shipped.original() == rope
    assert shipped.original().spectrum.inv_freq == (1.0, 0.0, 0.0, 0.0)


def test_a_rope_with_two_sets_has_both_in_its_spectrum() -> None:
    rope = Rope(
        4, 100.0, 4096, original_context=64, pair_factors=(1.0, 4.0), short_pair_factors=(1.0, 2.0)
    )
    assert rope.spectrum.short_inv_freq is not None
    assert_close(rope.spectrum.short_inv_freq, [1.0, 0.05], 1e-14, "short set")
    assert rope.spectrum.short_context == 64


@pytest.mark.parametrize(
    "bad",
    [
        {"dim": 5},
        {"dim": 0},
        {"theta": 0.0},
        {"theta": math.inf},
        {"theta": math.nan},
        {"pair_factors": (1.0,)},
        {"short_pair_factors": (1.0, 1.0, 1.0)},
    ],
    ids=str,
)
def test_impossible_geometry_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        Rope(**({"dim": 4, "theta": 100.0, "context": 64} | bad))


def test_phase_ratio_equals_the_one_worked_by_hand() -> None:
    """L 629, T 1257, dim 4, theta 1e6: 628 rad seen by pair 0 (all of a turn), 0.628 by pair 1."""
    rope = Rope(4, 1e6, 629)
    untouched = phase_ratio(rope, rope.spectrum, 1257)
    assert_close(untouched, [1.0, 2.0], 1e-12, "untouched, twice as far")
    halved = Spectrum((1.0, 0.0005))
    assert_close(phase_ratio(rope, halved, 1257), [1.0, 1.0], 1e-12, "slow pair halved")
    # A pair that has seen 3 rad of its 2 pi needs no more than 2 pi ever.
    rope = Rope(2, 1e4, 4)
    assert_number(phase_ratio(rope, rope.spectrum, 4000)[0], 2 * math.pi / 3, 1e-12, "capped")


def test_divisors() -> None:
    now = Rope(4, 100.0, 628).spectrum.inv_freq
    assert_close(divisors(now, (1.0, 0.025)), [1.0, 4.0], 1e-12, "divisors")
    assert divisors(now, (1.0, 0.0))[1] == math.inf
    assert divisors((1.0, 0.0), (1.0, 0.0)) == (1.0, 1.0)


def test_explain_counts_extrapolated_pairs_and_the_mean_compression() -> None:
    """PI at 4: nothing extrapolated, everything compressed by 4. Untouched: the reverse."""
    rope = Rope(8, 1e6, 1000)
    interpolated = Spectrum(tuple(f / 4 for f in rope.spectrum.inv_freq))
    pi = explain(rope, interpolated, 4000)
    assert pi.pairs_extrapolated == 0
    assert_number(pi.mean_compression, 4.0, 1e-12, "compression of PI")
    # Frequencies 1, 0.0316, 0.001, 0.0000316: the last two see less than a turn in 1000 tokens.
    untouched = explain(rope, rope.spectrum, 4000)
    assert untouched.pairs_extrapolated == 2
    assert_number(untouched.worst_extrapolation, 3999 / 999, 1e-12, "worst")
    assert_number(untouched.mean_compression, 1.0, 1e-12, "compression of nothing")


def test_explain_ignores_pairs_of_frequency_zero() -> None:
    rope = Rope(4, 100.0, 64, pair_factors=(1.0, math.inf))
    got = explain(rope, Spectrum((0.25, 0.0)), 256)
    assert got.pairs_extrapolated == 0
    assert_number(got.mean_compression, 4.0, 1e-12, "compression of the pair that turns")


def test_digest_tells_spectra_apart() -> None:
    one = Spectrum((1.0, 0.1), 1.1, 1.2)
    assert one.digest() == Spectrum((1.0, 0.1), 1.1, 1.2).digest()
    others = [
        Spectrum((1.0, math.nextafter(0.1, 1)), 1.1, 1.2),
        Spectrum((1.0, 0.1), 1.2, 1.1),
        Spectrum((1.0, 0.1), 1.1, 1.2, (1.0, 0.1), 64),
        Spectrum((1.0, 0.1), 1.1, 1.2, (1.0, 0.1), 65),
    ]
    assert len({one.digest(), *(other.digest() for other in others)}) == 5
