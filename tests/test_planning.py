"""Plans of released configs: the forms they can have, the refusals, the recommendation and its
reason."""

import json
import math
import shlex
from collections import Counter
from contextlib import suppress

import configs
import numpy as np
import pytest

import ropext
from ropext import families
from ropext.base.errors import InputError, NotExpressible, UnsupportedModel, UsageError
from ropext.families.config import packaged_facts
from ropext.files import inspecting
from ropext.files.schemes.plan import make_table_plan
from ropext.options.extend import Extend
from ropext.planning import make_plan, methods
from ropext.planning.carrier import Carrier
from ropext.results.report import text
from ropext.scaling import METHODS

NO_INPUT = [method.name for method in METHODS.values() if not method.needs]


def plan(config, **options):
    options.setdefault("factor", 4.0)
    return make_plan(config, Extend(**options), "model")


def test_a_yarn_plan_of_llama_2_is_the_published_one():
    # jquesnelle/yarn on Llama-2 at s = 16: ramp from pair 20 to 46, mscale 1.2773.
    made = plan(configs.LLAMA, method="yarn", factor=16.0)
    assert made.target == 65536
    assert made.main.wanted.attention_factor == pytest.approx(1.2772588722, abs=1e-9)
    plain = [10000.0 ** (-2 * i / 128) for i in range(64)]
    kept = [f == p for f, p in zip(made.main.wanted.inv_freq, plain, strict=True)]
    assert kept.index(False) == 21
    divided = [
        math.isclose(f, p / 16) for f, p in zip(made.main.wanted.inv_freq, plain, strict=True)
    ]
    assert divided.index(True) == 46
    assert made.config["rope_scaling"] == {
        "type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096,
    }  # fmt: skip
    assert made.config["rope_parameters"]["rope_theta"] == 10000.0
    assert made.config["max_position_embeddings"] == 65536


def test_the_input_config_is_not_changed_and_planning_twice_agrees():
    before = json.dumps(configs.LLAMA)
    one, two = plan(configs.LLAMA), plan(configs.LLAMA)
    assert json.dumps(configs.LLAMA) == before
    assert one.to_json() == two.to_json()


def test_a_plan_is_one_json_document():
    for config in (configs.LLAMA, configs.LLAMA31, configs.DEEPSEEK_V3, configs.PHI3):
        data = json.loads(json.dumps(plan(config).to_json(), allow_nan=False))
        assert data["target"] == 4 * data["context"]


def test_a_scaled_model_is_composed_from_its_current_spectrum():
    # Llama 3.1 reads 131072 tokens; its last pair is divided by 8 already, PI divides by 4 again.
    made = plan(configs.LLAMA31, method="pi")
    plain_last = 500000.0 ** (-126 / 128)
    assert made.context == 131072
    assert made.main.wanted.inv_freq[-1] == pytest.approx(plain_last / 32, rel=1e-12)
    assert made.main.wanted.inv_freq[0] == pytest.approx(1 / 4, rel=1e-12)
    assert made.main.params["rope_type"] == "longrope"


def test_from_original_starts_from_the_original_context():
    made = plan(configs.LLAMA31, method="llama3", from_original=True, factor=32.0)
    assert (made.context, made.target) == (8192, 262144)
    assert made.main.params["rope_type"] == "llama3"
    assert made.main.wanted.inv_freq[-1] == pytest.approx(500000.0 ** (-126 / 128) / 32, rel=1e-12)


def test_deepseek_keeps_its_softmax_pair_under_every_method():
    # mscale_all_dim 1 at 160 times the original 4096: (0.1 ln 160 + 1)^2.
    wanted = (0.1 * math.log(160) + 1) ** 2
    for method in ("pi", "ntk", "by-parts", "yarn"):
        made = plan(configs.DEEPSEEK_V3, method=method)
        assert made.main.wanted.softmax_factor == pytest.approx(wanted, rel=1e-12)
        assert made.main.params["mscale_all_dim"] == 1.0
        assert made.main.params["factor"] == 160.0
    assert any("softmax factor goes from" in warning for warning in made.warnings)
    shorter = plan(configs.DEEPSEEK_V3, from_original=True, factor=16.0)
    now, new = ((0.1 * math.log(s) + 1) ** 2 for s in (40, 16))
    assert any(f"goes from {now:.6g} to {new:.6g}" in warning for warning in shorter.warnings)


def test_phi_3_gets_other_forms_written_as_longrope():
    for method in ("pi", "by-parts", "yarn"):
        assert plan(configs.PHI3, method=method).main.params["rope_type"] == "longrope"
    assert plan(configs.PHI3, method="ntk").main.params["rope_type"] == "default"


