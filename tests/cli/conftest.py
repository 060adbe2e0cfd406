"""A tiny checkpoint, and the command line run in this process."""

import sys

import pytest
from tiny_checkpoint import make_llama


@pytest.fixture
def llama(tmp_path):
    return make_llama(tmp_path / "base")


@pytest.fixture
def ropext(monkeypatch, capsys):
    """Run the command line in this process: (exit code, stdout, stderr)."""
    from ropext.cli.app import main

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["ropext", *map(str, words)])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        said = capsys.readouterr()
        return code, said.out, said.err

    return run
