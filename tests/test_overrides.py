"""The lines that serve a base's own weights with a plan's numbers, against the checkpoint that
`extend` writes: run in stock transformers as printed."""

import json
import os
import shlex
import subprocess
from pathlib import Path

import configs
import kit
import numpy as np
import pytest
import torch
import transformers
from command_line import run
from gguf_files import making
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from ropext import families
from ropext.base.narration import join_for_shells
from ropext.files import inspecting
from ropext.options.extend import Extend
from ropext.planning import make_plan

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
SCALED = {
    "rope_type": "llama3",
    "factor": 2.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}


def llama(**more):
    return LlamaForCausalLM(LlamaConfig(**(SIZES | more)))


def qwen():
    """Build a composite: its line is nested, and holds the sections and the partial factor."""
    sections = {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "rope_type": "default"}
    rope = sections | {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "full_attention_interval": 1}
    text = SIZES | linear | {"rope_parameters": rope, "layer_types": ["full_attention"] * 2}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
    vision |= {"out_hidden_size": 64}
    return Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision))


CASES = {
    "yarn": (llama, {"method": "yarn", "factor": 4.0}),
    "yarn's own factor": (llama, {"method": "yarn", "factor": 4.0, "attention_factor": 1.3}),
    "llama3": (llama, {"method": "llama3", "factor": 4.0}),
    "linear": (llama, {"method": "pi", "factor": 4.0}),
    "theta": (llama, {"method": "ntk", "factor": 4.0}),
    "longrope": (
        llama,
        {"method": "longrope", "factor": 4.0, "pair_factors": (1.0,) * 8 + (6.0,) * 8},
    ),
    "scaled before": (
        lambda: llama(rope_parameters=SCALED),
        {"method": "yarn", "factor": 8.0, "from_original": True},
    ),
    "composite": (qwen, {"method": "yarn", "factor": 4.0}),
}


IDS = torch.randint(0, 64, (1, 96), generator=torch.Generator().manual_seed(1))


def write(folder, make, options):
    """Write a base and its extension into folders of these names; return the printed lines by
    loader."""
    torch.manual_seed(0)
    base, out = folder / "base", folder / "out"
    model = make()
    for weights in model.parameters():  # sharp attention: a lost scaling shows
        weights.data += torch.randn_like(weights) / weights.shape[-1] ** 0.5
    model.save_pretrained(base)
    model.save_pretrained(out)
    config = json.loads((base / "config.json").read_text("utf-8"))
    made = make_plan(config, Extend(**options), str(base))
    (out / "config.json").write_text(json.dumps(made.config), "utf-8")
    return base, out, {line.loader: line for line in made.overrides()}


def read(loaded):
    with torch.no_grad():
        return loaded.eval()(input_ids=IDS).logits.log_softmax(-1)


@pytest.mark.parametrize(("make", "options"), CASES.values(), ids=CASES)
def test_the_printed_line_computes_the_same_as_the_written_checkpoint(tmp_path, make, options):
    base, out, lines = write(tmp_path, make, options)
    line = lines["transformers"]
    written = read(AutoModelForCausalLM.from_pretrained(out))
    served = read(eval(line.command, vars(transformers)))
    plain = read(AutoModelForCausalLM.from_pretrained(base))
    assert (served - written).abs().max() < 1e-3
    assert (plain - written).abs().max() > 1e-2


