"""`--like DIR`: the spectrum of an extended directory in a GGUF of the same model."""

import json

import numpy as np
import pytest
from gguf_files import ggml, making
from safetensors.numpy import save_file

import ropext
from ropext.base.errors import InputError, UsageError
from ropext.files import inspecting
from ropext.files.checkpoint.provenance import read_record

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 8,
    "max_position_embeddings": 256,
    "rope_theta": 50000.0,
}
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
NAMES |= {"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj"}


@pytest.fixture
def model(tmp_path):
    """Write a directory and the GGUF of the same weights."""
    data = making.tensors()
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(CONFIG))
    named = {}
    for name, array in data.items():
        for old, new in (*NAMES.items(), ("blk.", "model.layers.")):
            name = name.replace(old, new)
        named[name] = array
    save_file(named, tmp_path / "base" / "model.safetensors")
    return tmp_path / "base", making.write(tmp_path / "base.gguf", data=data)


def extended(base, out, **options):
    ropext.extend(str(base), out, no_verify=True, **({"factor": 4.0} | options))
    return read_record(out).sites[0].wanted


FACTORS = tuple(np.linspace(1, 4, 8).tolist())


@pytest.mark.parametrize(
    "options",
    [
        {"method": "yarn"},
        {"method": "ntk"},
        {"method": "yarn", "attention_factor": 1.25, "beta_fast": 16.0},
        {"method": "llama3"},
        {"method": "longrope", "pair_factors": FACTORS},
        {"method": "longrope", "pair_factors": FACTORS, "short_pair_factors": (1.0,) * 8},
    ],
)
def test_ggml_computes_the_spectrum_of_the_directory(model, tmp_path, options):
    base, file = model
    wanted = extended(base, tmp_path / "out", **options)
    made = ropext.extend(str(file), tmp_path / "long.gguf", like=str(tmp_path / "out"))
    names = ("rope_factors_long.weight", "rope_freqs.weight")
    angles, attention = ggml.rope(tmp_path / "long.gguf", 16, names)
    np.testing.assert_allclose(angles, wanted.inv_freq, rtol=64 * 2**-23)
    assert attention == pytest.approx(wanted.attention_factor, rel=1e-6)
    assert (made.plan.context, made.plan.target) == (256, 1024)
    if wanted.short_inv_freq is not None:
        angles, _ = ggml.rope(tmp_path / "long.gguf", 16, ("rope_factors_short.weight",))
        np.testing.assert_allclose(angles, wanted.short_inv_freq, rtol=64 * 2**-23)


def test_a_form_that_the_architecture_reads_is_kept(model, tmp_path):
    """qwen2 has no rope_freqs, but its yarn."""
    base, _ = model
    content = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(content | {"model_type": "qwen2"}))
    file = making.write(tmp_path / "q.gguf", "qwen2")
    extended(base, tmp_path / "out", method="yarn")
    made = ropext.extend(str(file), tmp_path / "long.gguf", like=str(tmp_path / "out"))
    assert made.plan.method == "yarn"
    assert ggml.keys(tmp_path / "long.gguf")["qwen2.rope.scaling.type"] == "yarn"


def test_the_converters_gguf_of_the_result_is_accepted_too(model, tmp_path):
    base, _ = model
    wanted = extended(base, tmp_path / "out", method="longrope", pair_factors=FACTORS)
    lost = making.LLAMA | {"context_length": 1024, "rope.scaling.type": "longrope"}
    file = making.write(tmp_path / "lost.gguf", metadata=lost)
    ropext.extend(str(file), tmp_path / "long.gguf", like=str(tmp_path / "out"))
    angles, _ = ggml.rope(tmp_path / "long.gguf", 16)
    np.testing.assert_allclose(angles, wanted.inv_freq, rtol=64 * 2**-23)