def test_a_temperature_finds_a_form_that_carries_it():
    # linear and theta have no attention factor of their own.
    pi = plan(configs.LLAMA, method="pi", temperature=0.64)
    assert pi.main.params["rope_type"] == "longrope"
    assert pi.main.params["attention_factor"] == pytest.approx(1.25)
    ntk = plan(configs.LLAMA, method="ntk", attention_factor=1.25)
    assert ntk.main.params["rope_type"] == "yarn"
    assert ntk.main.wanted.inv_freq[-1] == pytest.approx(10000.0 ** (-126 / 128) / 4, rel=1e-9)


def test_for_a_loader_only_forms_that_it_reads_exactly_are_written():
    assert plan(configs.LLAMA, for_loaders=("llama.cpp",)).main.params["rope_type"] == "yarn"
    with pytest.raises(NotExpressible) as caught:
        plan(configs.LLAMA31, for_loaders=("llama.cpp",))
    assert "--for llama.cpp" in str(caught.value)
    with pytest.raises(NotExpressible, match="attention factor"):
        plan(configs.LLAMA, temperature=0.5, for_loaders=("llama.cpp",))


def test_a_refusal_names_the_form_that_the_loader_reads():
    with pytest.raises(NotExpressible, match="--from-original --target 524288 --method yarn"):
        plan(configs.LLAMA31, for_loaders=("llama.cpp",))
    with pytest.raises(NotExpressible, match=r"these methods can: pi, ntk, dynamic$"):
        plan(configs.LLAMA, method="yarn", for_loaders=("ctranslate2",))
    with pytest.raises(NotExpressible, match=r"without that factor these methods can: .*yarn"):
        plan(configs.LLAMA, temperature=0.5, for_loaders=("llama.cpp",))


def test_the_row_of_the_chosen_method_has_the_given_knobs():
    rows = {row.method: row for row in plan(configs.LLAMA, method="abf", theta=5e5).methods}
    assert rows["abf"].form == "default"
    # Mean over 64 pairs of (2i/128) ln 50, as a factor: 50^(63/128).
    assert rows["abf"].explanation.mean_compression == pytest.approx(50 ** (63 / 128), rel=1e-9)
    assert rows["longrope"].explanation is None
    wide = {r.method: r for r in plan(configs.LLAMA, beta_fast=64.0).methods}["yarn"]
    assert wide.explanation.mean_compression > rows["yarn"].explanation.mean_compression
    assert plan(configs.LLAMA, method="abf", theta=5e5).spectra()["abf"].inv_freq[1] < 1


def test_a_temperature_is_counted_in_every_row():
    rows = {row.method: row.form for row in plan(configs.LLAMA, temperature=0.64).methods}
    assert (rows["pi"], rows["ntk"], rows["yarn"]) == ("longrope", "yarn", "yarn")


def test_a_loader_that_was_not_measured_is_refused_unless_even_so():
    olmoe = configs.LLAMA | {"model_type": "olmoe", "architectures": ["OlmoeForCausalLM"]}
    with pytest.raises(NotExpressible, match=r"was not measured .*; --even-so"):
        plan(olmoe, for_loaders=("vllm",))
    assert plan(olmoe, for_loaders=("vllm",), even_so=True).main.scaled


def test_for_chooses_the_method_if_none_is_given():
    """CTranslate2 and MLX-LM (in Qwen 3 MoE) read a theta and no ramp."""
    assert plan(configs.LLAMA, for_loaders=("vllm",)).method == "yarn"
    assert plan(configs.LLAMA, for_loaders=("vllm", "exllamav2")).method == "llama3"
    assert plan(configs.LLAMA, for_loaders=("ctranslate2", "vllm")).method == "ntk"
    moe = configs.QWEN2 | {"model_type": "qwen3_moe", "head_dim": 128}
    assert plan(moe, for_loaders=("mlx",)).method == "ntk"
    with pytest.raises(NotExpressible, match="--method yarn cannot be written exactly"):
        plan(configs.LLAMA, method="yarn", for_loaders=("exllamav2",))


def test_the_default_method_is_the_recommended_one():
    """It has the given knobs, and carries a requested attention factor."""
    tiny = configs.LLAMA | {"hidden_size": 128, "num_attention_heads": 16, "head_dim": 8}
    for config in (configs.LLAMA, configs.LLAMA31, configs.GEMMA2, configs.QWEN2, tiny):
        made = plan(config)
        assert made.method == made.recommendation.method
    assert plan(tiny).method == "ntk"
    assert plan(configs.LLAMA, beta_fast=16.0).method == "yarn"
    assert plan(configs.LLAMA, low_freq_factor=1.5).method == "llama3"
    assert plan(configs.LLAMA, attention_factor=1.1).method == "yarn"
    with pytest.raises(UsageError, match="theta is a knob of abf, not of --method yarn"):
        plan(configs.LLAMA, theta=5e5)


def test_yarn_is_taken_at_every_factor():
    for factor in (1.5, 2.0, 2.01, 16.0):
        assert plan(configs.LLAMA, factor=factor).method == "yarn"
    assert plan(configs.LLAMA31, from_original=True, factor=2.0).method == "yarn"


