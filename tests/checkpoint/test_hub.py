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

CANARY = "hf_canaryCANARYcanary0123456789"

OPEN = """
import json, sys
from ropext.checkpoint import open_snapshot
from ropext.errors import RopextError
try:
    found = open_snapshot(sys.argv[1], revision=sys.argv[2] or None, weights=sys.argv[3] == "True")
except RopextError as error:
    print(json.dumps({"error": str(error), "kind": type(error).__name__}))
else:
    print(json.dumps({"directory": str(found.directory), "files": dict(found.files),
                      "hub_id": found.hub_id, "commit": found.commit, "name": found.name,
                      "config": found.config["model_type"], "weights": found.weight_files}))
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
        "org/broken": files | {"config.json": b'{"model_type": '},
        "org/partial": {name: data for name, data in files.items() if "00002-of" not in name},
    }
    stub = Stub(repos)
    stub.gated.add("org/gated")
    with serving(stub):
        yield stub


def ask(hub, cache: Path, model: str, *, revision: str = "", weights: bool = False, **extra: str):
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
        [sys.executable, "-c", OPEN, model, revision, str(weights)],
        env=environment | extra,
        cwd=cache,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert CANARY not in done.stdout + done.stderr
    return json.loads(done.stdout)


def test_small_files_first_and_weights_when_asked(hub, tmp_path: Path):
    hub.fetched.clear()
    small = ask(hub, tmp_path, "org/model")
    assert (small["hub_id"], small["commit"], small["name"]) == ("org/model", COMMIT, "org/model")
    assert small["directory"].startswith(str(tmp_path))
    assert small["weights"] == []
    assert {"config.json", "tokenizer.json", "modeling_custom.py"} <= set(hub.fetched)
    assert "1_Pooling/config.json" in small["files"]
    assert not [name for name in hub.fetched if name.endswith((".safetensors", ".gguf"))]
    assert not [name for name in hub.fetched if name.startswith("original/")]

    hub.fetched.clear()
    whole = ask(hub, tmp_path, "org/model", weights=True)
    assert len(whole["weights"]) == 2
    assert sorted(hub.fetched) == whole["weights"]  # nothing twice

    hub.fetched.clear()
    offline = ask(hub, tmp_path, "org/model", weights=True, HF_HUB_OFFLINE="1")
    assert offline == whole
    assert ask(hub, tmp_path, "org/model", weights=True, HF_ENDPOINT="http://127.0.0.1:9") == whole
    assert hub.fetched == []


def test_a_revision(hub, tmp_path: Path):
    assert ask(hub, tmp_path, "org/model", revision="v1")["commit"] == COMMIT
    assert ask(hub, tmp_path, "org/model", revision=COMMIT)["commit"] == COMMIT
    found = ask(hub, tmp_path, "org/model", revision="v9")
    assert found["kind"] == "InputError"
    assert "no revision 'v9'" in found["error"]


CASES = {
    "unknown": ("org/nothing", {}, "neither a local directory nor a model on the hub"),
    "gated": ("org/gated", {}, "hf auth login"),
    "pickled": ("org/pickled", {}, "pickled weights alone (pytorch_model.bin)"),
    "broken": ("org/broken", {}, "cut short"),
    "partial": ("org/partial", {}, "lacks 1 of the 2 shards"),
    "no network": ("org/model", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "cannot be reached"),
    "offline": ("org/model", {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE"),
    "not an id": ("a/b/c", {}, "does not exist"),
    "dots": ("../x", {}, "does not exist"),
}


@pytest.mark.parametrize("case", CASES)
def test_one_sentence_for(hub, tmp_path: Path, case: str):
    model, environment, words = CASES[case]
    found = ask(hub, tmp_path, model, weights=True, **environment)
    assert found["kind"] == "InputError"
    assert words in found["error"]
    assert "\n" not in found["error"]


def test_a_hub_that_is_down(hub, tmp_path: Path):
    hub.broken = True
    try:
        found = ask(hub, tmp_path, "org/model")
    finally:
        hub.broken = False
    assert found["kind"] == "InputError"


def test_a_cache_that_cannot_be_written(hub, tmp_path: Path):
    (tmp_path / "file").write_text("x")
    found = ask(hub, tmp_path, "org/model", HF_HOME=str(tmp_path / "file"))
    assert found["kind"] == "InputError"
    assert "\n" not in found["error"]
