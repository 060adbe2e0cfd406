"""A small real checkpoint on the disk, written without any library of ours."""

import json
import struct
from pathlib import Path

from ropext.files.checkpoint.card import Card
from ropext.files.checkpoint.provenance import Record, SiteRecord
from ropext.scaling.rope import Spectrum

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "zzz_unknown": {"keep": [1, 2.5, "ü"]},
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
}


def safetensors(tensors: dict[str, tuple[str, list[int], bytes]], metadata=None) -> bytes:
    """Write the format by hand: length, JSON, data."""
    table, data = {}, b""
    if metadata:
        table["__metadata__"] = metadata
    for name, (dtype, shape, content) in tensors.items():
        offsets = [len(data), len(data) + len(content)]
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += content
    header = json.dumps(table).encode()
    return struct.pack("<Q", len(header)) + header + data


def write_json(path: Path, value) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def make_model(directory: Path, *, shards: int = 2) -> Path:
    """Write a checkpoint with everything that real ones have: shards, tokenizer files, code, and
    files to leave."""
    directory.mkdir(parents=True)
    write_json(directory / "config.json", CONFIG)
    write_json(directory / "generation_config.json", {"max_length": 2048, "do_sample": True})
    write_json(
        directory / "tokenizer_config.json",
        {"model_max_length": 2048, "added": {"0": "<s>"}, "name": "é"},
    )
    (directory / "tokenizer.json").write_text(
        '{"version":"1.0", "truncation": {"max_length": 2048, "stride": 0},\n "model":{"a":["]"]}}'
    )
    weight_map = {}
    for n in range(shards):
        name = f"model-{n + 1:05}-of-{shards:05}.safetensors"
        content = bytes(range(32)) * (n + 1)
        tensors = {f"layer.{n}.weight": ("F32", [8 * (n + 1)], content)}
        (directory / name).write_bytes(safetensors(tensors, {"format": "pt"}))
        weight_map[f"layer.{n}.weight"] = name
    write_json(
        directory / "model.safetensors.index.json",
        {"metadata": {"total_size": 32}, "weight_map": weight_map},
    )
    (directory / "README.md").write_text("---\nlicense: mit\ntags:\n- text\n---\n# The base\n")
    (directory / "modeling_custom.py").write_text("x = 1\n")
    (directory / "original").mkdir()
    (directory / "original" / "params.json").write_text("{}")
    (directory / "model.Q4.gguf").write_bytes(b"GGUF")
    (directory / "1_Pooling").mkdir()
    write_json(directory / "1_Pooling" / "config.json", {"pooling": "mean"})
    return directory


def tree(directory: Path) -> dict[str, bytes]:
    """Return every file and link under a directory, with its bytes."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def record(context: int = 2048, target: int = 8192) -> Record:
    site = SiteRecord(
        label="",
        dim=4,
        context=context,
        base=Spectrum((1.0, 0.01)),
        wanted=Spectrum((1.0, 0.0025), 1.1386294361119891),
        params={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0},
    )
    return Record(
        base={"name": "base", "hub_id": None, "revision": None, "commit": None, "config": {}},
        method="yarn",
        knobs={"beta_fast": 32.0},
        context=context,
        target=target,
        sites=(site,),
        command=("ropext", "extend", "base"),
        versions={"ropext": "0"},
    )


def card(record=None, title="") -> Card:
    return Card("extended", "base", False, ("Extended with yarn.",))
