"""Train rotary decoders of four families, each a stock checkpoint, and write held-out documents.

The documents are from books that none of them has read; benchmarks/auto.py reads them besides the
bundled model's.

    python benchmarks/small_decoders.py TEXTS HELD_OUT --work DIR [--steps 1500]

TEXTS and HELD_OUT are folders of .txt files. DIR/documents.jsonl holds eight passages of each
held-out book. The families differ in the rotating channels: all channels of a head, half of them,
behind a norm of queries and keys with a large theta, and narrow heads with twice the context.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from position_schemes import BATCH, RATE, SEED, VOCAB, Logits, tokens_of, train

from ropext.base.bundled import MODELS

PASSAGES, PASSAGE_TOKENS = 8, 4400
TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}


def configs() -> dict[str, Any]:
    """Return each family's config, small."""
    half = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    shape: dict[str, Any] = {"vocab_size": VOCAB, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"tie_word_embeddings": True} | TOKENS
    wide: dict[str, Any] = shape | {"hidden_size": 128, "max_position_embeddings": 256}
    return {
        "falcon": hf.FalconConfig(
            **shape, hidden_size=96, multi_query=False, parallel_attn=False, alibi=False,
            max_position_embeddings=256, hidden_dropout=0.0, attention_dropout=0.0,
        ),
        "gpt-neox": hf.GPTNeoXConfig(
            **wide, intermediate_size=384,
            rope_parameters=half,
        ),
        "qwen3": hf.Qwen3Config(
            **wide, intermediate_size=384, num_key_value_heads=2, head_dim=32,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        ),
        "llama": hf.LlamaConfig(
            **shape, hidden_size=64, intermediate_size=192, num_key_value_heads=4, head_dim=16,
            max_position_embeddings=512,
        ),
    }  # fmt: skip


def write_documents(folder: Path, tokenizer: Any, output: Path) -> None:
    """Write passages of each book, from evenly spaced places."""
    with output.open("w", encoding="utf-8") as file:
        for path in sorted(folder.glob("*.txt")):
            text = path.read_text(encoding="utf-8")
            ends = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            begins = [begin for begin, _ in ends["offset_mapping"]]
            for start in np.linspace(0, len(begins) - PASSAGE_TOKENS - 1, PASSAGES).astype(int):
                passage = text[begins[start] : begins[start + PASSAGE_TOKENS]]
                file.write(json.dumps({"text": passage}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("texts", type=Path)
    parser.add_argument("held_out", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1500)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    tokenizer = hf.AutoTokenizer.from_pretrained(MODELS["ropext://demo"])
    write_documents(given.held_out, tokenizer, given.work / "documents.jsonl")
    tokens = tokens_of(given.texts, given.work)
    for name, config in configs().items():
        folder = given.work / name
        if folder.exists():
            continue
        torch.manual_seed(SEED)
        model = hf.AutoModelForCausalLM.from_config(config)
        print(f"{name}: {model.num_parameters():,} parameters", flush=True)
        length = config.max_position_embeddings
        train(Logits(model), tokens, given.steps, BATCH * 256 // length, length, RATE)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
