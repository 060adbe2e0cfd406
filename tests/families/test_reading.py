"""What read, write, diff and check_spellings say, on values written by hand."""

import copy
import json
import math

import pytest
import transformers
from configs import DEEPSEEK_V3
from hypothesis import given, settings
from hypothesis import strategies as st
from published import CONFIGS, LLAMA, config

from ropext import families
from ropext.base.errors import InputError, RopextError, UnsupportedModel
from ropext.families import config as config_room
from ropext.families import stock
from ropext.options.extend import Extend
from ropext.planning import make_plan
from ropext.scaling.rope import ABSENT

BASE = LLAMA | {"model_type": "llama", "rope_theta": 50000.0, "max_position_embeddings": 256}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 4,
    "original_max_position_embeddings": 256.0,
}


def written(base, params, target=1024):
    model = families.read(base)
    labels = {site.label: params for site in model.scaled_sites}
    return families.write(base, model, labels, target)


@pytest.mark.parametrize("part", [(), ("vision_config",), ("quantization_config", "inner")])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, 10**8) for key in ("vocab_size", "intermediate_size", "hidden_size", "d_ff")),
        *((key, 10**5) for key in ("n_routed_experts", "encoder_layers", "depth")),
        *((key, 10**8) for key in ("num_attention_heads", "head_dim", "q_lora_rank", "n_inner")),
        ("hidden_size", 1e300),
        *((key, 10**8) for key in ("num_labels", "num_classes", "n_layer", "num_blocks")),
        *((key, 10**8) for key in ("num_patches", "num_codebooks", "n_positions")),
        ("num_position_embeddings", 10**8),
        ("depths", [2, [10**8]]),
    ],
)
def test_a_size_that_no_model_has_is_refused_before_anything_is_built(part, key, value):
    """By its name alone, for all parts of a composite are built for the proof."""
    inner = {key: value}
    for name in reversed(part):
        inner = {name: inner}
    with pytest.raises(
        InputError, match=rf"{'.'.join((*part, key))} must be at most \d+, was [1[]"
    ):
        families.read(BASE | inner)


def test_yarn_is_written_as_measured():
    new = written(BASE | {"unknown": {"kept": [1]}}, YARN)
    said = {"factor": 4.0, "original_max_position_embeddings": 256}
    assert new["rope_scaling"] == {"type": "yarn"} | said
    assert new["rope_parameters"] == {"rope_type": "yarn", "rope_theta": 50000.0} | said
    assert new["rope_theta"] == 50000.0
    assert new["max_position_embeddings"] == 1024
    assert new["unknown"] == {"kept": [1]}
    assert list(new)[: len(BASE)] == list(BASE)
    dicts = new["rope_scaling"], new["rope_parameters"]
    assert all(type(d["factor"]) is float for d in dicts)
    assert all(type(d["original_max_position_embeddings"]) is int for d in dicts)


def test_theta_is_written_with_a_null_dict():
    new = written(BASE, {"rope_type": "default", "rope_theta": 2e5})
    assert new["rope_theta"] == 2e5
    assert new["rope_scaling"] is None
    assert new["rope_parameters"] == {"rope_type": "default", "rope_theta": 2e5}


def test_linear_has_exactly_two_keys():
    new = written(BASE, {"rope_type": "linear", "rope_theta": 5e4, "factor": 4.0})
    assert new["rope_scaling"] == {"type": "linear", "factor": 4.0}


def test_llama3_and_some_families_say_rope_type():
    llama3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1, "high_freq_factor": 4}
    assert written(BASE, llama3)["rope_scaling"]["rope_type"] == "llama3"
    assert "type" not in written(BASE, llama3)["rope_scaling"]
    for model_type in ("cohere", "cohere2", "granite", "granitemoe", "qwen3_next"):
        new = written(BASE | {"model_type": model_type}, YARN)
        assert new["rope_scaling"]["rope_type"] == "yarn"
        assert "type" not in new["rope_scaling"]


