"""One guard knows when two paths are one place and which files are ropext's own, and it sees every
path."""

import hashlib
import inspect
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import get_args

import command_line
import numpy as np
import pyarrow.parquet
import pytest
from marked import checkpoint, mark

import ropext
from ropext.base import bundled, guard
from ropext.base.bundled import MODELS
from ropext.base.errors import OutputExists, RopextError, UsageError
from ropext.cli.app import COMMANDS
from ropext.cli.options import command_of
from ropext.results import rundir
from ropext.results.measurement import MeasuredModel, Measurement
from ropext.results.perplexity import LossStatistics, Reading
from ropext.results.values import Bootstrap

# --- identity ---


@pytest.fixture
def twice(tmp_path, monkeypatch):
    """Make `there` another name of `here`, as after a second mount."""
    (tmp_path / "here/model/sub").mkdir(parents=True)
    (tmp_path / "here/model/config.json").write_text("{}")
    here, there, real = tmp_path / "here", tmp_path / "there", os.stat

    def stat(path, *words, **how):
        text = path if isinstance(path, int) else os.path.abspath(path)
        if not isinstance(text, int) and Path(text).is_relative_to(there):
            path = here / Path(text).relative_to(there)
        return real(path, *words, **how)

    monkeypatch.setattr(os, "stat", stat)
    return here, there


@pytest.mark.parametrize(
    ("read", "write", "said"),
    [
        ("model", "model", "is the input itself"),
        ("model", "model/out", "is inside the input"),
        ("model", "model/sub/not/yet", "is inside the input"),
        ("model/config.json", "model", "which ropext writes; copy it to another place first"),
        ("model/sub", ".", "is inside"),
        ("model/sub", "model", "is inside"),
    ],
)
@pytest.mark.parametrize("way", ["plain", "twice", "link"])
def test_the_guard_refuses_an_output_under_another_name_of_an_input(
    twice, tmp_path, read, write, said, way
):
    here, there = twice
    if way == "link":
        (tmp_path / "link").symlink_to(here)
    source = {"plain": here, "twice": there, "link": tmp_path / "link"}[way]
    with pytest.raises(UsageError) as error:
        guard.check({"--data": source / read}, {"--output": here / write})
    for part in (said, f"{source / read} (--data)", f"{here / write} (--output)"):
        assert part in str(error.value)


def test_the_guard_accepts_places_with_similar_names(tmp_path):
    for name in ("a", "a-2", "ab"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "f").write_text("the same")
    os.link(tmp_path / "a/f", tmp_path / "ab/g")  # the input keeps its own name
    guard.check({"x": tmp_path / "a", "y": None, "z": "org/name"}, {"--output": tmp_path / "a-2"})
    (tmp_path / "a/broken").symlink_to(tmp_path / "nowhere")
    guard.check({"x": [tmp_path / "a/f"]}, {"--output": tmp_path / "ab"})
    guard.check({"x": "nul\0byte", "y": "x" * 5000}, {"--output": tmp_path / "new/out"})


@pytest.mark.parametrize("name", ["model.safetensors", "sub/x.jsonl", "folder"])
def test_targets_of_links_are_read_too(tmp_path, name):
    (tmp_path / "X/folder").mkdir(parents=True)
    (tmp_path / "S" / name).parent.mkdir(parents=True)
    (tmp_path / "S" / name).symlink_to(tmp_path / "X" / Path(name).name)
    (tmp_path / "X/model.safetensors").touch()
    (tmp_path / "X/x.jsonl").touch()
    with pytest.raises(UsageError, match=r"X/.* \(MODEL\) is inside .*X \(--output\)"):
        guard.check({"MODEL": tmp_path / "S"}, {"--output": tmp_path / "X"})


def test_nothing_is_written_through_a_link(tmp_path):
    (tmp_path / "there").mkdir()
    for target in ("there", "nowhere"):
        (tmp_path / "out").symlink_to(tmp_path / target)
        with pytest.raises(OutputExists, match="is a link, and links are not written through"):
            guard.check({}, {"--output": tmp_path / "out"})
        (tmp_path / "out").unlink()


# --- single files ---

NOT_OURS = {
    "weights": b"\x08\0\0\0\0\0\0\0{}",
    "another program's picture": b"\x89PNG\r\n\x1a\n....tEXtSoftware\0Matplotlib",
    "nothing": b"",
}


