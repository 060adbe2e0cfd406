"""Rope dicts as stock reads them, against literal transcriptions; and which dict carries a wish."""

import math
from dataclasses import replace
from typing import Any

import configs
import pytest
import transcriptions as truth
from comparing import assert_close, assert_number

from ropext import families, scaling
from ropext.base.errors import InputError, UsageError
from ropext.options.extend import Extend
from ropext.planning.carrier import Carrier
from ropext.planning.methods import Attempts, attempt_of
from ropext.scaling import forms
from ropext.scaling.rope import Rope, Spectrum, plain_inv_freq

BOUND = 1e-12
DIM, THETA, ORIGINAL, TARGET = 64, 70_000.0, 4096, 16_384
ROPE = Rope(DIM, THETA, ORIGINAL)
LENGTHS = {"factor": 4.0, "original_max_position_embeddings": ORIGINAL}
FACTORS = [1.0 + i / 9 for i in range(DIM // 2)]


def read(params: dict[str, Any], rope: Rope = ROPE, context: int = TARGET) -> Spectrum:
    """Read a published dict; the config's max_position_embeddings is the *extended* length."""
    usual = {"rope_type": "default", "rope_theta": THETA}
    return forms.read(forms.completed(usual | params, context), rope).spectrum


def config_with(params: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a model with this rope dict."""
    sizes = {"hidden_size": 2 * DIM, "num_attention_heads": 2, "num_hidden_layers": 2}
    rope = {"rope_theta": THETA} | params
    lengths = {"max_position_embeddings": TARGET}
    return {"model_type": "llama", "rope_parameters": rope} | sizes | lengths


def assert_reads(params: dict[str, Any], expected: truth.Result, **kwargs: Any) -> None:
    got = read(params, **kwargs)
    assert_close(got.inv_freq, expected[0], BOUND, str(params))
    assert_number(got.attention_factor, expected[1], BOUND, f"attention factor of {params}")


def test_the_default_rope_type_reads_its_theta() -> None:
    assert_reads({"rope_type": "default"}, (truth.rope(DIM, THETA), 1.0))
    assert_reads({}, (truth.rope(DIM, THETA), 1.0))


def test_linear_reads_as_position_interpolation() -> None:
    expected = truth.position_interpolation(DIM, THETA, ORIGINAL, TARGET)
    assert_reads({"rope_type": "linear", "factor": 4}, expected)


def test_yarn_counts_turns_in_the_original_length() -> None:
    """Not in max_position_embeddings, which is the target."""
    expected = truth.yarn(DIM, THETA, ORIGINAL, TARGET)
    assert_reads({"rope_type": "yarn"} | LENGTHS, expected)


def test_yarn_without_its_original_counts_in_max_position_embeddings() -> None:
    expected = truth.yarn(DIM, THETA, TARGET, 4 * TARGET)
    assert_reads({"rope_type": "yarn", "factor": 4.0}, expected)


def test_yarn_with_a_factor_of_none_takes_the_ratio_of_the_lengths() -> None:
    expected = truth.yarn(DIM, THETA, ORIGINAL, TARGET)
    assert_reads({"rope_type": "yarn"} | LENGTHS | {"factor": None}, expected)


def test_yarn_reads_its_betas_truncation_and_attention_factor() -> None:
    inv_freq, _ = truth.yarn(DIM, THETA, ORIGINAL, TARGET, 16, 2, truncate=False)
    knobs = {"beta_fast": 16, "beta_slow": 2, "truncate": False, "attention_factor": 0.9}
    assert_reads({"rope_type": "yarn"} | LENGTHS | knobs, (inv_freq, 0.9))


def test_yarn_nested_per_layer_type_never_sees_truncate() -> None:
    """Stock reads `truncate` from the outer dict."""
    nested = Rope(DIM, THETA, ORIGINAL, nested=True)
    params = {"rope_type": "yarn", "truncate": False} | LENGTHS
    assert_reads(params, truth.yarn(DIM, THETA, ORIGINAL, TARGET), rope=nested)
    assert_reads(params, truth.yarn(DIM, THETA, ORIGINAL, TARGET, truncate=False))


def test_yarn_with_deepseeks_pair() -> None:
    params = {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.5} | LENGTHS
    inv_freq, _ = truth.yarn(DIM, THETA, ORIGINAL, TARGET)
    assert_reads(params, (inv_freq, truth.deepseek_attention(4.0, 1.0, 0.5)))
    # One of the two alone is ignored.
    alone = {k: v for k, v in params.items() if k != "mscale_all_dim"}
    assert_reads(alone, truth.yarn(DIM, THETA, ORIGINAL, TARGET))


def test_llama3_reads_as_the_released_code() -> None:
    params = {"rope_type": "llama3", "low_freq_factor": 1, "high_freq_factor": 4} | LENGTHS
    assert_reads(params, truth.llama3(DIM, THETA, ORIGINAL, TARGET, 1, 4))


def test_llama3_without_a_ramp_is_a_step() -> None:
    params = {"rope_type": "llama3", "low_freq_factor": 2, "high_freq_factor": 2} | LENGTHS
    plain = truth.rope(DIM, THETA)
    step = [f if ORIGINAL * f / (2 * math.pi) >= 2 else f / 4 for f in plain]
    assert_reads(params, (step, 1.0))


def test_longrope_reads_as_the_paper() -> None:
    params = {"rope_type": "longrope", "short_factor": FACTORS, "long_factor": FACTORS} | LENGTHS
    assert_reads(params, truth.longrope(DIM, THETA, ORIGINAL, TARGET, FACTORS))
    # Phi-3 writes no factor: the ratio of the lengths counts.
    phi3 = {k: v for k, v in params.items() if k != "factor"}
    assert_reads(phi3, truth.longrope(DIM, THETA, ORIGINAL, TARGET, FACTORS))


def test_longrope_reads_a_short_and_a_long_set() -> None:
    short = [1.0] * (DIM // 2)
    params = {"rope_type": "longrope", "short_factor": short, "long_factor": FACTORS} | LENGTHS
    got = read(params)
    assert got.short_inv_freq is not None
    assert_close(got.short_inv_freq, truth.rope(DIM, THETA), BOUND, "short set")
    assert got.short_context == ORIGINAL


def test_longrope_reads_transformers_infinity() -> None:
    """transformers writes a standing pair's factor as {"__float__": "Infinity"}, because JSON has
    no such number."""
    factors: list[Any] = [1.0] * (DIM // 2 - 1) + [{"__float__": "Infinity"}]
    params = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors} | LENGTHS
    assert families.read(config_with(params)).sites[0].wanted.inv_freq[-1] == 0.0


def test_hunyuan_alpha_is_a_static_theta() -> None:
    params = {"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0}
    assert_reads(params, truth.hunyuan_alpha(DIM, THETA, 1000.0))


def test_dynamic_is_plain_within_its_context() -> None:
    assert_reads({"rope_type": "dynamic", "factor": 4.0}, (truth.rope(DIM, THETA), 1.0))


def test_proportional_reads_as_stock() -> None:
    params = {"rope_type": "proportional", "partial_rotary_factor": 0.3, "factor": 8.0}
    assert_reads(params, truth.proportional(DIM, THETA, 0.3, 8.0))


def test_the_attention_factor_is_ignored_if_stock_ignores_it() -> None:
    for params in (
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0} | LENGTHS,
        {"rope_type": "default"},
    ):
        assert read(params | {"attention_factor": 1.5}).attention_factor == 1.0


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_deepseek_softmax_in_every_scaled_form(kind: str) -> None:
    rope = Rope(DIM, THETA, ORIGINAL, softmax_mscale=True)
    params = {"rope_type": kind, "mscale": 1.0, "mscale_all_dim": 0.707} | LENGTHS
    expected = truth.deepseek_softmax(4.0, 0.707)
    assert_number(read(params, rope).softmax_factor, expected, BOUND, kind)
    assert read(params).softmax_factor == 1.0  # a family whose attention does not read it
    assert read(params | {"rope_type": "default"}, rope).softmax_factor == 1.0


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({"rope_type": "mystery"}, "'mystery'"),
        ({"rope_type": "linear"}, "lacks factor"),
        (
            {"rope_type": "linear", "factor": "4"},
            "rope_parameters.factor must be a number, was '4'",
        ),
        (
            {"rope_type": "linear", "factor": 0},
            "rope_parameters.factor must be a number above 0 and below 1e+12, was 0",
        ),
        ({"rope_type": "linear", "factor": None}, "lacks factor"),
        ({"rope_type": "linear", "factor": True}, "True"),
        ({"rope_type": "linear", "factor": math.nan}, "nan"),
        ({"rope_type": "linear", "factor": 2.0, "rope_theta": "1e4"}, "rope_theta"),
        ({"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0}, "above 1"),
        ({"rope_type": "yarn", "factor": 4.0, "beta_fast": -1}, "beta_fast"),
        ({"rope_type": "llama3", "factor": 4.0}, "low_freq_factor, high_freq_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0]}, "lacks long_factor"),
        (
            {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
            "has 1 numbers, but this model rotates 32 pairs",
        ),
        (
            {"rope_type": "longrope", "short_factor": FACTORS, "long_factor": [*FACTORS[1:], 0]},
            "long_factor[31] must be a number above 0",
        ),
        ({"rope_type": "longrope", "short_factor": 1.0, "long_factor": FACTORS}, "must be a list"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_dict_gives_one_sentence(params: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError) as caught:
        families.read(config_with(params))
    message = str(caught.value)
    assert told in message
    assert "\n" not in message


def test_theta_with_a_temperature_is_a_yarn_with_an_empty_ramp() -> None:
    wanted = Spectrum(tuple(truth.ntk_aware(DIM, THETA, ORIGINAL, TARGET)[0]), 1.25)
    params = next(forms.candidates(ROPE, wanted, TARGET))
    assert params["rope_type"] == "yarn"
    # The published code, given these betas and the new theta, keeps every frequency.
    inv_freq, default = truth.yarn(
        DIM, params["rope_theta"], ORIGINAL, TARGET, params["beta_fast"], params["beta_slow"]
    )
    assert_close(inv_freq, wanted.inv_freq, BOUND, "empty ramp")
    # Under both names: vLLM up to 0.21 and SGLang multiply the default by attn_factor.
    assert params["attention_factor"] == 1.25
    assert_number(params["attn_factor"] * default, 1.25, BOUND, "attn_factor")


def test_attn_factor_counts_from_deepseeks_own_default() -> None:
    rope = Rope(DIM, THETA, ORIGINAL, mscale=1.0, mscale_all_dim=0.5)
    asked = scaling.scale(rope, "yarn", TARGET, scaling.find("yarn").knobs(), 1.3)
    params = next(
        forms.candidates(
            rope, scaling.compose(rope, asked, TARGET), TARGET, scaling.native(rope, asked)
        )
    )
    default = truth.deepseek_attention(4.0, 1.0, 0.5)
    assert_number(params["attn_factor"] * default, 1.3, BOUND, "attn_factor")


def test_pi_with_a_temperature_is_a_longrope_under_every_name() -> None:
    wanted = Spectrum(tuple(truth.position_interpolation(DIM, THETA, ORIGINAL, TARGET)[0]), 1.2)
    params = next(forms.candidates(ROPE, wanted, TARGET))
    assert params["rope_type"] == "longrope"
    assert params["short_factor"] == params["long_factor"]
    assert_close(params["long_factor"], [4.0] * (DIM // 2), BOUND, "factors")
    for name in ("attention_factor", "short_mscale", "long_mscale"):
        assert params[name] == 1.2
    assert params["original_max_position_embeddings"] == ORIGINAL
    assert params["factor"] == 4.0


def test_longrope_names_its_default_factor_too_but_not_twice() -> None:
    default = math.sqrt(1 + math.log(4) / math.log(ORIGINAL))
    wanted = Spectrum(
        tuple(f / p for f, p in zip(plain_inv_freq(DIM, THETA), FACTORS, strict=True)), default
    )
    params = next(forms.candidates(ROPE, wanted, TARGET))
    assert params["attention_factor"] == default
    assert "short_mscale" not in params


def test_proportional_is_only_for_models_with_pairs_of_frequency_zero() -> None:
    """To any other model, its partial_rotary_factor would say something else."""
    standing = (1.0,) * 8 + (math.inf,) * 24
    rope = Rope(DIM, THETA, ORIGINAL, pair_factors=standing)
    asked = scaling.scale(rope, "pi", TARGET, scaling.find("pi").knobs(), None)
    wanted = scaling.compose(rope, asked, TARGET)
    params = next(forms.candidates(rope, wanted, TARGET, scaling.native(rope, asked)))
    assert params == {
        "rope_type": "proportional",
        "rope_theta": THETA,
        "partial_rotary_factor": 0.25,
        "factor": 4.0,
    }
    kinds = {p["rope_type"] for p in forms.candidates(ROPE, ROPE.spectrum, TARGET)}
    assert "proportional" not in kinds


@pytest.mark.parametrize("dim", range(4, 260, 2))
def test_proportional_share_survives_stocks_rounding(dim: int) -> None:
    """int(p * d // 2) of p = 2 n / d falls one short in float64 for some n."""
    for turning in range(1, dim // 2):
        standing = (2.0,) * turning + (math.inf,) * (dim // 2 - turning)
        spectrum = Rope(dim, THETA, TARGET, pair_factors=standing).spectrum
        params = next(forms.candidates(Rope(dim, THETA, ORIGINAL), spectrum, TARGET))
        assert params["rope_type"] == "proportional"
        share = params["partial_rotary_factor"]
        assert truth.proportional(dim, THETA, share, 2.0)[0][turning] == 0.0
        assert truth.proportional(dim, THETA, share, 2.0)[0][turning - 1] > 0.0


def phi3() -> Rope:
    """Return two sets, switching at 4096, as Phi-3 ships."""
    return Rope(
        DIM,
        THETA,
        131_072,
        original_context=4096,
        pair_factors=tuple(FACTORS),
        short_pair_factors=(1.05,) * (DIM // 2),
        attention_factor=1.19,
    )


def test_a_second_set_stays_when_the_model_is_extended() -> None:
    rope, target = phi3(), 262_144
    asked = scaling.scale(rope, "pi", target, scaling.find("pi").knobs(), None)
    wanted = scaling.compose(rope, asked, target)
    params = next(forms.candidates(rope, wanted, target, scaling.native(rope, asked)))
    assert params["rope_type"] == "longrope"
    assert_close(params["long_factor"], [2 * p for p in FACTORS], BOUND, "long set, doubled")
    assert_close(params["short_factor"], [1.05] * (DIM // 2), BOUND, "short set, as it was")
    assert params["original_max_position_embeddings"] == 4096
    assert params["attention_factor"] == 1.19


def test_a_third_set_is_refused() -> None:
    rope = phi3()
    knobs = scaling.find("longrope").knobs(tuple(FACTORS), (1.0,) * (DIM // 2))
    with pytest.raises(UsageError, match="--from-original"):
        scaling.compose(rope, scaling.scale(rope, "longrope", 262_144, knobs, None), 262_144)


def test_two_sets_on_a_scaled_model_switch_at_its_present_context() -> None:
    rope = Rope(DIM, THETA, TARGET, original_context=ORIGINAL, pair_factors=(4.0,) * 32)
    knobs = scaling.find("longrope").knobs((2.0,) * 32, (1.0,) * 32)
    target = 2 * TARGET
    wanted = scaling.compose(rope, scaling.scale(rope, "longrope", target, knobs, None), target)
    params = next(forms.candidates(rope, wanted, target))
    assert_close(params["long_factor"], [8.0] * 32, BOUND, "long")
    assert_close(params["short_factor"], [4.0] * 32, BOUND, "short")
    assert params["original_max_position_embeddings"] == TARGET
    assert params["factor"] == 2.0


@pytest.mark.parametrize("method", ["ntk", "by-parts", "yarn", "pi"])
def test_deepseeks_pair_travels_in_every_form(method: str) -> None:
    """V3: longrope without the keys gives a softmax scale of 0.177 instead of 0.331."""
    rope = Rope(DIM, THETA, ORIGINAL, mscale=1.0, mscale_all_dim=1.0, softmax_mscale=True)
    asked = scaling.scale(rope, method, TARGET, scaling.find(method).knobs(), None)
    wanted = scaling.compose(rope, asked, TARGET)
    assert_number(
        wanted.softmax_factor, truth.deepseek_softmax(4.0, 1.0), BOUND, "wanted softmax factor"
    )
    dicts = list(forms.candidates(rope, wanted, TARGET, scaling.native(rope, asked)))
    assert "longrope" in {params["rope_type"] for params in dicts}
    for params in dicts:
        assert params["mscale"] == params["mscale_all_dim"] == 1.0
        got = truth.deepseek_softmax(params["factor"], params["mscale_all_dim"])
        assert_number(got, wanted.softmax_factor, BOUND, params["rope_type"])


def test_deepseek_extended_again_counts_from_its_original_context() -> None:
    """V3 ships 40 times 4096; twice that is 80, not 2."""
    shipped = {"rope_type": "yarn", "rope_theta": THETA, "factor": 40.0, "mscale": 1.0}
    shipped |= {"mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}
    plain = Rope(DIM, THETA, 163_840, mscale=1.0, mscale_all_dim=1.0, softmax_mscale=True)
    rope = forms.read(shipped, plain)
    target = 327_680
    asked = scaling.scale(rope, "yarn", target, scaling.find("yarn").knobs(), None)
    wanted = scaling.compose(rope, asked, target)
    params = next(forms.candidates(rope, wanted, target, scaling.native(rope, asked)))
    assert_number(wanted.softmax_factor, truth.deepseek_softmax(80.0, 1.0), BOUND, "softmax")
    assert params["factor"] == 80.0


def test_native_keys_are_written_only_if_stock_reads_them() -> None:
    """`truncate: false` is lost inside a nested dict, so another form carries the same spectrum."""
    knobs = scaling.find("yarn").knobs(truncate=False)
    for nested, kind in ((False, "yarn"), (True, "longrope")):
        rope = Rope(DIM, THETA, ORIGINAL, nested=nested)
        asked = scaling.scale(rope, "yarn", TARGET, knobs, None)
        wanted = scaling.compose(rope, asked, TARGET)
        params = next(forms.candidates(rope, wanted, TARGET, scaling.native(rope, asked)))
        assert params["rope_type"] == kind
        expected = truth.yarn(DIM, THETA, ORIGINAL, TARGET, truncate=False)
        assert_close(forms.read(params, rope).spectrum.inv_freq, expected[0], BOUND, kind)


def test_the_first_form_that_the_family_and_the_loaders_read_is_taken() -> None:
    model = families.read(configs.LLAMA)
    (site,) = model.sites
    target = 4 * site.rope.context

    def kind(allowed: tuple[str, ...], names: tuple[str, ...] = ()) -> str | None:
        attempts = Attempts(Carrier(replace(model, forms=allowed)), target)
        attempt = attempt_of(Extend(for_loaders=names), "yarn", scaling.find("yarn").knobs())
        planned = attempts.planned(site, attempt)
        return None if planned is None else planned.params["rope_type"]

    assert kind(("default", "yarn", "longrope")) == "yarn"
    assert kind(("default", "longrope")) == "longrope"
    assert kind(("default", "longrope"), ("llama.cpp",)) is None  # it ignores a longrope
    assert kind(("default",)) is None


def test_a_native_dict_that_contradicts_the_plan_is_never_used() -> None:
    asked = scaling.scale(ROPE, "yarn", TARGET, scaling.find("yarn").knobs(), None)
    wrong = {"rope_type": "yarn", "rope_theta": THETA} | LENGTHS | {"factor": 3.99}
    params = next(forms.candidates(ROPE, scaling.compose(ROPE, asked, TARGET), TARGET, wrong))
    assert params["rope_type"] == "longrope"
