"""A dry run refuses the same calls as the run, in the same words, and neither changes anything."""

import json
import os
import shutil

import pytest

from ropext.base.bundled import MODELS


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Make an extension of the bundled model, and documents that are unfit in several ways."""
    import ropext

    folder = tmp_path_factory.mktemp("made")
    ropext.extend("ropext://demo", folder / "long", method="yarn", factor=2, no_verify=True)
    shutil.copytree(MODELS["ropext://demo"], folder / "base")
    shutil.copytree(MODELS["ropext://demo"], folder / "hollow")
    (folder / "hollow/model.safetensors").unlink()
    (folder / "short.jsonl").write_text(json.dumps({"text": "a few words"}) + "\n")
    (folder / "other.jsonl").write_text(json.dumps({"body": "words " * 900}) + "\n")
    for name in ("taken", "busy.run"):
        (folder / name).mkdir()
        (folder / name / "mine.txt").write_text("mine")
    (folder / "file").write_text("mine")
    return folder


TUNING = ("--data", "ropext://tuning")
FIT = ("fit", "ropext://demo", "--factor", "2", "--steps", "2")
FINETUNE = ("finetune", "long", "--steps", "2")
EVALUATE = ("eval", "long", "-o", "out")
LONG = "x" * 235  # a legal name, also with .run after it; not with ropext's additions
EXTEND = ("extend", "base", "--factor", "2")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*EXTEND, "-o", "taken"), "taken (--output) exists"),
        ((*EXTEND, "-o", "taken", "--force"), "is not marked as written by ropext"),
        ((*EXTEND, "-o", "base"), "is the input itself"),
        ((*EXTEND, "-o", "base/out"), "is inside the input"),
        ((*EXTEND, "-o", "file/out"), "cannot be written"),
        (("extend", "hollow", "--factor", "2", "-o", "out"), "hollow"),
        ((*EXTEND, "-o", "out", "--push-to-hub", "ORG/NAME"), "needs a token"),
        ((*EXTEND, "-o", LONG), "name too long"),
        ((*FIT, *TUNING, "-o", LONG), "name too long"),
        ((*FINETUNE, *TUNING, "-o", LONG), "name too long"),
        (("run", "smoke-test", "-o", LONG), "name too long"),
        ((*FIT, *TUNING, "-o", "taken"), "taken (--output) exists"),
        ((*FIT, *TUNING, "-o", "busy"), "holds something else"),
        ((*FIT, "--data", "short.jsonl", "-o", "out"), "512 tokens"),
        ((*FIT, "--data", "other.jsonl", "-o", "out"), "--column"),
        ((*FIT, *TUNING, "-o", "out", "--push-to-hub", "ORG/NAME"), "needs a token"),
        ((*FINETUNE, *TUNING, "-o", "taken"), "taken (--output) exists"),
        ((*FINETUNE, *TUNING, "-o", "busy"), "holds something else"),
        ((*FINETUNE, "--data", "short.jsonl", "-o", "out"), "512 tokens"),
        ((*FINETUNE, "--data", "other.jsonl", "-o", "out"), "--column"),
        ((*FINETUNE, *TUNING, "--eval", "short.jsonl", "-o", "out"), "512 tokens"),
        ((*FINETUNE, *TUNING, "-o", "out", "--push-to-hub", "ORG/NAME"), "needs a token"),
        ((*EVALUATE, "--data", "short.jsonl"), "reaches 64 tokens"),
        ((*EVALUATE, "--data", "other.jsonl"), "--column"),
        ((*EVALUATE, "--data", "nowhere.jsonl"), "nowhere.jsonl"),
        (("eval", "long", "--tasks", "passkey", "-o", "taken"), "holds something else"),
        (("eval", "hollow", "--tasks", "passkey"), "hollow"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, tuple) else "",
)
def test_a_dry_run_refuses_the_same_as_the_run(ropext, made, monkeypatch, words, said):
    monkeypatch.chdir(made)
    # A push is refused offline; and nobody is logged in, whoever runs this.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(made / "no-login"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    before = sorted(os.walk(made))
    told = []
    for dry in ([], ["--dry-run"]):
        code, out, err = ropext(*words, *dry)
        assert (code, out) == (2, ""), err
        told.append(next(line for line in err.splitlines() if line.startswith("error: ")))
        assert sorted(os.walk(made)) == before, dry
    assert said in told[0]
    assert told[0] == told[1]
