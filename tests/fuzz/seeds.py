"""What the fuzzer starts from: real-shaped files of every kind that ropext reads."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import configs
import published
import tiny

from ropext.families.config import census
from ropext.files.checkpoint import provenance
from ropext.files.checkpoint.provenance import record_of
from ropext.files.checkpoint.snapshot import Snapshot
from ropext.options import extend
from ropext.planning import make_plan

# A checkpoint's files; each input of the fuzzer is one of them, mutated, among good others.
FILES = (
    "config.json",
    "tokenizer_config.json",
    "generation_config.json",
    "sentence_bert_config.json",
    "tokenizer.json",
    "model.safetensors.index.json",
    "model.safetensors",
    "ropext.json",
)
SHARD = "model.safetensors"
LINK = provenance.LINK  # keys of a record that a chain keeps of it

SMALL_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "vocab_size": 64,
    "layer_types": ["full_attention", "full_attention"],
}

OTHERS: dict[str, dict[str, Any]] = {
    "tokenizer_config.json": {
        "tokenizer_class": "LlamaTokenizer",
        "model_max_length": 2048,
        "added_tokens_decoder": {"0": {"content": "<unk>", "special": True}},
        "chat_template": "{% for m in messages %}{{ m }}{% endfor %}",
    },
    "generation_config.json": {"max_length": 2048, "do_sample": True, "eos_token_id": [1, 2]},
    "sentence_bert_config.json": {"max_seq_length": 2048, "do_lower_case": False},
    "tokenizer.json": {
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 512, "strategy": "LongestFirst"},
        "padding": None,
        "added_tokens": [{"id": 0, "content": "<unk>"}],
        "model": {"type": "BPE", "vocab": {"a": 0, 'b"\\': 1}, "merges": []},
    },
    "model.safetensors.index.json": {
        "metadata": {"total_size": 8},
        "weight_map": {"model.embed_tokens.weight": SHARD},
    },
}


def safetensors() -> bytes:
    """Return a file with one tensor of two float32."""
    table = {"model.embed_tokens.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    header = json.dumps({"__metadata__": {"format": "pt"}} | table).encode()
    return len(header).to_bytes(8, "little") + header + b"\0" * 8


def record(config: dict[str, Any]) -> dict[str, Any]:
    """Return the ropext.json that an extension of `config` writes."""
    plan = make_plan(config, extend.parse_extend({"factor": 4.0}), "base")
    snapshot = Snapshot(name="base", directory=Path("base"), config=config)
    return provenance.to_json(record_of(plan, provenance.base_of(snapshot)))


@cache
def model_configs() -> tuple[dict[str, Any], ...]:
    """Return released, tiny and bare configs of every model type that the census knows."""
    found = [v for k, v in sorted(vars(configs).items()) if k.isupper() and "model_type" in v]
    found += [published.config(name) for name in published.CONFIGS]
    for model_type in sorted(census()):
        part = tiny.text_part(model_type)
        if part is None:
            found.append({"model_type": model_type, "max_position_embeddings": 512})
            continue
        texts = [tiny.modern(part[0]), tiny.legacy(part[0]), tiny.bare(part[0])]
        found += [tiny.wrapped(model_type, text) for text in texts if text is not None]
    return tuple(found)


@cache
def rotary_configs() -> tuple[dict[str, Any], ...]:
    """Return the model configs that can be extended unchanged."""
    return tuple(c for c in model_configs() if tiny.text_part(c["model_type"]))


@cache
def good_files() -> dict[str, bytes]:
    """Return one checkpoint in which every file is right."""
    out = {name: json.dumps(content, indent=2).encode() for name, content in OTHERS.items()}
    out["config.json"] = json.dumps(SMALL_LLAMA).encode()
    out[SHARD] = safetensors()
    return out


def chained(config: dict[str, Any]) -> dict[str, Any]:
    """Return the record of three extensions, each of the one before."""
    links: dict[str, Any] = {}
    for factor in (2.0, 1.5, 2.0):
        plan = make_plan(config, extend.parse_extend({"factor": factor}), "base")
        snapshot = Snapshot(name="base", directory=Path("base"), config=config)
        base = provenance.base_of(snapshot)
        if links:
            base["extended"] = {key: links[key] for key in LINK}
        links = provenance.to_json(record_of(plan, base))
        config = plan.config
    sections = {"fit": {"steps": 3}, "finetune": {"numbers": {"tuned": {}}}, "run": {}}
    return links | sections | {"trained_on": {"documents": 3}}


@cache
def records() -> tuple[dict[str, Any], ...]:
    windowed = next(c for c in model_configs() if c["model_type"] == "gemma3_text")
    return record(SMALL_LLAMA), record(windowed), chained(SMALL_LLAMA), chained(SMALL_LLAMA)
