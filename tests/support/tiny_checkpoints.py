"""A tiny random checkpoint on the disk, documents, and one way to evaluate it."""

import json

import numpy as np
from small_models import tiny
from small_tokenizer import make_tokenizer

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "and", "runs"]
LENGTHS = "64,128,256"


def write_checkpoint(path, **changes):
    """Write a Llama of context 64 with a tokenizer that puts a BOS."""
    tokenizer = make_tokenizer()
    model = tiny(vocab_size=len(tokenizer), **changes)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def write_documents(path, count=9, words=160, seed=0):
    """Write `count` documents of random words, each longer than 256 tokens."""
    rng = np.random.default_rng(seed)
    rows = [{"text": " ".join(rng.choice(WORDS, words)) + f" number {k}"} for k in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
