"""The files that open_snapshot finds in a directory, and its refusal of any directory that is no
checkpoint."""

import json
import os
from pathlib import Path

import pytest
from marked import at_work
from sample_checkpoint import CONFIG, make_model, safetensors, write_json

from ropext.base.errors import InputError, UsageError
from ropext.files.checkpoint import open_snapshot
from ropext.files.checkpoint.snapshot import INDEX, reason_to_leave, short_name
from ropext.verifying.weights import check_other_sets


def test_open_snapshot_reads_config_and_file_names_of_a_directory(model: Path):
    snapshot = open_snapshot(str(model), weights=True)
    assert snapshot.config == CONFIG
    assert list(snapshot.config) == list(CONFIG)
    assert snapshot.weight_files == (
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    )
    assert snapshot.files["modeling_custom.py"] == 6
    assert "1_Pooling/config.json" in snapshot.files
    assert set(snapshot.left) == {"README.md", "model.Q4.gguf", "original/"}
    assert snapshot.length_files["tokenizer_config.json"]["model_max_length"] == 2048
    assert snapshot.length_files["generation_config.json"]["max_length"] == 2048
    assert snapshot.shards["layer.1.weight"] == "model-00002-of-00002.safetensors"
    assert (snapshot.hub_id, snapshot.commit, snapshot.quantisation) == (None, None, None)


@pytest.mark.parametrize(
    ("name", "carried"),
    {
        "tokenizer.json": True,
        "tokenizer.model": True,
        "chat_template.jinja": True,
        "additional_chat_templates/tool.jinja": True,
        "preprocessor_config.json": True,
        "modeling_x.py": True,
        "model-00001-of-00002.safetensors": True,
        "2_Dense/model.safetensors": True,
        "2_Dense/pytorch_model.bin": False,
        "pytorch_model.bin": False,
        "pytorch_model.bin.index.json": False,
        "training_args.bin": False,
        "model.gguf": False,
        "original/tokenizer.model": False,
        "onnx/model.onnx_data": False,
        "onnx/config.json": False,
        "consolidated.00.safetensors": False,
        "consolidated.safetensors.index.json": False,
        "params.json": False,
        ".gitattributes": False,
        ".cache/huggingface/x.json": False,
        "checkpoint-500/model.safetensors": False,
        "vae/weights.safetensors": False,
        "README.md": False,
        "docs/README.md": True,
        "ropext.json": False,
        "LICENSE": True,
    }.items(),
)
def test_the_copied_files_are_chosen_by_name(name: str, carried: bool):
    assert (reason_to_leave(name) is None) is carried


def test_quantisation_is_reported(model: Path):
    write_json(model / "config.json", CONFIG | {"quantization_config": {"quant_method": "awq"}})
    assert open_snapshot(str(model)).quantisation == "awq"
    nested = {"text_config": {"quantization_config": {"quant_method": "fp8"}}}
    write_json(model / "config.json", CONFIG | nested)
    assert open_snapshot(str(model)).quantisation is not None


def test_links_to_weights_to_a_hub_cache_and_inside_of_the_directory_are_files(
    model: Path, tmp_path: Path
):
    """`--link symlink` makes the first, the hub's cache and its old local_dir the second."""
    linked, blobs = tmp_path / "linked", tmp_path / "models--org--name" / "blobs"
    linked.mkdir()
    blobs.mkdir(parents=True)
    for number, path in enumerate(path for path in model.iterdir() if path.is_file()):
        target = path
        if path.suffix != ".safetensors":
            target = blobs / f"{number:040x}"
            target.write_bytes(path.read_bytes())
        (linked / path.name).symlink_to(target)
    (linked / "vocab.txt").symlink_to("config.json")
    snapshot = open_snapshot(str(linked), weights=True)
    assert snapshot.weight_files == open_snapshot(str(model)).weight_files
    assert "vocab.txt" in snapshot.files
    (tmp_path / "named").symlink_to(linked)  # the user's own word for it
    assert open_snapshot(str(tmp_path / "named")).files == snapshot.files


SECRET = "-----BEGIN OPENSSH PRIVATE KEY-----"


