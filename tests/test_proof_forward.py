"""The proof's one forward pass: what it passes, what it catches, what it cannot run."""

import json
import re
import sys
from pathlib import Path

import pytest

from ropext import proof
from ropext.errors import ProofFailed
from ropext.options.extend import Extend
from ropext.planning import make_plan

sys.path.append(str(Path(__file__).parent / "families"))

import published
import tiny

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


# name -> config, options, the damage to what was written, what the proof says
WRONG = {
    "a key that queries read": (
        *RUN["ministral pi"][:2],
        drop_original,
        "fails: TypeError.*base's",
    ),
    "the length that queries read": (
        *RUN["ministral pi"][:2],
        other_original,
        "differs by .* something beside them",
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
}
# Its forward wants embeddings of patches; it has no layer of attention; its config fails in stock.
NOT_RUN = {
    "blt": "forward not run: .*inputs_embeds",
    "bamba": "finite; not compared: no output depends on the rotation",
    "ministral3": "forward not run: the base's own small model fails: TypeError",
}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Everything in one child process: name -> what it built, and the sites."""
    root = tmp_path_factory.mktemp("forward")
    jobs = [(name, config, options, None) for name, (config, options, _) in RUN.items()]
    jobs += [(name, *rest) for name, (*rest, _) in WRONG.items()]
    jobs += [(name, typed(name), {"factor": 4}, None) for name in NOT_RUN]
    jobs += [("no base", SMALL | {"model_type": "llama"}, {"factor": 4}, None)]
    directories, paths, forwards = [], [], []
    for name, config, options, damage in jobs:
        plan = make_plan(config, Extend(**options, even_so=True))
        if damage:
            damage(plan.config)
        directories.append(root / name.replace(" ", "-"))
        directories[-1].mkdir()
        (directories[-1] / "config.json").write_text(json.dumps(plan.config))
        paths.append(plan.model.path)
        base = None if name == "no base" else config
        sites = proof.expected(plan.sites, plan.factor)
        forwards.append((proof.Forward(plan.context, plan.target, base), sites))
    found = proof.build(directories, text_paths=paths, forwards=forwards, tensors=False)
    sites = [asked for _, asked in forwards]
    return dict(zip([job[0] for job in jobs], zip(found, sites, strict=True), strict=True))


def compare(entry) -> str:
    found, sites = entry
    return proof.compare(found, sites, tensors=False).forward


@pytest.mark.parametrize("name", RUN)
def test_equals_the_base_with_the_planned_numbers(built, name: str) -> None:
    said = compare(built[name])
    assert "equals the base's with the planned numbers" in said
    layers = RUN[name][2]
    assert f"({layers} of " in said
    found = built[name][0]["forward"]
    assert found["difference"] <= 1e-6
    assert found["moved"] > 1e-4  # the base with its own numbers computes something else


@pytest.mark.parametrize("name", WRONG)
def test_catches(built, name: str) -> None:
    with pytest.raises(ProofFailed, match=WRONG[name][3]) as caught:
        compare(built[name])
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("name", NOT_RUN)
def test_what_cannot_be_made_small_is_no_failure(built, name: str) -> None:
    assert re.search(NOT_RUN[name], compare(built[name]))


def test_without_the_base_the_pass_is_finite(built) -> None:
    assert compare(built["no base"]).endswith("finite; the base is not at hand to compare with")


def test_the_last_position_is_the_targets(built) -> None:
    assert built["wide and deep"][0]["forward"]["last"] == 4 * 131072 - 1
    assert built["ministral pi"][0]["forward"]["last"] == 65535