def test_like_refuses_a_gguf_of_another_model(model, tmp_path):
    base, file = model
    extended(base, tmp_path / "out")
    other = making.tensors() | {"blk.1.attn_norm.weight": np.ones(64, np.float32)}
    for bad, said in [
        ({"data": other}, r"numbers of blk\.1\.attn_norm\.weight differ"),
        ({"metadata": making.LLAMA | {"block_count": 3}}, "layers differ"),
        ({"arch": "qwen2"}, "their types differ"),
        ({"metadata": making.LLAMA | {"context_length": 512}}, "lengths"),
        ({"data": {"token_embd.weight": other["token_embd.weight"]}}, "no norm in float32"),
    ]:
        path = making.write(tmp_path / "other.gguf", **bad)
        with pytest.raises(InputError, match=said) as caught:
            inspecting.plan(str(path), like=str(tmp_path / "out"))
        if said != "no norm in float32":
            assert "--like" in str(caught.value)
            assert "convert_hf_to_gguf.py" in str(caught.value)
    with pytest.raises(UsageError, match="sets length and method"):
        inspecting.plan(str(file), like=str(tmp_path / "out"), factor=4.0)
    with pytest.raises(InputError, match=r"no ropext\.json"):
        inspecting.plan(str(file), like=str(base))
    with pytest.raises(UsageError, match="needs a GGUF file as MODEL"):
        inspecting.plan(str(base), like=str(tmp_path / "out"))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q5_1", "Q4_0"])
@pytest.mark.parametrize(
    ("tensor", "named"),
    [("mlp.up_proj", "ffn_up"), ("mlp.down_proj", "ffn_down"), ("self_attn.q_proj", "attn_q")],
)
def test_a_changed_matrix_is_another_model(tmp_path, kind, tensor, named):
    """Norms may agree although a matrix differs: only quantisation is accepted."""
    draw = np.random.default_rng(0)
    shapes = {"mlp.up_proj": (96, 64), "mlp.down_proj": (64, 96), "self_attn.q_proj": (64, 64)}
    shapes |= {"input_layernorm": (64,)}
    data, directory = {}, {}
    for layer in range(2):
        for part, shape in shapes.items():
            array = draw.standard_normal(shape).astype(np.float32)
            directory[f"model.layers.{layer}.{part}.weight"] = array
            if part == "self_attn.q_proj":  # as llama.cpp's converter turns each head of 16
                array = array.reshape(4, 2, 8, 64).swapaxes(1, 2).reshape(64, 64)
            data[f"blk.{layer}.{making.PARTS[part]}.weight"] = array
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(CONFIG))
    save_file(directory, tmp_path / "base" / "model.safetensors")
    extended(tmp_path / "base", tmp_path / "out")

    def plan(name):
        matrices = [] if kind == "F32" else [key for key in data if "norm" not in key]
        file = making.write(tmp_path / name, data=data, q8=matrices, kind=kind)
        return inspecting.plan(str(file), like=str(tmp_path / "out"))

    assert plan("same.gguf").target == 1024
    data[f"blk.1.{named}.weight"] = data[f"blk.1.{named}.weight"] * np.float32(1.5)
    with pytest.raises(InputError, match=rf"the numbers of blk\.1\.{named}\.weight differ"):
        plan("other.gguf")


def test_weights_that_were_trained_are_converted_first(model, tmp_path):
    base, file = model
    extended(base, tmp_path / "out")
    record = json.loads((tmp_path / "out" / "ropext.json").read_text())
    (tmp_path / "out" / "ropext.json").write_text(json.dumps(record | {"finetune": {"steps": 1}}))
    with pytest.raises(InputError, match="weights differ, as after training; convert it"):
        inspecting.plan(str(file), like=str(tmp_path / "out"))
    own = making.write(tmp_path / "own.gguf", metadata=making.LLAMA | {"context_length": 1024})
    assert inspecting.plan(str(own), like=str(tmp_path / "out")).target == 1024


def test_a_longrope_directory_says_how_it_gets_into_a_gguf(model, tmp_path):
    base, _ = model
    options = {"factor": 4.0, "method": "longrope", "pair_factors": FACTORS}
    ropext.extend(str(base), tmp_path / "out", no_verify=True, **options)
    line = "ropext extend out.gguf --like"
    assert line in (tmp_path / "out" / "README.md").read_text()
    made = inspecting.plan(str(base), **options)
    served = next(each for each in made.serving("out") if each.loader == "llama.cpp")
    assert "ropext extend out.gguf --like out -o out-long.gguf" in served.command
