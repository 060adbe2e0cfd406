"""How many tokens a scaled model reads, and read before: released spellings, the truth by hand.

The truth comes from model cards and reports, not from the arithmetic under test. Vicuna 1.5 is
Llama 2 (4k) read at 16k. DeepSeek-Coder was trained at 4k and then at 16k, Gemma 3 at 32k and then
at 128k by 8.
"""

import configs
import pytest
from published import LLAMA3, LONG, config

from ropext import families
from ropext.base.errors import InputError, UsageError
from ropext.options.extend import Extend
from ropext.planning import make_plan

LLAMA = configs.LLAMA | {"hidden_size": 1024}


def llama(length, **scaling):
    kind = "rope_type" if scaling["type"] == "llama3" else "type"
    dict_ = {kind: scaling.pop("type")} | scaling
    return LLAMA | {"max_position_embeddings": length, "rope_scaling": dict_}


VICUNA = llama(4096, type="linear", factor=4.0)
FROM_4K = {"original_max_position_embeddings": 4096}
FROM_32K = {"original_max_position_embeddings": 32768}
V5 = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
GEMMA4 = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}

# name: config, tokens it reads, tokens before its scaling
SAID = {
    "linear, Vicuna-16k": (VICUNA | {"max_sequence_length": 16384}, 16384, 4096),
    "linear, Vicuna-16k saved by transformers 5": (
        LLAMA | {"max_sequence_length": 16384, "rope_parameters": V5}, 16384, 4096,
    ),
    "linear, LongChat-32k": (
        llama(4096, type="linear", factor=8.0) | {"max_sequence_length": 32768}, 32768, 4096,
    ),
    "linear with its original, after": (
        llama(16384, type="linear", factor=4.0, **FROM_4K), 16384, 4096,
    ),
    "linear with its original, before": (
        llama(4096, type="linear", factor=4.0, **FROM_4K), 16384, 4096,
    ),
    "linear, its original at top level": (
        llama(16384, type="linear", factor=4.0) | FROM_4K, 16384, 4096,
    ),
    "linear, Gemma 3 4B": (config("Gemma 3 4B"), 131072, 32768),
    "linear of 1": (llama(4096, type="linear", factor=1.0), 4096, 4096),
    "dynamic, SOLAR-0-70b": (llama(4096, type="dynamic", factor=2.0), 4096, 4096),
    "yarn, Yarn-Llama-2-7b-64k": (
        llama(65536, type="yarn", factor=16.0, finetuned=True, **FROM_4K), 65536, 4096,
    ),
    "yarn, Qwen2.5's card": (config("Qwen2.5 with its card's YaRN"), 131072, 32768),
    "yarn, Qwen3's card beside 40960": (
        configs.QWEN2 | {"model_type": "qwen3", "max_position_embeddings": 40960}
        | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, **FROM_32K}}, 131072, 32768,
    ),
    "yarn without its original": (llama(32768, type="yarn", factor=4.0), 131072, 32768),
    "yarn, DeepSeek-V3": (configs.DEEPSEEK_V3, 163840, 4096),
    "yarn, gpt-oss": (config("gpt-oss"), 131072, 4096),
    "yarn, Ministral 3": (config("Ministral 3 by class default"), 262144, 16384),
    "llama3, Llama 3.1": (configs.LLAMA31, 131072, 8192),
    "llama3, Llama 3.2": (
        llama(131072, type="llama3", **{k: v for k, v in LLAMA3.items() if k != "rope_type"})
        | {"rope_scaling": LLAMA3 | {"factor": 32.0}}, 131072, 8192,
    ),
    "llama3 without its original": (
        llama(8192, type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
        65536, 8192,
    ),
    "llama3, Apertus": (config("Apertus by class default"), 65536, 8192),
    "longrope, Phi-3-mini-128k": (config("Phi-3-mini-128k"), 131072, 4096),
    "longrope, Phi-3.5-MoE": (config("Phi-3.5-MoE"), 131072, 4096),
    "longrope at its original, MiniCPM 4": (
        LLAMA | {"hidden_size": 1024, "num_attention_heads": 32, "max_position_embeddings": 32768}
        | {"rope_scaling": {"rope_type": "longrope", **FROM_32K}
           | {"long_factor": LONG, "short_factor": LONG}}, 32768, 32768,
    ),
    "longrope without its original": (
        llama(4096, type="longrope", factor=4.0, long_factor=LONG, short_factor=LONG),
        16384, 4096,
    ),
}  # fmt: skip