def test_longrope_has_the_original_length_at_top_level():
    long = [1.0] * 8 + [4.0] * 8
    form = YARN | {"rope_type": "longrope", "short_factor": long, "long_factor": long}
    assert written(BASE, form)["original_max_position_embeddings"] == 256
    assert written(config("Phi-3-mini-128k"), form)["original_max_position_embeddings"] == 256


def test_the_partial_factor_is_at_top_level():
    base = BASE | {"model_type": "phi"}
    rope = {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.75}
    del base["rope_theta"]
    new = written(base | {"rope_parameters": rope}, YARN)
    assert new["partial_rotary_factor"] == 0.75
    assert new["rope_parameters"]["partial_rotary_factor"] == 0.75
    assert "partial_rotary_factor" not in new["rope_scaling"]
    new = written(config("Pythia"), YARN)
    assert (new["rotary_pct"], new["rotary_emb_base"]) == (0.5, 50000.0)


def test_gemma3_scales_the_full_layers_alone():
    new = written(config("Gemma 3 4B"), YARN)["text_config"]
    assert new["rope_parameters"]["sliding_attention"] == {
        "rope_type": "default",
        "rope_theta": 10000.0,
    }
    assert new["rope_parameters"]["full_attention"]["rope_type"] == "yarn"
    assert new["rope_scaling"]["rope_type"] == "yarn"
    assert (new["rope_theta"], new["rope_local_base_freq"]) == (50000.0, 10000.0)
    # Left out by the published file, and part of the spectrum.
    assert new["head_dim"] == 256
    assert "rope_parameters" not in written(config("Gemma 3 4B"), YARN)


def test_nested_families_without_an_old_reader_lose_the_legacy_keys():
    base = BASE | {"model_type": "mellum", "rope_scaling": None}
    new = written({k: v for k, v in base.items() if k != "rope_theta"}, YARN)
    assert "rope_scaling" not in new
    assert "rope_theta" not in new
    assert new["rope_parameters"]["full_attention"]["rope_type"] == "yarn"


def test_modernbert_keeps_its_two_names_for_theta():
    new = written(config("ModernBERT"), {"rope_type": "default", "rope_theta": 777777.0})
    assert (new["global_rope_theta"], new["local_rope_theta"]) == (777777.0, 20000.0)
    assert "rope_scaling" not in new


def test_granite_moves_its_list_of_thetas():
    base = config("Granite with windows")
    model = families.read(base)
    form = {"rope_type": "default"}
    params = {s.label: form | {"rope_theta": 2 * s.rope.theta} for s in model.sites}
    new = families.write(base, model, params, 16384)
    assert new["layer_rope_theta"] == [40000.0, 1000000.0, 0, 40000.0]


def test_phimoe_gets_the_keys_that_its_forward_pass_reads():
    base = config("Phi-3.5-MoE")
    new = written(base, {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0})
    assert new["rope_parameters"]["short_mscale"] == new["rope_parameters"]["long_mscale"] == 1.0
    assert new["rope_parameters"]["original_max_position_embeddings"] == 4096


def test_multimodal_sections_survive_a_change_of_theta():
    form = {"rope_type": "default", "rope_theta": 5e6}
    new = written(config("Qwen2.5-VL"), form)["text_config"]
    assert new["rope_scaling"] == {"type": "mrope", "mrope_section": [4, 6, 6]}
    assert new["rope_parameters"]["mrope_section"] == [4, 6, 6]
    new = written(config("Qwen2.5-VL"), YARN)["text_config"]
    assert new["rope_scaling"]["type"] == "yarn"
    assert new["rope_scaling"]["mrope_section"] == [4, 6, 6]


def test_query_scaling_keys_survive():
    """A stated key survives, and the class default replaces a missing one."""
    base = config("Ministral 3 by class default")
    assert written(base, YARN)["rope_parameters"]["llama_4_scaling_beta"] == 0.1
    stated = base | {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.37}}
    new = written(stated, YARN | {"factor": 16})["rope_parameters"]
    assert (new["llama_4_scaling_beta"], new["factor"]) == (0.37, 16.0)


