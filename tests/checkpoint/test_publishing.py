"""`ropext push`, the real huggingface_hub against a small hub on this machine, over Git LFS.

Each command runs in an interpreter of its own: huggingface_hub reads its environment when imported.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hub_stub import Stub, serving
from marked import manifest
from sample_checkpoint import card, make_model, record, tree, write_json

from ropext.base.errors import InputError
from ropext.base.staging import Output, check_output
from ropext.files.checkpoint import open_snapshot, provenance
from ropext.files.checkpoint.card import Figure, render
from ropext.files.checkpoint.digests import Digests
from ropext.files.checkpoint.push import Head, _keep_card

pytestmark = pytest.mark.slow  # every interpreter imports huggingface_hub

CANARY = "hf_canaryCANARYcanary0123456789"
VALUE = {"value": 7.25, "se": 0.1, "ci95": [7.0, 7.5], "n": 8}


@pytest.fixture
def hub():
    stub = Stub({})
    stub.writers[CANARY] = "org"
    with serving(stub):
        yield stub


@pytest.fixture
def output(tmp_path):
    """Make a finished output with files that must stay in their places."""
    directory = make_model(tmp_path / "out")
    numbers = {"base": {"tail@8192": VALUE | {"value": 9.0}}, "tuned": {"tail@8192": VALUE}}
    (directory / "README.md").write_text(render(card(), (directory / "README.md").read_text()))
    for folder in ("training/runs", "base", "adapter", ".cache"):
        (directory / folder).mkdir(parents=True)
        (directory / folder / "file.json").write_text("{}")
    (directory / "training/losses.json").write_text("[1.5]")
    (directory / "training.log").write_text("12:00:00 began")
    made = record()
    provenance.write(
        type(made)(**vars(made) | {"more": {"finetune": {"numbers": numbers}}}), directory
    )
    beside = tmp_path / "out.run"
    beside.mkdir()
    (beside / "record.json").write_text("{}")
    return directory


def environment(hub, home: Path, **extra: str) -> dict[str, str]:
    own = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(sys.path),
        "HOME": str(home),
        "HF_HOME": str(home / "cache"),
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": CANARY,
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",  # the stub speaks Git LFS
        "NO_PROXY": "*",
    }
    return {key: value for key, value in (own | extra).items() if value}


def ropext(hub, home: Path, *words: object, **extra: str) -> subprocess.CompletedProcess:
    done = subprocess.run(
        [sys.executable, "-m", "ropext", *map(str, words)],
        env=environment(hub, home, **extra),
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
    )
    assert CANARY not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_an_output_goes_up_whole_with_its_figures_and_nothing_else(hub, output, tmp_path):
    mine = tree(output)
    done = ropext(hub, tmp_path, "push", output, "org/long", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    there = dict(hub.repos["org/long"])
    assert there.pop(".gitattributes")
    assert set(there) == {
        *("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"),
        *("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
        *("model.safetensors.index.json", "modeling_custom.py", "1_Pooling/config.json"),
        *("README.md", "ropext.json", "training/losses.json"),
    }
    changed = ("README.md", "ropext.json")
    assert {n: b for n, b in there.items() if n not in changed} == {
        name: content for name, content in mine.items() if name in there and name not in changed
    }
    record = json.loads(mine["ropext.json"])
    assert record.pop("files").keys() == mine.keys() - {"ropext.json"}
    assert json.loads(there["ropext.json"]) == record
    assert (told["private"], told["changed"], told["figures"]) == (True, True, 1)
    assert hub.private["org/long"] is True
    assert told["url"] == f"{hub.url}/org/long"
    assert sorted(told["files"]) == sorted(there)
    assert "%|" not in done.stderr  # no bar where nobody looks on

    from huggingface_hub import ModelCard  # the library's own reader of a model-index

    found = ModelCard(there["README.md"].decode()).data
    assert found.license == "mit"
    (figure,) = found.eval_results
    assert (figure.task_type, figure.metric_type, figure.metric_value) == (
        "text-generation",
        "perplexity",
        7.25,
    )
    assert figure.metric_name == "tail perplexity at 8,192 tokens (last tokens before it)"
    assert figure.metric_args == {"n": 8, "ci95": [7.0, 7.5]}
    assert found.model_name == "long"
    assert there["README.md"] == (output / "README.md").read_bytes() != mine["README.md"]
    again = ropext(hub, tmp_path, "push", output, "org/long")
    assert again.returncode == 0
    assert "is up to date" in again.stdout
    assert len(hub.commits["org/long"]) == 2
    check_output(Output(output, force=True))  # the card that push wrote is not the user's


def test_push_uploads_no_path_of_this_machine(hub, output, tmp_path):
    """Nor a private file under a weight file's name; a chat template goes up as it is."""
    template = "run /usr/bin/python3 <tool>/a/b</tool> https://x.org/a/b"
    for name, more in {
        "config.json": {"_name_or_path": "/home/alice/my models/base"},
        "tokenizer_config.json": {"name_or_path": r"C:\Users\alice\m", "chat_template": template},
        "ropext.json": {
            "command": [
                "ropext",
                "extend",
                "/home/alice/base",
                "--data=~/alice/books.jsonl",
                "org/m",
            ],
            "run": {"recipe": "model: /home/alice/base\nextend: {for: ./here/m}\n", "at": "a/b/c"},
        },
        "training/settings.json": [{"data": "/mnt/alice/b.jsonl"}, 1.5, None],
    }.items():
        path = output / name
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(more if isinstance(more, list) else known | more))
    mine = tree(output)
    done = ropext(hub, tmp_path, "push", output, "org/long")
    assert done.returncode == 0, done.stderr
    assert (
        "paths of this machine in config.json, ropext.json, tokenizer_config.json, " in done.stderr
    )
    there = hub.repos["org/long"]
    assert not [name for name, content in there.items() if b"alice" in content]
    assert json.loads(there["config.json"])["_name_or_path"] == "base"
    assert json.loads(there["tokenizer_config.json"])["name_or_path"] == "m"
    assert json.loads(there["tokenizer_config.json"])["chat_template"] == template
    found = json.loads(there["ropext.json"])
    assert found["command"] == ["ropext", "extend", "base", "--data=books.jsonl", "org/m"]
    assert found["run"] == {"recipe": "model: base\nextend: {for: ./here/m}\n", "at": "a/b/c"}
    after = tree(output)
    assert {n for n in mine if mine[n] != after[n]} <= {"README.md", "ropext.json"}
    again = ropext(hub, tmp_path, "push", output, "org/long")
    assert "is up to date" in again.stdout, again.stderr

    (tmp_path / "id_rsa").write_text("-----BEGIN OPENSSH PRIVATE KEY-----" * 9)
    (output / "model-00002-of-00002.safetensors").unlink()
    (output / "model-00002-of-00002.safetensors").symlink_to(tmp_path / "id_rsa")
    for words in ((), ("--dry-run",)):
        done = ropext(hub, tmp_path, "push", output, "org/other", *words)
        assert (done.returncode, done.stdout) == (2, "")
        assert "model-00002-of-00002.safetensors" in done.stderr
    assert "org/other" not in hub.repos