# Those that leave it open: config, tokens it reads, tokens before its scaling.
OPEN = {
    "linear, Vicuna-16k, a copy without the second length": (VICUNA, 16384, 4096),
    "linear, Vicuna-16k, a copy that states what it reads": (
        VICUNA | {"max_position_embeddings": 16384, "max_sequence_length": 16384}, 16384, 4096,
    ),
    "linear, DeepSeek-Coder": (llama(16384, type="linear", factor=4.0), 16384, 4096),
    "linear, LLaMA-2-7B-32K": (llama(32768, type="linear", factor=8.0), 32768, 4096),
    "proportional, Gemma 4 after PI by 4": (
        {"model_type": "gemma4_text", "max_position_embeddings": 524288}
        | {"rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": GEMMA4 | {"factor": 4.0},
        }}, 524288, 131072,
    ),
}  # fmt: skip


def lengths(*config, **told):
    model = families.read(*config, **told)
    return model.context, model.scaled_sites[0].rope.original_context


@pytest.mark.parametrize("name", SAID)
def test_lengths_that_a_config_states(name):
    config, context, original = SAID[name]
    assert lengths(config) == (context, original)
    made = make_plan(config, Extend(method="pi", target=2 * context, even_so=True))
    assert made.context == context
    assert (made.model.asks_context, made.model.asks_original) == ("", "")


@pytest.mark.parametrize("name", OPEN)
def test_a_length_that_no_key_states_is_not_guessed(name):
    config, context, original = OPEN[name]
    for from_original in (False, True):
        wish = {"method": "pi", "target": 2 * context, "from_original": from_original}
        with pytest.raises(UsageError, match=f"--original-context {original}"):
            make_plan(config, Extend(**wish))
        for told in ({"context": context}, {"original_context": original}):
            made = make_plan(config, Extend(**wish, **told))
            assert made.context == (original if from_original else context)
            assert made.main.rope.original_context == original


def test_from_original_divides_vicuna_from_the_context_of_llama_2():
    """PI to 32k from Llama 2's 4k divides by 8, however its config states its 16k."""
    plain = [10000.0 ** (-2 * i / 32) for i in range(16)]
    wish = Extend(method="pi", target=32768, context=16384, from_original=True)
    for name, (released, *_) in (SAID | OPEN).items():
        if "Vicuna" in name:
            made = make_plan(released, wish)
            assert made.main.wanted.inv_freq == pytest.approx([f / 8 for f in plain], rel=1e-12)


def test_hunyuans_config_does_not_hold_the_length_before_its_alpha():
    hunyuan = config("HunYuan")
    assert make_plan(hunyuan, Extend(method="pi", factor=2.0)).context == 32768
    with pytest.raises(UsageError, match="--original-context"):
        make_plan(hunyuan, Extend(method="pi", target=131072, from_original=True))
    told = {"from_original": True, "original_context": 4096}
    assert make_plan(hunyuan, Extend(method="pi", target=131072, **told)).factor == 32


def test_an_option_that_contradicts_the_config_is_refused():
    dynamic = llama(4096, type="dynamic", factor=2.0)
    for released in (configs.LLAMA, configs.LLAMA31, dynamic):
        with pytest.raises(InputError, match="--original-context 2048"):
            families.read(released, original=2048)
    with pytest.raises(InputError, match="--context 8192"):
        families.read(dynamic, context=8192)
    assert lengths(configs.LLAMA31, original=8192) == (131072, 8192)


COMMAND_R = LLAMA | {
    "model_type": "cohere",
    "max_position_embeddings": 8192,
    "model_max_length": 131072,
    "rope_theta": 8000000.0,
}


@pytest.mark.parametrize("text_type", ["cohere", "cohere2"])
def test_command_r_reads_the_length_of_its_card(text_type):
    """Its card: 128K tokens; its config.json: 8,192 in one key and 131,072 in the other."""
    model = families.read(COMMAND_R | {"model_type": text_type})
    assert (model.context, model.scaled_sites[0].rope.original_context) == (131072, 131072)
    (note,) = (one for one in model.notes if one.startswith("[length]"))
    assert "max_position_embeddings is 8,192, but model_max_length is 131,072" in note
    assert families.read(COMMAND_R | {"model_type": text_type}, context=8192).context == 8192
    if text_type == "cohere":  # the other rotates in windowed layers alone
        plan = make_plan(COMMAND_R, Extend(method="yarn", factor=2.0))
        assert plan.config["max_position_embeddings"] == 262144
        assert plan.config["model_max_length"] == 262144
        assert plan.config["rope_parameters"]["original_max_position_embeddings"] == 131072
        again = families.read(plan.config)
        assert (again.context, again.notes) == (262144, ())


@pytest.mark.parametrize("key", ["model_max_length", "seq_length", "n_ctx", "max_sequence_length"])
@pytest.mark.parametrize("length", [2048, 16384])
def test_a_key_of_another_length_is_named(key, length):
    model = families.read(LLAMA | {key: length})
    assert model.context == 4096
    (note,) = model.notes
    assert f"max_position_embeddings is 4,096, but {key} is {length:,}" in note
    assert families.read(LLAMA | {key: 4096}).notes == ()
