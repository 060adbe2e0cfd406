"""Configs as they were released: read, extended again and built by stock transformers."""

import pytest
import tiny
from building import FACTOR, Case, Stock, differences, scaled
from published import CONFIGS, LLAMA, RECIPES, config

from ropext import families
from ropext.base.errors import NotExpressible
from ropext.families.config import packaged_facts
from ropext.families.table import FAMILIES
from ropext.options.extend import Extend
from ropext.planning import make_plan
from ropext.results.report import text
from ropext.scaling import forms


def test_a_given_context_replaces_the_configs():
    model = families.read(config("Llama 2"), context=2048)
    assert (model.context, model.stated_context) == (2048, 4096)
    assert model.sites[0].rope.context == 2048


@pytest.fixture(scope="module")
def stock():
    process = Stock()
    yield process
    process.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_stock_reads_published_configs_as_ropext_does(stock, name):
    base = config(name)
    model = families.read(base)
    if model.model_type not in stock.tasks:
        pytest.skip(f"transformers {stock.version} does not know {model.model_type}")
    spectra = {site.label: site.rope.spectrum for site in model.sites}
    thetas = {site.label: site.params["rope_theta"] for site in model.sites}
    case = Case(model.model_type, "base", base, spectra, thetas)
    wrong = differences(case, stock.build(case))
    for method in ("pi", "yarn", "by-parts"):
        target = FACTOR * model.context
        try:
            plan = scaled(model, method, target)
            params = {label: made for label, (_, made) in plan.items()}
            new = families.write(base, model, params, target)
        except NotExpressible:
            continue
        wanted = spectra | {label: spectrum for label, (spectrum, _) in plan.items()}
        moved = thetas | {label: made["rope_theta"] for label, made in params.items()}
        case = Case(model.model_type, method, new, wanted, moved)
        wrong += [f"{method}: {line}" for line in differences(case, stock.build(case))]
        again = families.read(new)
        assert again.context == target
        for site in again.sites:
            assert forms.same(site.rope.spectrum, wanted[site.label]), (method, site.label)
    assert not wrong, "\n".join(wrong)


def test_deepseek_v3_extended_twofold():
    """mscale 0.1 ln(80) + 1 = 1.43820, squared: its factor 40 extended by 2."""
    model = families.read(config("DeepSeek-V3"))
    assert model.sites[0].rope.softmax_factor == pytest.approx(1.36889**2, rel=1e-5)
    wanted, _ = scaled(model, "pi", 2 * model.context)[""]
    assert wanted.softmax_factor == pytest.approx(1.43820**2, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type", sorted(t for t, row in FAMILIES.items() if row.softmax_mscale)
)
def test_the_softmax_scale_is_kept(stock, model_type):
    if model_type not in stock.tasks:
        pytest.skip(f"transformers {stock.version} does not know {model_type}")
    plain = tiny.modern(model_type)
    unit = stock.build(Case(model_type, "plain", plain))["scales"]
    rope = plain["rope_parameters"] | {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "mscale": 0.7,
        "mscale_all_dim": 0.9,
    }
    base = plain | {"rope_parameters": rope}
    model = families.read(base)
    for method in ("", "pi", "yarn", "longrope"):
        wanted, new = model.sites[0].rope.spectrum, base
        if method:
            try:
                wanted, params = scaled(model, method, 2 * model.context)[""]
            except NotExpressible:  # Mistral 4 builds no longrope
                continue
            new = families.write(base, model, {"": params}, 2 * model.context)
        answer = stock.build(Case(model_type, method, new))
        assert wanted.softmax_factor > 1.2
        assert answer["scales"] == pytest.approx(
            [s * wanted.softmax_factor for s in unit], rel=1e-6
        )
        assert not differences(Case(model_type, method, new, {"": wanted}), answer)


def planned(name, **other):
    """Return the plan of a released config by its authors' options, or by others; and its rope
    dict."""
    base, options, _ = RECIPES[name]
    base = base if "text_config" in base else LLAMA | base
    made = make_plan(base, Extend(**(other or options)), name)
    rope = made.config.get("text_config", made.config)["rope_parameters"]
    return made, rope.get("full_attention") or rope.get("compress") or rope


@pytest.mark.parametrize("name", RECIPES)
def test_the_authors_own_recipe_is_written_key_by_key_and_said(name):
    made, rope = planned(name)
    wanted = RECIPES[name][2]
    if wanted is None:
        assert "publish no scaling of it" in made.warnings[0]
        return
    assert {key: rope.get(key) for key in wanted} == wanted
    assert made.notes[0].startswith("as its authors publish (")
    assert "\nnote: as its authors publish (" in text.plan_details(made)


KNOBS = {
    "gpt-oss": {"truncate": None},
    "DeepSeek V4": {"attention_factor": None},
    "Llama 3.1": {"high_freq_factor": 32.0},
    "Phi-3.5": {"attention_factor": None},
    "Qwen2.5": {"beta_fast": 4.0},
    "Qwen3": {"attention_factor": 2.0},
    "Laguna": {"temperature": 0.5},
}
ASKED = [(name, RECIPES[name][1]) for name, entry in RECIPES.items() if entry[2] is not None]
ASKED += [(name, RECIPES[name][1] | knobs) for name, knobs in KNOBS.items()]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), ASKED)
def test_a_plan_is_the_authors_exactly_if_transformers_computes_the_same_of_both(
    stock, name, options
):
    base, _, keys = RECIPES[name]
    base = base if "text_config" in base else LLAMA | base
    if base["model_type"] not in stock.tasks or "text_config" in base:
        pytest.skip("transformers builds no such language model alone")
    scaled = base.get("rope_scaling") or "factor" in str(base.get("rope_parameters"))
    released = base if scaled else base | {"rope_scaling": keys}
    plan = make_plan(base, Extend(**options), name)
    theirs, ours = (
        stock.build(Case(base["model_type"], name, config))["sites"]
        for config in (released, plan.config)
    )
    same = all(
        one["inv_freq"] == pytest.approx(two["inv_freq"], rel=1e-6)
        and one["attention"] == pytest.approx(two["attention"], rel=1e-6)
        for one, two in zip(theirs, ours, strict=True)
    )
    assert any("as its authors publish" in note for note in plan.notes) == same
    assert same == (options == RECIPES[name][1])
    assert same or "(this plan has other frequencies or another attention" in plan.warnings[0]


