"""Hub ids, through the real huggingface_hub against a small hub on this machine.

Each case runs in an interpreter of its own: huggingface_hub reads its environment when imported.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hub_stub import COMMIT, Stub, serving
from sample_checkpoint import make_model

pytestmark = pytest.mark.slow  # every interpreter imports huggingface_hub

CANARY = "hf_canaryCANARYcanary0123456789"

OPEN = """
import json, sys
from ropext.files.checkpoint import open_snapshot
from ropext.base.errors import RopextError
for model, revision, weights in json.loads(sys.argv[1]):
    try:
        found = open_snapshot(model, revision=revision, weights=weights)
    except RopextError as error:
        print(json.dumps({"error": str(error), "kind": type(error).__name__}))
    else:
        print(json.dumps({"directory": str(found.directory), "files": dict(found.files),
                          "hub_id": found.hub_id, "commit": found.commit, "name": found.name,
                          "weights": found.weight_files}))
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    base = make_model(tmp_path_factory.mktemp("hub") / "base")
    files = {
        str(path.relative_to(base)): path.read_bytes() for path in base.rglob("*") if path.is_file()
    }
    pickled = {name: data for name, data in files.items() if "safetensors" not in name}
    del pickled["model.Q4.gguf"]
    repos = {
        "org/model": files,
        "org/gated": files,
        "org/pickled": pickled | {"pytorch_model.bin": b"\x80\x02"},
        "org/gguf": {"model.gguf": b"GGUF", "README.md": b"x"},
        "org/data": {"train.parquet": b"x"},
        "org/broken": files | {"config.json": b'{"model_type": '},
        "org/partial": {name: data for name, data in files.items() if "00002-of" not in name},
    }
    stub = Stub(repos)
    stub.gated.add("org/gated")
    with serving(stub):
        yield stub


def ask(hub, cache: Path, *questions: tuple[str, str | None, bool], **extra: str) -> list[dict]:
    """Return open_snapshot(model, revision, weights)'s answers to the questions, in one
    interpreter."""
    lines = run(hub, cache, OPEN, json.dumps(questions), **extra).splitlines()
    assert len(lines) == len(questions)
    return [json.loads(line) for line in lines]


def run(hub, cache: Path, code: str, argument: str, **extra: str) -> str:
    """Return the output of a program whose hub is the stub, and whose cache is `cache`."""
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(sys.path),
        "HOME": str(cache),
        "HF_HOME": str(cache),
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": CANARY,
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "NO_PROXY": "*",
    }
    done = subprocess.run(
        [sys.executable, "-c", code, argument],
        env=environment | extra,
        cwd=cache,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert CANARY not in done.stdout + done.stderr
    return done.stdout


def refused(answer: dict, words: str) -> None:
    assert answer["kind"] == "InputError"
    assert words in answer["error"]
    assert "\n" not in answer["error"]


def test_a_hub_model_fetches_weights_only_on_request(hub, tmp_path: Path):
    hub.fetched.clear()
    small, tagged, pinned, unknown = ask(
        hub,
        tmp_path,
        ("org/model", None, False),
        ("org/model", "v1", False),
        ("org/model", COMMIT, False),
        ("org/model", "v9", False),
    )
    assert (small["hub_id"], small["commit"], small["name"]) == ("org/model", COMMIT, "org/model")
    assert small["directory"].startswith(str(tmp_path))
    assert small["weights"] == []
    assert {"config.json", "tokenizer.json", "modeling_custom.py"} <= set(hub.fetched)
    assert "1_Pooling/config.json" in small["files"]
    assert not [name for name in hub.fetched if name.endswith((".safetensors", ".gguf"))]
    assert not [name for name in hub.fetched if name.startswith("original/")]
    assert len(hub.fetched) == len(set(hub.fetched))
    assert tagged["directory"] == pinned["directory"] == small["directory"]
    refused(unknown, "no revision 'v9'")

    hub.fetched.clear()
    question = ("org/model", None, True)
    (whole,) = ask(hub, tmp_path, question)
    assert len(whole["weights"]) == 2
    assert sorted(hub.fetched) == whole["weights"]  # nothing twice

    hub.fetched.clear()
    assert ask(hub, tmp_path, question, HF_HUB_OFFLINE="1") == [whole]
    assert ask(hub, tmp_path, question, HF_ENDPOINT="http://127.0.0.1:9") == [whole]
    assert hub.fetched == []


CASES = {
    "org/nothing": "neither a local directory nor a model on the hub",
    "nothing": "neither a local directory nor a model on the hub",
    "org/gated": "hf auth login",
    "org/pickled": "only pickled weights (pytorch_model.bin)",
    "org/gguf": "only GGUF files",
    "org/data": "no config.json",
    "org/broken": "cut short",
    "org/partial": "lacks 1 of the 2 shards",
    "a/b/c": "does not exist",
    "../x": "does not exist",
    "x--y": "neither a local directory nor a possible hub id",
}


def test_each_refusal_of_the_hub_gives_one_sentence(hub, tmp_path: Path):
    answers = ask(hub, tmp_path, *((model, None, True) for model in CASES))
    for answer, words in zip(answers, CASES.values(), strict=True):
        refused(answer, words)


MOVED = """
import json, sys
from urllib.request import urlopen
from ropext.files.checkpoint import open_snapshot, with_weights
small = open_snapshot("org/model")
(small.directory / "model-00002-of-00002.safetensors").unlink()  # a download that was interrupted
urlopen(sys.argv[1] + "/move").close()
whole = with_weights(small)
print(json.dumps([whole.commit, str(whole.directory) == str(small.directory), whole.revision,
                  whole.weight_files, open_snapshot("org/model").commit]))
"""


def test_weights_come_from_the_commit_whose_config_was_read(hub, tmp_path: Path):
    """The branch moves on between plan and download, and one shard is in the cache already."""
    ask(hub, tmp_path, ("org/model", None, True))
    try:
        done = run(hub, tmp_path, MOVED, hub.url)
    finally:
        hub.head = COMMIT
    commit, same, revision, weights, newer = json.loads(done)
    assert (commit, same, revision) == (COMMIT, True, None)
    assert len(weights) == 2
    assert newer != COMMIT


def test_an_unreachable_or_failing_hub_gives_one_sentence(hub, tmp_path: Path):
    question = ("org/model", None, False)
    refused(*ask(hub, tmp_path, question, HF_ENDPOINT="http://127.0.0.1:9"), "cannot be reached")
    refused(*ask(hub, tmp_path, question, HF_HUB_OFFLINE="1"), "HF_HUB_OFFLINE")
    hub.broken = True
    try:
        (answer,) = ask(hub, tmp_path, question)
    finally:
        hub.broken = False
    refused(answer, "HTTP status 503")


def test_a_hub_cache_that_cannot_be_written_gives_one_sentence(hub, tmp_path: Path):
    (tmp_path / "file").write_text("x")
    (answer,) = ask(hub, tmp_path, ("org/model", None, False), HF_HOME=str(tmp_path / "file"))
    refused(answer, "cannot be stored")