def test_a_recommendation_names_its_method_and_its_certainty():
    what = plan(configs.LLAMA, factor=2.0).recommendation.reason
    assert what.startswith(
        "the default without training; written as yarn, exact in all engines of the table but "
        "exllamav2"
    )
    assert "vllm" not in what
    assert ". " not in plan(configs.LLAMA, finetune="books.jsonl").recommendation.reason


def test_the_recommendation_differs_if_the_reasons_do():
    chosen = {
        "plain": plan(configs.LLAMA),
        "finetuned": plan(configs.LLAMA, finetune="books.jsonl"),
        "scaled": plan(configs.LLAMA31),
        "scaled for llama.cpp": plan(
            configs.LLAMA31, method="yarn", from_original=True, factor=64.0,
            for_loaders=("llama.cpp",),
        ),
        "windows": plan(configs.GEMMA2, method="pi"),
    }  # fmt: skip
    got = {name: made.recommendation for name, made in chosen.items()}
    assert got["plain"].method == "yarn"
    assert got["finetuned"].method == "yarn"
    assert got["scaled"].method == "by-parts"
    assert (got["scaled for llama.cpp"].method, got["scaled for llama.cpp"].from_original) == (
        "yarn", True,
    )  # fmt: skip
    assert got["windows"].method == "by-parts"
    causes = {name: own.reason.split(";")[0] for name, own in got.items()}
    assert causes == {
        "plain": "the default without training",
        "finetuned": "the default for training",
        "scaled": "the model is scaled already",
        "scaled for llama.cpp": "the default without training",
        "windows": "sliding-window and full-attention layers share one rope dict, so both are "
        "scaled",
    }


def test_the_plan_warns_if_scaling_cannot_help_and_extend_wants_a_confirmation():
    made = plan(configs.MISTRAL_WINDOWED)
    assert made.recommendation.method == "none"
    said = made.to_json()
    assert "scaling cannot help this model" in said["refused"]
    assert said["serving"] == said["overrides"] == []
    assert text.plan_details(made).startswith(
        "model: scaling cannot help this model: [windowed] every "
    )
    assert "to serve it" not in text.plan_details(made)
    assert plan(configs.LLAMA).to_json()["refused"] is None
    far = plan(configs.LLAMA, factor=1000.0)
    assert (far.serving("OUT"), far.overrides()) == ((), ())
    assert any("window of 4096 tokens" in warning for warning in made.warnings)
    with pytest.raises(UnsupportedModel, match="--even-so"):
        made.raise_if_refused()
    plan(configs.MISTRAL_WINDOWED, even_so=True).raise_if_refused()


SCALED = configs.LLAMA | {
    "max_position_embeddings": 16384,
    "rope_scaling": {"type": "linear", "factor": 4.0, "original_max_position_embeddings": 4096},
}


WITHOUT_MOTION = {
    "plain": configs.LLAMA,
    "linear": SCALED,
    "llama3": configs.LLAMA31,
    "yarn": configs.DEEPSEEK_V3,
    "two thetas": configs.GEMMA4,
    "windowed": configs.MISTRAL_WINDOWED,
}


@pytest.mark.parametrize("config", WITHOUT_MOTION.values(), ids=WITHOUT_MOTION)
def test_length_only_changes_no_spectrum(config):
    """What stock reads of the new config turns as before; nothing but the length is another."""
    before = families.read(config)
    made = plan(config, factor=None, target=2 * before.context, length_only=True)
    made.raise_if_refused()
    after = families.read(made.config)
    assert [s.rope.spectrum for s in after.sites] == [s.rope.spectrum for s in before.sites]
    assert after.context == after.stated_context == 2 * before.context
    assert (made.method, made.knobs) == ("length-only", {})
    assert any("the RoPE frequencies stay the same" in warning for warning in made.warnings)
    assert made.edits


@pytest.mark.parametrize(
    "more",
    [
        {"method": "yarn"},
        {"theta": 2e4},
        {"attention_factor": 1.1},
        {"temperature": 0.9},
        {"from_original": True},
    ],
)
def test_length_only_refuses_options_that_scale(more):
    with pytest.raises(UsageError, match="--length-only changes no spectrum; --"):
        plan(configs.LLAMA, length_only=True, **more)
    with pytest.raises(UsageError, match="is for rotary embeddings"):
        make_table_plan(configs.GPT2, Extend(factor=2.0, length_only=True), "model")