@pytest.mark.parametrize(
    "name",
    ["config.json", "vocab.txt", "README.md", "ropext.json", "training", "1_Pooling/notes.txt"],
)
def test_a_link_out_of_the_directory_is_refused_by_name(model: Path, tmp_path: Path, name: str):
    home = tmp_path / "home"
    home.mkdir()
    (home / "id_rsa").write_text(SECRET)
    (model / "1_Pooling").mkdir(exist_ok=True)
    (model / name).unlink(missing_ok=True)
    for target in (home / "id_rsa", home):
        (model / name).symlink_to(os.path.relpath(target, (model / name).parent))
        said = refused(model, f"{name} is a link to {tmp_path}")
        assert f"outside of {model}" in said
        (model / name).unlink()


def test_the_hub_cache_tells_id_and_commit(tmp_path: Path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    directory = tmp_path / "models--org--some-model" / "snapshots" / commit
    make_model(directory)
    snapshot = open_snapshot(str(directory))
    assert (snapshot.hub_id, snapshot.commit) == ("org/some-model", commit)
    assert short_name(snapshot.name, snapshot.hub_id) == "org/some-model"


def refused(model, words: str, **kwargs):
    with pytest.raises(InputError) as error:
        open_snapshot(str(model), **kwargs)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_open_snapshot_refuses_directories_without_a_checkpoint(tmp_path: Path):
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(empty, "no config.json")
    (empty / "model.gguf").write_bytes(b"GGUF")
    refused(empty, "model.gguf is a GGUF file")
    (empty / "other.gguf").write_bytes(b"GGUF")
    refused(empty, "only GGUF files")
    (empty / "adapter_config.json").write_text("{}")
    refused(empty, "merge it")
    refused(empty / "model.gguf", "GGUF file")
    refused(tmp_path / "nowhere", "does not exist")
    refused("", "MODEL is empty")
    refused("a\0b", "not a name")
    refused("x/" * 3000, "name too long")
    refused("~nobody-of-that-name/x/y", "does not exist")
    (tmp_path / "file.txt").write_text("x")
    refused(tmp_path / "file.txt", "is a file")


def test_an_interrupted_force_is_explained(model: Path, tmp_path: Path):
    model.rename(at_work(model) / "old")
    assert "--force" in refused(model, "/old is there")


def test_open_snapshot_refuses_a_revision_of_a_local_directory(model: Path):
    with pytest.raises(UsageError, match="--revision"):
        open_snapshot(str(model), revision="main")


def test_a_config_alone_is_enough_until_weights_are_needed(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    assert open_snapshot(str(tmp_path)).weight_files == ()
    refused(tmp_path, "no weights", weights=True)
    (tmp_path / "model-q4.gguf").write_bytes(b"GGUF")
    refused(tmp_path, "only as GGUF", weights=True)
    (tmp_path / "pytorch_model-00001-of-00002.bin").write_bytes(b"x")
    assert "save_pretrained" in refused(tmp_path, "only pickled weights", weights=True)


def test_open_snapshot_names_missing_shards(tmp_path: Path):
    model = make_model(tmp_path / "base", shards=6)
    for n in (2, 3, 5, 6):
        (model / f"model-0000{n}-of-00006.safetensors").unlink()
    sentence = refused(model, "lacks 4 of the 6 shards", weights=True)
    assert "model-00002-of-00006.safetensors" in sentence
    assert "and 1 more" in sentence


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "a/b", "a\\b", "", "..", "a\n"]
)
def test_shards_must_be_plain_file_names(model: Path, name: str):
    write_json(model / "model.safetensors.index.json", {"weight_map": {"t": name}})
    refused(model, "not a plain file name")


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {"t": 3}}])
def test_open_snapshot_refuses_an_index_without_a_weight_map(model: Path, index):
    write_json(model / "model.safetensors.index.json", index)
    refused(model, "weight_map")


def test_open_snapshot_refuses_an_index_that_is_too_large(model: Path):
    path = model / "model.safetensors.index.json"
    with open(path, "wb") as file:
        file.truncate(128 * 10**6 + 1)
    refused(model, "128 MB")
    path.write_bytes(b'{"weight_map": {' + b'"":"",' * 1_000_001 + b'"x":"y"}}')
    refused(model, "1,000,000 tensors")
    path.write_bytes(b'{"weight_map": [' + b"[]," * 2000 + b"1]}")
    refused(model, "1,000 objects")


