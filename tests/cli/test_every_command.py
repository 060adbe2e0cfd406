"""Rules for every command: stdout, stderr, --json, --quiet, exit codes, no escape codes.

Each command has a row; a new one fails until it has its own. All rows run in one interpreter whose
standard output and error are files, so that lines that a library prints past Python are seen too.
They run on a model with code of its own, which none of them runs.
"""

import json
import signal
import subprocess
import sys

import pytest
from canaries import HEAR, TOKENS, check, check_files
from command_line import BLANK_PICTURES, drive, environment
from stranger import write_stranger

from ropext.cli.app import COMMANDS

QUICK = ("--factor", "4", "--force", "-o", "OUT")
TRAINED = ("--data", "ropext://tuning", "--batch-tokens", "1024", "--force", "-o", "OUT")
JUDGED = ("--held-out", "2", "--retrieval-items", "0")
ROWS = {
    "inspect": ("stranger",),
    "plan": ("stranger", "--factor", "4"),
    "extend": ("stranger", *QUICK),
    "verify": ("extended",),
    "fit": ("stranger", "--start", "yarn", "--factor", "2", "--steps", "1", *JUDGED, *TRAINED),
    "finetune": ("extended", "--steps", "1", "--eval-documents", "0", *TRAINED),
    "run": ("smoke.yaml", "-o", "OUT", "--force"),
    "recipes": ("ls",),
    "schema": (),
    "eval": ("extended", "--data", "ropext://held-out", "--max-docs", "1", "-o", "evaluation"),
    "compare": ("evaluation",),
    "methods": (),
}
# Modules that a stranger's folder may hold, and that nothing started there may import.
SHADOWS = ("warnings", "contextlib", "torch", "transformers", "json", "numpy", "accelerate", "yaml")
# Rows that their own tests run, with --json and with --quiet.
ELSEWHERE = {
    "push": "tests/checkpoint/test_publishing.py, which has a hub; test_secrets.py",
    "demo": "tests/demo, for its length",
    "serve": "tests/serving, which asks it",
}
SMOKE = """\
model: stranger
extend: {method: ntk, factor: 2}
evaluate: {data: ropext://held-out, max_docs: 1, lengths: "256,512"}
"""


def test_every_command_has_a_row():
    assert set(ROWS) | set(ELSEWHERE) == set(COMMANDS)
    assert not set(ROWS) & set(ELSEWHERE)


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Return the output of each command with --json and with --quiet."""
    folder = tmp_path_factory.mktemp("every")
    for name in SHADOWS:
        (folder / f"{name}.py").write_text(
            "open(__file__ + '.ran', 'w').close()\nraise SystemExit(9)"
        )
    (folder / "smoke.yaml").write_text(SMOKE)
    write_stranger(folder / "stranger", folder / "code.ran")
    lines, keys = [["extend", "stranger", "--factor", "2", "-o", "extended", "-q"]], [None]
    for name, words in ROWS.items():
        for way in ("--json", "--quiet"):
            own = [f"out-{name}" if word == "OUT" else word for word in words]
            lines.append([name, *own, way])
            keys.append((name, way))
    lines += [["push", "extended", "org/name", "--dry-run"]]
    answers = drive(folder, lines, BLANK_PICTURES + HEAR, **TOKENS)
    assert [code for code, _, _ in answers[-1:]] == [0], answers[-1:]
    return dict(zip(keys, answers, strict=False)) | {"folder": folder}


@pytest.mark.slow
def test_no_command_imports_from_the_working_folder(said):
    """Nor does a process that it starts: Python, torch or transformers looks for each of these
    names."""
    assert not list(said["folder"].rglob("*.ran"))


@pytest.mark.slow
def test_no_command_runs_the_models_code(said):
    """tests/cli/test_strangers.py shows that it would run with the user's consent."""
    assert not (said["folder"] / "code.ran").exists()
    assert (said["folder"] / "extended/evil.py").exists()


