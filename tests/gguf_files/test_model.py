"""The Model of a GGUF says what its header says."""

import json
from pathlib import Path

import numpy as np
import pytest
from gguf_files import making, test_architectures

import ropext
from ropext.base.errors import InputError, UsageError
from ropext.files import inspecting
from ropext.files.gguf import open_gguf

TABLE = Path(ropext.__file__).parent / "loaders" / "gguf.json"
ARCHITECTURES = json.loads(TABLE.read_text("utf-8"))["architectures"]
HALF = {"rope.dimension_count": 8}
LATENT = HALF | {"attention.kv_lora_rank": 32, "attention.key_length": 24}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
YARN |= {"rope.scaling.original_context_length": 64}


def written(path, arch, more=None):
    metadata = dict(more or {})
    if arch in test_architectures.NEW:
        return test_architectures.made(path, arch, test_architectures.NEW[arch][0] | metadata)
    if arch == "deepseek2":
        metadata |= LATENT
    elif ARCHITECTURES[arch].get("partial"):
        metadata |= HALF
    return making.write(path, arch, making.LLAMA | metadata)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_model_has_the_sizes_of_the_header(tmp_path, arch):
    more = {"block_count": 9, "nextn_predict_layers": 1, "expert_count": 2}
    file = open_gguf(str(written(tmp_path / "m.gguf", arch, more)))
    model = file.read()
    assert (model.layers, model.stated_context, model.hidden_size) == (8, 256, 64)
    assert model.scaled_sites[0].rope.theta == file.head.decimal(f"{arch}.rope.freq_base")


def test_a_theta_of_neox_is_the_headers(tmp_path):
    model = open_gguf(str(written(tmp_path / "m.gguf", "gptneox"))).read()
    assert model.scaled_sites[0].rope.theta == 50_000
    plan = inspecting.plan(str(tmp_path / "m.gguf"), factor=2.0, method="ntk")
    assert plan.main.rope.dim == 8
    theta = {edit.key: edit.after for edit in plan.edits}["gptneox.rope.freq_base"]
    assert theta == pytest.approx(50_000 * 2 ** (8 / 6))


def test_the_original_length_of_phi3_is_the_headers(tmp_path):
    long = np.linspace(2, 16, 8, dtype=np.float32)
    data = {"rope_factors_long.weight": long, "rope_factors_short.weight": long}
    metadata = making.LLAMA | {"rope.scaling.original_context_length": 64}
    path = making.write(tmp_path / "m.gguf", "phi3", metadata, data=data | making.tensors())
    file = open_gguf(str(path))
    assert file.read().scaled_sites[0].rope.original_context == 64


def test_each_channel_that_turns_is_counted(tmp_path):
    metadata = making.LLAMA | {"attention.key_length": 52, "rope.dimension_count": 30}
    assert int(52 * (30 / 52)) == 29  # which the share of a head, as a float, makes of it
    path = making.write(tmp_path / "m.gguf", "stablelm", metadata)
    file = open_gguf(str(path))
    assert file.read().scaled_sites[0].rope.dim == 30
    ropext.extend(str(path), tmp_path / "long.gguf", factor=2.0, method="yarn")
    assert open_gguf(str(tmp_path / "long.gguf")).read().context == 512


def test_the_cache_of_a_layer_is_by_its_own_heads(tmp_path):
    heads = {"attention.head_count_kv": [2, 1], "attention.sliding_window_pattern": [True, False]}
    metadata = making.LLAMA | heads | {"attention.sliding_window": 32}
    path = making.write(tmp_path / "m.gguf", "gemma3", metadata)
    windowed, full = open_gguf(str(path)).read().kv_layers
    assert (windowed.values, windowed.window) == (2 * 2 * 16, 32)
    assert (full.values, full.window) == (2 * 1 * 16, None)


WINDOWS = {"attention.sliding_window": 32, "attention.sliding_window_pattern": [True, False]}
TURNS = "channels per head, but a rotary embedding needs an even number of 2 to 8192"


@pytest.mark.parametrize(
    ("arch", "more", "sentence"),
    [
        ("gemma4", {"rope.dimension_count_swa": 7}, f"rotates 7 of 16 {TURNS}"),
        ("gemma4", {"attention.key_length": 33}, f"rotates 33 of 33 {TURNS}"),
        ("gemma3", WINDOWS | {"attention.key_length_swa": 15}, f"rotates 15 of 15 {TURNS}"),
        ("gemma3", WINDOWS | {"attention.key_length_swa": 16_384}, f"16384 of 16384 {TURNS}"),
        ("gemma3", WINDOWS | {"attention.head_count_kv": [-1, 2]}, "head_count_kv lists -1"),
        ("llama", {"attention.head_count_kv": [1 << 30] * 2}, "head_count_kv lists 1073741824"),
        ("gemma4", {"attention.shared_kv_layers": 3}, "shared_kv_layers is 3, not a whole"),
    ],
)
def test_a_size_that_no_model_has_is_refused(tmp_path, arch, more, sentence):
    path = str(written(tmp_path / "m.gguf", arch, more))
    with pytest.raises(InputError) as refused:
        inspecting.inspect(path)
    assert sentence in str(refused.value)
    assert str(refused.value).startswith(path)


def test_heads_are_counted_in_the_layers_that_have_some(tmp_path):
    """A layer that attends to nothing is listed with none."""
    heads = {"block_count": 4, "attention.head_count_kv": [0, 0, 0, 2]}
    model = open_gguf(str(written(tmp_path / "m.gguf", "qwen35", heads))).read()
    assert model.kv_heads == 2
    assert [layer.values for layer in model.kv_layers] == [2 * 2 * 16]


def test_sentences_name_the_file_that_is_read(tmp_path):
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    path = str(written(tmp_path / "m.gguf", "qwen2", scaling))
    with pytest.raises(UsageError, match="no key says whether") as asked:
        inspecting.plan(path, factor=2.0)
    assert str(asked.value).startswith(f"{path}, its metadata as a config: ")
    path = str(written(tmp_path / "far.gguf", "qwen2", scaling | {"rope.scaling.factor": 1e13}))
    with pytest.raises(InputError) as refused:
        inspecting.inspect(path)
    said = f"{path}, its metadata as a config: rope_scaling.factor must be a number above 0"
    assert str(refused.value).startswith(said)
    path = str(written(tmp_path / "yarn.gguf", "llama", YARN))
    with pytest.raises(InputError) as refused:
        inspecting.plan(path, factor=2.0, original_context=100)
    said = f"--original-context 100 contradicts {path}, its metadata as a config, which states 64;"
    assert str(refused.value).startswith(said)
