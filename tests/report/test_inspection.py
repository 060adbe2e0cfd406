"""The screen of `inspect` for an embedding in which some pairs do not rotate."""

import json

import configs

from ropext.files import inspecting
from ropext.results.report import text


def shown(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    return text.inspection_text(inspecting.inspect(str(tmp_path)))


def test_pairs_that_turn_are_counted(tmp_path):
    """A full layer of Gemma 4 has heads of 512 channels, of which a quarter turns: 64 pairs."""
    gemma = shown(tmp_path, configs.GEMMA4)
    assert "rotary dim   512 channels (64 of 256 rotary pairs rotate, split in halves)" in gemma
    assert "rotary dim   256 of 256 channels (128 rotary pairs, split in halves)" in gemma
    assert "rotary dim   128 of 128 channels (64 rotary pairs, split" in shown(
        tmp_path, configs.LLAMA
    )