def test_a_method_that_moves_no_pair_is_refused_as_such():
    # The slowest pair of Gemma 4's full layers turns 131072 * 1e6^(-126/512) / 2 pi times.
    for method in ("yarn", "by-parts", "llama3"):
        with pytest.raises(
            NotExpressible, match=r"changes no frequency.*696\.3 rotations"
        ) as caught:
            plan(configs.GEMMA4, method=method)
        assert "these methods move some: pi, ntk, dynamic" in str(caught.value)
    notes = {row.method: row.note for row in plan(configs.GEMMA4, method="ntk").methods}
    assert notes["llama3"] == notes["yarn"] == "moves no pair here"
    forced = plan(configs.GEMMA4, method="llama3", even_so=True)
    assert any("no frequency changes" in warning for warning in forced.warnings)
    assert plan(configs.LLAMA, method="llama3").recommendation
    # A new theta moves no frequency either; a requested temperature is a change.
    with pytest.raises(NotExpressible, match="changes no frequency"):
        plan(configs.LLAMA, method="abf", theta=10000.0)
    assert plan(configs.LLAMA, method="abf", theta=10000.0, temperature=0.64).target


def test_the_length_alone_is_recommended_if_no_pair_needs_scaling():
    """The slowest pair of Gemma 4 turns 131072 / (2 pi 1e6^(126/512)) = 696.3 times."""
    turned = 131072 / (2 * math.pi * 1e6 ** (126 / 512))
    assert turned == pytest.approx(696.3, abs=0.1)
    made = plan(configs.GEMMA4)
    assert (made.method, made.recommendation.method) == ("length-only", "length-only")
    assert made.main.wanted == made.model.scaled_sites[0].rope.spectrum
    assert (
        "no rotary pair needs scaling: each makes at least 696 rotations"
        in made.recommendation.reason
    )
    assert dict(made.facts())["recommended"].startswith("--length-only: ")
    asked = plan(configs.GEMMA4, method="ntk")
    assert (asked.method, asked.recommendation.method) == ("ntk", "length-only")
    # Its slowest pair turns 0.08 times; YaRN's ramp moves a pair that turns 31 times.
    assert plan(configs.LLAMA).recommendation.method == "yarn"
    context = 2 * math.pi * 10000 ** (126 / 128)
    for turns, method in ((31, "yarn"), (33, "length-only")):
        often = configs.LLAMA | {"max_position_embeddings": round(turns * context)}
        assert plan(often).method == method
    # Who asks for a temperature wants more than a length.
    assert plan(often, temperature=0.9).method == "yarn"


def reason(config, **options):
    return plan(config, **options).recommendation.reason


def test_reasons_describe_the_written_config():
    wish = {"for_loaders": ("llama.cpp", "exllamav2"), "finetune": "books.jsonl"}
    tuned = reason(configs.LLAMA, method="llama3", **wish)
    assert tuned.startswith("the default for training; yarn: cannot be")
    assert "cannot be written exactly for llama.cpp and exllamav2" in tuned
    assert "without training" not in tuned
    linear = configs.LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}}
    linear = reason(linear, method="pi", original_context=4096, for_loaders=("llama.cpp",))
    assert "written as linear" in linear
    assert "longrope" not in linear
    assert "written as longrope, exact in all engines of the table but " in reason(
        configs.DEEPSEEK_V3
    )


@pytest.mark.parametrize("name", [n for n in vars(configs) if n.isupper() and n != "GPT2"])
def test_every_reason_agrees_with_the_plan_of_the_recommended_method(name):
    config = vars(configs)[name]
    for wish in ({}, {"finetune": "x.jsonl"}, {"for_loaders": ("llama.cpp",)}):
        for method in ("yarn", "ntk", "pi"):
            try:
                advice = plan(config, method=method, **wish).recommendation
            except NotExpressible:
                continue
            if advice.method == "length-only":
                assert plan(config, **wish).method == "length-only"
                continue
            if advice.method == "none":
                assert plan(config, method=method, **wish).model.obstacles
                continue
            made = plan(config, method=advice.method, **wish)
            form = made.main.params["rope_type"].replace("default", "a new theta")
            assert f"written as {form}, " in advice.reason
            assert ("default without training" in advice.reason) <= ("finetune" not in wish)


def test_a_refusal_names_the_form_that_works():
    with pytest.raises(NotExpressible, match="--from-original --target 2097152 --method yarn"):
        plan(configs.MISTRAL4, factor=2.0)
    assert plan(configs.MISTRAL4, factor=None, target=2097152, from_original=True).main.scaled
    with pytest.raises(NotExpressible, match="that vllm and ctranslate2 read exactly"):
        plan(configs.LLAMA, method="yarn", for_loaders=("vllm", "ctranslate2"))


def test_a_model_without_rotary_embedding_is_refused_with_the_reason():
    with pytest.raises(UnsupportedModel, match="learned table"):
        plan(configs.GPT2)


def test_ntk_needs_more_than_one_pair():
    tiny = configs.LLAMA | {"head_dim": 2}
    with pytest.raises(UsageError, match="rotary dim of 2"):
        plan(tiny, method="ntk")
    assert plan(tiny, method="pi").main.params["rope_type"] == "linear"