@pytest.mark.parametrize(
    ("name", "said"),
    {
        "Qwen3": ": --method yarn --context 32768 --factor 4; https://",
        "Qwen3.5": ": --method yarn --factor 4; https://",
        "Llama 3.1": "llama3 8 from 8,192 (Llama 3.1), which its config has, and this goes on from",
        "gpt-oss": "YaRN 32 from 4,096 (gpt-oss), which its config has",
    }.items(),
)
def test_a_plan_that_differs_names_the_authors_setting(name, said):
    method = "ntk" if name == "Qwen3.5" else None
    first = planned(name, factor=2.0, method=method)[0].warnings[0]
    assert first.startswith("[published] its authors publish ")
    assert said in first
    again = planned(name, method="pi", factor=2.0, from_original=name == "gpt-oss")[0].warnings[0]
    if name == "gpt-oss":
        assert ": --method yarn --from-original --factor 32 --no-truncate; https://" in again


def test_a_model_of_similar_shape_gets_no_note_about_its_authors():
    """Llama 3.2 has the length of 3.1 and a factor of 32; a Qwen of another theta is none."""
    llama = config("Llama 3.1")
    llama["rope_scaling"] = llama["rope_scaling"] | {"factor": 32.0}
    for base in (llama, LLAMA | RECIPES["Qwen3"][0] | {"rope_theta": 5e6}):
        made = make_plan(base, Extend(factor=2.0), "model")
        assert not any("authors" in warning for warning in made.warnings)
    assert (
        planned("Qwen3", method="yarn", context=32768, factor=2.0)[0]
        .notes[0]
        .startswith("its authors' method (Qwen3: YaRN 4 from 32,768) with a smaller factor, 2;")
    )


def test_every_recipe_names_its_source():
    entries = packaged_facts("published.json")
    assert len([entry for entry in entries if "card" not in entry]) == len(RECIPES) == 12
    others = [other for entry in entries for other in entry.get("others", ())]
    assert all("https://" in one["source"] for one in [*entries, *others])
    assert all(other["date"].startswith("2026") for other in others)


def test_layers_that_the_authors_do_not_scale_stay_unscaled():
    windowed = planned("Laguna")[0].config["rope_parameters"]["sliding_attention"]
    assert (windowed["rope_type"], windowed["rope_theta"]) == ("default", 10000.0)
    assert "factor" not in windowed


GEMMA = {
    "model_type": "gemma4_unified",
    "text_config": LLAMA
    | {
        "model_type": "gemma4_unified_text",
        "max_position_embeddings": 131072,
        "head_dim": 32,
        "global_head_dim": 64,
        "sliding_window": 1024,
    },
}


def test_a_config_that_states_less_than_its_card_has_its_length_raised():
    plan = make_plan(GEMMA, Extend(target=262_144))
    assert plan.recipe.length_only
    assert plan.recommendation.method == "length-only"
    assert "states 131,072 tokens and its authors' card 262,144 (2026-05-23" in (
        plan.recommendation.reason
    )
    assert "needles alone" in plan.recommendation.reason
    assert not any("[published]" in one for one in plan.warnings)
    shorter = make_plan(GEMMA, Extend(context=65_536, target=262_144))
    assert not any("[published]" in one for one in shorter.warnings)  # it already does it
    scaled = make_plan(GEMMA, Extend(target=262_144, method="pi", even_so=True))
    assert any("--length-only --target 262144 is enough" in one for one in scaled.warnings)
    # Beyond the card, and for a config that states the card's length, nothing is known.
    beyond = make_plan(GEMMA, Extend(target=300_000))
    assert "card" not in beyond.recommendation.reason
    assert any("[published]" in one and "262,144 tokens" in one for one in beyond.warnings)
    text = GEMMA["text_config"] | {"max_position_embeddings": 262_144}
    stated = make_plan(GEMMA | {"text_config": text}, Extend(target=300_000))
    assert not any("[published]" in one for one in stated.warnings)


def test_contradicting_sources_are_named_with_the_deciding_one():
    qwen = {
        "model_type": "qwen3_5_text",
        **LLAMA,
        "max_position_embeddings": 262_144,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    }
    plan = make_plan(qwen, Extend(factor=4, method="yarn"))
    (said,) = [one for one in plan.warnings if one.startswith("[disputed]")]
    assert "vLLM's recipe for Qwen3.8-27B raises the length alone to 1,010,000 (2026-08-14" in said
    assert "434,000 tokens with nothing changed (2026, needles alone" in said
    assert "--method auto" in said
    # The rule does not flip: the method stays the authors'.
    assert any("as its authors publish" in note for note in plan.notes)
    assert not plan.recipe.length_only
