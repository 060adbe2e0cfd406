"""Every command with tokens in its environment and in the hub's store; nothing shows one.

Searched: stdout, stderr, every file that was written, all that a hub was sent but the token's own
header, and the command line of every process that was started. The tokens differ in form from
`hf_...`, which is hidden by its form alone.
"""

import base64
import json
import os
import subprocess
import sys

import pytest
from cli.test_every_command import ROWS, SMOKE
from hub_stub import Stub, serving

from ropext.cli.app import COMMANDS

pytestmark = pytest.mark.slow

FIRST, SECOND, STORED, KEY = (f"CaNaRy{number}OfTheTests{number}" for number in range(4))
PASSWORD = "CaNaRyPassword"
ADDRESS = f"https://user:{PASSWORD}@127.0.0.1:9/model"
SECRETS = (FIRST, SECOND, STORED, KEY, PASSWORD)

# One interpreter for many commands. What each process is started with is told by Python itself.
DRIVER = """
import contextlib, io, json, sys, traceback
lines, heard = json.loads(sys.stdin.read()), open("started.txt", "w")
def hook(event, args):
    if event in ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system"):
        heard.write(event + " " + repr(args[:2]) + "\\n")
sys.addaudithook(hook)
from proving import first_apart
from ropext.cli.app import main
from ropext import demo
# The demo's own recipe, on less.
less = "finetune: {data: 'ropext://tuning', eval_documents: 2, batch_tokens: 1024, steps: 1}"
asked = "max_docs: 8, tasks: [passkey], items: 1, lengths: [256, 1024]"
read = "evaluate: {data: 'ropext://held-out', " + asked + "}"
with open("cheaper.yaml", "w") as file:
    file.write(f"model: ropext://demo\\nextend: {{method: yarn, factor: 4}}\\n{less}\\n{read}\\n")
demo.RECIPE = "cheaper.yaml"
first_apart()
for words in lines:
    out, err, code = io.StringIO(), io.StringIO(), 0
    sys.argv = ["ropext", *words]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        except BaseException:
            traceback.print_exc()
            code = 1
    print(json.dumps([code, out.getvalue(), err.getvalue()]), file=sys.__stdout__, flush=True)
"""


