"""The proof's one forward pass: the models that pass, the damage it catches, the models it cannot
run."""

import json
import re
from dataclasses import replace
from pathlib import Path

import published
import pytest
import tiny
import transformers

from ropext import extend, families
from ropext.base.errors import ProofFailed
from ropext.families import stock, table
from ropext.options.extend import Extend
from ropext.planning import make_plan
from ropext.verifying import proof

pytestmark = pytest.mark.slow

LLAMA70 = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": published.LLAMA3,
}
MINISTRAL3 = {
    "model_type": "ministral3",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 34,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 131072,
    "max_position_embeddings": 262144,
    "rope_parameters": {
        "type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
# Kimi K2 at its full size, as it was released; a million of millions of parameters.
KIMI_K2 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 163840,
    "max_position_embeddings": 131072,
    "rope_theta": 50000.0,
    "rope_scaling": published.CONFIGS["DeepSeek-V3"]["rope_scaling"] | {"factor": 32.0},
}
GPTQ = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}
SMALL = published.LLAMA | {"max_position_embeddings": 512}
DSV3 = published.LLAMA | published.CONFIGS["DeepSeek-V3"]


def typed(name: str) -> dict:
    text, _ = tiny.text_part(name)
    return tiny.wrapped(name, tiny.modern(text))


# name -> config, options of the extension, layers that hold one of each kind
RUN = {
    "wide and deep": (LLAMA70, {"factor": 4}, 1),
    "quantised": (LLAMA70 | GPTQ, {"factor": 4}, 1),
    "ministral pi": (MINISTRAL3, {"method": "pi", "from_original": True, "target": 65536}, 1),
    "ministral yarn": (MINISTRAL3, {"factor": 4}, 1),
    "MLA, experts": (DSV3, {"factor": 2}, 4),
    "gpt-oss": (published.LLAMA | published.CONFIGS["gpt-oss"], {"factor": 2}, 2),
    "Gemma 3": (typed("gemma3"), {"factor": 4}, 6),
    "no rotation in some": (typed("smollm3"), {"factor": 4}, 4),
    "two thetas": (typed("granite_swa"), {"method": "pi", "factor": 4}, 4),
    "linear attention": (typed("qwen3_next"), {"factor": 4}, 4),
    "state space": (typed("bamba") | {"attn_layer_indices": [2]}, {"factor": 4}, 3),
    "composite": (typed("llava"), {"factor": 4}, 1),
    "masked": (typed("modernbert"), {"factor": 4}, 4),
    "longrope of two sets": (
        published.LLAMA | published.CONFIGS["Phi-3-mini-128k"],
        {"factor": 2},
        1,
    ),
}


def drop_original(config: dict) -> None:
    for spelling in ("rope_parameters", "rope_scaling"):
        del config[spelling]["original_max_position_embeddings"]


def other_original(config: dict) -> None:
    for spelling in ("rope_parameters", "rope_scaling"):
        config[spelling]["original_max_position_embeddings"] = 32768


# name -> config, options, the damage to the written config, the proof's sentence
WRONG = {
    "a key that queries read": (
        *RUN["ministral pi"][:2],
        drop_original,
        "fails: TypeError.*base's",
    ),
    "the length that queries read": (
        *RUN["ministral pi"][:2],
        other_original,
        "differs by .* something else, too",
    ),
    "the softmax scale": (
        SMALL | {"model_type": "granite", "attention_multiplier": 0.1},
        {"factor": 4},
        lambda config: config.update(attention_multiplier=0.2),
        "differs by",
    ),
    "layers that rotate": (
        typed("smollm3"),
        {"factor": 4},
        lambda config: config.update(no_rope_layers=[0, 1, 1, 1]),
        "differs by",
    ),
    "a layer that did not rotate": (  # its kind is in the base's config alone
        typed("smollm3"),
        {"factor": 4},
        lambda config: config.update(no_rope_layers=[1, 1, 1, 1]),
        "differs by",
    ),
}
# Its forward wants embeddings of patches; it has no layer of attention; its config fails in stock.
NOT_RUN = {
    "blt": "forward not run: .*inputs_embeds",
    "bamba": "finite; not compared: no output depends on the rotation",
    "ministral3": "forward not run: the base's own small model fails: TypeError",
}


