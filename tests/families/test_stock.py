"""Every rotary type: tiny config -> read -> extend -> stock transformers builds the same spectrum.

One process builds all of them, and it cannot import ropext. A type that stock cannot build here is
skipped with stock's reason, and the number of built types is compared with the census.
"""

import functools
import os
import sys

import pytest
import tiny
from building import (
    Case,
    Stock,
    base_case,
    cache_differences,
    cases,
    differences,
    release,
    rotary_types,
    spelled,
)
from tiny import text_part, wrapped

from ropext import families
from ropext.base.errors import InputError
from ropext.families import config
from ropext.families.described import NO_FACTS
from ropext.families.geometry import attends, is_windowed
from ropext.families.table import family
from ropext.options.extend import Extend
from ropext.planning import make_plan
from ropext.scaling import forms

# The census ran 127 decoder and 10 masked-LM types of transformers 5.23 (gemma3n needs timm, the
# two assistants are drafters): these task heads must be built for at least so many.
BUILT_AT_LEAST = 137

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stock():
    process = Stock()
    yield process
    process.close()


def goes_apart(process, model_type):
    """Return whether stock builds the text part of a composite by itself.

    If so, its own cases test each method, and the composite's cases test only the place in the
    config.
    """
    text_type, path = text_part(model_type)
    if not path or text_type not in process.tasks or not process.has_head(text_type):
        return False
    left_out, _ = outcome(process, text_type)
    return not left_out


@functools.cache
def outcome(process, model_type):
    """Return (reason why this type is left out or "", list of (case, differences))."""
    if model_type not in process.tasks:
        return f"transformers {process.version} has no model of this type by itself", []
    found = []
    for case in cases(model_type, process.has_head(model_type), goes_apart(process, model_type)):
        answer = process.build(case)
        if case.name == "modern" and "error" in answer and not case.error:
            return answer["error"].strip().splitlines()[0], []
        found.append((case, differences(case, answer)))
    return "", found


@pytest.mark.parametrize("model_type", rotary_types())
def test_stock_builds_the_read_and_written_spectrum(stock, model_type):
    left_out, found = outcome(stock, model_type)
    if left_out:
        pytest.skip(left_out)
    wrong = [f"{case.id}: {sentence}" for case, bad in found for sentence in bad]
    assert not wrong, "\n".join(wrong)


def test_the_census_is_covered(stock, capsys):
    left_out, built = {}, {"AutoModelForCausalLM": 0, "AutoModelForMaskedLM": 0, "AutoModel": 0}
    for model_type in rotary_types():
        reason, _ = outcome(stock, model_type)
        if reason:
            left_out[model_type] = reason
        else:
            built[stock.tasks[model_type]] += 1
    with capsys.disabled():
        print(f"\nbuilt by transformers {stock.version}: {built}", file=sys.stderr)
        for model_type, reason in left_out.items():
            print(f"left out: {model_type}: {reason}", file=sys.stderr)
    if release(stock.version) < release(config.census_version()):
        pytest.skip(f"the count is of transformers {config.census_version()}")
    assert built["AutoModelForMaskedLM"] >= 10
    assert built["AutoModelForCausalLM"] + built["AutoModelForMaskedLM"] >= BUILT_AT_LEAST


@pytest.mark.parametrize("model_type", [t for t in rotary_types() if not text_part(t)[1]])
def test_the_written_file_reads_back(model_type):
    for case in cases(model_type):
        model = families.read(case.config)
        for site, wanted in zip(model.sites, case.wanted.values(), strict=True):
            assert forms.same(site.rope.spectrum, wanted), case.id
        again = families.read(families.respell(case.config))
        for site, wanted in zip(again.sites, case.wanted.values(), strict=True):
            assert forms.same(site.rope.spectrum, wanted), f"{case.id} respelled"


# What a step of a model reads, in the tests of keys: more than any window there.
TOKENS = 12
# A few types, each for a spelling of its own; .ci/slow takes all.
SPELLINGS = [
    *("cohere2", "deepseek_v4", "dots3_note_text", "exaone4", "falcon", "gemma4_text", "hrm_text"),
    *("lfm2", "llama4_text", "mimo_v2_flash", "minimax_m2", "mistral_large4_text", "neomme"),
    *("qwen2_moe", "qwen3_next", "smollm3", "step3p5"),
]
if os.environ.get("SPELLINGS") == "all":
    SPELLINGS = [name for name in rotary_types() if not text_part(name)[1]]
# What no released model has, and the proof refuses: it holds the base against stock too.
LEFT = {
    "diffusion_gemma_text partial_rotary_factor": "would cut its sliding layers alone",
    "dots3_note_text use_dsa": "renames the label of its full layers",
    "gemma3_text use_bidirectional_attention": "makes an encoder, which has no cache",
    "mistral4 head_dim": "contradicts qk_rope_head_dim, which is read",
    "mistral_large4_text partial_rotary_factor": "cuts a rotary part that has a size of its own",
    "unlimited_ocr_text head_dim": "is not read: the width over the heads is",
    "openai_privacy_filter partial_rotary_factor": "is read with a scaled type alone",
}