# Further keys of a variant in results.json.
UNREAD = {"model": "m", "target": None, "adapter": None, "store": "", "positions": []}
UNREAD |= {"retrieval": {}, "verdicts": []}


def test_figures_come_from_a_run_that_read_this_very_checkpoint(hub, output, tmp_path):
    own = Digests().of_checkpoint(open_snapshot(str(output)))
    variants = {
        "base": {"kind": "base", "model": own},
        "yarn-4x": {"kind": "extended", "model": own | {"config_sha256": "0"}},
        "tuned": {"kind": "extended", "model": own},
    }
    metrics = {"tail@8192": VALUE, "tail_nll@8192": VALUE, "passkey@8192": VALUE | {"value": 0.5}}
    run = tmp_path / "run"
    run.mkdir()
    manifest(run, "eval", {"variants": variants}, names={"data": "/home/me/books.jsonl"})
    frame = {"schema": 1, "context": 2048, "lengths": [8192], "tail_tokens": 512}
    frame |= {"seed": 0, "resamples": 1000, "documents": None, "warnings": []}
    frame |= {"protocol": "ropext", "protocol_text": "", "headline": "tail"}
    told = {
        label: {"kind": own["kind"], "passes": {}, "metrics": metrics} | UNREAD
        for label, own in variants.items()
    }
    write_json(run / "results.json", frame | {"variants": told})
    done = ropext(hub, tmp_path, "push", output, "org/long", "--public", "--results", run)
    assert done.returncode == 0, done.stderr
    assert "2 measured figures" in done.stdout
    assert hub.private["org/long"] is False
    text = hub.cards[-1]
    assert "tail perplexity at 8,192 tokens (last 512 tokens before it)" in text
    assert "passkey retrieval at 8,192 tokens, exact answers" in text
    assert "/home/me" not in text
    other = ropext(
        hub, tmp_path, "push", output, "org/long", "--public", "--results", f"{run}:base"
    )
    assert other.returncode == 2
    assert "did not measure" in other.stderr
    variants["yarn-4x"]["model"] = own
    manifest(run, "eval", {"variants": variants}, names={"data": "org/set"})
    several = ropext(hub, tmp_path, "push", output, "org/long", "--public", "--results", run)
    assert several.returncode == 2
    assert "yarn-4x, tuned" in several.stderr
    named = f"{run}:tuned"
    chosen = ropext(hub, tmp_path, "push", output, "org/long", "--public", "--results", named)
    assert chosen.returncode == 0
    assert "type: org/set" in hub.cards[-1]


