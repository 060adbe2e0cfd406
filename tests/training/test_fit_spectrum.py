"""The moving spectrum on tiny random models equals stock's computation, with gradients."""

import json
import math

import pytest
import torch
from tiny_llama import SHAPE, new_llama

from ropext.base.errors import InputError, UnsupportedModel, UsageError
from ropext.models.patching import apply_config
from ropext.options.extend import Extend
from ropext.planning import make_plan
from ropext.training import spectrum
from ropext.training.spectrum import LeftGuards, SpectrumLearner
from ropext.training.starts import example_knobs

TARGET = 256


def config_of(model):
    return json.loads(model.config.to_json_string())


def plan_of(config, method="yarn", **knobs):
    return make_plan(config, Extend(method=method, target=TARGET, **knobs))


def live(model, within="longrope", method="yarn", ceiling=16.0, **knobs):
    """Make a model whose spectrum moves, patched to its start."""
    config = config_of(model)
    plan = plan_of(config, method, **knobs)
    learned = spectrum.learned_spectrum(within, plan.main, TARGET, ceiling)
    apply_config(model, plan_of(config, learned.method, **learned.knobs()).config)
    spectrum.install_learned_spectrum(model, plan.sites, TARGET, learned)
    return learned, plan, config


def ids_of(model, length=TARGET):
    generator = torch.Generator().manual_seed(1)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    return torch.randint(3, vocabulary, (2, length), generator=generator)