def test_length_keys_that_hold_the_old_context_are_raised():
    base = BASE | {"seq_length": 256, "n_ctx": 128, "model_max_length": 256}
    new = written(base, YARN)
    assert (new["seq_length"], new["n_ctx"], new["model_max_length"]) == (1024, 128, 1024)
    assert "n_positions" not in new


def test_a_null_head_dim_is_written_out():
    base = BASE | {"model_type": "mixtral", "head_dim": None}
    assert written(base, YARN)["head_dim"] == 32
    assert "head_dim" not in written(BASE, YARN)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_given_dict_is_left_alone(name):
    base = config(name)
    before = json.dumps(base)
    model = families.read(base)
    families.check_spellings(base)
    families.write(base, model, {s.label: s.params for s in model.scaled_sites}, 1 << 20)
    assert json.dumps(base) == before


def test_diff_lists_the_paths_of_changed_keys():
    edits = families.diff({"a": {"b": 1, "c": 2}, "d": 1}, {"a": {"b": 1, "c": 3}, "e": None})
    assert [(e.path, e.before, e.after) for e in edits] == [
        (("a", "c"), 2, 3),
        (("d",), 1, ABSENT),
        (("e",), ABSENT, None),
    ]


TWO_SETS_OF_TWO_LENGTHS = {
    "type": "longrope",
    "short_factor": [1.0],
    "long_factor": [2.0] * 16,
    "original_max_position_embeddings": 1024,
}
REFUSED = {
    "no model_type": ({}, "model_type"),
    "unknown": ({"model_type": "lama"}, "'lama'"),
    "remote code": ({"model_type": "mine", "auto_map": {"AutoConfig": "x.Y"}}, "auto_map"),
    "Kimi K2 of another class": (
        DEEPSEEK_V3 | {"model_type": "kimi_k2", "architectures": ["KimiForCausalLM"]},
        "'kimi_k2' is not among",
    ),
    "packed queries": ({"model_type": "internlm2", "auto_map": {}}, "one wqkv holds"),
    "a string": (BASE | {"rope_theta": "50000"}, "rope_theta"),
    "not a number": (BASE | {"rope_theta": math.nan}, "rope_theta"),
    "true": (BASE | {"max_position_embeddings": True}, "max_position_embeddings"),
    "negative": (BASE | {"rope_scaling": {"type": "linear", "factor": -4.0}}, "factor"),
    "absurd": (BASE | {"hidden_size": 10**300}, "hidden_size"),
    "a list of a million": (
        BASE | {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 10**6}},
        "short_factor",
    ),
    "a list for a dict": (BASE | {"rope_scaling": [4.0]}, "rope_scaling"),
    "infinite thetas": (
        LLAMA | {"model_type": "granite_swa", "layer_rope_theta": [math.inf] * 4},
        "layer_rope_theta",
    ),
    "a factor of 1e30": (BASE | {"rope_scaling": {"type": "yarn", "factor": 1e30}}, "factor"),
    "an unknown type": (BASE | {"rope_scaling": {"type": "yarnn", "factor": 4.0}}, "yarnn"),
    "a missing key": (BASE | {"rope_scaling": {"type": "yarn"}}, "factor"),
    "flat where nested is wanted": (
        LLAMA | {"model_type": "laguna", "rope_parameters": {"rope_type": "default"}},
        "per layer type",
    ),
    "nested where flat is wanted": (
        BASE | {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "flat",
    ),
    "ignored by stock": (
        LLAMA | {"model_type": "gemma3_text", "rope_parameters": YARN},
        "rope_parameters",
    ),
    "no text part": ({"model_type": "llava"}, "text_config"),
    "PhiMoE's short set of another length": (
        LLAMA | {"model_type": "phimoe", "rope_scaling": TWO_SETS_OF_TWO_LENGTHS},
        "short_factor.* has 1 numbers",
    ),
    "odd rotary dim": (BASE | {"model_type": "phi", "partial_rotary_factor": 0.35}, "even"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_configs_give_one_sentence(case):
    bad, named = REFUSED[case]
    with pytest.raises(InputError, match=named) as told:
        families.read(bad)
    assert "\n" not in str(told.value)
    assert len(str(told.value)) < 400


@pytest.mark.parametrize(
    "model_type", ["gpt2", "gptj", "bloom", "t5", "mamba", "vit", "jamba", "xlnet", "esm"]
)
def test_a_type_with_other_positions_is_refused_by_name(model_type):
    with pytest.raises(UnsupportedModel, match=model_type):
        families.read(LLAMA | {"model_type": model_type})


def test_configs_without_rotation_are_refused():
    for bad in (
        {"model_type": "falcon", "alibi": True},
        {"model_type": "zamba2", "use_mem_rope": False},
        {"model_type": "granitemoehybrid", "position_embedding_type": None},
        {"model_type": "olmo_hybrid", "rope_parameters": {"rope_theta": None}},
    ):
        with pytest.raises(UnsupportedModel):
            families.read(LLAMA | bad)


DISAGREE = {
    "theta": ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "rope_theta"),
    "type": (
        {
            "rope_scaling": {"type": "linear", "factor": 2.0},
            "rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 50000.0},
        },
        "rope_type",
    ),
    "factor": (
        {
            "rope_scaling": {"type": "linear", "factor": 2.0},
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0},
        },
        "factor",
    ),
}