REFUSALS = [
    # (environment, words, exit code, message)
    ({"HF_TOKEN": ""}, ("org/long",), 2, "HF_TOKEN, or log in once with `hf auth login`"),
    ({"HF_HUB_OFFLINE": "1"}, ("org/long",), 2, "HF_HUB_OFFLINE"),
    ({"HF_TOKEN": "hf_wrongwrongwrong"}, ("org/long",), 2, "does not know this token"),
    ({}, ("other/long",), 2, "may not write to other/long"),
    ({}, ("long",), 2, "error: push wants ORG/NAME"),
    ({"HF_TOKEN": ""}, ("long", "--dry-run"), 2, "error: push wants ORG/NAME"),
    ({}, ("org/open",), 2, "is a public repository"),
    ({}, ("org/full",), 2, "holds something else already (model.bin)"),
    ({"HF_ENDPOINT": "http://127.0.0.1:9"}, ("org/long",), 4, "cannot be reached"),
]


@pytest.mark.parametrize(("extra", "words", "code", "says"), REFUSALS)
def test_an_output_that_cannot_be_pushed_gives_one_sentence(
    hub, output, tmp_path, extra, words, code, says
):
    hub.repos |= {"org/open": {}, "org/full": {"model.bin": b"x"}}
    hub.private["org/full"] = True
    done = ropext(hub, tmp_path, "push", output, *words, "--quiet", **extra)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert "org/long" not in hub.repos
    assert not hub.sent


def test_other_content_is_replaced_only_by_force_and_stays_in_the_history(hub, output, tmp_path):
    hub.repos["org/full"] = {".gitattributes": b"", "model.bin": b"x", "config.json": b"{}"}
    hub.private["org/full"] = True
    hub.commits["org/full"] = ["c0ffee00c0ffee00c0ffee00c0ffee00c0ffee00"]
    done = ropext(hub, tmp_path, "push", output, "org/full", "--force")
    assert done.returncode == 0, done.stderr
    assert "model.bin" not in hub.repos["org/full"]
    assert hub.repos["org/full"]["config.json"] == (output / "config.json").read_bytes()
    assert len(hub.commits["org/full"]) == 2


# huggingface_hub waits half a minute between its tries.
IMPATIENT = """
import time
rest = time.sleep
time.sleep = lambda seconds: rest(min(seconds, 0.1))
"""


def test_a_broken_upload_shows_nothing_and_the_next_push_resumes(hub, output, tmp_path):
    hub.drop_after = 1
    (tmp_path / "sitecustomize.py").write_text(IMPATIENT)
    first = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    broken = ropext(hub, tmp_path, "push", output, "org/long", **first)
    assert broken.returncode == 4, broken.stderr
    assert "run the same command to resume" in broken.stderr
    assert set(hub.repos["org/long"]) == {".gitattributes"}
    assert len(hub.sent) == 1
    hub.drop_after = None
    done = ropext(hub, tmp_path, "push", output, "org/long")
    assert done.returncode == 0, done.stderr
    assert len(hub.sent) == 2  # the first file was not sent again
    assert "model-00002-of-00002.safetensors" in hub.repos["org/long"]