@pytest.mark.parametrize("content", NOT_OURS.values(), ids=NOT_OURS)
def test_a_picture_replaces_pictures_of_ropext_alone(tmp_path, content, capsys):
    file = tmp_path / "x.png"
    file.write_bytes(content)
    code, said = command_line.run("inspect", "ropext://demo", "--plot", file, capsys=capsys)
    assert (code, file.read_bytes()) == (2, content)
    assert "(--plot) exists, and ropext did not write it; move or rename it" in said.err
    file.unlink()
    for _ in range(2):
        assert command_line.run("inspect", "ropext://demo", "--plot", file)[0] == 0
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    os.rename(file, tmp_path / "kept.png")
    file.symlink_to(tmp_path / "kept.png")
    before = (tmp_path / "kept.png").stat()
    assert command_line.run("plan", "ropext://demo", "--factor", "2", "--plot", file)[0] == 2
    assert (tmp_path / "kept.png").stat() == before


# --- every option of every command ---

# Options and arguments whose value is a text that is no place on this machine.
WORDS = """action attn_implementation base_model begin chat_args column data_revision depths
device device_map dtype endpoint factor family for_loaders keys kv lengths license lm_eval
memory method name only plain push_to_hub report_to repository revision split split_documents
start targets words"""
# (command, its option): the words that give it a path IN; what else the command needs.
EXTENDED = ("ext", "--data", "texts.jsonl", "-o", "OUT")
PORT = ("--endpoint", "http://127.0.0.1:9", "--tasks", "passkey", "-o", "OUT")
KEPT = ("--plain", "http://127.0.0.1:9", "--fingerprint", "IN")
PATHS = {
    ("inspect", "model"): ("IN", "--plot", "p.png"),
    ("inspect", "plot"): ("ropext://demo", "--plot", "IN"),
    ("plan", "model"): ("IN", "--factor", "2", "--plot", "p.png"),
    ("plan", "plot"): ("ropext://demo", "--factor", "2", "--plot", "IN"),
    ("plan", "measure"): ("ropext://demo", "--factor", "2", "--measure", "IN", "--plot", "p.png"),
    ("plan", "pair_factors"): ("base", "--pair-factors", "IN", "--plot", "p.png"),
    ("plan", "like"): ("base", "--like", "IN", "--plot", "p.png"),
    ("plan", "finetune"): ("base", "--factor", "2", "--finetune", "IN", "--plot", "p.png"),
    ("extend", "model"): ("IN", "--factor", "2", "-o", "OUT"),
    ("extend", "pair_factors"): ("base", "--pair-factors", "IN", "-o", "OUT"),
    ("extend", "like"): ("base", "--like", "IN", "-o", "OUT"),
    ("extend", "output"): ("base", "--factor", "2", "-o", "IN"),
    ("extend", "data"): ("base", "--method", "auto", "--factor", "2", "--data", "IN", "-o", "OUT"),
    ("extend", "fit"): ("base", "--factor", "2", "--fit", "IN", "-o", "OUT"),
    ("extend", "finetune"): ("base", "--factor", "2", "--finetune", "IN", "-o", "OUT"),
    ("extend", "evaluate"): ("base", "--factor", "2", "--eval", "IN", "-o", "OUT"),
    ("verify", "directory"): ("IN", "--fix"),
    ("verify", "against"): ("base", "--fix", "--against", "IN"),
    ("verify", "fingerprint"): (*("base", "--endpoint", "http://127.0.0.1:9"), *KEPT),
    ("fit", "model"): ("IN", "--data", "t.jsonl", "--factor", "2", "-o", "OUT"),
    ("fit", "data"): ("base", "--data", "IN", "--factor", "2", "-o", "OUT"),
    ("fit", "output"): ("base", "--data", "t.jsonl", "--factor", "2", "-o", "IN"),
    ("finetune", "directory"): ("IN", "--data", "t.jsonl", "-o", "OUT"),
    ("finetune", "data"): ("base", "--data", "IN", "-o", "OUT"),
    ("finetune", "evaluate"): ("base", "--data", "t.jsonl", "--eval", "IN", "-o", "OUT"),
    ("finetune", "output"): ("base", "--data", "t.jsonl", "-o", "IN"),
    ("run", "recipe"): ("recipe.yaml", "-o", "OUT"),
    ("run", "output"): ("recipe.yaml", "-o", "IN"),
    ("eval", "model"): ("IN", "--tasks", "passkey", "-o", "OUT"),
    ("eval", "data"): ("base", "--data", "IN", "-o", "OUT"),
    ("eval", "passages"): ("base", "--tasks", "qa_1", "--passages", "IN", "-o", "OUT"),
    ("eval", "tasks"): ("base", "--tasks", "passkey,IN.jsonl", "-o", "OUT"),
    ("eval", "base"): ("base", "--tasks", "passkey", "--base", "IN", "-o", "OUT"),
    ("eval", "adapter"): ("base", "--tasks", "passkey", "--adapter", "IN", "-o", "OUT"),
    ("eval", "fail_if"): ("base", "--data", "t", "--fail-if", "tail@1k > vs IN", "-o", "OUT"),
    ("eval", "against"): (*PORT, "--against", "IN"),
    ("eval", "tokenizer"): (*PORT, "--tokenizer", "IN"),
    ("eval", "losses"): ("base", "--data", "t", "--losses", "IN"),
    ("eval", "output"): ("base", "--tasks", "passkey", "-o", "IN"),
    ("compare", "runs"): ("IN", "-o", "OUT"),
    ("compare", "fail_if"): ("run", "--fail-if", "tail@1k > vs IN", "-o", "OUT"),
    ("compare", "output"): ("run", "-o", "IN"),
    ("push", "directory"): ("IN", "org/name", "--dry-run"),
    ("push", "results"): ("ext", "org/name", "--results", "IN", "--dry-run"),
    ("demo", "output"): ("-o", "IN"),
}