@pytest.mark.parametrize("case", DISAGREE)
def test_spellings_that_disagree_name_both(case):
    keys, named = DISAGREE[case]
    with pytest.raises(InputError, match=rf"{named}.*{named}"):
        families.read(BASE | keys)
    problems = families.check_spellings(BASE | keys)
    assert any(problem.fixable for problem in problems)
    fixed = families.respell(BASE | keys)
    assert families.check_spellings(fixed) == []
    assert families.read(BASE | keys | {"rope_scaling": None, "rope_parameters": None})


def test_a_transformers_5_save_has_lost_its_theta():
    saved = {k: v for k, v in BASE.items() if k != "rope_theta"}
    saved["rope_parameters"] = YARN | {"factor": 4.0, "original_max_position_embeddings": 64}
    found = {p.key for p in families.check_spellings(saved)}
    assert found == {"rope_theta", "rope_scaling"}
    assert families.check_spellings(families.respell(saved)) == []


def test_check_spellings_names_keys_that_engines_misread():
    qwen = config("Qwen2.5 with its card's YaRN") | {"model_max_length": 1024}
    qwen["rope_scaling"] = qwen["rope_scaling"] | {"factor": 4}
    said = {p.key: p.sentence for p in families.check_spellings(qwen)}
    assert "reads 131072 tokens" in said["max_position_embeddings"]
    assert "should be a float" in said["rope_scaling.factor"]
    assert "below 32768" in said["model_max_length"]
    fixed = families.respell(qwen)
    assert fixed["max_position_embeddings"] == fixed["model_max_length"] == 131072
    assert repr(fixed["rope_scaling"]["factor"]) == "4.0"
    null = LLAMA | {"model_type": "mellum", "rope_scaling": None}
    assert [p.key for p in families.check_spellings(null)] == ["rope_scaling"]


def test_check_spellings_ignores_differences_that_no_engine_reads():
    """Each is written otherwise by `respell`, and read alike by all: a class default without a
    dict (Apertus), absent rope_parameters, an integer theta at top level."""
    for name in ("Apertus by class default", "Llama 2", "gpt-oss"):
        written = families.diff(config(name), families.respell(config(name)))
        assert written
        assert families.check_spellings(config(name)) == []