# Where an interrupt that is raised in the library would leave its threads waiting for ever.
SLOW = """
import time
from concurrent.futures import _base

def enter(self):
    for future in self.futures:
        future._condition.acquire()
        time.sleep(2)

_base._AcquireFutures.__enter__ = enter
"""


@pytest.mark.parametrize("slow", ["", SLOW])
def test_an_interrupt_of_an_upload_shows_nothing_and_the_next_push_resumes(
    hub, output, tmp_path, slow
):
    hub.go_on.clear()
    (tmp_path / "sitecustomize.py").write_text(slow)
    env = environment(hub, tmp_path)
    run = subprocess.Popen(
        [sys.executable, "-m", "ropext", "push", str(output), "org/long"],
        env=env | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{env['PYTHONPATH']}"},
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert hub.arrived.wait(600)
    run.send_signal(signal.SIGINT)
    # Line by line: what readline has taken ahead, communicate would not see.
    assert "pushing" in run.stderr.readline()
    assert "error: interrupted; stopping after the current piece" in run.stderr.readline()
    hub.go_on.set()
    try:
        assert run.wait(timeout=100) == 4
    finally:
        run.kill()
    assert "org/long is unchanged" in run.stderr.read()
    assert set(hub.repos["org/long"]) == {".gitattributes"}
    done = ropext(hub, tmp_path, "push", output, "org/long")
    assert done.returncode == 0, done.stderr
    assert len(hub.sent) == 2


def test_a_concurrent_push_is_not_overwritten(hub, output, tmp_path):
    hub.others_push = True
    done = ropext(hub, tmp_path, "push", output, "org/long")
    assert done.returncode == 4, done.stderr
    assert "was changed by someone else meanwhile" in done.stderr
    assert set(hub.repos["org/long"]) == {".gitattributes"}


def test_a_card_that_the_hub_refuses_is_named_and_changes_nothing(hub, output, tmp_path):
    text = (output / "README.md").read_text()
    (output / "README.md").write_text(text.replace("license: mit", "license: nonsense"))
    done = ropext(hub, tmp_path, "push", output, "org/long")
    assert done.returncode == 2, done.stderr
    assert "the hub refuses the head of the card" in done.stderr
    assert '"license" must be one of the known' in done.stderr
    assert set(hub.repos["org/long"]) == {".gitattributes"}


@pytest.mark.parametrize("quiet", [True, False])
def test_no_bar_is_drawn_without_a_terminal(hub, tmp_path, quiet):
    base = make_model(tmp_path / "base")
    names = [path for path in base.rglob("*") if path.is_file()]
    hub.repos["org/model"] = {str(p.relative_to(base)): p.read_bytes() for p in names}
    words = ("extend", "org/model", "--factor", "2", "-o", "out", "--no-verify")
    done = ropext(hub, tmp_path, *words, *(["-q"] if quiet else []))
    assert done.returncode == 0, done.stderr
    assert "Fetching" not in done.stderr
    assert "%|" not in done.stderr
    assert (tmp_path / "out/config.json").is_file()


def test_only_an_output_of_ropext_is_pushed(hub, tmp_path):
    plain = make_model(tmp_path / "plain")
    done = ropext(hub, tmp_path, "push", plain, "org/long")
    assert done.returncode == 2
    assert "is no output of ropext (it has no ropext.json)" in done.stderr
    gone = ropext(hub, tmp_path, "push", tmp_path / "nothing", "org/long")
    assert gone.returncode == 2


def test_a_push_that_fails_after_the_work_keeps_the_output_and_says_the_command(hub, tmp_path):
    words = ("extend", "ropext://demo", "--factor", "2", "--no-verify", "-o", "an output")
    hub.broken = True
    done = ropext(hub, tmp_path, *words, "--push-to-hub", "org/long", "--public", "--json")
    assert done.returncode == 4, done.stderr
    told = json.loads(done.stdout)  # the result of the finished push, all the same
    assert told["output"] == "an output"
    assert told["pushed"] is None
    assert "HTTP status 503" in done.stderr
    assert (tmp_path / "an output/model.safetensors").is_file()
    command = shlex.split(done.stderr.strip().splitlines()[-1].partition("push it: ")[2])
    assert command == ["ropext", "push", "an output", "org/long", "--public"]
    hub.broken = False
    again = ropext(hub, tmp_path, *command[1:], "--quiet")
    assert (again.returncode, again.stderr) == (0, "")
    assert hub.private["org/long"] is False
    assert "model.safetensors" in hub.repos["org/long"]


def test_an_extension_is_pushed_when_it_is_complete(hub, tmp_path):
    words = ("extend", "ropext://demo", "--factor", "2", "--no-verify", "-o", "out")
    done = ropext(hub, tmp_path, *words, "--push-to-hub", "org/long", "--json", "--quiet")
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert told["pushed"]["url"] == f"{hub.url}/org/long"
    assert hub.private["org/long"] is True
    card = (tmp_path / "out/README.md").read_bytes()
    assert card == hub.repos["org/long"]["README.md"]
    assert b"vllm serve org/long" in card


def test_a_run_whose_output_was_pushed_is_done_and_may_be_changed(hub, tmp_path):
    words = ("extend", "ropext://demo", "extend.no_verify=true", "-o", "out", "--factor")
    done = ropext(hub, tmp_path, *words, "2", "--push-to-hub", "org/long")
    assert done.returncode == 0, done.stderr
    again = ropext(hub, tmp_path, *words, "2")
    assert "plan skipped, extend skipped, report skipped" in again.stdout, again.stderr
    assert "vllm serve org/long" in (tmp_path / "out/README.md").read_text()
    assert ropext(hub, tmp_path, *words, "4").returncode == 0
    (tmp_path / "out/README.md").write_text("by hand")
    assert ropext(hub, tmp_path, *words, "2").returncode == 2


def test_a_card_that_cannot_be_written_here_is_noted_after_the_push(tmp_path):
    (tmp_path / "file").write_text("")
    (note,) = _keep_card(tmp_path / "file/README.md", "the card")
    assert "could not be updated to the hub's name" in note


def test_a_dry_run_shows_the_files_and_the_card_without_a_token(tmp_path):
    import ropext

    ropext.extend("ropext://demo", tmp_path / "out", method="yarn", factor=2, no_verify=True)
    card = tmp_path / "out/README.md"
    before = card.read_text()
    assert "pipeline('text-generation', 'out')" in before
    found = ropext.push(tmp_path / "out", "org/name", dry_run=True)
    assert (found.commit, found.changed) == (None, False)
    assert found.files["model.safetensors"] == (tmp_path / "out/model.safetensors").stat().st_size
    # The commands use the hub's name, and everything else is unchanged.
    assert "vllm serve org/name --max-model-len 512" in found.card
    assert "convert_hf_to_gguf.py --remote org/name --outfile name.gguf" in found.card
    assert "--model-path out" not in found.card
    head, _, tail = before.partition("### Serving")
    assert found.card.startswith(head)
    assert found.card.endswith(tail[tail.index("Written by ropext") :])
    assert "library_name: transformers\npipeline_tag: text-generation\n" in found.card
    # The demo's card has a license; a base on the hub it has not.
    assert found.notes == ("the card names no base_model; --base-model ORG/NAME adds it",)
    told = ropext.push(
        tmp_path / "out", "org/name", dry_run=True, license="a: b", base_model="org/base"
    )
    assert (told.notes, card.read_text()) == ((), before)
    assert "license: 'a: b'\n" in told.card
    assert "license: apache-2.0" not in told.card


def test_figures_replace_an_older_index_and_leave_the_rest_of_the_card():
    text = "---\nlicense: mit\nmodel-index:\n- name: old\n  results: []\ntags:\n- a\n---\n\n# T\n"
    head = Head([Figure("books", "accuracy", "n: 1", 0.5)])
    found = str(head.put_into(text, "org/new"))
    assert "old" not in found
    assert found.startswith("---\nlicense: mit\ntags:\n- a\nmodel-index:\n- name: new\n")
    assert found.endswith("\n---\n\n# T\n")
    assert str(head.put_into("# T\n", "org/new")).endswith("---\n# T\n")
    with pytest.raises(InputError, match=r"head of README.md cannot be read"):
        head.put_into("---\na: [\n---\n", "org/new")