# Stock differs from the authors here, and the proof mentions it: DBRX's theta, PhiMoE's long
# factors.
SETS = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "type": "longrope"}
SETS |= {"short_mscale": 1.2, "long_mscale": 1.2, "original_max_position_embeddings": 128}
KNOWN = {
    "DBRX": {**tiny.legacy("dbrx"), "attn_config": {"rope_theta": 5e5, "kv_n_heads": 2}},
    "PhiMoE": {**tiny.legacy("phimoe"), "rope_scaling": SETS},
    "OLMo 3": {**tiny.legacy("olmo3"), "rope_theta": 5e5},
}
del KNOWN["DBRX"]["rope_theta"], KNOWN["OLMo 3"][""]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build everything in one child process; return name -> its answer, and the sites."""
    root = tmp_path_factory.mktemp("forward")
    jobs = [(name, config, options, None) for name, (config, options, _) in RUN.items()]
    jobs += [(name, *rest) for name, (*rest, _) in WRONG.items()]
    jobs += [(name, typed(name), {"factor": 4}, None) for name in NOT_RUN]
    jobs += [(name, config, {"method": "pi", "factor": 4}, None) for name, config in KNOWN.items()]
    jobs += [("no base", SMALL | {"model_type": "llama"}, {"factor": 4}, None)]
    requests = []
    for name, config, options, damage in jobs:
        plan = make_plan(config, Extend(**options, even_so=True))
        if damage:
            damage(plan.config)
        place = root / name.replace(" ", "-")
        place.mkdir()
        (place / "config.json").write_text(json.dumps(plan.config))
        base = None if name == "no base" else config
        sites = proof.ExpectedRotary(plan.sites, plan.factor)
        lengths = plan.context, plan.target
        requests.append(proof.BuildRequest(place, plan.model.path, base, sites, *lengths))
    found = proof.build(requests, tensors=False)
    sites = [request.promise for request in requests]
    reads = [request.read for request in requests]
    entries = zip(found, sites, reads, strict=True)
    return dict(zip([job[0] for job in jobs], entries, strict=True))


def compare(entry) -> str:
    found, sites, _ = entry
    return proof.compare(found, sites, tensors=False).forward


@pytest.mark.parametrize("name", RUN)
def test_equals_the_base_with_the_planned_numbers(built, name: str) -> None:
    said = compare(built[name])
    assert "matches the base with the planned frequencies" in said
    layers = RUN[name][2]
    assert f"({layers} of " in said
    found = built[name][0]["forward"]
    assert found["difference"] <= 1e-6
    assert found["moved"] > 1e-4  # the base with its own numbers computes something else


@pytest.mark.parametrize("name", WRONG)
def test_the_forward_pass_finds_wrong_configs(built, name: str) -> None:
    with pytest.raises(ProofFailed, match=WRONG[name][3]) as caught:
        compare(built[name])
    assert caught.value.exit_code == 3


# Each of those faults, as keys that stock reads otherwise than the base's.
SEEN = {
    "a key that queries read": ["rope_parameters.original_max_position_embeddings"],
    "the length that queries read": ["rope_parameters.original_max_position_embeddings"],
    "the softmax scale": ["attention_multiplier"],
    "layers that rotate": ["no_rope_layers"],
    "a layer that did not rotate": ["no_rope_layers"],
}


@pytest.mark.parametrize("name", [*RUN, *WRONG])
def test_each_fault_is_found_in_stocks_reading(built, name: str) -> None:
    found, _, read = built[name]
    beside = families.unexpected_changes(read, found["base"]["changed"])
    assert beside == SEEN.get(name, [])


@pytest.mark.parametrize("name", NOT_RUN)
def test_a_model_that_cannot_be_made_small_is_no_failure(built, name: str) -> None:
    assert re.search(NOT_RUN[name], compare(built[name]))


def base_of(entry, change=lambda read: read, known=True) -> str:
    """Return the proof's sentence about a base whose config was read with `change`.

    With `known` the facts listed about stock appear too.
    """
    found, sites, read = entry
    own = changed(proof.expected_rotary(read), change)
    stock = changed(proof.expected_rotary(read, stock=True), change) if known else None
    return proof.compare(found, sites, tensors=False, read=own, known=stock).base


def changed(promise: proof.ExpectedRotary, change) -> proof.ExpectedRotary:
    return promise.only([change(site) for site in promise.sites])


def with_numbers(site, **numbers):
    return replace(site, wanted=replace(site.wanted, **numbers))


def theta(read, value: float):
    """Return the site read with another theta, by the formula."""
    pairs = len(read.wanted.inv_freq)
    inv_freq = tuple(value ** (-pair / pairs) for pair in range(pairs))
    params = read.params | {"rope_theta": value}
    return with_numbers(replace(read, params=params), inv_freq=inv_freq)


@pytest.mark.parametrize("name", RUN)
def test_stock_builds_the_base_that_was_read(built, name: str) -> None:
    assert "attention modules match" in base_of(built[name])


# name -> the base, the misreading, the proof's sentence about it
MISREAD = {
    "theta": (
        "composite",
        lambda read: theta(read, 2e4),
        rf"ropext read rope_theta as 20000\.0, transformers as {tiny.THETA}; .*frequency of pair",
    ),
    "two labels changed over": (
        "Gemma 3",
        lambda read: theta(read, tiny.LOCAL_THETA if read.scaled else tiny.THETA),
        "ropext read rope_theta as",
    ),
    "temperature": (
        "gpt-oss",
        lambda read: with_numbers(read, attention_factor=1.5),
        r"attention factor is 1\.5 by ropext's reading, 1\.346573",
    ),
    "softmax": (
        "MLA, experts",
        lambda read: with_numbers(read, softmax_factor=1.0),
        r"softmax factor is 1 by ropext's reading, 1\.87",
    ),
    "share": (
        "wide and deep",
        lambda read: with_numbers(read, inv_freq=read.wanted.inv_freq[::2]),
        "number of pairs is 32 by ropext's reading, 64 in transformers",
    ),
}


@pytest.mark.parametrize("name", MISREAD)
def test_a_misread_base_fails_the_proof(built, name: str) -> None:
    base, change, said = MISREAD[name]
    with pytest.raises(
        ProofFailed, match=f"reads the base's config otherwise .*{said}.*report this"
    ) as caught:
        base_of(built[base], change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("DBRX", "ropext read rope_theta as 500000.0, transformers as 10000.0"),
        ("PhiMoE", "short-input frequency of pair"),
    ],
)
def test_a_known_departure_of_stock_stays_a_note(built, name: str, said: str) -> None:
    assert any("differs from the authors" in note for note in built[name][2].notes)
    assert re.search(
        f"builds another base, a known difference: .*{re.escape(said)}", base_of(built[name])
    )
    with pytest.raises(ProofFailed, match="reads the base's config otherwise"):
        base_of(built[name], known=False)


def other_pair(read, pair: int):
    """Return the site read with one frequency a hundredth higher."""
    inv_freq = list(read.wanted.inv_freq)
    inv_freq[pair] *= 1.01
    return with_numbers(read, inv_freq=tuple(inv_freq))


# What is listed of DBRX is its theta, of PhiMoE its set of factors, of OLMo 3 a note alone.
BESIDE = {
    "attention factor is 1.5": lambda read: with_numbers(read, attention_factor=1.5),
    "softmax factor is 1.5": lambda read: with_numbers(read, softmax_factor=1.5),
    "frequency of pair 3": lambda read: other_pair(read, 3),
    "number of pairs": lambda read: with_numbers(read, inv_freq=read.wanted.inv_freq[::2]),
}


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("said", BESIDE)
def test_a_second_departure_is_refused_in_a_model_with_a_known_one(
    built, name: str, said: str
) -> None:
    with pytest.raises(
        ProofFailed, match=f"reads the base's config otherwise .*{said}.*report this"
    ) as caught:
        base_of(built[name], BESIDE[said])
    assert caught.value.exit_code == 3


def test_a_spelling_that_the_table_lacks_is_not_proved(tmp_path: Path, monkeypatch) -> None:
    """GPT-NeoX without its row: rotary_emb_base and rotary_pct are read as nothing."""
    directory, out = tmp_path / "base", tmp_path / "out"
    transformers.set_seed(0)
    config = tiny.legacy("gpt_neox") | {"rotary_pct": 1.0}
    stock = transformers.AutoConfig.for_model(**config)
    transformers.AutoModelForCausalLM.from_config(stock).save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(config))
    monkeypatch.setitem(table.FAMILIES, "gpt_neox", table.FLAT)
    with pytest.raises(
        ProofFailed, match=f"ropext read rope_theta as .*, transformers as {tiny.THETA}"
    ):
        extend(directory, out, method="yarn", factor=4)
    assert not out.exists()


def test_a_trillion_parameters_are_proved_within_4_gb(tmp_path: Path, monkeypatch) -> None:
    """A layer's experts alone would take 45 GB; no weight is on the disk either."""
    child = tmp_path / "child.py"
    limit = f"resource.setrlimit(resource.RLIMIT_AS, ({4 << 30}, {4 << 30}))"
    run = f"runpy.run_path({str(stock.CHILD)!r}, run_name='__main__')"
    child.write_text(f"import resource, runpy\n{limit}\n{run}\n")
    monkeypatch.setattr(stock, "CHILD", child)
    plan = make_plan(KIMI_K2, Extend(factor=2))
    (tmp_path / "config.json").write_text(json.dumps(plan.config))
    sites = proof.ExpectedRotary(plan.sites, plan.factor)
    request = proof.BuildRequest(tmp_path, (), KIMI_K2, sites, plan.context, plan.target)
    (found,) = proof.build([request], tensors=False)
    made = proof.compare(found, sites, tensors=False, read=proof.expected_rotary(request.read))
    assert made.attention_modules == 61
    assert "attention modules match" in made.base
    assert "matches the base with the planned frequencies" in made.forward
    assert made.forward_agrees
    assert made.to_json()["forward_agrees"]
    assert made.base_was_built


def test_without_the_base_the_pass_is_finite(built) -> None:
    assert compare(built["no base"]).endswith("finite; the base is not at hand to compare with")


def test_the_forward_pass_reads_up_to_the_target(built) -> None:
    assert built["wide and deep"][0]["forward"]["last"] == 4 * 131072 - 1
    assert built["ministral pi"][0]["forward"]["last"] == 65535