def test_float32_angles_are_off_by_at_least_the_plans_figure():
    """In the float32 of transformers' and ggml's formulas."""
    target, dim, theta = 2**20, 128, configs.LLAMA["rope_theta"]
    pairs = np.arange(0, dim, 2)
    exact = theta ** (-pairs / dim)
    stock = (1 / np.float32(theta) ** (pairs.astype(np.float32) / np.float32(dim))).astype(
        np.float32
    )
    step = np.float32(theta) ** np.float32(-2 / dim)
    stated = target * 2.0**-25
    positions = np.arange(target - 500, target)
    angles = np.float32(positions)[:, None] * stock
    ggml = [positions.astype(np.float32)]
    for _ in pairs[1:]:
        ggml.append(ggml[-1] * step)
    wanted = positions[:, None] * exact
    assert np.abs(angles.astype(float) - wanted).max() > stated
    assert np.abs(np.stack(ggml, 1).astype(float) - wanted).max() > stated
    (said,) = [
        one
        for one in plan(configs.LLAMA, factor=None, target=target).warnings
        if "[float32]" in one
    ]
    assert f"in transformers are off by {stated:.1e} rad and more" in said


def test_the_attention_factor_of_longropes_code_is_printed():
    """microsoft/LongRoPE 0ed4418 multiplies cos and sin by it; its CSV files do not hold it."""
    pairs = {"method": "longrope", "pair_factors": (1.5,) * 64}
    made = plan(configs.LLAMA, factor=8.0, **pairs)
    assert made.main.wanted.attention_factor == 1
    (note,) = made.notes
    theirs = math.sqrt(1 + math.log(8) / math.log(4096))
    assert note.endswith(f"√(1 + ln 8 / ln 4096): --attention-factor {theirs:.6g}")
    assert "note: the file of pair factors has no attention factor" in text.plan_details(made)
    given = plan(configs.LLAMA, factor=8.0, attention_factor=1.0, **pairs)
    assert given.notes == ()
    assert plan(configs.LLAMA, factor=8.0, method="yarn").notes == ()


def test_pair_factors_of_the_wrong_number_are_counted():
    with pytest.raises(UsageError, match=r"3 numbers.*64 pairs"):
        plan(configs.LLAMA, method="longrope", pair_factors=(1.0, 2.0, 4.0))


def test_phimoe_is_judged_with_the_keys_that_are_written():
    """Its class wants the attention factor as short_mscale and long_mscale in every scaled form."""
    phimoe = configs.LLAMA | {"model_type": "phimoe"}
    for method in ("pi", "yarn", "by-parts", "llama3"):
        made = plan(phimoe, method=method)
        assert made.readings[0].verdict == "same", made.readings[0]
        assert made.config["rope_parameters"] == made.main.params
        assert plan(phimoe, method=method, for_loaders=("transformers",)).main.scaled


def test_the_written_form_reads_back_as_the_wanted_spectrum():
    for config in (configs.LLAMA, configs.LLAMA31, configs.DEEPSEEK_V3, configs.PHI3):
        for method in NO_INPUT:
            made = plan(config, method=method)
            again = families.read(made.config)
            assert again.context == made.target
            rope = again.scaled_sites[0].rope
            assert rope.spectrum.inv_freq == pytest.approx(made.main.wanted.inv_freq, rel=1e-9)
            assert rope.attention_factor == pytest.approx(made.main.wanted.attention_factor)
            assert rope.softmax_factor == pytest.approx(made.main.wanted.softmax_factor)


def test_extending_twice_counts_from_the_extended_context():
    once = plan(configs.LLAMA, method="ntk", factor=2.0)
    twice = make_plan(once.config, Extend(method="ntk", factor=2.0), "again")
    # NTK after NTK is NTK by the product: the last pair is divided by 4.
    assert twice.target == 16384
    assert twice.main.wanted.inv_freq[-1] == pytest.approx(10000.0 ** (-126 / 128) / 4, rel=1e-12)


def test_long_targets_warn_of_float32_angles():
    assert not any("float32" in w for w in plan(configs.LLAMA, factor=16.0).warnings)
    assert any("float32" in w for w in plan(configs.LLAMA, factor=256.0).warnings)


def test_a_second_extension_warns_of_engines_and_names_from_original():
    extended = plan(configs.LLAMA, method="yarn").config
    (said,) = [w for w in plan(extended, factor=2.0, method="yarn").warnings if "longrope" in w]
    assert "llama.cpp (ignored)" in said
    assert "vllm" not in said
    assert said.endswith("--from-original --target 32768 --method yarn")
    one_step = plan(extended, factor=None, target=32768, from_original=True, method="yarn")
    assert one_step.main.params["rope_type"] == "yarn"
    for made in (one_step, plan(configs.LLAMA), plan(configs.PHI3, method="yarn")):
        assert not any("scaled already" in warning for warning in made.warnings)
    with pytest.raises(UsageError, match="4× its original 4096; --target N --from-original"):
        plan(extended, factor=None)


