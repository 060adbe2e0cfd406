"""Configs as they were released: read, extended again and built by stock transformers."""

import pytest
import tiny
from building import FACTOR, Case, Stock, differences, scaled
from published import CONFIGS, config

from ropext import families, forms
from ropext.errors import NotExpressible
from ropext.families.table import FAMILIES


def test_a_context_that_is_told_replaces_the_stated_one():
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
def test_stock_agrees(stock, name):
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