def texts(name):
    """Yield the options and arguments of a command that take a text or a path."""
    for option, own in inspect.signature(command_of(name)).parameters.items():
        kinds = {get_args(own.annotation)[0]}
        while inner := {deeper for kind in kinds for deeper in get_args(kind)} - kinds:
            kinds |= inner
        if kinds & {str, Path}:
            yield option


WRITES_NOTHING = ("serve",)


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in WRITES_NOTHING])
def test_every_text_option_is_listed_as_a_path_or_not(name):
    """What takes a text is either given to the guard (`PATHS`) or no place (`WORDS`)."""
    taken = {option for command, option in PATHS if command == name}
    assert set(texts(name)) - set(WORDS.split()) == taken


class Stop(RopextError):
    """Enough was seen."""


@pytest.mark.parametrize(("name", "option"), PATHS, ids=["-".join(own) for own in PATHS])
def test_every_path_option_is_checked_by_the_guard(tmp_path, monkeypatch, name, option):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(bundled.MODELS["ropext://demo"], "base")
    checkpoint(tmp_path / "ext")
    given = "recipe.yaml" if option == "recipe" else "IN"
    (tmp_path / "recipe.yaml").write_text("model: base\nextend: {method: yarn, factor: 2}\n")
    if option in ("model", "directory", "recipe"):
        if option != "recipe":
            os.rename(tmp_path / "base", tmp_path / "IN")
        mark(tmp_path / "IN") if option == "directory" else None
    if option == "pair_factors":
        (tmp_path / "IN").write_text("1, 2")  # read with the options, before anything is written
    if (name, option) == ("compare", "fail_if"):  # a gate may also name a variant of the run
        words = ("--tasks", "passkey", "--items", "1", "--lengths", "128", "-o", "run")
        assert command_line.run("eval", "base", *words)[0] == 0
    seen = []

    def check(reads, writes):
        seen.extend(str(path) for _, path in (*guard._each(reads), *guard._each(writes)))
        if any(given in path for path in seen):
            raise Stop("seen")

    monkeypatch.setattr(guard, "check", check)
    with suppress(Exception):
        command_line.run(name, *PATHS[name, option])
    assert any(given in path for path in seen), seen


def log(lines):
    """Return a log of ropext's, as documented: its last line has the digest of the others."""
    digest = hashlib.sha256(lines.encode()).hexdigest()
    return lines + json.dumps({"sha256": digest}) + "\n"


def test_a_log_of_ropexts_is_known_by_the_digest_at_its_end(tmp_path):
    """Its content differs from run to run, and the record does not."""
    used = tmp_path / "used.log"
    used.write_text(log('{"seconds": 1}\n'))
    before = guard.states(tmp_path)
    used.write_text(log('{"seconds": 2}\n'))
    assert guard.states(tmp_path) == before == {"used.log": "log"}
    (tmp_path / "ropext.json").write_text(json.dumps({"files": before | {"train.log": "log"}}))
    (tmp_path / "train.log").write_text("mine")  # an older ropext listed every log so
    assert guard.recorded(tmp_path) == {"ropext.json", "used.log"}
    for edited in (log("") + "notes\n", "notes\n" + log(""), '{"seconds": 2}\n', "notes", ""):
        used.write_text(edited)
        assert guard.recorded(tmp_path) == {"ropext.json"}, edited