def test_every_fault_that_can_be_mended_is_an_edit_of_the_respelling():
    faulty = config("DeepSeek-V3") | {"rope_scaling": {"type": "yarn", "rope_type": "yarn"}}
    faulty["rope_scaling"] |= {"factor": 40, "original_max_position_embeddings": 4096.0}
    problems = families.check_spellings(faulty)
    keys = ["rope_scaling", "rope_scaling.factor"]
    keys += ["rope_scaling.original_max_position_embeddings"]
    assert sorted(problem.key for problem in problems) == keys
    assert all(problem.fixable for problem in problems)
    assert families.check_spellings(families.respell(faulty)) == []


def test_a_window_is_named_as_an_obstacle():
    for name, bad in {
        "window": {"model_type": "mistral", "sliding_window": 128},
        "windowed layers": {"model_type": "cohere2", "sliding_window": 128},
    }.items():
        model = families.read(BASE | bad)
        assert name in model.obstacles[0]
    mistral = families.read(BASE | {"model_type": "mistral", "sliding_window": 128})
    assert mistral.reach == 4 * 127 + 1
    assert families.read(BASE | {"model_type": "mistral", "sliding_window": None}).reach is None
    qwen = BASE | {"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": True}
    assert families.read(qwen | {"max_window_layers": 0}).obstacles
    assert not families.read(qwen | {"max_window_layers": 2}).obstacles
    assert not families.read(qwen | {"use_sliding_window": False}).notes


def test_kv_cache_counts_latent_attention_and_windows():
    assert families.read(BASE).kv_bytes(1000) == 1000 * 4 * 2 * 2 * 32 * 2
    deepseek = families.read(config("DeepSeek-V3"))
    assert deepseek.kv_bytes_per_token == 4 * (32 + 16) * 2
    gemma = families.read(config("Gemma 3 4B"))
    one_layer = 2 * 4 * 256 * 2
    assert gemma.kv_bytes(10000) == one_layer * (10000 + 5 * 1024)


GQA = {"num_key_value_heads": 8, "head_dim": 128}
MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
# "Insights into DeepSeek-V3" (arXiv 2505.09343), table 1: 70.272, 327.680 and 516.096 KB a token in
# 16 bits; Llama 3 8B's 128 KiB is 2 x 32 layers x 8 heads x 128 x 2 bytes.
PUBLISHED_KV = {
    "DeepSeek-V3": (70_272, {"model_type": "deepseek_v3", "num_hidden_layers": 61} | MLA),
    "Qwen 2.5 72B": (327_680, {"model_type": "qwen2", "num_hidden_layers": 80} | GQA),
    "Llama 3.1 405B": (516_096, {"model_type": "llama", "num_hidden_layers": 126} | GQA),
    "Llama 3 8B": (128 * 1024, {"model_type": "llama", "num_hidden_layers": 32} | GQA),
}


@pytest.mark.parametrize("name", PUBLISHED_KV)
def test_kv_cache_of_a_token_is_the_published_one(name):
    published, shape = PUBLISHED_KV[name]
    heads = {"hidden_size": 16384, "num_attention_heads": 128}
    model = families.read(BASE | heads | shape)
    assert model.kv_bytes_per_token == published
    assert model.kv_bytes(131072) == published * 131072


def test_kv_cache_of_gemma_3_holds_a_window_in_five_of_six_layers():
    """The 27B: 62 layers, each sixth global, 16 heads of 128, windows of 1024 (2503.19786)."""
    text = {"num_hidden_layers": 62, "num_key_value_heads": 16, "num_attention_heads": 32}
    shape = {"head_dim": 128, "sliding_window": 1024, "hidden_size": 5376}
    model = families.read(config("Gemma 3 4B")["text_config"] | text | shape)
    of_a_layer = 2 * 16 * 128 * 2
    assert model.kv_bytes(131072) == of_a_layer * (10 * 131072 + 52 * 1024)
    assert model.kv_bytes(1024) == of_a_layer * 62 * 1024