@pytest.mark.slow
def test_no_command_shows_a_token(said):
    """A token in its environment is neither printed, nor written, nor given to a process that it
    starts. Failures, and commands that use a hub, are in tests/reliability/test_secrets.py."""
    folder = said["folder"]
    for name in ROWS:
        for way in ("--json", "--quiet"):
            _, out, err = said[name, way]
            check(out + err, f"{name} {way}")
    check_files(folder)
    assert "proof/child" in (folder / "started.txt").read_text()


@pytest.mark.slow
def test_as_a_module_it_imports_no_library_from_the_working_folder(tmp_path):
    """Python's own start of `-m` reads contextlib and warnings from there before any line of ours:
    docs/security.md."""
    for name in set(SHADOWS) - {"contextlib", "warnings"}:
        (tmp_path / f"{name}.py").write_text("raise SystemExit(9)")
    words = ("eval", "ropext://demo", "--data", "ropext://held-out", "--max-docs", "1", "--json")
    done = subprocess.run(
        [sys.executable, "-m", "ropext", *words, "--lengths", "256"],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_json_is_one_document_on_stdout(said, name):
    code, out, err = said[name, "--json"]
    assert code == 0, err
    json.loads(out)  # exactly one: anything before or after it is an error
    assert out.endswith("\n")
    assert "\x1b" not in out + err  # no colour, no cursor: this is no terminal
    assert "\r" not in err  # no bar either


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_quiet_leaves_stderr_empty_and_still_gives_the_result(said, name):
    code, out, err = said[name, "--quiet"]
    assert (code, err) == (0, "")
    assert out.strip()
    assert "\x1b" not in out


MISTAKES = [
    *([name, "--no-such-option"] for name in COMMANDS),
    *([name, "one", "two", "three", "--json", "--factor"] for name in ("plan", "extend")),
    *([name, "no/such/thing", "--json"] for name in ("inspect", "verify", "compare", "run")),
    ["plan", "ropext://demo", "--factor", "much"],
    ["extend", "ropext://demo", "--factor", "4"],
    ["finetune", "ropext://demo", "--data", "ropext://tuning"],
    ["eval", "ropext://demo", "--data", "gone.jsonl", "--quiet"],
    # Said before anything is computed: nothing can be pushed from here (no token, offline mode).
    ["extend", "ropext://demo", "--factor", "4", "-o", "out", "--push-to-hub", "org/name"],
    ["finetune", "gone", "--data", "gone.jsonl", "-o", "out", "--push-to-hub", "org/name"],
    ["fit", "gone", "--factor", "4", "--data", "gone", "-o", "out", "--push-to-hub", "org/name"],
    ["run", "smoke-test", "-o", "out", "--push-to-hub", "org/name"],
    ["extend", "ropext://demo", "--factor", "4", "-o", "out", "--public"],
    ["methods", "nope"],
    ["nope"],
    ["--nope"],
]


@pytest.mark.slow
def test_a_mistake_exits_2_with_one_sentence_on_stderr(tmp_path):
    for words, (code, out, err) in zip(MISTAKES, drive(tmp_path, MISTAKES), strict=True):
        assert code == 2, (words, err)
        if "--json" in words:
            told = json.loads(out)
            assert (err, told["exit_code"]) == (f"error: {told['error']}\n", 2)
        else:
            assert out == "", words
        assert err.startswith("error: "), (words, err)
        assert err.count("\n") == 1, (words, err)
        assert "\x1b" not in err, words
        if "--push-to-hub" in words:
            assert "HF_HUB_OFFLINE" in err, words
    assert {path.name for path in tmp_path.iterdir()} == {"said-1", "said-2"}


INTERRUPT = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "ropext.cli." + sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from ropext.__main__ import main
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_an_interrupt_before_the_work_is_a_sentence_and_130(tmp_path, name):
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPT, name, "--json"],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 130, done.stderr
    assert json.loads(done.stdout)["exit_code"] == 130
    assert done.stderr.startswith("error: interrupted")
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_scripts_background_process_survives_ctrl_c(tmp_path):
    """A shell without job control starts it with Ctrl-C ignored, which is for the script."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPT, "methods"],
        cwd=tmp_path,
        env=environment(tmp_path),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "yarn" in done.stdout