def vision(model_type, text_type, **text):
    return {"model_type": model_type, "text_config": {"model_type": text_type, **text}}


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_vl", "qwen2_5_vl", "qwen2_vl", "glm4v"])
def test_mrope_takes_a_yarn_or_a_theta(kind):
    """By the class's default; engines build an embedding of one axis for any other form."""
    config = vision(kind, f"{kind}_text")
    for factor in (2.0, 8.0):
        made = plan(config, factor=factor)
        assert (made.method, made.main.params["rope_type"]) == ("yarn", "yarn")
        assert "only under yarn or a new theta" in made.recommendation.reason
        assert any("an image takes fewer positions than tokens" in w for w in made.warnings)
    # Where vLLM was seen to take another ramp than the authors', a theta.
    trusted = plan(config, factor=2.0, for_loaders=("vllm",), even_so=True)
    ramps = kind in ("qwen2_vl", "qwen2_5_vl")
    assert trusted.main.params["rope_type"] == ("default" if ramps else "yarn")
    verdicts = {"qwen3_5": "same", "qwen3_vl": "same", "glm4v": "not measured"}
    (found, *_) = (own for own in plan(config, factor=2.0).readings if own.loader == "vllm")
    assert found.verdict == verdicts.get(kind, "different")
    wrong = next(o for o in plan(config, method="llama3").readings if o.loader == "vllm")
    assert wrong.verdict == ("not measured" if kind == "glm4v" else "different")
    lost = [w for w in plan(config, method="llama3").warnings if "images as if they were text" in w]
    assert len(lost) == 1
    ramp = [w for w in plan(config, method="yarn").warnings if "4× the original" in w]
    assert ("up to 0.30" in ramp[0]) == (kind in ("qwen3_5", "qwen3_vl"))
    assert not any("mrope" in w.lower() for w in plan(configs.QWEN2).warnings)


def test_a_scaled_mrope_is_extended_in_a_form_that_keeps_it():
    scaled = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32768}
    scaled |= {"mrope_section": [16, 24, 24]}
    text = {"max_position_embeddings": 65536, "head_dim": 128, "rope_theta": 1e6}
    config = vision("qwen2_5_vl", "qwen2_5_vl_text", rope_scaling=scaled, **text)
    made = plan(config, factor=2.0, from_original=True)
    assert made.recommendation.method == "yarn"
    assert made.config["text_config"]["rope_scaling"]["mrope_section"] == [16, 24, 24]
    goes_on = plan(config, factor=2.0)
    kept = goes_on.recommendation
    assert (kept.method, kept.from_original) == ("yarn", True)


def test_an_infinite_factor_stops_a_pair():
    """CoPE's slowest pairs, DroPE's all: the numbers by hand, and who is known to read them."""
    plain = [10000.0 ** (-2 * i / 128) for i in range(64)]
    pairs = (1.0,) * 60 + ({"__float__": "Infinity"}, *(math.inf,) * 3)
    made = plan(configs.LLAMA, method="longrope", pair_factors=pairs)
    assert made.main.wanted.inv_freq == (*map(pytest.approx, plain[:60]), 0, 0, 0, 0)
    assert any(
        w.startswith("[still] rotary pairs 60, 61, 62, 63 no longer rotate") for w in made.warnings
    )
    assert families.read(made.config).sites[0].rope.spectrum.inv_freq[60:] == (0,) * 4
    assert made.config["rope_parameters"]["long_factor"][60:] == [{"__float__": "Infinity"}] * 4
    found = {each.loader: each.verdict for each in reversed(made.readings)}
    assert (found["transformers"], found["vllm"], found["mlx"]) == (
        "same", "same", "different",  # MLX takes LongRoPE's attention factor, not 1
    )  # fmt: skip
    assert found["llama.cpp"] == "ignored"
    llama = next(line for line in made.serving("OUT") if line.loader == "llama.cpp")
    assert not llama.command
    whole = plan(configs.LLAMA, method="longrope", pair_factors=(math.inf,) * 64)
    assert any("no rotary pair rotates" in w for w in whole.warnings)
    assert families.read(whole.config).sites[0].rope.spectrum.inv_freq == (0,) * 64
    with pytest.raises(NotExpressible, match="every pair of this model stands still already"):
        plan(whole.config, factor=2.0)
    for wrong in (0.0, -1.0, math.nan, -math.inf):
        with pytest.raises(UsageError):
            plan(configs.LLAMA, method="longrope", pair_factors=(wrong,) * 64)


def counted(monkeypatch, shown=True, **options):
    """Count how often a plan for Llama 3.1, shown whole, runs a method, looks for a form and asks
    the loaders."""
    counts = Counter()

    def count(module, name):
        function = getattr(module, name)

        def counting(*given, **named):
            counts[name] += 1
            return function(*given, **named)

        monkeypatch.setattr(module, name, counting)

    count(methods.scaling, "scale")
    count(Carrier, "offers")
    count(Carrier, "readings")
    with suppress(NotExpressible):
        made = make_plan(configs.LLAMA31, Extend(target=262144, **options))
        if shown:
            made.to_json()
    return counts