# name: config, then per layer in bytes a token: layers that keep every token, layers with a window.
BY_LAYER = {
    "Falcon-7B": (
        {"model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71}
        | {"num_hidden_layers": 32, "num_kv_heads": 71, "multi_query": True},
        32 * [4 * 64],
        [],
        0,
    ),
    "Falcon-40B": (
        {"model_type": "falcon", "hidden_size": 8192, "num_attention_heads": 128}
        | {"num_hidden_layers": 60, "num_kv_heads": 8, "new_decoder_architecture": True},
        60 * [4 * 8 * 64],
        [],
        0,
    ),
    "Gemma 4": (
        {"model_type": "gemma4_text", "num_hidden_layers": 12, "num_key_value_heads": 4}
        | {"num_kv_shared_layers": 0},
        2 * [4 * 4 * 512],
        10 * [4 * 4 * 256],
        512,
    ),
    "Gemma 4 with keys for values": (
        {"model_type": "gemma4_text", "num_hidden_layers": 12, "num_key_value_heads": 16}
        | {"num_global_key_value_heads": 4, "attention_k_eq_v": True, "num_kv_shared_layers": 6},
        [4 * 4 * 512],
        5 * [4 * 16 * 256],
        512,
    ),
    "Gemma 3n E4B": ({"model_type": "gemma3n_text"}, 4 * [4 * 2 * 256], 16 * [4 * 2 * 256], 512),
    "LFM2-1.2B": (
        {"model_type": "lfm2", "hidden_size": 2048, "num_attention_heads": 32}
        | {"num_hidden_layers": 16, "num_key_value_heads": 8}
        | {"full_attn_idxs": [2, 5, 8, 10, 12, 14]},
        6 * [4 * 8 * 64],
        [],
        0,
    ),
    "Qwen3-Next, every sixth": (
        {"model_type": "qwen3_next", "full_attention_interval": 6, "num_hidden_layers": 48},
        8 * [4 * 2 * 256],
        [],
        0,
    ),
    "Cohere 2, every second": (
        {"model_type": "cohere2", "hidden_size": 4096, "num_attention_heads": 32}
        | {"num_key_value_heads": 8, "num_hidden_layers": 8, "sliding_window_pattern": 2},
        4 * [4 * 8 * 128],
        4 * [4 * 8 * 128],
        4096,
    ),
    "EXAONE 4, every fourth": (
        {"model_type": "exaone4", "hidden_size": 4096, "num_attention_heads": 32}
        | {"num_key_value_heads": 8, "num_hidden_layers": 8, "sliding_window": 1024}
        | {"sliding_window_pattern": 4},
        2 * [4 * 8 * 128],
        6 * [4 * 8 * 128],
        1024,
    ),
    "Llama 4, every second": (
        {"model_type": "llama4_text", "num_hidden_layers": 8, "no_rope_layer_interval": 2},
        4 * [4 * 8 * 128],
        4 * [4 * 8 * 128],
        8192,
    ),
}


@pytest.mark.parametrize("name", BY_LAYER)
def test_kv_cache_by_layer(name):
    shape, whole, windowed, window = BY_LAYER[name]
    model = families.read(shape)
    assert model.kv_bytes(100) == 100 * sum(whole + windowed)
    assert model.kv_bytes(1 << 20) == (1 << 20) * sum(whole) + window * sum(windowed)


def test_a_sliding_window_of_0_is_read_as_none():
    """As stock saves Qwen2-MoE, which has none."""
    assert families.read({"model_type": "qwen2_moe", "sliding_window": 0}).sliding_window is None


def test_deepseek_v4_keeps_a_window_and_compressed_entries():
    """One vector of 512 a token in windows of 128, and one for every 4 or 128 tokens."""
    shape = {"model_type": "deepseek_v4", "num_hidden_layers": 3, "compress_ratios": [128, 4, 0]}
    model = families.read(shape | {"head_dim": 512, "qk_rope_head_dim": 64})
    tokens = 1 << 20
    heavy, sparse = 128 + tokens // 128, 128 + tokens // 4
    assert model.kv_bytes(tokens) == 2 * 512 * (heavy + sparse + 2 * 128)
    assert {site.rope.dim for site in model.sites} == {64}


MINIMAX = {
    "model_type": "minimax_m2", "head_dim": 128, "rotary_dim": 64, "rope_theta": 5000000,
    "hidden_size": 3072, "num_attention_heads": 48, "max_position_embeddings": 196608,
}  # fmt: skip


def test_minimax_m2_as_released_turns_half_of_each_head():
    made = make_plan(MINIMAX, Extend(method="ntk", factor=2))
    assert made.main.rope.dim == 64
    assert round(made.config["rope_theta"]) == 10_226_114  # 5e6 * 2^(64/62)
    assert made.config["rope_parameters"]["partial_rotary_factor"] == 0.5
    assert families.read(made.config).sites[0].rope.dim == 64
    with pytest.raises(InputError, match=r"rotary_dim / head_dim"):
        families.read(MINIMAX | {"partial_rotary_factor": 0.25})


STEP = {
    "model_type": "step3p5", "num_hidden_layers": 4, "num_nextn_predict_layers": 1,
    "sliding_window": 512, "max_position_embeddings": 4096, "head_dim": 128,
    "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("stated", "full", "sliding"),
    [
        ({}, (1e4, 128), (1e4, 128)),
        ({"rope_theta": 5e6}, (5e6, 128), (5e6, 128)),
        (
            {"rope_theta": [5e6, 1e4, 1e4, 1e4, 5e6]}
            | {"partial_rotary_factors": [0.5, 1.0, 1.0, 1.0, 0.5]},
            (5e6, 64),
            (1e4, 128),
        ),
    ],
)
def test_step_3_5_states_theta_once_or_by_layer(stated, full, sliding):
    model = families.read(STEP | stated)
    read = {site.label: (site.rope.theta, site.rope.dim) for site in model.sites}
    assert read == {"full_attention": full, "sliding_attention": sliding}
    new = families.write(STEP | stated, model, {"full_attention": {**YARN, "rope_theta": 7e6}}, 9)
    assert new["rope_parameters"]["full_attention"]["rope_theta"] == 7e6
    if isinstance(stated.get("rope_theta"), list):  # others read the list alone
        assert new["rope_theta"] == [7e6, 1e4, 1e4, 1e4, 7e6]
    else:
        assert "rope_theta" not in new


def test_neomme_gives_one_theta_to_every_layer_that_states_none():
    theta = {"model_type": "neomme", "rope_theta": 3e5}
    assert {site.rope.theta for site in families.read(theta).sites} == {3e5}
    own = theta | {"rope_parameters": {"sliding_attention": {"rope_theta": 2e4}}}
    assert [site.rope.theta for site in families.read(own).sites] == [2e4, 3e5]


def test_a_theta_that_stock_dbrx_ignores_is_noted():
    attention = {"attn_config": {"rope_theta": 500000.0, "kv_n_heads": 8}}
    dbrx = {"model_type": "dbrx", "max_seq_len": 2048, "d_model": 6144, "n_heads": 48} | attention
    model = families.read(dbrx)
    assert model.sites[0].rope.theta == 500000
    assert model.kv_heads == 8
    (note,) = [note for note in model.notes if "differs from the authors" in note]
    assert "attn_config.rope_theta" in note
    assert "10000" in note
    assert "500000" in note
    assert not families.read(dbrx | {"rope_theta": 500000.0}).notes


WINDOWS_ALONE = ["mistral", "mixtral", "starcoder2", "phi3", "phimoe", "ministral3", "doge"]


@pytest.mark.parametrize("model_type", WINDOWS_ALONE)
def test_kv_cache_of_a_model_of_windows_alone(model_type):
    """Mistral 0.1: 32 layers of 2 * 8 * 128 values at 2 bytes, for 4096 tokens and no more."""
    shape = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32}
    shape |= {"num_key_value_heads": 8, "max_position_embeddings": 32768, "sliding_window": 4096}
    model = families.read(BASE | shape | {"model_type": model_type})
    assert model.kv_bytes(131072) == model.kv_bytes(4096) == 1 << 29
    assert model.kv_bytes(1024) == 1 << 27
    whole = families.read(BASE | shape | {"model_type": model_type, "sliding_window": None})
    assert whole.kv_bytes(131072) == 1 << 34
    listed = {"model_type": model_type, "layer_types": ["full_attention"] * 32}
    assert families.read(BASE | shape | listed).kv_bytes(131072) == 1 << 29  # its class reads none


