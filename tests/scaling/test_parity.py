"""Every method against stock transformers: its arithmetic, and the module it builds from ours."""

import logging
from itertools import islice
from typing import Any

import pytest
from comparing import assert_close, assert_number, worst_pair
from grid import CASES, Case, case_id, points

from ropext.scaling import forms
from ropext.scaling.rope import Rope

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module", autouse=True)
def stock() -> Any:
    """Silence stock's warnings about knobs that it computes all the same."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


def llama_config(dim: int, params: dict[str, Any], mpe: int) -> Any:
    return transformers.LlamaConfig(
        hidden_size=dim,
        num_attention_heads=1,
        head_dim=dim,
        max_position_embeddings=mpe,
        rope_parameters=dict(params),
    )


def rotary_class() -> Any:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    return LlamaRotaryEmbedding


def built(dim: int, params: dict[str, Any], mpe: int) -> tuple[list[float], float]:
    """Return the buffers of the module that stock builds from a rope dict."""
    module = rotary_class()(llama_config(dim, params, mpe))
    return module.inv_freq.tolist(), module.attention_scaling


def computed(
    dim: int, params: dict[str, Any], mpe: int, tokens: int | None = None
) -> tuple[list[float], float]:
    """Return the output of stock's function for this rope type and an input of so many tokens."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = llama_config(dim, params, mpe)
    if params["rope_type"] == "default":
        inv_freq, attention = rotary_class().compute_default_rope_parameters(config)
    else:
        inv_freq, attention = ROPE_INIT_FUNCTIONS[params["rope_type"]](config, seq_len=tokens)
    return inv_freq.tolist(), attention


def stock_request(case: Case, dim: int, theta: float, context: int, target: int) -> dict[str, Any]:
    """Return the rope dict that asks stock transformers for this method, written by hand."""
    s = target / context
    lengths = {"factor": s, "original_max_position_embeddings": context}
    match case.method:
        case "pi":
            out = {"rope_type": "linear", "factor": s}
        case "ntk":
            return {"rope_type": "default", "rope_theta": theta * s ** (dim / (dim - 2))}
        case "abf":
            return {"rope_type": "default", "rope_theta": case.knobs["theta"]}
        case "dynamic":
            out = {"rope_type": "dynamic", "factor": s}
        case "by-parts":
            low, high = case.knobs.get("beta_slow", 1.0), case.knobs.get("beta_fast", 32.0)
            out = {"rope_type": "llama3", "low_freq_factor": low, "high_freq_factor": high}
            out |= lengths
        case "llama3":
            out = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            out |= lengths | case.knobs
        case "yarn":
            out = {"rope_type": "yarn"} | lengths | case.knobs
        case "longrope":
            factors = list(case.knobs_for(Rope(dim, theta, context))["pair_factors"])
            out = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors}
            out |= lengths | {"attention_factor": 1.0}
    return out | {"rope_theta": theta}


def bound(params: dict[str, Any], factor: float) -> float:
    """Return how far stock's float32 may be from float64, relative; its llama3 ramp cancels."""
    allowed = max(1e-6, 1e-7 * factor) * forms.steepness(params)
    return 4 * allowed if params["rope_type"] == "llama3" else allowed


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_every_method_equals_stock_transformers(case: Case) -> None:
    count = 0
    # Every second point, for time; an odd number of lengths and factors makes that hit them all.
    for dim, theta, context, target in islice(points(case), 0, None, 2):
        spectrum, params = case.scaled(Rope(dim, theta, context), target)
        request = stock_request(case, dim, theta, context, target)
        mpe = context if case.method == "dynamic" else target
        routes = {
            "asked of stock": computed(dim, request, mpe, target),
            "our dict, stock's module": built(dim, params, target),
        }
        if params["rope_type"] == "longrope":  # the module holds its short set until it runs
            routes["our dict, long set"] = computed(dim, params, target, target)
        for route, (inv_freq, attention) in routes.items():
            what = f"{case_id(case)} dim {dim} theta {theta:g} {context} -> {target}, {route}"
            assert_close(spectrum.inv_freq, inv_freq, bound(params, target / context), what)
            assert_number(spectrum.attention_factor, attention, 1e-12, f"{what}: attention factor")
        count += 1
    assert count >= 144


# (head_dim, share): 32 of 80, 24 of 96, 16 of 64 channels rotate.
PARTIAL = ((80, 0.4), (96, 0.25), (64, 0.25))


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_partial_rotation_counts_the_channels_that_rotate(case: Case) -> None:
    """Phi reads partial_rotary_factor; d in every formula is the rest, not head_dim."""
    from transformers.models.phi.modeling_phi import PhiRotaryEmbedding

    for head_dim, share in PARTIAL:
        dim = int(head_dim * share)
        for theta, context, target in ((77_000.0, 2048, 8192), (5e5, 8192, 262_144)):
            spectrum, params = case.scaled(Rope(dim, theta, context), target)
            config = transformers.PhiConfig(
                hidden_size=2 * head_dim,
                num_attention_heads=2,
                max_position_embeddings=target,
                rope_parameters=params | {"partial_rotary_factor": share},
                partial_rotary_factor=share,  # the key's place for transformers before 5.18
            )
            module = PhiRotaryEmbedding(config)
            what = f"{case_id(case)} {dim} of {head_dim} channels {context} -> {target}"
            allowed = bound(params, target / context)
            assert_close(spectrum.inv_freq, module.inv_freq.tolist(), allowed, what)
            attention = f"{what}: attention factor"
            assert_number(spectrum.attention_factor, module.attention_scaling, 1e-12, attention)


STEEP = (
    Case("yarn", {"beta_fast": 1.5, "beta_slow": 0.9, "truncate": False}),
    Case("by-parts", {"beta_fast": 1.3, "beta_slow": 1.0}),
    Case("llama3", {"low_freq_factor": 3.9, "high_freq_factor": 4.0}),
)


@pytest.mark.parametrize("case", STEEP, ids=case_id)
def test_steep_ramps_stay_within_the_bound_of_float32(case: Case) -> None:
    """A right config must not fail its proof because its knobs make stock's float32 lose digits."""
    beyond = 0
    for dim in (64, 80, 128):
        for theta in (4264.0, 1e4, 63_433.87, 2.3e6):
            for context in (1024, 2048, 4096):
                for s in (8, 16, 128):
                    spectrum, params = case.scaled(Rope(dim, theta, context), s * context)
                    inv_freq, _ = computed(dim, params, s * context)
                    what = f"{case_id(case)} dim {dim} theta {theta:g} {context}, factor {s}"
                    assert_close(spectrum.inv_freq, inv_freq, bound(params, s), what)
                    usual = bound(params, s) / forms.steepness(params)
                    beyond += worst_pair(spectrum.inv_freq, inv_freq)[1] > usual
    assert beyond, "the usual bound would do"
