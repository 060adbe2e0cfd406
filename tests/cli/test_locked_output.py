"""A command whose output another process is writing ends at once, with exit code 7."""

import json
import subprocess
import sys

import pytest

import ropext as library
from ropext.errors import OutputExists, OutputLocked

HOLD = """
import sys
from pathlib import Path
from ropext.base.locks import locked
real = Path(sys.argv[1])
with locked(real, real):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def held(tmp_path):
    """Let another process hold the lock of a path until the test ends."""
    holders = []

    def hold(name):
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLD, tmp_path / name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        holders.append(holder)
        assert holder.stdout.readline() == "locked\n"
        return holder

    yield hold
    for holder in holders:
        holder.communicate()


# No model, no documents and no server of these names exist: what opens one ends with 2 or 5.
COMMANDS = {
    "extend": (["extend", "./missing", "--method", "yarn", "--factor", 2], "out"),
    "extend, in a dry run": (["extend", "./missing", "--factor", 2, "--dry-run"], "out"),
    "extend, by force": (["extend", "./missing", "--factor", 2, "--force"], "out"),
    "eval": (["eval", "./missing", "--data", "no.txt", "--lengths", 64], "out"),
    "eval of a server": (["eval", "--endpoint", "http://127.0.0.1:1/v1"], "out"),
    "finetune": (["finetune", "./missing", "--data", "no.txt"], "out.run"),
    "fit": (["fit", "./missing", "--data", "no.txt", "--factor", 2], "out.run"),
    "run": (["run", "recipe.yaml"], "out.run"),
    "extend with a later step": (
        ["extend", "./missing", "--factor", 2, "--method", "yarn", "--eval", "no.txt"],
        "out.run",
    ),
    "demo": (["demo"], "out"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_locked_output_is_exit_code_7(ropext, tmp_path, monkeypatch, held, command):
    words, lock = COMMANDS[command]
    monkeypatch.chdir(tmp_path)
    recipe = "model: ./missing\nextend: {method: yarn, factor: 2}\n"
    (tmp_path / "recipe.yaml").write_text(recipe)
    holder = held(lock)
    before = sorted(tmp_path.iterdir())
    code, out, err = ropext(*words, "-o", "out", "--json")
    assert code == 7, err
    assert f"is being written by process {holder.pid} on " in err
    assert json.loads(out)["exit_code"] == 7
    assert sorted(tmp_path.iterdir()) == before
    holder.communicate()
    if command != "demo":  # which would now run
        assert ropext(*words, "-o", "out")[0] in (2, 5)


def test_an_output_that_only_exists_stays_exit_code_2(ropext, tmp_path, llama):
    out = tmp_path / "out"
    out.mkdir()
    (out / "note.txt").write_text("mine")
    words = ("extend", llama, "--method", "yarn", "--factor", 2, "--no-verify", "-o", out)
    assert ropext(*words)[0] == 2
    assert ropext(*words, "--force")[0] == 2


def test_python_gets_a_kind_of_output_exists(tmp_path, llama, held):
    held("out")
    with pytest.raises(OutputLocked) as refused:
        library.extend(llama, tmp_path / "out", method="yarn", factor=2, no_verify=True)
    assert isinstance(refused.value, OutputExists)
    assert OutputExists.exit_code == 2
