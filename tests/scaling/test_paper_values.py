"""Values computed by hand from the papers' equations, at dims small enough to follow.

Numbers with many digits were computed with 30-digit arithmetic from the equation in the docstring.
"""

import json
import math
from typing import Any

import pytest
from comparing import assert_close, assert_number

from ropext import scaling
from ropext.scaling import forms
from ropext.scaling.longrope import parse_pair_factors
from ropext.scaling.rope import Rope, Spectrum

# The values are printed to 12 digits or more.
BOUND = 1e-11


def spectrum(rope: Rope, method: str, target: int, **knobs: Any) -> Spectrum:
    asked = scaling.scale(rope, method, target, scaling.find(method).knobs(**knobs), None)
    return scaling.compose(rope, asked, target)


def test_pi_equals_the_papers_formula() -> None:
    """2306.15595 eq. 4: m -> m L/L'. theta 100, dim 4: 1 and 100^(-1/2) = 0.1, halved."""
    got = spectrum(Rope(4, 100.0, 8), "pi", 16)
    assert_close(got.inv_freq, [0.5, 0.05], BOUND, "pi")
    assert got.attention_factor == 1.0


def test_ntk_equals_the_papers_theta() -> None:
    """2309.00071 eq. 16: b' = b s^(d/(d-2)).

    dim 6, b 1e6, s 16: b' = 1e6 * 16^1.5 = 6.4e7, b'^(1/3) = 400: 1, 1/400, 1/160000.
    """
    rope = Rope(6, 1e6, 1000)
    got = spectrum(rope, "ntk", 16_000)
    assert_close(got.inv_freq, [1.0, 1 / 400, 1 / 160_000], BOUND, "ntk")
    params = next(forms.candidates(rope, got, 16_000))
    assert params["rope_type"] == "default"
    assert_number(params["rope_theta"], 6.4e7, BOUND, "theta")


def test_ntk_of_llama_2_equals_the_worked_theta() -> None:
    """dim 128, s 2: theta' = 10000 * 2^(128/126) = 20221.2616897379."""
    rope = Rope(128, 1e4, 4096)
    params = next(forms.candidates(rope, spectrum(rope, "ntk", 8192), 8192))
    assert_number(params["rope_theta"], 20221.2616897379, BOUND, "theta")


def test_dynamic_is_frozen_at_the_target() -> None:
    """b' = b (s l/L - (s-1))^(d/(d-2)), l = s L. dim 4, s 4: 100 * (16-3)^2 = 16900, root 130."""
    got = spectrum(Rope(4, 100.0, 8), "dynamic", 32)
    assert_close(got.inv_freq, [1.0, 1 / 130], BOUND, "dynamic")


def test_abf_equals_the_papers_theta() -> None:
    """2309.16039 section 4.1: theta 1e4 -> 1e6; dim 4: 1e6^(-1/2) = 0.001."""
    got = spectrum(Rope(4, 1e4, 4096), "abf", 16_384, theta=1e6)
    assert_close(got.inv_freq, [1.0, 0.001], BOUND, "abf")


def test_by_parts_equals_the_papers_formula() -> None:
    """2309.00071 eq. 17-20. dim 4, b 100, L 628, s 4, alpha 1, beta 32.

    Pair 0: r = 628/(2 pi) = 99.949 > 32, so gamma = 1 and the frequency stays 1.
    Pair 1: r = 9.99493042617, gamma = (r-1)/31 = 0.290159046006,
            0.1 * ((1-gamma)/4 + gamma) = 0.0467619284504.
    """
    got = spectrum(Rope(4, 100.0, 628), "by-parts", 2512)
    assert_close(got.inv_freq, [1.0, 0.0467619284504137752], BOUND, "by-parts")
    assert got.attention_factor == 1.0


def test_by_parts_divides_pairs_below_one_turn() -> None:
    """L 6 is less than one turn (2 pi) of even the fastest pair: gamma = 0, all divided by s."""
    got = spectrum(Rope(4, 100.0, 6), "by-parts", 24)
    assert_close(got.inv_freq, [0.25, 0.025], BOUND, "by-parts")