def test_a_masked_language_model_has_no_kv_cache():
    model = families.read({"model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"]})
    assert model.masked_lm
    assert model.kv_bytes(1000) is None
    assert model.kv_bytes_per_token is None


# Values that a config.json may hold at any key.
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats()
    | st.sampled_from(["", "yarn", "longrope", "default", "full_attention", "inf", "4"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["rope_type", "factor", "full_attention", "x"]), inner)
    ),
    max_leaves=6,
)
KEYS = sorted({key for name in CONFIGS for key in config(name)} - {"auto_map"})
ROPE_KEYS = sorted({k for n in CONFIGS for k in (config(n).get("rope_scaling") or {})})


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(CONFIGS)), st.sampled_from(KEYS + ROPE_KEYS), JSON)
def test_any_value_at_any_key_is_read_or_refused(name, key, value):
    broken = copy.deepcopy(config(name))
    text = broken.get("text_config", broken)
    holder = text
    if key in ROPE_KEYS:
        text["rope_scaling"] = holder = dict(text.get("rope_scaling") or {"rope_type": "yarn"})
    holder[key] = value
    try:
        model = families.read(broken)
        families.write(broken, model, {s.label: s.params for s in model.scaled_sites}, 1 << 20)
    except RopextError:
        pass
    families.check_spellings(broken)


