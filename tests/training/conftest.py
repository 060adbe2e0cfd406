"""Tiny random models, built once per session and never changed by a test."""

import json
import random

import pytest
from tiny_llama import new_llama, write_tokenizer

WORDS = ("the cat sat", "on a mat", "and then", "it ran away", "over the hill", "with a dog")


def story(seed, length):
    """Return repetitive text, so that a few steps learn something."""
    draw = random.Random(seed)
    text = ""
    while len(text) < length:
        text += draw.choice(WORDS) + " "
    return text


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """Write an unextended checkpoint with a tokenizer; its embeddings are tied."""
    directory = tmp_path_factory.mktemp("models") / "base"
    new_llama(tie_word_embeddings=True).save_pretrained(directory)
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def extended(base):
    """Write the same checkpoint, extended from 64 to 256 tokens."""
    import ropext

    output = base.parent / "extended"
    ropext.extend(str(base), output, method="yarn", factor=4, no_verify=True)
    return output


@pytest.fixture(scope="session")
def stories(tmp_path_factory):
    """Write 24 documents of about 700 tokens, as jsonl."""
    path = tmp_path_factory.mktemp("data") / "stories.jsonl"
    lines = [json.dumps({"text": story(seed, 700)}) for seed in range(24)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path