def test_an_index_of_a_hundred_thousand_tensors_is_read_and_carried(model: Path):
    shards = sorted(file.name for file in model.glob("model-*.safetensors"))
    table = {f"layer.{n}.expert.weight": shards[n % len(shards)] for n in range(100_000)}
    write_json(model / "model.safetensors.index.json", {"weight_map": table})
    assert open_snapshot(str(model), weights=True).shards == table


@pytest.mark.needs("mkfifo")
def test_links_to_anything_else_are_refused(model: Path, tmp_path: Path):
    for target, words in ((model / "gone", "cannot be read"), (model, "neither a regular file")):
        link = model / "vocab.txt"
        link.symlink_to(target)
        refused(model, words, weights=True)
        open_snapshot(str(model))  # inspecting needs no more than the config
        link.unlink()
    os.mkfifo(model / "vocab.txt")
    refused(model, "neither a regular file", weights=True)


def test_open_snapshot_refuses_a_file_name_that_is_not_utf8(model: Path):
    with open(os.fsencode(model) + b"/vocab\xff.txt", "wb"):
        pass
    refused(model, "UTF-8", weights=True)


def test_bad_small_files_are_named(model: Path):
    (model / "generation_config.json").write_text("[]")
    refused(model, "generation_config.json")


def test_spaces_and_letters_beyond_ascii(tmp_path: Path):
    model = make_model(tmp_path / "mein Modell ü 模型")
    snapshot = open_snapshot(str(model), weights=True)
    assert short_name(snapshot.name, snapshot.hub_id) == "mein Modell ü 模型"


def test_home_is_expanded(model: Path, monkeypatch):
    monkeypatch.setenv("HOME", str(model.parent))
    assert json.loads((open_snapshot("~/base").path("config.json")).read_text()) == CONFIG


def test_an_adapter_next_to_a_model_is_refused(model: Path):
    """transformers' auto classes would load the model that adapter_config.json names."""
    write_json(model / "adapter_config.json", {"base_model_name_or_path": "somebody/else"})
    with pytest.raises(InputError, match="the adapter's base in place of the model"):
        open_snapshot(str(model))


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("attn_implementation", "evil/kernel"),
        ("_attn_implementation", "evil/kernel@main:run"),
        ("attn_implementation", {"text_config": "evil/kernel"}),
        ("attn_implementation", "kernels-community/x/../../evil/kernel"),
        ("attn_implementation", "paged|evil/kernel"),
    ],
)
def test_a_config_that_names_a_kernel_on_the_hub_is_refused(model: Path, key: str, name: object):
    for config in (CONFIG | {key: name}, CONFIG | {"text_config": {key: name}}):
        write_json(model / "config.json", config)
        with pytest.raises(InputError, match="kernel on the hub"):
            open_snapshot(str(model))
    for fine in ("sdpa", "flash_attention_2", "kernels-community/flash-attn", None, {"a": 1}, 3):
        write_json(model / "config.json", CONFIG | {key: fine})
        open_snapshot(str(model))


def placed(part: dict) -> list[dict]:
    """Return configs that hold something at the top, in a part, in a part of a part, and in a
    list."""
    tower = {"model_type": "llava", "vision_config": part}
    return [part, tower, {"thinker_config": tower}, {"towers": [[part]]}]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"attn_implementation": {"": "sdpa", "x": "evil/kernel"}}, "kernel on the hub"),
        ({"_attn_implementation_internal": "evil/kernel"}, "kernel on the hub"),
        ({"experts_implementation": "evil/experts"}, "kernel on the hub"),
        ({"experts_implementation": "mine"}, "no implementation of transformers' own"),
        ({"transformers_weights": "zz.safetensors"}, "another file than model.safetensors"),
        ({"transformers_weights": "adapter_model.bin"}, "another file than model.safetensors"),
        ({"model_type": "timm_wrapper", "model_args": {"checkpoint_path": "/x"}}, "timm"),
        ({"model_type": "timm_wrapper", "model_args": {"depth": ["a"]}}, "timm"),
        ({"model_type": "timm_backbone", "checkpoint_path": "/x"}, "timm"),
        ({"pretrained_cfg": {"file": "/x"}}, "timm"),
        ({"backbone_kwargs": {"checkpoint_path": "/x"}}, "timm"),
        ({"use_pretrained_backbone": True}, "timm"),
        ({"model_type": "timm_wrapper", "architecture": "local-dir:/x"}, "timm"),
    ],
)
def test_forbidden_keys_of_a_config_are_refused_at_any_depth(model: Path, asked, words):
    for part in placed(asked):
        write_json(model / "config.json", CONFIG | part)
        with pytest.raises(InputError, match=words):
            open_snapshot(str(model))


