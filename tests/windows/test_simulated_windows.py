"""The program under a simulated Windows (simulated/sitecustomize.py) gives the bytes of Linux.

Each story runs twice, in folders of one name: once on the plain system, once masked, with every
process that it starts. Only a real machine shows differences that the mask does not know
(docs/versions.md).
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import BLANK_PICTURES, DRIVER, FIRST_APART, NONE_APART, environment
from gguf_files import making
from tiny_checkpoint import make_llama

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the mask is made for Linux")
MASK = Path(__file__).with_name("simulated")
YARN = ("--method", "yarn", "--factor", "2")
QUICK = {
    "inspect": ("inspect", "base"),
    "plan": ("plan", "base", *YARN),
    "extend": ("extend", "base", *YARN, "--no-verify", "-o", "out"),
    "extend --force": ("extend", "base", *YARN, "--no-verify", "-o", "out", "--force"),
    "extend --force again": ("extend", "base", *YARN, "--no-verify", "-o", "out", "--force"),
    "hard": ("extend", "base", *YARN, "--no-verify", "-o", "hard", "--link", "hard"),
    "symlink": ("extend", "base", *YARN, "--no-verify", "-o", "soft", "--link", "symlink"),
    "refused": ("extend", "base", *YARN, "--no-verify", "-o", "out"),
    "inspect GGUF": ("inspect", "model.gguf"),
    "extend GGUF": ("extend", "model.gguf", *YARN, "-o", "long.gguf"),
    "extend GGUF --force": ("extend", "model.gguf", *YARN, "-o", "long.gguf", "--force"),
    "verify GGUF": ("verify", "long.gguf"),
    "recipes": ("recipes", "ls"),
}
TRAINED = ("--data", "ropext://tuning", "--batch-tokens", "1024", "--seed", "3")
JUDGED = ("--held-out", "2", "--retrieval-items", "0")
FIT = ("--start", "yarn", "--factor", "2", "--steps", "1", *JUDGED)
LONG = {
    "extend": ("extend", "ropext://demo", *YARN, "-o", "extended"),
    "verify": ("verify", "extended"),
    "fit": ("fit", "ropext://demo", *FIT, *TRAINED, "-o", "fitted"),
    "run": ("run", "recipe.yaml", "-o", "out"),  # it extends, trains and reads
    "compare": ("compare", "out.run/evaluation:base", "out.run/evaluation:untouched"),
}
RECIPE = """\
model: ropext://demo
extend: {method: ntk, factor: 2}
finetune: {data: "ropext://tuning", steps: 2, save_every: 1, batch_tokens: 1024, eval_documents: 0}
evaluate: {data: ropext://held-out, max_docs: 2, lengths: "256,512"}
"""


def around(folder, masked, **more):
    place = environment(folder) | more
    if masked:
        place["PYTHONPATH"] = f"{MASK}{os.pathsep}{place['PYTHONPATH']}"
        place["ROPEXT_SEES"] = str(folder.parent / "never")
    return place


def inputs(folder):
    folder.mkdir(parents=True)
    make_llama(folder / "base")
    making.write(folder / "model.gguf")
    (folder / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    return folder


def told(folder, masked, story):
    """Return {step: (exit code, stdout, stderr)} of command lines in one interpreter."""
    # The mask must see the proof's other process; the others are as on Linux.
    before = BLANK_PICTURES + (FIRST_APART if masked else NONE_APART)
    done = subprocess.run(
        [sys.executable, "-P", "-c", before + DRIVER, json.dumps(list(story.values()))],
        cwd=folder,
        env=around(folder, masked),
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(story, map(json.loads, done.stdout.splitlines()), strict=True))


def contents(folder):
    """Return every file of a folder by its bytes, without times and the driver's files."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".log" and not path.name.startswith("said-")
        and path.name not in ("log.txt")
        and ".cache" not in path.parts
    }  # fmt: skip


def both(tmp_path, story, before=lambda folder: None):
    said, trees = [], []
    for system in ("linux", "windows"):
        folder = inputs(tmp_path / system / "here")
        if system == "windows":
            before(folder)
        said.append(told(folder, system == "windows", story))
        trees.append(contents(folder))
        for step, (code, _, err) in said[-1].items():
            assert code == (2 if step == "refused" else 0), (system, step, err)
    assert not (tmp_path / "windows" / "never").exists()
    assert not [name for name in trees[1] if ".ropext-" in name]
    assert trees[0].keys() == trees[1].keys()
    other = [name for name in trees[0] if trees[0][name] != trees[1][name]]
    assert [name for name in other if name != "soft/ropext.json"] == []  # it lists the links
    return said


def test_quick_commands_give_the_same_bytes(tmp_path):
    linux, windows = both(tmp_path, QUICK)
    for step in ("inspect", "inspect GGUF", "verify GGUF", "recipes"):
        assert linux[step] == windows[step]
    assert "hard linked instead of symlinked" in "".join(windows["symlink"][1:])
    place = tmp_path / "windows" / "here"
    one, two = (os.stat(place / name / "model.safetensors") for name in ("base", "soft"))
    assert one.st_ino == two.st_ino


def test_a_console_of_cp1252_escapes_letters_that_it_lacks(tmp_path):
    """A folder's name that its encoding lacks is escaped, in JSON as JSON does; a dash is not."""
    folder = inputs(tmp_path / "windows" / "here")
    (folder / "base").rename(folder / "模型 – ü")
    place = around(folder, True, PYTHONIOENCODING="cp1252")
    for words in (("inspect", "模型 – ü"), ("inspect", "模型 – ü", "--json"), ("inspect", "模")):
        done = subprocess.run(
            [sys.executable, "-m", "ropext", *words],
            cwd=folder,
            env=place,
            capture_output=True,
            check=False,
        )
        assert done.returncode == (2 if words[1] == "模" else 0), done.stderr
        said = (done.stdout + done.stderr).decode("cp1252")
        if "--json" in words:
            assert "模型 – ü" in json.dumps(json.loads(said), ensure_ascii=False)
        else:
            assert "\\u6a21" in said
    assert "模型 – ü" not in said


SCANNED = """\
import tempfile, pathlib, ropext
held = []
def say(sentence):
    held.extend(map(open, pathlib.Path(tempfile.gettempdir()).glob("ropext-*/base/*/*")))
options = {"data": "ropext://held-out", "lengths": [512], "max_docs": 1}
options |= {"method": ["yarn"], "target": 512, "kl": True}
print(ropext.evaluate("ropext://demo", say=say, **options).frame.lengths)
assert held
"""


def test_an_evaluation_ends_though_a_virus_scanner_reads_its_folder(tmp_path):
    """The base's states for --kl are in the temporary folder; Windows deletes no file in use."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCANNED],
        env=around(inputs(tmp_path / "here"), True, TMPDIR=str(tmp_path)),
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "(512,)\n"), done.stderr


def killed(folder):
    """Start the last of the long commands and kill it in the middle of its fine-tuning."""
    child = subprocess.Popen(
        [sys.executable, "-m", "ropext", *LONG["run"]],
        cwd=folder,
        env=around(folder, True),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while not list(folder.rglob("checkpoint-1")) and child.poll() is None:
        time.sleep(0.05)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL


@pytest.mark.slow
def test_long_commands_give_the_same_bytes(tmp_path):
    """This includes a killed run that resumes."""
    both(tmp_path, LONG, before=killed)
