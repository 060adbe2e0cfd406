"""Two stored tensors for one parameter: `verify` calls them WRONG, and `extend` refuses them.

transformers' own from_pretrained shows that engines disagree on such a checkpoint.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.slow

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "max_position_embeddings": 64,
}
FIRST = "model.layers.0.self_attn.q_proj.weight"
HEAD = "lm_head.weight"
ALIAS = FIRST.removeprefix("model.")


def save(directory: Path, config_class: str = "LlamaConfig", **keys: object) -> Path:
    """Save a tiny random model, by transformers."""
    import transformers

    config = getattr(transformers, config_class)(**SIZES | keys)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def change(directory: Path, change_tensors) -> None:
    """Change the tensors of the single weight file."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change_tensors(tensors)
    save_file(tensors, path, {"format": "pt"})


def split(directory: Path, more: dict[str, torch.Tensor], left_out: str = "") -> None:
    """Write two shards in place of the single file, the second one with the head and `more`, and an
    index that says that all but the head is in the first one."""
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    weight_map = dict.fromkeys(tensors, names[0]) | {HEAD: names[1]}
    more = more | {HEAD: tensors.pop(HEAD)}
    tensors.pop(left_out, None)
    save_file(tensors, directory / names[0], {"format": "pt"})
    save_file(more, directory / names[1], {"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def loaded(directory: Path, name: str) -> torch.Tensor:
    """Return the parameter as transformers loads it."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    return model.state_dict()[name]


def is_wrong(ropext, directory: Path, *words: str) -> None:
    """Assert that verify finds it WRONG and that extend refuses it and writes nothing."""
    code, out, _ = ropext("verify", directory)
    said = " ".join(out.split())
    assert code == 3
    assert "WRONG" in said
    for word in words:
        assert word in said
    output = directory.with_name("out")
    code, _, err = ropext("extend", directory, "--factor", 2, "--method", "yarn", "-o", output)
    assert code == 2
    assert "Traceback" not in err
    for word in words:
        assert word in err
    assert not output.exists()


def is_right(ropext, directory: Path) -> None:
    """Assert that verify passes it and that extend proves it."""
    code, out, err = ropext("verify", directory)
    assert code == 0, out + err
    output = directory.with_name("out")
    code, _, err = ropext("extend", directory, "--factor", 2, "--method", "yarn", "-o", output)
    assert code == 0, err
    assert ropext("verify", output)[0] == 0


def test_verify_fails_if_two_tensors_fill_one_parameter(ropext, tmp_path):
    model = save(tmp_path / "m")
    change(model, lambda tensors: tensors.update({ALIAS: torch.full((32, 32), 9.0)}))
    assert loaded(model, FIRST)[0, 0] == 9  # not the tensor that is called like the parameter
    is_wrong(ropext, model, ALIAS, FIRST)


def test_verify_accepts_a_second_tensor_with_the_same_bytes(ropext, tmp_path):
    model = save(tmp_path / "m")

    def repeat(tensors):
        tensors[FIRST][0, 0] = float("nan")  # which does not equal itself
        tensors[ALIAS] = tensors[FIRST].clone()

    change(model, repeat)
    is_right(ropext, model)


def test_verify_fails_if_a_second_tensor_has_another_dtype(ropext, tmp_path):
    model = save(tmp_path / "m")
    change(model, lambda tensors: tensors.update({ALIAS: tensors[FIRST].bfloat16()}))
    is_wrong(ropext, model, ALIAS, FIRST)


def test_verify_accepts_a_tied_head_that_is_stored_too(ropext, tmp_path):
    model = save(tmp_path / "m", tie_word_embeddings=True)
    embedding = "model.embed_tokens.weight"

    def store_head(tensors):
        assert "lm_head.weight" not in tensors
        tensors["lm_head.weight"] = tensors[embedding].clone()

    change(model, store_head)
    is_right(ropext, model)


def test_verify_finds_a_differing_head_in_a_file_that_transformers_skips(ropext, tmp_path):
    """MLX and llama.cpp's converter read every model*.safetensors."""
    model = save(tmp_path / "m", tie_word_embeddings=True)
    save_file({HEAD: torch.zeros(64, 32)}, model / "model-head.safetensors", {"format": "pt"})
    assert loaded(model, HEAD).any()
    code, out, _ = ropext("verify", model)
    said = " ".join(out.split())
    assert code == 3
    assert "model-head.safetensors: transformers does not load them" in said
    assert "config.json ties lm_head.weight and model.embed_tokens.weight" in said


def test_verify_accepts_experts_that_transformers_stacks(ropext, tmp_path):
    model = save(tmp_path / "m", "MixtralConfig", num_local_experts=4)
    assert sum(".experts." in name for name in load_file(model / "model.safetensors")) == 24
    is_right(ropext, model)


def test_verify_fails_if_an_expert_is_stored_twice_and_another_is_missing(ropext, tmp_path):
    """Four experts are there by their number, but one of them twice and the last one not at all."""
    model = save(tmp_path / "m", "MixtralConfig", num_local_experts=4)
    expert = "model.layers.0.block_sparse_moe.experts.{}.{}.weight"

    def shift(tensors):
        for part in ("w1", "w2", "w3"):
            last = tensors.pop(expert.format(3, part))
            tensors[expert.format(0, part).removeprefix("model.")] = last

    before = loaded(model, "model.layers.0.mlp.experts.down_proj")
    change(model, shift)
    after = loaded(model, "model.layers.0.mlp.experts.down_proj")
    assert after[1].equal(before[0])  # every expert is another one
    is_wrong(ropext, model, ".experts.0.w")


def test_verify_fails_if_a_part_of_a_fused_tensor_is_stored_too(ropext, tmp_path):
    model = save(tmp_path / "m", "HrmTextConfig")
    part = "model.H_module.layers.0.mlp.up_proj.weight"
    before = loaded(model, part)
    change(model, lambda tensors: tensors.update({part: torch.full_like(before, 9.0)}))
    assert loaded(model, part)[0, 0] == 9  # and not the half of gate_up_proj
    is_wrong(ropext, model, part, "gate_up_proj")


def test_verify_fails_if_two_files_hold_one_tensor(ropext, tmp_path):
    model = save(tmp_path / "m")
    split(model, {FIRST: torch.full((32, 32), 9.0)})
    assert loaded(model, FIRST)[0, 0] == 9  # against the index
    is_wrong(ropext, model, FIRST, "model-00001-of-00002", "model-00002-of-00002")


def test_verify_fails_if_the_index_names_another_file(ropext, tmp_path):
    model = save(tmp_path / "m")
    before = loaded(model, FIRST)
    split(model, {FIRST: before}, left_out=FIRST)
    assert loaded(model, FIRST).equal(before)  # transformers does not heed the index
    is_wrong(ropext, model, FIRST, "model-00001-of-00002", "model-00002-of-00002")