def test_keys_of_published_configs_are_accepted(model: Path):
    fine = [
        # Of facebook/Perception-LM-1B and google/gemma-3n-E2B.
        {"model_type": "timm_wrapper", "model_args": {"img_size": [448, 448], "global_pool": ""}},
        {"model_type": "gemma3n_vision", "model_args": None, "architecture": "mobilenetv5_300m"},
        {"auto_map": {"AutoModelForCausalLM": "theirs--code.Model"}},
        {"attn_implementation": "paged|sdpa", "experts_implementation": "grouped_mm"},
        {"use_pretrained_backbone": False, "backbone_kwargs": {}, "transformers_weights": None},
    ]
    for asked in fine:
        for part in placed(asked):
            write_json(model / "config.json", CONFIG | part)
            open_snapshot(str(model))


def header(names: str) -> bytes:
    return safetensors({name: ("U8", [1], b"x") for name in names})


VARIANT_SHARD = "model.fp16-00001-of-00002"


@pytest.mark.parametrize(
    ("files", "shards", "left"),
    [
        ({"model": "ab", "zz": "b"}, "", {"zz": "another set"}),
        ({"model": "ab", "zz": "c"}, "", {}),  # of another model
        ({"model": "ab", "model-1": "ab"}, "model-1", {"model-1": "another", "index": "another"}),
        ({"model-1": "a", "model-2": "b"}, "model-1 model-2", {}),
        ({"model-1": "ab", "old-1": "a"}, "model-1", {"old-1": "another set"}),
        ({"model": "ab"}, "model", {}),  # an index of the single file
        ({"model": "ab", "model.fp16": "ab"}, "", {"model.fp16": "a variant"}),
        ({"model": "ab", VARIANT_SHARD: "a"}, "", {VARIANT_SHARD: "a variant"}),
        ({"one": "ab", "two": "ab"}, "", {}),  # stock loads neither
    ],
)
def test_the_set_of_weights_that_stock_loads_is_copied(tmp_path, files, shards, left):
    write_json(tmp_path / "config.json", CONFIG)
    for name, tensors in files.items():
        (tmp_path / f"{name}.safetensors").write_bytes(header(tensors))
    if shards:
        table = {t: f"{name}.safetensors" for name in shards.split() for t in files[name]}
        write_json(tmp_path / INDEX, {"weight_map": table})
    snapshot = open_snapshot(str(tmp_path), weights=True)
    names = {name: INDEX if name == "index" else f"{name}.safetensors" for name in left}
    assert set(names.values()) == set(snapshot.left)
    for name, reason in left.items():
        assert snapshot.left[names[name]].startswith(reason)
    kept = {f"{name}.safetensors" for name in files} - set(snapshot.left)
    assert set(snapshot.weight_files) == kept
    assert (snapshot.index is not None) is (bool(shards) and "index" not in left)
    passed = [check.passed for check in check_other_sets(snapshot)]
    loaded = {"model.safetensors"} | {f"{name}.safetensors" for name in shards.split()}
    noted = [True] if kept - loaded else []
    assert passed == noted + [not reason.startswith("another") for reason in left.values()]


def test_other_forms_of_the_weights_are_a_note(tmp_path):
    write_json(tmp_path / "config.json", CONFIG)
    for name in ("model", "consolidated", "consolidated-00001"):
        (tmp_path / f"{name}.safetensors").write_bytes(header("a"))
    (tmp_path / "original").mkdir()
    (note,) = check_other_sets(open_snapshot(str(tmp_path)))
    assert note.passed
    for name in ("consolidated.safetensors", "consolidated-00001.safetensors", "original/"):
        assert name in note.sentence
