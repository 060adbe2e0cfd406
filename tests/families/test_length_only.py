"""`--length-only`: stock's rotations at every position below the old length are unchanged.

The truth is the rotary module of stock transformers, built from the config before and after.
"""

import copy

import configs
import published
import pytest
import torch
from building import Stock, base_case, differences, rotary_types, stated_case
from tiny import bare, legacy, modern, text_part, wrapped
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import (
    HunYuanDenseV1RotaryEmbedding,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from ropext import families
from ropext.base.errors import NotExpressible
from ropext.options.extend import Extend
from ropext.planning import make_plan
from ropext.scaling.forms import same

ROTARY = {"phi3": Phi3RotaryEmbedding, "hunyuan_v1_dense": HunYuanDenseV1RotaryEmbedding}
LENGTHS = {"original_max_position_embeddings": 1024}
SCALINGS = {
    "none": None,
    "linear": {"rope_type": "linear", "factor": 4.0, **LENGTHS},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **LENGTHS},
    "a yarn without its factor": {"rope_type": "yarn", "factor": None, **LENGTHS},
    "llama3": configs.LLAMA31["rope_scaling"] | LENGTHS,
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        **LENGTHS,
        "short_factor": [1.0] * 64,
        "long_factor": [1.0 + i / 20 for i in range(64)],
    },
}
LLAMA = configs.LLAMA | {"head_dim": 128, "max_position_embeddings": 4096}
SHAPES = {name: LLAMA | {"rope_scaling": scaling} for name, scaling in SCALINGS.items()}
SHAPES |= {name: published.RECIPES[name][0] for name in ("Phi-3.5", "Phi-4-mini")}
SHAPES |= {
    "gpt-oss": published.config("gpt-oss"),
    "HunYuan": published.config("HunYuan"),
}


def turned(config, length):
    """Return the cosines and sines that stock computes for one input of `length` tokens."""
    kind = AutoConfig.for_model(**copy.deepcopy(config))
    rotary = ROTARY.get(kind.model_type, LlamaRotaryEmbedding)(kind)
    return torch.stack(rotary(torch.zeros(1), torch.arange(length)[None]))


def stated(config, **more):
    before = families.read(config)
    return make_plan(config, Extend(length_only=True, target=2 * before.context, **more))


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_length_only_changes_no_rotation_below_the_old_length(config):
    before = families.read(config)
    made = stated(config)
    # An input within the original length too, for which a longrope has a set of its own.
    for length in sorted({512, min(before.context, 8192)}):
        gap = (turned(config, length) - turned(made.config, length)).abs().max()
        assert gap < 1e-6, length
    assert made.target == families.read(made.config).context


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "internlm3"])
def test_length_only_refuses_a_scaling_that_follows_the_stated_length(model_type):
    """Stock's dynamic begins at max_position_embeddings: with another one it is another model."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    text = modern(model_type)
    text["rope_parameters"] |= {"rope_type": "dynamic", "factor": 6.0}
    with pytest.raises(NotExpressible, match="dynamic scaling begins at the stated length") as said:
        stated(text)
    theta = float(str(said.value).partition("--theta ")[2].split()[0])
    frozen = text | {"rope_parameters": text["rope_parameters"] | {"rope_type": "default"}}
    frozen["rope_parameters"] |= {"rope_theta": theta}
    length = 2 * text["max_position_embeddings"]
    assert (turned(text, length) - turned(frozen, length)).abs().max() < 1e-3


def text_types():
    """Return every rotary text type of the census, each by one model type that holds it."""
    holders = {}
    for model_type in rotary_types():
        text_type = text_part(model_type)[0]
        if model_type == text_type or text_type not in holders:
            holders[text_type] = model_type
    return sorted(holders.values())


@pytest.mark.slow
def test_length_only_keeps_the_spectrum_of_every_known_type():
    """Stock builds the same from the config with the longer length."""
    stock, wrong, built = Stock(), [], 0
    for model_type in text_types():
        base, model = base_case(
            model_type, "modern", wrapped(model_type, modern(text_part(model_type)[0]))
        )
        if model is None or model_type not in stock.tasks:
            continue
        case = stated_case(base, model)
        answer = stock.build(case)
        if "error" in answer and "error" in stock.build(base):
            continue
        built += 1
        wrong += [f"{case.id}: {said}" for said in differences(case, answer)]
    stock.close()
    assert not wrong, "\n".join(wrong)
    assert built > 100


@pytest.mark.slow
def test_every_spelling_of_the_census_reads_back():
    """As transformers 4 had it and left to the class, too, by the reader that test_stock holds."""
    for model_type in text_types():
        text_type = text_part(model_type)[0]
        for text in filter(None, (modern(text_type), legacy(text_type), bare(text_type))):
            config = wrapped(model_type, text)
            before = families.as_read(config)
            target = 2 * before.context
            made = make_plan(config, Extend(length_only=True, target=target)).config
            pairs = zip(before.sites, families.as_read(made).sites, strict=True)
            assert all(same(a.rope.spectrum, b.rope.spectrum) for a, b in pairs), model_type