@pytest.mark.parametrize(
    "key", ["num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules"]
)
def test_layers_that_predict_further_tokens_are_reported_as_following(key):
    def said(count):
        model = families.read(config("Llama 2") | {key: count})
        return any("multi-token prediction" in note for note in model.notes)

    assert (said(1), said(0), said(None)) == (True, False, False)
    with pytest.raises(InputError, match=key):
        said("many")


def test_a_renamed_stock_class_is_read_as_that_class():
    """Kimi K2's config names DeepseekV3ForCausalLM; so does the text part of Kimi K2.5."""
    stock = DEEPSEEK_V3 | {"rope_theta": 5e4}
    kimi = stock | {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "x.Y"}}
    model = families.read(kimi)
    assert model.sites == families.read(stock).sites
    assert model.model_type == model.text_type == "deepseek_v3"
    assert sum("kimi_k2 is deepseek_v3 by class" in note for note in model.notes) == 1
    whole = families.read({"model_type": "kimi_k25", "text_config": kimi})
    assert (whole.model_type, whole.text_type) == ("kimi_k25", "deepseek_v3")
    assert whole.sites[0].rope == model.sites[0].rope


def test_an_unknown_type_names_both_versions():
    """The census's and the installed one's, which may know more types than the census."""
    with pytest.raises(InputError) as caught:
        stock.describe_unknown_types(BASE | {"model_type": "lama"})
    said = str(caught.value)
    assert f"those of transformers {config_room.census_version()}" in said
    assert f"(installed is {transformers.__version__}, which lacks it too)" in said


def test_a_rope_dict_that_no_layer_reads_may_lack_its_theta():
    """Gemma 3 of 4 layers has sliding ones alone; the full-attention entry stays as it is."""
    full = {"rope_type": "linear", "factor": 4.0}
    sliding = {"rope_type": "default", "rope_theta": 1e4}
    entries = {"full_attention": full, "sliding_attention": sliding}
    given = BASE | {"model_type": "gemma3_text", "num_hidden_layers": 4, "rope_parameters": entries}
    plan = make_plan(given, Extend(factor=2))
    assert plan.config["rope_parameters"]["full_attention"] == full
    assert isinstance(families.check_spellings(given), list)
