"""Secrets in the words and the environment of commands that push or fail; nothing shows one.

Searched: stdout, stderr, every file that was written, all that a hub was sent but the token's own
header, and the command line of every process that was started. Commands that end well are searched
in tests/cli/test_every_command.py, the demo in tests/demo and `serve` in tests/serving.
"""

import base64

import command_line
import pytest
from canaries import FIRST, HEAR, KEY, PASSWORD, SECOND, STORED, check, check_files
from cli.test_every_command import SMOKE
from hub_stub import Stub, serving

pytestmark = pytest.mark.slow

ADDRESS = f"https://user:{PASSWORD}@127.0.0.1:9/model"


def drive(folder, lines, **own):
    """Return the exit code of each command line, in a folder that is their home too."""
    home = folder / "home"
    (home / "hub").mkdir(parents=True, exist_ok=True)
    own |= {"HOME": str(home), "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "NO_PROXY": "*"}
    own |= {"HF_HUB_DISABLE_XET": "1", "ROPEXT_ENDPOINT_KEY": KEY}
    before = command_line.BLANK_PICTURES + HEAR
    told = command_line.drive(folder, [list(map(str, words)) for words in lines], before, **own)
    for words, (_, out, err) in zip(lines, told, strict=True):
        check(out, f"stdout of {words}")
        check(err, f"stderr of {words}")
        assert "Traceback" not in err, err[-2000:]
    check_files(folder)
    return [code for code, _, _ in told]


@pytest.fixture
def hub():
    stub = Stub({"org/gated": {"config.json": b"{}"}, "org/open": {}})
    stub.gated.add("org/gated")
    stub.writers[FIRST] = "org"
    with serving(stub):
        yield stub


# huggingface_hub then tells every request, its address as it is.
DEBUG = {"HF_HUB_VERBOSITY": "debug", "HF_DEBUG": "1"}
EXTEND = ("extend", "ropext://demo", "--factor", "2")
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


def test_no_failure_and_no_push_shows_a_token(tmp_path, hub):
    (tmp_path / "smoke.yaml").write_text(SMOKE)
    (tmp_path / "secret.yaml").write_text("model: ./${HF_TOKEN}\nextend: {factor: 2}\n")
    lines = [[*EXTEND, "-o", "extended"], ["push", "extended", "org/name"]]
    tokens = {"HF_TOKEN": FIRST, "HUGGING_FACE_HUB_TOKEN": SECOND, "HF_ENDPOINT": hub.url}
    codes = drive(tmp_path, lines + [words for words, _ in FAILURES], **tokens, **DEBUG)
    assert codes == [0, 0, *(code for _, code in FAILURES)]
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
    assert drive(tmp_path, lines, HF_ENDPOINT=hub.url, **DEBUG) == [0, 2, 4, 2]
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