def test_llama3_equals_the_released_code() -> None:
    """Llama 3.1 8B: dim 128, theta 5e5, L 8192, s 8, low 1, high 4.

    Pairs up to 28 turn more than 4 times in 8192 tokens (pair 28: 4.187) and stay. Pairs from 35 on
    turn less than once (0.9967) and are divided by 8. Pair 31 turns 2.26345299 times, so smooth =
    1.26345299/3 = 0.421150997408. So 0.00173604670218 becomes 0.000856751412920.
    """
    got = spectrum(Rope(128, 5e5, 8192), "llama3", 65_536).inv_freq
    pairs = (28, 29, 31, 34, 35)
    expected = [
        0.00321144599475259102,
        0.00216657076350335861,
        0.000856751412919632081,
        0.000178507812767996419,
        0.0000955621235396468302,
    ]
    assert_close([got[i] for i in pairs], expected, BOUND, f"llama3 pairs {pairs}")


def test_yarn_equals_the_published_code() -> None:
    """The published code at dim 8, b 1e4, L 6283, s 4.

    dim(r) = 8 ln(6283/(2 pi r)) / (2 ln 1e4): dim(32) = 1.49484, floor 1; dim(1) = 2.99999, ceil 3.
    Ramp 0, 0, 1/2, 1 over 1, 0.1, 0.01, 0.001: pair 2 is 0.01 * (1/8 + 1/2) = 0.00625.
    2309.00071 eq. 22: sqrt(1/t) = 0.1 ln 4 + 1 = 1.13862943611.
    """
    got = spectrum(Rope(8, 1e4, 6283), "yarn", 25_132)
    assert_close(got.inv_freq, [1.0, 0.1, 0.00625, 0.00025], BOUND, "yarn")
    assert_number(got.attention_factor, 1.13862943611198906, BOUND, "temperature")


def test_yarn_without_truncation_has_fractional_ends() -> None:
    """The same with the fractional ends 1.494837213 and 2.999987191.

    Pair 2: ramp = (2 - 1.494837213)/(1.505149978) = 0.335622890901, 0.00748282831825.
    Pair 3 is beyond the end.
    """
    got = spectrum(Rope(8, 1e4, 6283), "yarn", 25_132, truncate=False)
    expected = [1.0, 0.1, 0.00748282831824859175, 0.00025]
    assert_close(got.inv_freq, expected, BOUND, "yarn, truncate off")


def test_yarn_ramp_may_end_beyond_the_last_pair() -> None:
    """The ramp's end is clamped to dim - 1, not dim/2 - 1: dim 8, b 10, L 6283, s 4.

    Here dim(32) = 4 ln(31.25)/ln 10 = 5.98, floor 5. And dim(1) = 4 ln(1000)/ln 10 = 12, clamped to
    7: no pair of 0..3 is touched.

    With L 628: dim(32) = 1.98, floor 1; dim(1) = 8 -> 7. The ramp over pairs 1, 2, 3 is 0, 1/6,
    2/6. The divisors are 1, 1/(1/24 + 5/6) = 8/7, 1/(1/12 + 2/3) = 4/3.
    """
    untouched = spectrum(Rope(8, 10.0, 6283), "yarn", 25_132)
    assert_close(untouched.inv_freq, [10 ** (-i / 4) for i in range(4)], BOUND, "ramp beyond")
    got = spectrum(Rope(8, 10.0, 628), "yarn", 2512)
    divisors = [1.0, 1.0, 8 / 7, 4 / 3]
    expected = [10 ** (-i / 4) / p for i, p in enumerate(divisors)]
    assert_close(got.inv_freq, expected, BOUND, "ramp end clamped to dim - 1")


def test_yarn_of_llama_2_equals_the_worked_numbers() -> None:
    """Llama-2, dim 128, L 4096: ramp from 20 (20.94) to 46 (45.03), s 16: temperature 1.2773.

    Pair 33 is in its middle: 0.00865964323360 * (1/32 + 1/2) = 0.00460043546785.
    """
    rope = Rope(128, 1e4, 4096)
    got = spectrum(rope, "yarn", 65_536)
    assert_number(got.inv_freq[33], 0.00460043546785034718, BOUND, "pair 33")
    plain = rope.spectrum.inv_freq
    assert_close(got.inv_freq[:21], plain[:21], BOUND, "kept pairs")
    assert_close(got.inv_freq[46:], [f / 16 for f in plain[46:]], BOUND, "interpolated pairs")
    assert_number(got.attention_factor, 1.27725887222397812, BOUND, "temperature")


@pytest.mark.parametrize(
    ("s", "expected"),
    [(8, 1.20794415416798359), (16, 1.27725887222397812), (32, 1.3465735902799727)],
)
def test_the_attention_factor_of_yarn_is_the_papers(s: int, expected: float) -> None:
    """2309.00071 eq. 22."""
    got = spectrum(Rope(128, 1e4, 4096), "yarn", 4096 * s)
    assert_number(got.attention_factor, expected, BOUND, f"s = {s}")