def ask(engine, reader, *words):
    """Run a reader of scripts/loaders in the environment of its engine."""
    script = str(Path(kit.__file__).with_name(reader))
    done = subprocess.run([engine, script, *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def rotations(found, place):
    """Return every number that a reader reports for one place, and the length."""
    keys = [key.removeprefix(f"{place}/") for key in found if key.startswith(f"{place}/")]
    assert "error" not in keys, found[f"{place}/error"]
    return {key: found[f"{place}/{key}"] for key in keys}


def told_alike(served, written, plain):
    """Check that a line rotates as its checkpoint, which rotates otherwise than the base."""
    assert served.keys() == written.keys()
    assert all(np.abs(own - written[key]).max() < 1e-6 for key, own in served.items())
    turned = [key for key in written if key.endswith(("/cos", "/sin"))]
    assert max(np.abs(plain[key][:64] - written[key][:64]).max() for key in turned) > 1e-2


@pytest.mark.skipif("VLLM" not in os.environ, reason="`.ci/slow loaders` runs it")
@pytest.mark.parametrize(("make", "options"), CASES.values(), ids=CASES)
def test_vllm_computes_the_same_by_its_line_and_from_the_checkpoint(tmp_path, make, options):
    """By its engine; a composite, which its CPU build does not open, by its classes."""
    base, out, lines = write(tmp_path, make, options)
    ids, answer = tmp_path / "ids.npy", tmp_path / "answer.npz"
    tables = make is qwen
    np.save(ids, np.arange(255) if tables else IDS[0].numpy())
    long = json.dumps({"max_position_embeddings": 256})
    plain = f"vllm serve {shlex.quote(str(base))} --hf-overrides {shlex.quote(long)}"
    written = f"vllm serve {shlex.quote(str(out))} --max-model-len 256"
    places = (written, lines["vllm"].command, *([plain] if tables else []))
    reader = "read_vllm_tables.py" if tables else "read_vllm.py"
    ask(os.environ["VLLM"], reader, ids, answer, *places)
    found = np.load(answer)
    if tables:
        told_alike(*(rotations(found, place) for place in (places[1], places[0], plain)))
        return
    written, served = (found[place] for place in places)
    assert np.abs(served - written).max() < 1e-3
    rows = read(AutoModelForCausalLM.from_pretrained(base))[0, :-1]
    unscaled = rows.gather(1, IDS[0, 1:, None])[:, 0].numpy()
    assert np.abs(unscaled - written).max() > 1e-2
    rows = read(AutoModelForCausalLM.from_pretrained(out))[0, :-1]
    assert np.abs(rows.gather(1, IDS[0, 1:, None])[:, 0].numpy() - written).max() < 1e-2


@pytest.mark.skipif("SGLANG" not in os.environ, reason="`.ci/slow loaders` runs it")
def test_sglang_rotates_by_its_lines_as_it_does_by_the_written_checkpoints(tmp_path):
    """By its own parser, config and model classes: its kernels need a GPU."""
    told, places = tmp_path / "lines.json", []
    for name, (make, options) in CASES.items():
        base, out, lines = write(tmp_path / name.replace("'", ""), make, options)
        long = json.dumps({"text_config": {"max_position_embeddings": 256}})
        long = long if make is qwen else json.dumps({"max_position_embeddings": 256})
        launch = "python -m sglang.launch_server --model-path"
        written = f"{launch} {shlex.quote(str(out))} --context-length 256"
        plain = f"{launch} {shlex.quote(str(base))} --context-length 256"
        plain += f" --json-model-override-args {shlex.quote(long)}"
        places.append((lines["sglang"].command, written, plain))
    told.write_text(json.dumps([own for three in places for own in three]), "utf-8")
    ask(os.environ["SGLANG"], "read_sglang.py", "--lines", told, tmp_path / "answer.npz", 256)
    found = np.load(tmp_path / "answer.npz")
    for three in places:
        told_alike(*(rotations(found, place) for place in three))


@pytest.mark.parametrize(
    ("arch", "options", "flags"),
    [
        (
            "llama",
            {"method": "yarn"},
            "--rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 256 -c 1024",
        ),
        (
            "llama",
            {"method": "pi"},
            "--override-kv llama.context_length=int:1024,llama.rope.scaling.type=str:linear,"
            "llama.rope.scaling.factor=float:4.0,"
            "llama.rope.scaling.original_context_length=int:256 -c 1024",
        ),
        ("llama", {"length_only": True}, "--override-kv llama.context_length=int:1024 -c 1024"),
        ("llama", {"method": "llama3"}, ""),  # a tensor
        ("gemma2", {"method": "yarn"}, "--override-kv"),  # whose windows no option reaches
        ("qwen3", {"method": "yarn", "attention_factor": 1.3}, "--override-kv"),
        (
            "mistral3",
            {"method": "yarn", "beta_fast": 8.0},
            "mistral3.rope.scaling.yarn_beta_fast=float:8.0,",
        ),
    ],
)
def test_the_keys_of_a_file_are_named(tmp_path, arch, options, flags):
    path = making.write(tmp_path / "my model.gguf", arch)
    (line,) = inspecting.plan(str(path), target=1024, **options).overrides()
    assert (line.loader, bool(line.command)) == ("llama.cpp", bool(flags))
    assert flags in line.command
    assert (f"llama-server -m {join_for_shells(str(path))} " in line.command) is bool(flags)
    assert ("no flags express this: extend the file" in line.note) is not bool(flags)


def test_extend_without_weights_names_the_lines_that_need_none(tmp_path, capsys):
    base, out = tmp_path / "base", str(tmp_path / "out")
    base.mkdir()
    (base / "config.json").write_text(json.dumps(configs.LLAMA))
    code, said = run("extend", str(base), "--factor", "4", "-o", out, capsys=capsys)
    assert (code, said.out) == (2, "")
    shown = run("plan", str(base), "--factor", "4", "--details", capsys=capsys)[1].out
    lines = shown.partition("or without a copy")[2].splitlines()[2:]
    loaders = [line.split()[0] for line in lines if line[2] != " "]
    assert loaders == ["transformers", "vllm", "sglang", "llama.cpp"]
    assert said.err.splitlines()[-len(lines) :] == lines
    assert "serve the base's own weights without a copy:" in said.err


@pytest.mark.parametrize("method", ["fp8", "awq", "compressed-tensors"])
def test_a_quantised_checkpoint_gets_the_same_lines(method):
    plain = make_plan(configs.LLAMA, Extend(method="yarn", factor=4.0), "some/model")
    own = configs.LLAMA | {"quantization_config": {"quant_method": method}}
    quantised = make_plan(own, Extend(method="yarn", factor=4.0), "some/model")
    assert quantised.overrides() == plain.overrides() != ()


def test_the_json_of_a_plan_holds_the_override_lines():
    """The JSON for programs holds the same values as the printed command."""
    made = make_plan(configs.LLAMA, Extend(method="yarn", factor=4.0), "some/my model")
    lines = {line["loader"]: line for line in made.to_json()["overrides"]}
    told = {"max_position_embeddings": 16384, "rope_parameters": made.config["rope_parameters"]}
    for loader in ("vllm", "sglang"):
        line = lines[loader]
        assert list(line["argv"]) == shlex.split(line["command"])
        assert line["hf_overrides"] == told
    assert lines["transformers"]["hf_overrides"] == told
    assert lines["transformers"]["argv"] == ()
    server = lines["llama.cpp"]
    assert list(server["argv"]) == shlex.split(server["command"])
    assert server["environment"] == {
        "LLAMA_ARG_ROPE_SCALING_TYPE": "yarn",
        "LLAMA_ARG_ROPE_SCALE": "4",
        "LLAMA_ARG_YARN_ORIG_CTX": "4096",
        "LLAMA_ARG_CTX_SIZE": "16384",
    }
    nested = {"model_type": "qwen3_vl", "text_config": {"model_type": "qwen3_vl_text"}}
    inside = make_plan(nested, Extend(method="yarn", factor=2.0), "m").overrides()
    assert {*inside[0].hf_overrides} == {"text_config"}


def test_only_engines_that_read_it_are_listed_and_alike():
    made = make_plan(configs.LLAMA, Extend(method="yarn", factor=4.0), "some/model")
    lines = {line.loader: line for line in made.overrides()}
    vllm = shlex.split(lines["vllm"].command)
    told = json.loads(vllm[vllm.index("--hf-overrides") + 1])
    assert told["rope_parameters"] == made.config["rope_parameters"]
    assert told["max_position_embeddings"] == 16384
    sglang = shlex.split(lines["sglang"].command)
    assert json.loads(sglang[sglang.index("--json-model-override-args") + 1]) == told
    flags = "--rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 4096 -c 16384"
    assert lines["llama.cpp"].command == f"llama-server -m MODEL.gguf {flags} -np 1"
    again = families.read(configs.LLAMA | told).sites[0].rope.spectrum
    assert again == made.main.wanted
    for options in ({"method": "llama3"}, {"method": "yarn", "attention_factor": 1.3}):
        other = make_plan(configs.LLAMA, Extend(factor=4.0, **options), "m").overrides()
        assert not any(line.command for line in other if line.loader == "llama.cpp")
    for method in ("pi", "ntk"):  # a limit of llama-server that only a yarn's options raise
        other = make_plan(configs.LLAMA, Extend(factor=4.0, method=method), "m").overrides()
        said = next(line.command for line in other if line.loader == "llama.cpp")
        assert "llama.context_length=int:16384" in said
    unknown = configs.LLAMA | {"model_type": "olmoe"}
    none = make_plan(unknown, Extend(method="yarn", factor=4.0), "m").overrides()
    assert {line.loader for line in none} == {"transformers"}
