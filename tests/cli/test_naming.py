"""What help and lists name."""

import json

import pytest
from command_line import run


@pytest.mark.parametrize("words", [("--help",), ("inspect", "--help"), ("plan", "--help")])
def test_the_help_mentions_gguf(words, capsys):
    assert "GGUF" in run(*words, capsys=capsys)[1].out


def test_self_extend_is_described(capsys):
    code, shown = run("methods", "self-extend", capsys=capsys)
    assert code == 0
    assert "arXiv 2401.01325" in shown.out
    assert "stored   only in memory" in shown.out
    data = json.loads(run("methods", "self-extend", "--json", capsys=capsys)[1].out)
    assert [knob["flag"] for knob in data["knobs"]] == ["--window", "--group", "--literal"]
