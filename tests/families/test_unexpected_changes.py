"""An extension changes, as stock reads it, only form, theta and lengths."""

import copy
import os

import pytest
import tiny
from transformers import CONFIG_MAPPING

from ropext import families
from ropext.base.errors import RopextError
from ropext.families.config import census
from ropext.options.extend import Extend
from ropext.planning import make_plan
from ropext.verifying.proof.child import changed_keys, config_without_quantiser

# One of each kind; .ci/slow spellings takes all.
TYPES = (
    *("cohere2", "deepseek_v3", "gemma3", "gemma4_text", "glm4", "gpt_neox", "gpt_oss"),
    *(
        "granite_swa",
        "lfm3",
        "llava",
        "mellum",
        "ministral3",
        "modernbert",
        "phi3",
        "smollm3",
        "zaya",
    ),
)
if os.environ.get("SPELLINGS") == "all":
    TYPES = tuple(filter(tiny.text_part, sorted(census())))


def read_by_stock(config):
    """Return the config as its class of stock keeps it."""
    kind = CONFIG_MAPPING[config["model_type"]]
    return config_without_quantiser(kind.from_dict(copy.deepcopy(config))).to_dict()


@pytest.mark.parametrize("model_type", TYPES)
def test_no_plan_changes_an_unrelated_key(model_type):
    text_type, _ = tiny.text_part(model_type)
    planned = 0
    for spelling in (tiny.modern, tiny.legacy, tiny.bare):
        text = spelling(text_type)
        if text is None:
            continue
        config = tiny.wrapped(model_type, text)
        for method in ("pi", "ntk", "yarn", "by-parts"):
            try:
                plan = make_plan(config, Extend(factor=4.0, method=method, even_so=True))
            except RopextError:
                continue  # a form that the family lacks
            try:
                before = read_by_stock(config)
            except Exception:  # a small size that a class refuses
                continue
            changed = changed_keys(before, read_by_stock(plan.config))
            assert families.unexpected_changes(plan.model, changed) == []
            assert changed
            planned += 1
    assert planned or os.environ.get("SPELLINGS") == "all"


@pytest.mark.parametrize(
    ("changed", "unexpected"),
    [
        (["rope_parameters.factor", "max_position_embeddings", "rope_theta"], []),
        (["rope_parameters.original_max_position_embeddings"], []),
        (["attention_multiplier", "hidden_size"], ["attention_multiplier", "hidden_size"]),
        (["rope_parameters.mrope_section"], ["rope_parameters.mrope_section"]),
        (["layer_types", "sliding_window"], ["layer_types", "sliding_window"]),
    ],
)
def test_unexpected_changes_lists_keys_that_no_extension_writes(changed, unexpected):
    model = families.read(tiny.modern("llama"))
    assert families.unexpected_changes(model, changed) == unexpected


def test_a_length_that_queries_read_stays():
    """A scaling of queries reads the original length in the dict; the top-level one is the
    form's."""
    config = tiny.modern("ministral3")
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}
    config["rope_parameters"] |= yarn | {"llama_4_scaling_beta": 0.1}
    key = "rope_parameters.original_max_position_embeddings"
    changed = [key, "original_max_position_embeddings", "rope_parameters.factor"]
    assert families.unexpected_changes(families.read(config), changed) == [key]
