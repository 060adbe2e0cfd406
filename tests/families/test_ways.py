"""A model that is scaled already: the plan lists both ways, each with its condition and its
readers."""

import configs
import published
import pytest

from ropext import families
from ropext.base.errors import NotExpressible
from ropext.options.extend import Extend
from ropext.planning import make_plan
from ropext.results.report import text
from ropext.scaling import forms

TRAINED = "if its weights were trained after that scaling, or this is not known"
NOT_TRAINED = "if its weights were not trained after that scaling"
MODELS = {
    "DeepSeek V3": (published.config("DeepSeek-V3"), "yarn"),
    "gpt-oss": (published.config("gpt-oss"), "yarn"),
    "Ministral 3": (published.config("Ministral 3 by class default"), "yarn"),
    "Phi-4-mini": (published.RECIPES["Phi-4-mini"][0], "yarn"),
    "Llama 3.1": (configs.LLAMA31, "llama3"),
    "Gemma 3": (published.config("Gemma 3 4B"), "pi"),
}


def planned(config, **options):
    before = families.read(config)
    return make_plan(config, Extend(target=2 * before.context, **options), "model")


@pytest.mark.parametrize(("config", "method"), MODELS.values(), ids=MODELS)
def test_a_plan_shows_the_way_with_training_and_the_one_without(config, method):
    made = planned(config)
    on, one = made.ways
    assert on.condition == TRAINED
    assert on.options == f"--target {made.target} --method {made.method}"
    assert on.form == made.main.params["rope_type"]
    newest = {}
    for reading in made.readings:
        newest.setdefault(reading.loader, reading.verdict)
    assert set(on.read_by) == {name for name, verdict in newest.items() if verdict == "same"}
    shown = text.plan_details(made)
    assert "scaled again" in shown
    assert made.to_json()["ways"][0]["options"] == on.options
    pairs = "; its own pair factors are dropped" * (made.model.text_type == "phi3")
    assert one.condition == NOT_TRAINED + pairs
    assert one.options.startswith(f"--from-original --target {made.target} --method {method}")
    # Default, method, length and number of loaders are unchanged.
    assert made.method == "by-parts"


def test_the_step_from_the_original_keeps_every_key_of_the_scaling():
    """gpt-oss has a ramp without rounding, which is another spectrum than one with it."""
    gpt_oss = published.config("gpt-oss")
    one = planned(gpt_oss).ways[1]
    assert one.options.endswith("--method yarn --no-truncate")
    assert any(one.options in warning for warning in planned(gpt_oss).warnings)
    taken = planned(gpt_oss, from_original=True, method="yarn", truncate=False)
    assert taken.main.params["truncate"] is False
    assert taken.ways[1].form == one.form == "yarn"
    own = gpt_oss["rope_scaling"] | {"beta_fast": 16.0, "attention_factor": 1.1}
    kept = planned(gpt_oss | {"rope_scaling": own}).ways[1].options
    assert kept.endswith("--method yarn --beta-fast 16 --no-truncate --attention-factor 1.1")
    # At its present length, those options give its present values.
    same = make_plan(
        gpt_oss | {"rope_scaling": own},
        Extend(
            factor=32.0,
            from_original=True,
            method="yarn",
            beta_fast=16.0,
            truncate=False,
            attention_factor=1.1,
        ),
    )
    before = families.read(gpt_oss | {"rope_scaling": own}).scaled_sites[0].rope.spectrum
    assert forms.same(same.main.wanted, before)
    low = configs.LLAMA31["rope_scaling"] | {"low_freq_factor": 2.0}
    llama = planned(configs.LLAMA31 | {"rope_scaling": low}).ways[1].options
    assert llama.endswith("--method llama3 --low-freq-factor 2")


def test_a_model_without_a_scaling_has_one_way():
    assert planned(configs.LLAMA).ways == ()
    assert planned(configs.LLAMA31, length_only=True).ways == ()


def test_a_refusal_names_the_step_with_those_keys():
    """Of gpt-oss no ramp without rounding was measured in llama.cpp; a Mistral 4 with betas."""
    with pytest.raises(NotExpressible) as caught:
        planned(published.config("gpt-oss"), method="yarn", for_loaders=("llama.cpp",))
    assert "--method yarn (without its own --no-truncate)" in str(caught.value)
    rope = {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8192}
    betas = configs.MISTRAL4 | {"max_position_embeddings": 131072}
    betas |= {"rope_parameters": rope | {"beta_fast": 16.0, "rope_theta": 10000.0}}
    with pytest.raises(NotExpressible) as caught:
        planned(betas, method="yarn")
    assert "--method yarn --beta-fast 16 (or " in str(caught.value)