def test_force_keeps_a_log_that_was_edited(tmp_path, capsys):
    base = shutil.copytree(MODELS["ropext://demo"], tmp_path / "base")
    (base / "train.log").write_text("epoch 1\n")
    (base / "used.log").write_text("mine\n")
    words = ("extend", base, "--no-verify", "-o", tmp_path / "out", "--factor")
    assert command_line.run(*words, 2, capsys=capsys)[0] == 0
    assert command_line.run(*words, 4, "--force", capsys=capsys)[0] == 0
    for name in ("train.log", "used.log"):
        file = tmp_path / "out" / name
        before = file.read_text()
        file.write_text(f"{before}MY NOTES\n")
        code, said = command_line.run(*words, 2, "--force", capsys=capsys)
        assert code == 2
        assert f"added or edited since ropext wrote it: {name}; move" in said.err
        assert file.read_text() == f"{before}MY NOTES\n"
        file.write_text(before)


def rewritten(file):
    """Write a table again with pyarrow: the values and metadata stay the same, its own digest
    changes."""
    from pyarrow import parquet

    parquet.write_table(parquet.read_table(file), file)


DERIVED = {
    "bytes behind it": lambda file: file.write_bytes(file.read_bytes() + b"mine"),
    "another byte": lambda file: file.write_bytes(b"\x88" + file.read_bytes()[1:]),
}


@pytest.mark.parametrize("change", DERIVED.values(), ids=DERIVED)
def test_a_picture_that_was_derived_from_one_of_ropext_s_is_kept(tmp_path, change):
    file = tmp_path / "x.png"
    words = ("inspect", "ropext://demo", "--plot", file)
    assert command_line.run(*words)[0] == 0
    from PIL import Image

    Image.open(file).verify()  # each chunk has its checksum
    change(file)
    before = file.read_bytes()
    assert (command_line.run(*words)[0], file.read_bytes()) == (2, before)


@pytest.mark.parametrize("change", [*DERIVED.values(), rewritten], ids=[*DERIVED, "rewritten"])
def test_a_table_that_was_derived_from_one_of_ropext_s_is_kept(tmp_path, change):
    file = tmp_path / "x.parquet"
    frame = LossStatistics(4, (4,), 2, Bootstrap(0))
    reading = Reading("base", {4: [np.array([np.nan, 0.5, 0.25, 0.125])]})
    measured = Measurement(frame, {"base": MeasuredModel("base", reading)})
    texts = [("a", np.array([7, 8, 9, 10]))]
    for _ in range(2):
        rundir.write_losses(file, texts, measured)
        guard.check_file(file, "--losses", guard.LOSSES)
    assert pyarrow.parquet.read_table(file).column("loss").to_pylist() == [0.5, 0.25, 0.125]
    change(file)
    before = file.read_bytes()
    with pytest.raises(OutputExists, match=r"\(--losses\) exists, and (ropext did not|was edited)"):
        guard.check_file(file, "--losses", guard.LOSSES)
    assert file.read_bytes() == before


def test_a_tilde_is_the_home_folder_in_an_output_too(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    words = ("extend", "ropext://demo", "--factor", "2", "--no-verify", "-o")
    assert command_line.run(*words, "~/out", capsys=capsys)[0] == 0
    assert os.listdir(tmp_path) == ["home"]
    code, said = command_line.run(*words, "~", capsys=capsys)
    assert (code, os.listdir(tmp_path)) == (2, ["home"])
    assert f"{tmp_path / 'home'} (--output) exists" in said.err
    ropext.extend("ropext://demo", "~/out-2", factor=2, no_verify=True)
    assert sorted(os.listdir(tmp_path / "home")) == ["out", "out-2"]


def test_a_log_of_ropexts_that_was_copied_is_a_log(tmp_path):
    (tmp_path / "used.log").write_text(log("one\n"))
    (tmp_path / "train.log").write_text("one")
    known = {"used.log": "0" * 64, "train.log": "1" * 64}
    assert guard.states(tmp_path, known) == {"used.log": "log", "train.log": "1" * 64}