@functools.cache
def keys_that_stock_reads(process, model_type):
    """Return (keys without a value, keys with which stock built a model, sentences) for one
    type."""
    holders = [name for name in rotary_types() if text_part(name)[0] == model_type]
    holders.sort(key=lambda name: (name != model_type, len(name)))
    holder = next((name for name in holders if name in process.tasks), "")
    if not holder:
        return [], [], []
    decodes = holder == model_type and "CausalLM" in process.tasks[model_type]
    keys, built, wrong = process.keys(model_type), [], []
    for key, text in spelled(model_type, keys):
        said = f"{key} {text.get(key)!r}" if key else "bare"
        case, model = base_case(holder, said, wrapped(holder, text))
        answer = process.build(case, TOKENS if decodes else 0)
        refused = case.error.startswith("UnsupportedModel") or "loaders disagree" in case.error
        if "error" in answer or refused or f"{model_type} {key}" in LEFT:
            continue
        bad = differences(case, answer)
        if model is not None and decodes:
            bad += cache_differences(model, answer["cache"], TOKENS)
        built.append(key)
        wrong += [f"{case.id}: {sentence}" for sentence in bad]
    return [key for key, value in keys.items() if value is None], built, wrong


@pytest.mark.parametrize("model_type", SPELLINGS)
def test_every_key_that_stock_reads_is_read(stock, model_type):
    new, built, wrong = keys_that_stock_reads(stock, model_type)
    assert not new, "stock reads keys for which stock_keys.py has no value"
    assert not wrong, "\n".join(wrong)
    if not built:
        pytest.skip("stock builds none of these")


# The types whose code passes over the rotation in some layers, or may; .ci/slow takes all.
SKIPPING = [
    *("afmoe", "beam", "cohere2", "cohere2_moe", "cohere_compass_text", "exaone4", "exaone_moe"),
    *("flint", "gemma3_text", "granite_swa", "granitemoe_swa", "kolibri1", "llama", "llama4_text"),
    *("longcat_flash", "mistral_large4_text", "muse_glimmer_text", "muse_spark_text", "neomme"),
    *("olmo_hybrid", "recurrent_gemma", "smollm3", "zamba2"),
]
if os.environ.get("SPELLINGS") == "all":
    SKIPPING = [name for name in rotary_types() if not text_part(name)[1]]


@pytest.mark.parametrize("model_type", SKIPPING)
def test_the_layers_that_rotate_are_the_read_ones(stock, model_type):
    """Each attention gets the same hidden states at two sets of positions: if its output stays the
    same, it does not rotate. If none of them sees the whole text, ropext says that scaling does not
    help."""
    if model_type not in stock.tasks:
        pytest.skip(f"transformers {stock.version} has no model of this type by itself")
    case, model = base_case(model_type, "turns", tiny.modern(model_type))
    # A class with mRoPE wants sections of this very head.
    if not family(model_type, NO_FACTS).labels:
        third = model.sites[0].rope.dim // 2 // 3
        sections = [model.sites[0].rope.dim // 2 - 2 * third, third, third]
        case.config["rope_parameters"]["mrope_section"] = sections
    answer = stock.build(case, turns=8)
    if "error" in answer:
        pytest.skip(answer["error"])
    turns = answer["turns"]
    attending = [kind for kind in model.layer_types if attends(kind)] or [""] * len(turns)
    assert sum(turns) == sum(site.layers for site in model.sites)
    if len(turns) == len(model.layer_types):  # some linear layers are called attention too
        turns = [t for t, kind in zip(turns, model.layer_types, strict=True) if attends(kind)]
    assert model.nope_layers == (turns.count(False) if model.layer_types else 0)
    if len(turns) == len(attending) and model.sliding_window and False in turns:
        kinds = zip(attending, turns, strict=True)
        far = any(turn and not is_windowed(kind) for kind, turn in kinds)
        assert bool(model.obstacles) == (not far), model.obstacles


@pytest.mark.parametrize("last", [0, 20000.0])
def test_a_list_of_thetas_says_which_layers_of_muse_turn(stock, last):
    """A full layer that is given a theta turns, and then scaling helps."""
    config = tiny.modern("muse_glimmer_text") | {"layer_rope_theta": [20000.0, 0, 20000.0, last]}
    case, model = base_case("muse_glimmer_text", "listed", config)
    turns = stock.build(case, turns=8)["turns"]
    assert turns == [True, False, True, bool(last)]
    assert model.sites[0].layers == sum(turns)
    assert bool(model.obstacles) == (not last)


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}
UNCUT = {
    "scaling alone": {"rope_scaling": YARN},
    "scaling beside": {"rope_scaling": YARN, "rope_parameters": YARN},
    "another factor": {"rope_parameters": YARN | {"partial_rotary_factor": 0.25}},
    "plain": {"rope_parameters": {"rope_type": "default"}},
}


@pytest.mark.parametrize("method", ["pi", "yarn", "by-parts"])
def test_a_factor_that_stock_sets_before_it_takes_rope_scaling_is_written_out(stock, method):
    base = tiny.modern("mistral4")
    assert "partial_rotary_factor" not in str(base)
    plan = make_plan(base, Extend(method=method, factor=4, from_original=True))
    for holder in (plan.config, plan.config["rope_parameters"]):
        assert holder["partial_rotary_factor"] == 0.5  # 16 of 16 + 16 channels
    for built, wanted in (
        (base, plan.model.sites[0].rope.spectrum),
        (plan.config, plan.sites[0].wanted),
    ):
        case = Case("mistral4", method, built, {"": wanted}, factor=8)
        assert differences(case, stock.build(case)) == []


@pytest.mark.parametrize("spelling", UNCUT.values(), ids=UNCUT)
def test_a_head_that_stock_cuts_otherwise_is_refused(stock, spelling):
    base = {k: v for k, v in tiny.modern("mistral4").items() if k != "rope_parameters"}
    base |= {"rope_theta": 10000.0, **spelling}
    with pytest.raises(InputError, match=r"partial_rotary_factor is .* / head_dim is 0\.5"):
        make_plan(base, Extend(method="yarn", factor=4, from_original=True))
    (site,) = stock.build(Case("mistral4", "uncut", base))["sites"]
    assert len(site["inv_freq"]) != 8  # of 16 channels that the attention turns
