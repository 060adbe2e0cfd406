"""Tiny random models, built once per session and never changed by a test."""

import pytest
from tiny_llama import new_llama, write_tokenizer


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """An unextended checkpoint with a tokenizer."""
    directory = tmp_path_factory.mktemp("models") / "base"
    new_llama().save_pretrained(directory)
    write_tokenizer(directory)
    return directory