def test_a_plan_that_is_not_printed_runs_only_its_method(monkeypatch):
    counts = counted(monkeypatch, shown=False, method="yarn", from_original=True)
    assert counts == {"scale": 1, "offers": 1}


def test_each_method_is_run_once_for_a_plan(monkeypatch):
    """Those that need no input; the last count is the way from before Llama 3.1's scaling."""
    count = len(NO_INPUT) + 1
    assert counted(monkeypatch) == {"scale": count, "offers": count, "readings": count}


def test_each_method_is_run_once_for_a_refusal(monkeypatch):
    """Each method runs from the scaled model and from the original one. The named method is tried
    twice more: for any loader, and for the unmeasured ones. A method without a form here is not
    read."""
    counts = counted(monkeypatch, method="llama3", for_loaders=("llama.cpp",))
    methods = len(NO_INPUT)
    assert counts["scale"] == 2 * methods
    assert counts["offers"] == 2 * methods + 2
    assert 0 < counts["readings"] <= methods


@pytest.fixture
def untrained(tmp_path):
    """Return a directory with only a config, and a function that returns the [far] warning of its
    plan."""
    place = tmp_path / "model"
    place.mkdir()

    def warned(config, **options):
        (place / "config.json").write_text(json.dumps(config))
        made = inspecting.plan(place, **options)
        return "".join(warning for warning in made.warnings if warning.startswith("[far]"))

    return place, warned


def test_the_far_warning_begins_at_four_times(untrained):
    _, warned = untrained
    assert warned(configs.LLAMA, target=16383) == ""  # of 4,096 tokens
    assert warned(configs.LLAMA, target=16384).startswith("[far] 4× the context")
    assert warned(configs.LLAMA, factor=8.0, finetune="texts.jsonl") == ""
    assert warned(configs.LLAMA, factor=8.0, length_only=True) == ""
    assert "--untrained" not in warned(configs.LLAMA, factor=63.0)
    assert warned(configs.LLAMA, factor=64.0).endswith("; extend needs --untrained here")
    assert "extend needs" not in warned(configs.LLAMA, factor=64.0, untrained=True)
    # 32 times the original context are twice what Llama 3.1's authors trained.
    options = {"target": 262_144, "from_original": True, "method": "yarn"}
    assert warned(configs.LLAMA31, **options) == ""
    assert warned(configs.LLAMA31, **options | {"target": 524_288}).startswith("[far] 4×")


def test_a_published_untrained_factor_is_not_too_far(untrained):
    _, warned = untrained
    qwen = configs.LLAMA | {
        "model_type": "qwen3", "max_position_embeddings": 40960, "rope_theta": 1e6, "head_dim": 128,
    }  # fmt: skip
    assert warned(qwen, method="yarn", factor=4.0, context=32768) == ""
    assert warned(qwen, method="yarn", factor=8.0, context=32768) != ""
    told = [entry for entry in packaged_facts("published.json") if not entry.get("ships")]
    assert max(entry["factor"] for entry in told) == 4  # as the warning says


def test_a_far_target_is_written_untrained_only_on_request(untrained, tmp_path):
    place, warned = untrained
    warned(configs.LLAMA, factor=2.0)
    far = {"factor": 64.0, "no_verify": True}
    with pytest.raises(UsageError, match=r"262,144 tokens are 64× .* anyway with untrained=True"):
        ropext.extend(place, tmp_path / "out", **far)
    with pytest.raises(InputError, match="weights"):  # the next that is missing here
        ropext.extend(place, tmp_path / "out", untrained=True, **far)
    line = ropext.plan(place, factor=64.0).command
    assert line.endswith(" --factor 64 --untrained -o OUT")
    assert "--untrained" not in ropext.plan(place, factor=63.0).command
    with pytest.raises(InputError, match="weights"):
        ropext.extend(place, tmp_path / "out", **far | {"factor": 63.0})


