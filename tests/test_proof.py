"""The proof passes a checkpoint that stock reads as planned, tensors included, and names any
difference."""

import json
import shutil
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ropext.base.errors import ProofFailed
from ropext.families import stock
from ropext.options.extend import Extend
from ropext.planning import make_plan
from ropext.scaling import forms
from ropext.scaling.rope import Rope, Site, Spectrum
from ropext.verifying import proof
from ropext.verifying.proof.comparing import Difference

pytestmark = pytest.mark.slow

CONTEXT, TARGET, THETA = 64, 256, 5e4
LENGTHS = {"factor": 4.0, "original_max_position_embeddings": CONTEXT}
YARN = {"rope_type": "yarn", "rope_theta": THETA, **LENGTHS}
LINEAR = {"rope_type": "linear", "rope_theta": THETA, "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"rope_theta": THETA, **LENGTHS}
MSCALE = {"mscale": 1.0, "mscale_all_dim": 0.8}
SHORT, LONG = [1.0, 1.5, 2.0, 2.5], [1.0, 2.0, 3.0, 5.5]
LONGROPE = {"rope_type": "longrope", "rope_theta": THETA, "attention_factor": 1.25, **LENGTHS}
LONGROPE |= {"short_factor": SHORT, "long_factor": LONG}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
NESTED = {
    "full_attention": YARN,
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}

# name -> config class, its keys, rotary dim
RIGHT = {
    "tied-llama": ("LlamaConfig", {"rope_parameters": YARN, "tie_word_embeddings": True}, 8),
    "llama3": ("LlamaConfig", {"rope_parameters": LLAMA3}, 8),
    "mixtral": ("MixtralConfig", {"rope_parameters": LINEAR, "num_local_experts": 4}, 8),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {"rope_parameters": YARN, "num_experts": 4, "head_dim": 8, **MOE},
        8,
    ),
    "deepseek-v3": (
        "DeepseekV3Config",
        {
            "rope_parameters": YARN | MSCALE,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "v_head_dim": 8,
            **MLA,
            **MOE,
        },
        8,
    ),
    "gpt-neox": ("GPTNeoXConfig", {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}}, 4),
    "granite": ("GraniteConfig", {"rope_parameters": YARN, "attention_multiplier": 0.2}, 8),
    "gemma3": (
        "Gemma3TextConfig",
        {"rope_parameters": NESTED, "head_dim": 8, "query_pre_attn_scalar": 24}
        | {"layer_types": ["sliding_attention", "full_attention"]},
        8,
    ),
    "phi3": (
        "Phi3Config",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": CONTEXT},
        8,
    ),
}


def spectrum(params: dict, dim: int, softmax_mscale: bool = False) -> Spectrum:
    rope = Rope(dim, params["rope_theta"], CONTEXT, softmax_mscale=softmax_mscale)
    return forms.read(params, rope).spectrum


def site(params: dict, dim: int, label: str = "", softmax_mscale: bool = False) -> Site:
    wanted = spectrum(params, dim, softmax_mscale)
    return Site(label, wanted, params, params["rope_type"] != "default")


def wanted(name: str) -> list[Site]:
    _, keys, dim = RIGHT[name]
    params = keys["rope_parameters"]
    if "rope_type" in params:
        return [site(params, dim, softmax_mscale=name == "deepseek-v3")]
    return [site(entry, dim, label) for label, entry in params.items()]


def promise(sites: list[Site]) -> proof.ExpectedRotary:
    return proof.ExpectedRotary(tuple(sites), TARGET / CONTEXT)


def with_numbers(site: Site, **numbers) -> Site:
    return replace(site, wanted=replace(site.wanted, **numbers))


def write(config_class: str, keys: dict, directory: Path) -> None:
    """Write a tiny random checkpoint with stock."""
    import transformers

    config = getattr(transformers, config_class)(
        **SIZES | {"max_position_embeddings": TARGET} | keys
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)