def loss_of(model, learned):
    ids = ids_of(model)
    labels = ids.clone()
    labels[:, : TARGET // 2] = -100
    return SpectrumLearner(model, learned, sliced=False, tail=TARGET)(ids, labels)["loss"]


def wide_llama(**changes):
    """Make a Llama with weights large enough that positions matter to the loss."""
    model = new_llama(**changes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(12)
    return model


@pytest.mark.parametrize("pair", [1, 3])
def test_the_gradient_is_that_of_finite_differences(pair):
    model = wide_llama().requires_grad_(False)
    learned, _, _ = live(model)
    loss_of(model, learned).backward()
    step, values = 2e-3, []
    with torch.no_grad():
        for sign in (1, -1):
            learned.offsets[pair] += sign * step
            values.append(float(loss_of(model, learned)))
            learned.offsets[pair] -= sign * step
        for sign in (1, -1):
            learned.attention += sign * step
            values.append(float(loss_of(model, learned)))
            learned.attention -= sign * step
    expected = (values[0] - values[1]) / (2 * step)
    assert abs(expected) > 1e-3  # or the comparison would show nothing
    assert float(learned.offsets.grad[pair]) == pytest.approx(expected, rel=0.03)
    assert float(learned.attention.grad) == pytest.approx(
        (values[2] - values[3]) / (2 * step), rel=0.03
    )


def test_sliced_and_whole_logits_give_the_same_loss_and_gradient_for_the_same_rows():
    model = wide_llama().requires_grad_(False)
    learned, _, _ = live(model)
    ids = ids_of(model)
    labels = ids.clone()
    labels[0, : TARGET // 2] = -100
    labels[1, :-5] = -100  # a question: few tokens, a weight of its own
    weights = torch.tensor([1.0, 0.25])
    found = []
    for sliced in (True, False):
        learned.zero_grad()
        loss = SpectrumLearner(model, learned, sliced=sliced, tail=TARGET - 8)(
            ids, labels, weights
        )["loss"]
        loss.backward()
        found.append((float(loss.detach()), learned.offsets.grad.clone()))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    assert torch.allclose(found[0][1], found[1][1], rtol=1e-3, atol=1e-6)
    logits = model(ids).logits[:, :-1].float()
    each = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    ).view(2, -1)
    # The last 8 tokens weigh as much as the far half; all of an answer is among them.
    window = (each[0, TARGET // 2 - 1 :].mean() + each[0, -8:].mean()) / 2
    both = window + 0.25 * each[1, -5:].mean()
    assert found[0][0] == pytest.approx(float(both.detach()) / 2, rel=1e-5)


def moved(learned):
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for own in learned.parameters():
            own.add_(0.05 * torch.randn(own.shape, generator=generator, dtype=own.dtype))


@pytest.mark.parametrize(
    ("within", "method", "form"),
    [("longrope", "pi", "longrope"), ("yarn", "yarn", "yarn"), ("ntk", "ntk", "default")],
)
def test_the_written_factors_are_the_fitted_ones(within, method, form):
    """Stock transformers, from the config of the moved spectrum, against the live modules."""
    model = wide_llama(max_position_embeddings=1024 if within == "yarn" else 64)
    global_target = 4096 if within == "yarn" else TARGET
    config = config_of(model)
    plan = make_plan(config, Extend(method=method, target=global_target))
    learned = spectrum.learned_spectrum(within, plan.main, global_target, 16.0)
    apply_config(model, make_plan(config, Extend(method=learned.method, target=global_target,
                                          **learned.knobs())).config)  # fmt: skip
    spectrum.install_learned_spectrum(model, plan.sites, global_target, learned)
    start = learned.values()
    assert start[0] == pytest.approx(
        [a / b for a, b in zip(plan.main.rope.spectrum.inv_freq, plan.main.wanted.inv_freq,
                               strict=True)]
    )  # fmt: skip
    assert start[1] == pytest.approx(plan.main.wanted.attention_factor)
    moved(learned)
    factors, attention = learned.values()
    assert factors != start[0]
    written = make_plan(
        config, Extend(method=learned.method, target=global_target, **learned.knobs())
    )
    assert written.main.params["rope_type"] == form
    plain = plan.main.rope.spectrum.inv_freq
    wanted = [f / own for f, own in zip(plain, factors, strict=True)]
    assert written.main.wanted.inv_freq == pytest.approx(wanted, rel=1e-9)
    assert written.main.wanted.attention_factor == pytest.approx(attention, rel=1e-9)
    with torch.no_grad():
        found = model(ids_of(model)).logits
    spectrum.remove_learned_spectrum(model)
    apply_config(model, written.config)
    with torch.no_grad():
        stock = model(ids_of(model)).logits
    assert torch.allclose(found, stock, atol=2e-3 * float(stock.abs().max()))


def test_a_pair_is_held_at_its_guard_and_comes_back():
    config = config_of(new_llama())
    plan = plan_of(config, "pi")
    learned = spectrum.learned_spectrum("longrope", plan.main, TARGET, 6.0)
    with torch.no_grad():
        learned.offsets[3] = 2.0
        learned.offsets[4] = -5.0
    factors, _ = learned.values()
    assert factors[3] == pytest.approx(6.0)
    assert factors[4] == pytest.approx(0.9)
    assert learned.outside() is None
    learned()[0].sum().backward()
    assert float(learned.offsets.grad[3]) == pytest.approx(6.0)  # still moved by the gradient


def test_a_fit_begins_at_a_start_beyond_the_ceiling():
    """Frozen dynamic NTK slows its last pair by (s^2 - s + 1), 57 at 8 times: above 4 times 8."""
    model = wide_llama(max_position_embeddings=TARGET // 8)
    learned, plan, config = live(model, method="dynamic", ceiling=32.0)
    factors, _ = learned.values()
    assert max(factors) == pytest.approx(57)
    assert learned.outside() is None
    with torch.no_grad():
        began = model(ids_of(model)).logits
        stock = apply_config(wide_llama(**config), plan.config)
        assert torch.allclose(began, stock(ids_of(model)).logits, atol=1e-4 * float(began.std()))


def test_spectra_outside_of_the_guards_are_reported_and_stop_the_training():
    model = new_llama(max_position_embeddings=1024)
    config = config_of(model)
    plan = make_plan(config, Extend(method="yarn", factor=4))
    ramp = spectrum.learned_spectrum("yarn", plan.main, 4096, 16.0)
    assert ramp.outside() is None
    with torch.no_grad():
        ramp.ends[0] = 10.0
        ramp.ends[1] = -30.0
    assert "ends crossed" in ramp.outside()
    theta = spectrum.learned_spectrum(
        "ntk", make_plan(config, Extend(method="ntk", factor=4)).main, 4096, 16.0
    )
    with torch.no_grad():
        theta.offset -= 10
    assert "below the model's own" in theta.outside()
    with torch.no_grad():
        theta.offset += 13
    assert "beyond 16" in theta.outside()
    with torch.no_grad():
        theta.offset.fill_(math.nan)
    assert "not finite" in theta.outside()
    ids = ids_of(model, 8)
    with pytest.raises(LeftGuards, match="not finite"):
        SpectrumLearner(model, theta, sliced=False, tail=TARGET)(ids, ids)


def test_a_form_that_the_start_does_not_have_is_refused():
    plan = plan_of(config_of(new_llama()), "pi")
    with pytest.raises(
        UsageError, match="--within yarn needs a start that is written as one yarn rope dict"
    ):
        spectrum.learned_spectrum("yarn", plan.main, TARGET, 16.0)


def tiny(kind, config_kind, **changes):
    import transformers

    torch.manual_seed(0)
    shape = {k: v for k, v in SHAPE.items() if k not in changes.pop("without", ())}
    config = getattr(transformers, config_kind)(**(shape | changes))
    return getattr(transformers, kind)(config).eval().requires_grad_(False)


FAMILIES = {
    "per layer type": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32},
    ),
    "partial rotary": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {"without": ("head_dim",)}),
    "complex numbers, MLA": (
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        {
            "without": ("head_dim",),
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 16,
            "v_head_dim": 8,
            "n_routed_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "num_key_value_heads": 2,
        },
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_other_rotary_modules_move_too(family):
    model = tiny(FAMILIES[family][0], FAMILIES[family][1], **FAMILIES[family][2])
    learned, _, config = live(model, method="pi")
    moved(learned)
    found = model(ids_of(model)).logits
    found.square().mean().backward()
    assert float(learned.offsets.grad.abs().max()) > 0
    spectrum.remove_learned_spectrum(model)
    apply_config(model, plan_of(config, "longrope", **learned.knobs()).config)
    with torch.no_grad():
        stock = model(ids_of(model)).logits
    assert torch.allclose(found, stock, atol=1e-3 * float(stock.abs().max()))


def test_only_full_attention_moves_in_a_model_of_several_layer_types():
    model = tiny(*FAMILIES["per layer type"][:2], **FAMILIES["per layer type"][2])
    rotary = model.model.rotary_emb
    x, positions = torch.zeros(1, 1), torch.arange(TARGET)[None]
    windowed = rotary(x, positions, "sliding_attention")
    learned, _, _ = live(model, method="pi")
    full = rotary(x, positions, "full_attention")
    moved(learned)
    again = rotary(x, positions, "sliding_attention")
    assert all(torch.equal(a, b) for a, b in zip(windowed, again, strict=True))
    assert not torch.equal(full[0], rotary(x, positions, "full_attention")[0])


def test_a_model_whose_frequencies_no_module_holds_is_refused():
    model = new_llama()
    plan = plan_of(config_of(model), "pi")
    learned = spectrum.learned_spectrum("longrope", plan.main, TARGET, 16.0)
    with pytest.raises(UnsupportedModel, match="no rotary module holds the planned frequencies"):
        spectrum.install_learned_spectrum(model, plan.sites, TARGET, learned)  # it was not patched


def test_a_model_that_passes_no_gradient_is_refused():
    model = new_llama()
    own = model.model.forward

    def without(*args, **kwargs):
        with torch.no_grad():
            return own(*args, **kwargs)

    model.model.forward = without
    with pytest.raises(InputError, match=r"no gradient reaches the frequencies.*llama"):
        live(model)


def test_every_form_has_an_example_outside_of_the_closed_ones():
    plan = plan_of(config_of(new_llama()), "yarn")
    for within, form in (("longrope", "longrope"), ("yarn", "yarn"), ("ntk", "default")):
        method, knobs = example_knobs(within, plan.main)
        found = plan_of(config_of(new_llama()), method, **knobs)
        assert found.main.params["rope_type"] == form