@pytest.mark.parametrize(
    ("steps", "more", "times"),
    [
        ([(4096, 262_144, "yarn")], {}, 128),
        ([(4096, 16_384, "yarn"), (16_384, 262_144, "yarn")], {}, 128),
        ([(4096, 262_144, "length-only")], {}, 0),
        ([(4096, 262_144, "yarn")], {"finetune": {"steps": 9}}, 0),
        # `ropext.save` does not know whether a trainer changed weights since the patch.
        ([(4096, 262_144, "yarn")], {"saved_from_memory": True}, 0),
        # The last step's base was trained in part, if not by that step.
        ([(4096, 65_536, "yarn"), (65_536, 262_144, "yarn")], {"trained_on": {"count": 1}}, 8),
    ],
)
def test_an_untrained_extension_in_steps_counts_from_the_recorded_original(
    tmp_path, steps, more, times
):
    base = {"name": "base", "config": configs.LLAMA}
    for context, target, method in steps:
        link = {"method": method, "context": context, "target": target, "edits": []}
        link |= {"recipe": {}, "base": base}
        longer = configs.LLAMA | {"max_position_embeddings": target}
        base = {"name": "longer", "config": longer, "extended": link}
    place = tmp_path / "model"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(longer))
    record = link | {"schema": 1, "versions": {}, "knobs": {}, "weights": {}, "sites": []}
    record |= {"command": [], "proof": None, **more}
    (place / "ropext.json").write_text(json.dumps(record))
    made = inspecting.plan(place, factor=2.0, method="yarn")
    assert made.untrained_factor == (times or 2)
    told = "".join(warning for warning in made.warnings if warning.startswith("[far]"))
    trained = f"the {524_288 // (times or 2):,} tokens that its base was trained on (ropext.json)"
    assert (f"[far] {times}× {trained}" in told) == bool(times)
    assert bool(told) == bool(times)
    # Whoever names the context knows better.
    assert inspecting.plan(place, factor=2.0, context=target).untrained_factor == 2
    # --from-original would also undo an extension that something was trained for.
    is_refused = bool(times) and not more
    assert bool(made.in_one_step) == is_refused
    if is_refused:
        with pytest.raises(UsageError, match="--from-original") as refused:
            made.raise_if_refused()
        words = shlex.split(str(refused.value).partition("frequencies: ")[2])
        assert words[:4] == ["ropext", "extend", str(place), "--method"]
        assert words[4:9] == ["yarn", "--target", "524288", "--from-original", "--untrained"]
        with pytest.raises(UsageError, match="; again=True extends the extension"):
            ropext.extend(place, tmp_path / "out", factor=2.0, method="yarn")
    inspecting.plan(place, factor=2.0, method="yarn", again=True).raise_if_refused()


def test_the_far_warning_names_the_method_of_its_figures(untrained):
    _, warned = untrained
    assert "for YaRN, not for pi" in warned(configs.LLAMA, factor=4.0, method="pi")
    assert "not for" not in warned(configs.LLAMA, factor=4.0, method="yarn")


def test_quantised_weights_are_not_sent_to_a_training_that_refuses_them(untrained):
    """As `finetune` and `fit` refuse them."""
    _, warned = untrained
    packed = configs.LLAMA | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    told = warned(packed, factor=4.0)
    assert "train the checkpoint that it was quantised from" in told
    assert "--finetune" not in told


def test_a_recipe_that_trains_gets_no_warning(untrained, tmp_path):
    from ropext.pipeline.checked_recipe import recipe_from_options
    from ropext.pipeline.run_context import plan_run

    place, warned = untrained
    warned(configs.LLAMA, factor=2.0)
    (place / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    top = {"model": str(place), "revision": None}
    for later, told in (({"fit": "x.jsonl"}, 0), ({"evaluate": "x.jsonl"}, 1)):
        planned = plan_run(recipe_from_options(top, {"factor": 8.0}, later), tmp_path / "out")
        assert sum(one.startswith("[far]") for one in planned.plan.warnings) == told
    with pytest.raises(UsageError, match="--untrained"):
        plan_run(
            recipe_from_options(top, {"factor": 64.0}, {"evaluate": "x.jsonl"}), tmp_path / "out"
        )
    plan_run(recipe_from_options(top, {"factor": 64.0}, {"fit": "x.jsonl"}), tmp_path / "out")


def test_method_auto_refuses_a_far_target_unless_a_training_follows(untrained):
    from ropext.base.narration import NOBODY
    from ropext.pipeline.auto_plan import plan_choice
    from ropext.pipeline.checked_recipe import recipe_from_options

    place, warned = untrained
    warned(configs.LLAMA, factor=2.0)
    top = {"model": str(place), "revision": None}

    def recipe_of(method, word):
        options = {"method": method, "factor": 64.0}
        if method == "auto":
            options["data"] = "ropext://held-out"
        return recipe_from_options(top, options, {}, [word] if word else [])

    assert not recipe_of("yarn", "").trains
    assert recipe_of("yarn", "fit.data=x.jsonl").trains
    assert recipe_of("yarn", "finetune.data=x.jsonl").trains
    # A fit of `auto` follows if a closed form is taken, which is known after hours of reading.
    for word in ("", "fit.steps=2"):
        recipe = recipe_of("auto", word)
        assert not recipe.trains
        with pytest.raises(UsageError, match="--untrained"):
            plan_choice(recipe, NOBODY)
    recipe = recipe_of("auto", "finetune.data=x.jsonl")
    assert recipe.trains
    with pytest.raises(InputError, match="tokenizer"):  # the next that is missing here
        plan_choice(recipe, NOBODY)
