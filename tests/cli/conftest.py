"""A tiny checkpoint, and the command line run in this process."""

import command_line
import pytest
from tiny_checkpoint import make_llama


@pytest.fixture
def llama(tmp_path):
    return make_llama(tmp_path / "base")


@pytest.fixture
def ropext(capsys):
    """Run the command line in this process: (exit code, stdout, stderr)."""

    def run(*words):
        code, said = command_line.run(*words, capsys=capsys)
        return code, said.out, said.err

    return run