def edit_config(directory: Path, change) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def edit_tensors(directory: Path, change) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def quantise(directory: Path) -> None:
    """Pack the checkpoint as GPTQ does: packed projections with side data, the rest plain."""
    import torch

    def pack(tensors: dict) -> None:
        for name in [name for name in tensors if "_proj.weight" in name]:
            module = name.removesuffix(".weight")
            rows, columns = tensors.pop(name).shape
            tensors[f"{module}.qweight"] = torch.zeros(columns // 8, rows, dtype=torch.int32)
            tensors[f"{module}.scales"] = torch.zeros(1, rows)

    edit_tensors(directory, pack)
    method = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    edit_config(directory, lambda config: config.update(quantization_config=method))


def drop_mscale(config: dict) -> None:
    for key in MSCALE:
        del config["rope_parameters"][key]


def one_pair_off(config: dict) -> None:
    for key in ("long_factor", "short_factor"):
        config["rope_parameters"][key][2] *= 1 + 1e-4


def stack_off(tensors: dict) -> None:
    del tensors["model.layers.0.block_sparse_moe.experts.3.w1.weight"]


WRONG = {
    "mscale dropped": ("deepseek-v3", edit_config, drop_mscale),
    "pair off": ("phi3", edit_config, one_pair_off),
    "tensor dropped": (
        "tied-llama",
        edit_tensors,
        lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"),
    ),
    "tensor added": ("gpt-neox", edit_tensors, lambda t: t.update(stray=t["embed_out.weight"] * 1)),
    "tensor reshaped": (
        "qwen3-moe",
        edit_tensors,
        lambda t: t.update({"lm_head.weight": t["lm_head.weight"].T.contiguous()}),
    ),
    "expert dropped": ("mixtral", edit_tensors, stack_off),
    "build fails": (
        "llama3",
        edit_config,
        lambda config: config["rope_parameters"].update(rope_type="no-such"),
    ),
    "no weights": ("granite", lambda d, _: (d / "model.safetensors").unlink(), None),
    "quantised": ("llama3", lambda d, _: quantise(d), None),
    "quantised experts": ("qwen3-moe", lambda d, _: quantise(d), None),
    "never long": (
        "phi3",
        edit_config,
        lambda config: config.update(original_max_position_embeddings=TARGET),
    ),
    "only rope_scaling": (
        "gemma3",
        edit_config,
        lambda c: c["rope_parameters"].update(full_attention=NESTED["sliding_attention"]),
    ),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, dict]:
    """Build every directory, right or wrong, in one child process."""
    root = tmp_path_factory.mktemp("proof")
    for name, (config_class, keys, _) in RIGHT.items():
        write(config_class, keys, root / name)
    for name, (base, edit, change) in WRONG.items():
        shutil.copytree(root / base, root / name)
        edit(root / name, change)
    names = [*RIGHT, *WRONG]
    requests = [proof.BuildRequest(root / name) for name in names]
    return dict(zip(names, proof.build(requests), strict=True))


@pytest.mark.parametrize("name", RIGHT)
def test_compare_accepts_right_models(built, name: str) -> None:
    result = proof.compare(built[name], promise(wanted(name)))
    assert result.rotary_modules == (2 if name == "gemma3" else 1)
    assert result.attention_modules == 2
    assert result.tensors_not_compared == 0
    assert result.tensors_compared == tensor_count(Path(built[name]["directory"]))


def tensor_count(directory: Path) -> int:
    data = (directory / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    return len(json.loads(data[8 : 8 + size])) - 1  # but for __metadata__


def test_deepseek_softmax_factor_is_the_published_one(built) -> None:
    # softmax_scale * mscale^2, mscale = 0.1 * 0.8 * ln(4) + 1 = 1.1109035 (DeepSeek-V3, model.py)
    factors = [entry["softmax_factor"] for entry in built["deepseek-v3"]["attention"]]
    assert factors == pytest.approx([1.2341067, 1.2341067], rel=1e-7)


def test_both_sets_of_longrope_are_compared(built) -> None:
    (site,) = wanted("phi3")
    off = (*site.wanted.short_inv_freq[:3], site.wanted.short_inv_freq[3] * 1.0001)
    with pytest.raises(ProofFailed, match="short-input frequency of pair 3"):
        proof.compare(built["phi3"], promise([with_numbers(site, short_inv_freq=off)]))
    with pytest.raises(
        ProofFailed, match=r"short-input frequency of pair 3 is 0.000119.* in transformers"
    ):
        proof.compare(built["phi3"], promise([with_numbers(site, short_inv_freq=None)]))


SAYS = {
    "mscale dropped": r"softmax factor is 1 in transformers, 1\.234",
    "pair off": r"model.rotary_emb (short-input )?frequency of pair 2 .*relative error 1\.0e-04",
    "tensor dropped": "lacks tensors that the model has: model.layers.1.mlp.up_proj.weight",
    "tensor added": "has tensors that the model lacks: stray",
    "tensor reshaped": r"lm_head.weight \(\[32, 64\], not \[64, 32\]\)",
    "expert dropped": "too few or too many .* to build: model.layers.0.mlp.experts.gate_up_proj",
    "never long": "model.rotary_emb frequency of pair 3",
    "build fails": "cannot build .*KeyError: 'no-such'",
    "no weights": "has no safetensors weights",
    "only rope_scaling": r"model.rotary_emb \(full_attention\)",
}


@pytest.mark.parametrize("name", SAYS)
def test_compare_names_the_fault_of_wrong_models(built, name: str) -> None:
    with pytest.raises(ProofFailed, match=SAYS[name]) as caught:
        proof.compare(built[name], promise(wanted(WRONG[name][0])))
    assert caught.value.exit_code == 3
    assert "\n" not in str(caught.value)


def test_packed_tensors_are_counted_apart(built) -> None:
    result = proof.compare(built["quantised"], promise(wanted("llama3")))
    # 7 projections in 2 layers, each as qweight and scales; 2 embeddings and 5 norms stay plain
    assert (result.tensors_compared, result.tensors_not_compared) == (7, 28)
    result = proof.compare(built["quantised experts"], promise(wanted("qwen3-moe")))
    # 2 embeddings, 5 + 4 norms, 2 routers; 4 + 3*4 projections in 2 layers
    assert (result.tensors_compared, result.tensors_not_compared) == (13, 64)


@pytest.mark.parametrize("pair", [0, 3])
def test_compare_finds_a_pair_that_is_off_by_1e4(built, pair: int) -> None:
    (right,) = wanted("tied-llama")
    off = [f * (1.0001 if i == pair else 1) for i, f in enumerate(right.wanted.inv_freq)]
    with pytest.raises(ProofFailed, match=f"model.rotary_emb frequency of pair {pair}"):
        proof.compare(built["tied-llama"], promise([with_numbers(right, inv_freq=tuple(off))]))


def test_attention_factor_and_sites_left_alone_are_compared(built) -> None:
    full, sliding = wanted("gemma3")
    with pytest.raises(ProofFailed, match="attention factor"):
        proof.compare(built["gemma3"], promise([with_numbers(full, attention_factor=1.2), sliding]))
    faster = tuple(2 * f for f in sliding.wanted.inv_freq)
    with pytest.raises(ProofFailed, match=r"rotary_emb \(sliding_attention\)"):
        proof.compare(built["gemma3"], promise([full, with_numbers(sliding, inv_freq=faster)]))
    with pytest.raises(ProofFailed, match="the plan has only"):
        proof.compare(built["gemma3"], promise([full]))


def test_compare_finds_a_wrong_number_of_pairs(built) -> None:
    (right,) = wanted("llama3")
    with pytest.raises(ProofFailed, match="number of pairs is 4 in transformers, 3 in the plan"):
        proof.compare(
            built["llama3"], promise([with_numbers(right, inv_freq=right.wanted.inv_freq[:3])])
        )


def test_the_bound_grows_with_the_factor_and_for_llama3() -> None:
    plain = Site("", Spectrum((1.0,)), {"rope_type": "default", "rope_theta": 1e4})
    ramp = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3 = Site("", Spectrum((1.0,)), {"rope_type": "llama3", "rope_theta": 1e4} | ramp)
    assert proof.ExpectedRotary((plain,)).bound(plain) == 1e-6
    assert proof.ExpectedRotary((plain,), 32).bound(plain) == pytest.approx(3.2e-6)
    assert proof.ExpectedRotary((llama3,)).bound(llama3) == 4e-6


def test_result_is_plain_json(built) -> None:
    out = json.loads(
        json.dumps(proof.compare(built["mixtral"], promise(wanted("mixtral"))).to_json())
    )
    assert out["model_class"] == "MixtralForCausalLM"
    assert out["worst"]["error"] <= out["worst"]["bound"]


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own_llama"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_of_the_repository_runs_only_when_trusted(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    directory = tmp_path / "own"
    write("LlamaConfig", RIGHT["tied-llama"][1], directory)
    (directory / "modeling_own.py").write_text(CODE)
    auto = {"AutoConfig": "modeling_own.OwnConfig"}
    auto["AutoModelForCausalLM"] = "modeling_own.OwnForCausalLM"
    own = {"model_type": "own_llama", "auto_map": auto, "architectures": ["OwnForCausalLM"]}
    edit_config(directory, lambda config: config.update(own))
    request = proof.BuildRequest(directory, promise=promise(wanted("tied-llama")))
    with pytest.raises(ProofFailed, match=r"cannot build .*trust_remote_code"):
        proof.prove(request)
    result = proof.prove(request, trust_remote_code=True)
    assert result.model_class == "OwnForCausalLM"
    assert result.tensors_compared == tensor_count(directory)


def test_a_renamed_stock_class_is_built_by_that_class(tmp_path: Path) -> None:
    """The code that auto_map names is not there; a wrong spectrum is found all the same."""
    cls, keys, _ = RIGHT["deepseek-v3"]
    write(cls, keys, tmp_path)
    auto = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    edit_config(tmp_path, lambda c: c.update(model_type="kimi_k2", auto_map=auto))
    request = proof.BuildRequest(tmp_path, promise=promise(wanted("deepseek-v3")))
    result = proof.prove(request)
    assert result.model_class == "DeepseekV3ForCausalLM"
    assert result.tensors_compared == tensor_count(tmp_path)
    edit_config(tmp_path, lambda c: c["rope_parameters"].update(factor=2.0))
    with pytest.raises(ProofFailed, match=r"inv_freq|frequenc"):
        proof.prove(request)


def test_the_child_cannot_import_ropext(tmp_path: Path) -> None:
    code = (
        "import runpy, sys; child = runpy.run_path(sys.argv[1])\n"
        "child['block_ropext']()\n"
        "for name in ('ropext', 'ropext.scaling.forms'):\n"
        "    try: __import__(name)\n"
        "    except ImportError: continue\n"
        "    raise SystemExit('imported')\n"
    )
    run = subprocess.run([sys.executable, "-c", code, str(stock.CHILD)], check=False, cwd=tmp_path)
    assert run.returncode == 0


def test_the_child_stops_if_ropext_was_already_imported() -> None:
    code = "import runpy, sys, ropext; runpy.run_path(sys.argv[1])['block_ropext']()"
    run = subprocess.run(
        [sys.executable, "-c", code, str(stock.CHILD)],
        check=False,
        capture_output=True,
        text=True,
        cwd=stock.CHILD.parents[2],
    )
    assert run.returncode == 1
    assert "the proof process could import ropext" in run.stderr


def test_a_crash_or_timeout_of_the_child_process_is_reported(tmp_path: Path, monkeypatch) -> None:
    for code, said in (
        ("raise RuntimeError('no room')", r"run \(exit code 0x1\): RuntimeError: no room"),
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        ("import time; time.sleep(60)", "took longer than 2 seconds"),
    ):
        child = tmp_path / "child.py"
        child.write_text(code)
        monkeypatch.setattr(stock, "CHILD", child)
        with pytest.raises(ProofFailed, match=said):
            proof.build([proof.BuildRequest(tmp_path)], timeout=2)


TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "patch_size": 1}
TOWER |= {"model_type": "clip_vision_model", "num_attention_heads": 2}


def test_a_towers_config_is_built_within_limits(tmp_path: Path) -> None:
    """The square of image_size over patch_size: one and a half billion positions in eight bytes."""
    text = {"model_type": "llama", "num_key_value_heads": 4, "max_position_embeddings": CONTEXT}
    config = {"model_type": "llava", "text_config": SIZES | text, "image_token_index": 3}
    for size, error in ((40_000, "MemoryError: it takes more memory"), (8, None)):
        tower = TOWER | {"image_size": size}
        (tmp_path / "config.json").write_text(json.dumps(config | {"vision_config": tower}))
        (built,) = proof.build([proof.BuildRequest(tmp_path)], tensors=False)
        assert (built["error"] or "").startswith(error or "")
        assert bool(built["error"]) is bool(error)


def test_limits_follow_from_the_config(tmp_path: Path) -> None:
    def of(last=0, **stated):
        (tmp_path / "config.json").write_text(json.dumps(SIZES | stated))
        return proof._limits(tmp_path, last)

    usual = of()
    assert usual == (proof.LEAST_SECONDS + 0.1, min(stock.ROOM, usual[1]))
    assert of(num_hidden_layers=61, n_routed_experts=384)[0] > 2 * usual[0]
    assert of(num_hidden_layers=1000, n_routed_experts=60_000)[0] == proof.TIMEOUT
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.truncate(1 << 40)  # mapped, not held
    assert of()[1] >= 3 << 40


def test_prove_plan_fails_if_transformers_reads_another_key_differently(
    tmp_path: Path, monkeypatch
) -> None:
    """A writer drops a key that is no rope key: the numbers are as planned, yet the proof fails."""
    config = SIZES | {"model_type": "granite", "max_position_embeddings": CONTEXT}
    plan = make_plan(config | {"attention_multiplier": 0.5}, Extend(factor=4.0))
    difference = Difference("", "", -1, 1.0, 1.0, 0.0)
    changed = ("rope_parameters.factor", "max_position_embeddings", "attention_multiplier")
    proved = proof.RotaryProof(
        transformers="9.9", model_class="", rotary_modules=1, attention_modules=1,
        tensors_compared=0, tensors_not_compared=0, worst=difference, changed=changed,
    )  # fmt: skip
    monkeypatch.setattr(proof, "prove", lambda *args, **options: proved)
    with pytest.raises(ProofFailed, match="reads attention_multiplier otherwise than in the base"):
        proof.prove_plan(tmp_path, plan, config)