def drive(folder, lines, **own):
    """[exit code, stdout, stderr] of each command line, in a folder that is their home too."""
    home = folder / "home"
    (home / "hub").mkdir(parents=True, exist_ok=True)
    keep = {key: os.environ[key] for key in ("PATH", "OMP_NUM_THREADS") if key in os.environ}
    keep |= {"HOME": str(home), "HF_HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path)}
    keep |= {"HF_HUB_DISABLE_XET": "1", "NO_PROXY": "*", "ROPEXT_ENDPOINT_KEY": KEY}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        input=json.dumps([list(map(str, words)) for words in lines]),
        cwd=folder,
        env=keep | {"HF_HUB_VERBOSITY": "debug", "HF_DEBUG": "1"} | own,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    check(done.stderr, "what is said past Python's streams")
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(said) == len(lines)
    for words, (_, out, err) in zip(lines, said, strict=True):
        check(out, f"stdout of {words}")
        check(err, f"stderr of {words}")
        assert "Traceback" not in err, err[-2000:]
    check_files(folder)
    return [code for code, _, _ in said]


def check(text, where):
    coded = base64.b64encode(PASSWORD.encode()).decode().rstrip("=")
    for secret in (*SECRETS, coded):
        assert secret not in text, where


def check_files(folder):
    for path in folder.rglob("*"):
        if path.is_file() and path != folder / "home" / "token":
            check(path.read_bytes().decode("latin-1"), str(path))


@pytest.fixture
def hub():
    stub = Stub({"org/gated": {"config.json": b"{}"}, "org/open": {}})
    stub.gated.add("org/gated")
    stub.writers[FIRST] = "org"
    with serving(stub):
        yield stub


EXTEND = ("extend", "ropext://demo", "--factor", "2")
OTHERS = {
    "push": ("extended", "org/name", "--results", "evaluation"),
    "demo": ("-o", "demo"),
}
CHEAPER = {"fit": ("--held-out", "2", "--retrieval-items", "0")}
# What goes wrong, with the exit code.
FAILURES = [
    (("plan", "org/gated", "--factor", "2"), 2),
    (("plan", "nobody/nothing", "--factor", "2"), 2),
    (("push", "extended", "other/name"), 2),
    (("push", "extended", "org/open"), 2),
    ((*EXTEND, "-o", "not-pushed", "--push-to-hub", "other/name"), 4),
    (("verify", "extended", "--endpoint", f"http://user:{PASSWORD}@127.0.0.1:9"), 2),
    (("verify", "extended", "--endpoint", "http://127.0.0.1:9"), 5),
    (("serve", ADDRESS), 2),
    (("run", "secret.yaml", "-o", "never"), 2),
    (("run", "smoke.yaml", "-o", "never", f"evaluate.data={ADDRESS}.jsonl"), 2),
    (("run", "smoke.yaml", "-o", "never", f"model={FIRST}/model"), 2),
    (("extend", ADDRESS, "--factor", "2", "-o", "never", "seed=1"), 2),
    (("plan", ADDRESS, "--factor", "2"), 2),
    (("eval", "extended", "--data", f"{ADDRESS}.jsonl"), 2),
    (("eval", "extended", "--data", "ropext://held-out", "--adapter", ADDRESS), 2),
]


def test_no_command_shows_a_token(tmp_path, hub):
    (tmp_path / "smoke.yaml").write_text(SMOKE)
    (tmp_path / "secret.yaml").write_text("model: ./${HF_TOKEN}\nextend: {factor: 2}\n")
    rows = {
        name: [
            f"out-{name}" if word == "OUT" else word for word in (*words, *CHEAPER.get(name, ()))
        ]
        for name, words in (ROWS | OTHERS).items()
    }
    # A new command is run here too; `serve`, which does not end by itself, among the failures, and
    # what it logs in tests/serving.
    assert {*rows, "serve"} == set(COMMANDS)
    lines = [[*EXTEND, "-o", "extended"], *([name, *words] for name, words in rows.items())]
    tokens = {"HF_TOKEN": FIRST, "HUGGING_FACE_HUB_TOKEN": SECOND, "HF_ENDPOINT": hub.url}
    codes = drive(tmp_path, lines + [words for words, _ in FAILURES], **tokens)
    found = dict(zip(map(tuple, lines), codes, strict=False))
    assert found.pop(("demo", "-o", "demo")) in (0, 3)  # one step may reach no gate
    assert set(found.values()) == {0}, found
    assert codes[len(lines) :] == [code for _, code in FAILURES]
    started = (tmp_path / "started.txt").read_text()
    assert "proof/child" in started  # the proof's process was seen
    for repo, files in hub.repos.items():
        for name, content in files.items():
            check(content.decode("latin-1"), f"{name} of {repo}")
    assert "ropext.json" in hub.repos["org/name"]


def test_the_hubs_own_store_is_as_silent(tmp_path, hub):
    """A token that `hf auth login` stored, which this hub does not know."""
    (tmp_path / "home" / "hub").mkdir(parents=True)
    (tmp_path / "home" / "token").write_text(STORED)
    lines = [
        [*EXTEND, "-o", "extended", "--no-verify"],
        ["push", "extended", "org/name"],
        [*EXTEND, "-o", "other", "--push-to-hub", "org/name"],
        ["plan", "org/gated", "--factor", "2"],
    ]
    assert drive(tmp_path, lines, HF_ENDPOINT=hub.url) == [0, 2, 4, 2]
    assert "org/name" not in hub.repos


def test_a_password_in_the_hubs_address_is_not_repeated(tmp_path, hub):
    secret = base64.b64encode(f"user:{PASSWORD}".encode()).decode()
    hub.writers[f"Basic {secret}"] = "org"
    lines = [
        [*EXTEND, "-o", "extended", "--no-verify"],
        ["push", "extended", "org/name", "--json"],
        ["push", "extended", "other/name"],
        ["plan", "nobody/nothing", "--factor", "2"],
    ]
    address = hub.url.replace("http://", f"http://user:{PASSWORD}@")
    assert drive(tmp_path, lines, HF_ENDPOINT=address, HF_TOKEN=FIRST) == [0, 0, 2, 2]
