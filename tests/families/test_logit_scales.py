"""Keys that scale queries, logits or the softmax: kept by every form, and named in the plan."""

import pytest

from ropext import families, scaling
from ropext.base.errors import InputError
from ropext.families.described import NO_FACTS
from ropext.options.extend import Extend
from ropext.planning import make_plan

MINISTRAL3 = {
    "model_type": "ministral3",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
# As our own ntk leaves it: plain rotation over 2048 tokens, queries still scaled by 512.
PLAIN = MINISTRAL3 | {
    "max_position_embeddings": 2048,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 4e6,
        "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 512,
    },
}
FORMS = {
    ("pi", True): "linear",
    ("ntk", True): "default",
    ("yarn", True): "yarn",
    ("by-parts", True): "llama3",
    ("pi", False): "longrope",
    ("yarn", False): "longrope",
}


def kept(plan) -> None:
    for spelling in ("rope_parameters", "rope_scaling"):
        written = plan.config[spelling]
        assert written["llama_4_scaling_beta"] == 0.1, spelling
        assert written["original_max_position_embeddings"] == 512, spelling
    (note,) = [w for w in plan.warnings if "kept as it stands" in w]
    assert "llama_4_scaling_beta 0.1, original_max_position_embeddings 512" in note


@pytest.mark.parametrize(("method", "from_original"), FORMS)
def test_every_form_keeps_the_scale_of_the_queries(method: str, from_original: bool) -> None:
    wish = Extend(method=method, target=16384, from_original=from_original)
    plan = make_plan(MINISTRAL3, wish)
    assert plan.main.params["rope_type"] == FORMS[method, from_original]
    kept(plan)


@pytest.mark.parametrize("method", [name for name in scaling.METHODS if name != "abf"])
def test_a_rope_type_that_needs_another_original_length_is_not_chosen(method: str) -> None:
    factors = tuple(1 + i / 5 for i in range(16)) if method == "longrope" else None
    wish = Extend(method=method, factor=4, pair_factors=factors)
    plan = make_plan(PLAIN, wish)
    kept(plan)  # a yarn or llama3 counts its ramp from 2048 and would divide positions by it
    assert plan.main.params["rope_type"] not in ("yarn", "llama3")


def test_a_spelling_without_the_logit_scale_is_refused() -> None:
    bare = {k: v for k, v in PLAIN["rope_parameters"].items() if k != "llama_4_scaling_beta"}
    with pytest.raises(InputError, match=r"llama_4_scaling_beta is None but .* is 0\.1"):
        families.read(PLAIN | {"rope_scaling": bare})
    bare = PLAIN["rope_parameters"] | {"original_max_position_embeddings": 1024}
    with pytest.raises(InputError, match="original_max_position_embeddings is 1024 but"):
        families.read(PLAIN | {"rope_scaling": bare})


SIZES = {key: MINISTRAL3[key] for key in ("hidden_size", "num_hidden_layers", "head_dim")}
SIZES |= {"num_attention_heads": 2, "max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"model_type": "llama4_text", "attn_temperature_tuning": 4, "floor_scale": 8192}
            | {"attn_scale": 0.1},
            "attn_temperature_tuning 4, attn_scale 0.1, floor_scale 8192",
        ),
        ({"model_type": "gemma2", "query_pre_attn_scalar": 224}, "query_pre_attn_scalar 224"),
        ({"model_type": "granite", "attention_multiplier": 0.0078125}, "attention_multiplier"),
        ({"model_type": "falcon_h1", "key_multiplier": 0.3}, "key_multiplier 0.3"),
    ],
)
def test_other_keys_stay_and_are_named(config: dict, said: str) -> None:
    plan = make_plan(SIZES | config, Extend(method="ntk", factor=2, even_so=True))
    assert config.items() <= plan.config.items()
    assert any("kept as it stands" in w and said in w for w in plan.warnings)


@pytest.mark.parametrize("model_type", ["beam", "mistral_large4_text"])
def test_scales_that_no_key_holds_are_named(model_type: str) -> None:
    from ropext.families.table import family

    assert "position + 1" in family(model_type, NO_FACTS).remark