def test_longrope_equals_the_papers_formula() -> None:
    """Frequencies over factors; sqrt(1 + ln 32/ln 4096) = sqrt(1 + 3.4657/8.3178) = 1.19023807,
    which a published config's lengths say; numbers alone say no temperature."""
    got = spectrum(Rope(4, 100.0, 4096), "longrope", 131_072, pair_factors=(1.0, 5.0))
    assert_close(got.inv_freq, [1.0, 0.02], BOUND, "longrope")
    assert got.attention_factor == 1
    published = {"rope_scaling": {"long_factor": [1.0, 5.0], "short_factor": [1.0, 1.0]}}
    published |= {
        "max_position_embeddings": 131_072,
        "original_max_position_embeddings": 4096,
    }
    _, _, attention = parse_pair_factors(json.dumps(published), "config.json")
    assert_number(attention, 1.19023807142380833, BOUND, "temperature")


def deepseek(mscale: float, mscale_all_dim: float) -> Rope:
    return Rope(64, 1e4, 4096, mscale=mscale, mscale_all_dim=mscale_all_dim, softmax_mscale=True)


@pytest.mark.parametrize(
    ("m", "expected"), [(1.0, 1.87385420709262659), (0.707, 1.58962616512087351)]
)
def test_the_softmax_factor_of_deepseek_equals_the_released_one(m: float, expected: float) -> None:
    """DeepSeek-V3 and V2-Lite as released: s 40, softmax times (0.1 m ln 40 + 1)^2, cos times 1."""
    rope = deepseek(m, m)
    asked = scaling.scale(rope, "yarn", 163_840, scaling.find("yarn").knobs(), None)
    got = scaling.compose(rope, asked, 163_840)
    params = next(forms.candidates(rope, got, 163_840, scaling.native(rope, asked)))
    read = forms.read(params, rope).spectrum
    assert_number(got.softmax_factor, expected, BOUND, "softmax factor, planned")
    assert_number(read.softmax_factor, expected, BOUND, "softmax factor, as written")
    assert_number(read.attention_factor, 1.0, BOUND, "attention factor")


def test_the_attention_factor_of_deepseek_is_the_ratio_of_its_mscales() -> None:
    """(0.1 ln 40 + 1)/(0.05 ln 40 + 1) = 1.15572199."""
    got = spectrum(deepseek(1.0, 0.5), "yarn", 163_840)
    assert_number(got.attention_factor, 1.15572199019628861, BOUND, "attention factor")


def test_yarn_on_an_interpolated_model_sees_its_present_wavelengths() -> None:
    """Gemma 3's global layers ship linear 8; yarn then sees wavelengths eight times longer.

    dim 8, b 1e4, L 8*6283 read through linear 8: the same turns as 6283 plain, so the same ramp
    0, 0, 1/2, 1, on top of the division by 8.
    """
    rope = Rope(8, 1e4, 8 * 6283, original_context=6283, pair_factors=(8.0,) * 4)
    got = spectrum(rope, "yarn", 4 * 8 * 6283)
    assert_close(got.inv_freq, [1 / 8, 0.1 / 8, 0.00625 / 8, 0.00025 / 8], BOUND, "yarn on linear")
    assert_number(got.attention_factor, 0.1 * math.log(4) + 1, BOUND, "temperature of the new 4")


def test_by_parts_on_llama3_sees_its_present_frequencies() -> None:
    """Llama 3.1, which reads 131072 tokens through its own factor of 8, is doubled by by-parts.

    The ramp sees the model's present frequencies. Pair 35 is 0.0000955621235396 after the release's
    8, and turns 131072 * 0.0000955621235396 / (2 pi) = 1.99349821 times. So gamma = 0.99349821/31.
    """
    release = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    rope = forms.read(release, Rope(128, 5e5, 131_072))
    got = spectrum(rope, "by-parts", 262_144)
    turns = 131_072 * 0.0000955621235396468302 / (2 * math.pi)
    gamma = (turns - 1) / 31
    assert_number(turns, 1.99349820898583, 1e-10, "turns")
    expected = 0.0000955621235396468302 * ((1 - gamma) / 2 + gamma)
    assert_number(got.inv_freq[35], expected, BOUND, "pair 35")
    assert_close(got.inv_freq[:20], rope.spectrum.inv_freq[:20], BOUND, "fast pairs are kept")
