"""One run's folder is never another's: it is claimed, resumed, replaced, or refused by name."""

import hashlib
import json
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from marked import manifest

import ropext
from ropext.base import workdir
from ropext.base.errors import InputError, OutputExists, UsageError
from ropext.base.workdir import Workdir
from ropext.results import rundir
from ropext.results.measurement import write_piece

COMMANDS = ("eval", "fit", "finetune", "run")
KEPT = "readings/base/short/0a.npy"  # a name that a training gives


def place(tmp_path, command, output="out", **decides):
    return Workdir(tmp_path / output, command, decides)


def work(own, force=False):
    """Start a run that keeps a file and is interrupted."""
    with suppress(KeyboardInterrupt), own.claimed(force):
        write_piece(own.folder / KEPT, [1.0])
        raise KeyboardInterrupt


def named(own, command):
    """Return the output with which another command would use the same folder."""
    beside = own.command in workdir.BESIDE
    if beside == (command in workdir.BESIDE):
        return own.output
    return own.folder if beside else None


@pytest.mark.parametrize("theirs", COMMANDS)
@pytest.mark.parametrize("mine", COMMANDS)
def test_another_command_s_folder_is_refused_by_name(tmp_path, mine, theirs):
    old = place(tmp_path, theirs)
    work(old)
    output = named(old, mine)
    if mine == theirs or output is None:
        return
    own = Workdir(output, mine, {})
    assert own.folder == old.folder
    for force in (False, True, None):
        with pytest.raises(OutputExists, match=rf"ropext {theirs}, and ropext {mine} does not"):
            own.check(force)
        with pytest.raises(OutputExists, match="delete the folder"), own.claimed(force):
            pytest.fail("it was claimed")
    assert np.load(old.folder / KEPT) == [1.0]
    assert workdir.read(old.folder)["command"] == theirs


@pytest.mark.parametrize("command", COMMANDS)
def test_the_same_run_resumes_and_another_one_begins_on_request(tmp_path, command):
    first = place(tmp_path, command, data="a", sizes=(1, 2), model={"config": "c", "seed": 1})
    work(first)
    assert first.begun_manifest() is not None
    work(first)  # resumes: its file still exists, and its tuples are lists
    assert (first.folder / KEPT).is_file()
    other = place(tmp_path, command, data="a", sizes=(1, 2), model={"config": "c", "seed": 2})
    with pytest.raises(OutputExists, match=r"it differs in model\.seed\); repeat .*--force to"):
        other.check(False)
    with pytest.raises(OutputExists, match=r"give another -o$"):
        other.check(None)
    with other.claimed(True):
        assert not (other.folder / KEPT).exists()
    # What was of use until the output had its name goes; an evaluation and a run stay.
    assert other.folder.exists() == (command in ("eval", "run"))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_of_a_version_that_computes_otherwise_is_not_resumed(tmp_path, command):
    """Its values are the same, but their results are not."""
    work(place(tmp_path, command, schema=1, seed=1))
    newer = place(tmp_path, command, schema=2, seed=1)
    with pytest.raises(OutputExists, match=r"whose results differ; give .*--force to"):
        newer.check(False)
    with newer.claimed(True):
        assert not (newer.folder / KEPT).exists()


def test_a_run_that_failed_before_it_kept_anything_leaves_no_folder(tmp_path):
    own = place(tmp_path, "finetune", rank=9)
    with suppress(InputError), own.claimed(False):
        assert (own.folder / "run.json").is_file()
        raise InputError("--rank 9 is above 8")
    assert list(tmp_path.iterdir()) == []
    # Killed instead, it left a manifest alone: the corrected command takes that.
    manifest(own.folder, "finetune", {"rank": 9})
    place(tmp_path, "finetune", rank=8).check(False)


def test_of_several_processes_the_first_claims_and_none_is_cleared_away(tmp_path):
    own = place(tmp_path, "eval")
    with own.claimed(False, 1, 2):
        assert not own.folder.exists()
    with pytest.raises(InputError), own.claimed(False, 0, 2):
        raise InputError("of the first; the second may be about to write")
    assert own.begun_manifest() is not None


USERS = ("documents-2024/a.txt", "report.docx", "plots/mine", "plots/mine.png", "tuned/notes.md")


@pytest.mark.parametrize("command", ["eval", "fit", "finetune"])
@pytest.mark.parametrize("name", USERS)
def test_force_keeps_and_names_a_users_files(tmp_path, command, name):
    work(place(tmp_path, command, seed=1))
    other, said = place(tmp_path, command, seed=2), []
    (other.folder / name).parent.mkdir(parents=True, exist_ok=True)
    (other.folder / name).write_text("mine")
    with other.claimed(True, say=said.append):
        assert not (other.folder / KEPT).exists()
        assert said == [f"{other.folder} keeps {name}, which ropext did not write"]
    assert (other.folder / name).read_text() == "mine"


MADE = "report.md"
READ = "variants/base-0123456789abcdef/pass-64/0a.npy"
LISTING = ("eval", "compare", "demo")


def finished(own):
    """Run to the end: the log of a read model, and a report."""
    with own.claimed(False):
        write_piece(own.folder / READ, [2.0])
        own.write_results()
        (own.folder / MADE).write_text("made")


def listed(own):
    return json.loads((own.folder / "run.json").read_text())["files"]


@pytest.mark.parametrize("command", LISTING)
def test_files_of_a_run_are_in_its_manifest(tmp_path, command):
    own = place(tmp_path, command)
    finished(own)
    digests = {MADE: b"made", READ: (own.folder / READ).read_bytes()}
    wanted = {name: hashlib.sha256(text).hexdigest() for name, text in digests.items()}
    assert listed(own) == wanted
    before = (own.folder / "run.json").read_bytes()
    finished(own)
    assert (own.folder / "run.json").read_bytes() == before
    assert workdir.read(own.folder) == {"command": command, "decides": {}}


@pytest.mark.parametrize("command", LISTING)
@pytest.mark.parametrize("name", [MADE, READ, "plots/tail.png"])
def test_edited_and_added_files_of_a_run_are_kept_without_force(tmp_path, command, name):
    own = place(tmp_path, command)
    finished(own)
    (own.folder / name).parent.mkdir(exist_ok=True)
    (own.folder / name).write_text("mine")
    for force in (False, None):
        with (
            pytest.raises(OutputExists, match=rf"since ropext wrote its own: {name}; move them"),
            own.claimed(force),
        ):
            pytest.fail("it was claimed")
    assert (own.folder / name).read_text() == "mine"
    with own.claimed(True):
        assert (own.folder / READ).exists() == (name != READ)  # it is read again


def test_a_report_that_is_not_listed_is_ropext_s_while_a_run_writes_its_results(tmp_path):
    """After a kill; before that a user put it there."""
    own = place(tmp_path, "eval")
    work(own)
    (own.folder / MADE).write_text("mine")
    with pytest.raises(OutputExists, match=rf"wrote its own: {MADE}"):
        own.check(False)
    (own.folder / MADE).unlink()
    with suppress(KeyboardInterrupt), own.claimed(False):
        own.write_results()
        (own.folder / MADE).write_text("made")
        raise KeyboardInterrupt
    own.check(False)
    finished(own)
    assert set(listed(own)) == {MADE, READ, KEPT}


def test_units_that_another_run_read_go_and_a_user_s_files_stay(tmp_path):
    own = place(tmp_path, "eval")
    finished(own)
    users = [f"{STORE}/mine.npy", f"{STORE}/pass-64/mine.npy", "variants/my.json"]
    for name in users:
        (own.folder / name).write_text("mine")
    rundir.remove_unused_units(own.folder, [])
    left = {p.relative_to(own.folder).as_posix() for p in own.folder.rglob("*") if p.is_file()}
    assert left == {"run.json", MADE, *users}


STORE = str(Path(READ).parents[1])
CHECKPOINTS = ("best/checkpoint-6", "tuned/checkpoint-6-keep", "tuned/checkpoint-5-notes")


@pytest.mark.parametrize("command", ["fit", "finetune"])
@pytest.mark.parametrize("folder", CHECKPOINTS)
def test_a_checkpoint_that_a_user_saved_is_a_user_s(tmp_path, command, folder):
    own = place(tmp_path, command)
    work(own)
    for place_, text in ((folder, "mine"), ("tuned/checkpoint-6", "ropext's")):
        (own.folder / place_).mkdir(parents=True)
        for name in ("optimizer.pt", "adapter_model.safetensors", "complete", "notes.txt"):
            (own.folder / place_ / name).write_text(text)
    (own.folder / "tuned/checkpoint-6/notes.txt").unlink()
    with own.claimed(False):
        pass
    left = {p.relative_to(own.folder).as_posix() for p in own.folder.rglob("*") if p.is_file()}
    names = ("optimizer.pt", "adapter_model.safetensors", "complete", "notes.txt")
    assert left == {f"{folder}/{name}" for name in names}


@pytest.mark.parametrize("command", ["fit", "finetune"])
def test_notes_in_a_training_s_folder_outlive_it(tmp_path, command):
    own, said = place(tmp_path, command), []
    work(own)
    (own.folder / "tuned/checkpoint-2").mkdir(parents=True)
    (own.folder / "tuned/checkpoint-2/optimizer.pt").write_text("ropext's")
    (own.folder / "tuned/checkpoint-2/.tmpCXT7Zi").write_text("of safetensors, killed")
    (own.folder / "tuned/checkpoint-2/notes.txt").write_text("mine")
    (own.folder / "thoughts.md").symlink_to(tmp_path / "elsewhere")
    with own.claimed(False, say=said.append):
        pass
    left = {p.relative_to(own.folder).as_posix() for p in own.folder.rglob("*") if not p.is_dir()}
    assert left == {"tuned/checkpoint-2/notes.txt", "thoughts.md"}
    assert "keeps thoughts.md and tuned/checkpoint-2/notes.txt, which" in said[0]


def test_the_owner_of_a_folder_stays_recorded_while_another_run_is_removed(tmp_path, monkeypatch):
    work(place(tmp_path, "eval", seed=1))
    names, unlink = [], Path.unlink

    def noted(path, **how):
        names.append(path.name)
        unlink(path, **how)

    monkeypatch.setattr(Path, "unlink", noted)
    with place(tmp_path, "eval", seed=2).claimed(True):
        assert [name for name in names if not name.startswith(".")] == ["0a.npy"]


def test_a_folder_is_not_claimed_through_a_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OutputExists, match="is a link"), place(tmp_path, "eval").claimed(True):
        pytest.fail("it was claimed")


UNSEALED = '{"command": "eval", "decides": {}}'


@pytest.mark.parametrize("content", ["[]", "{}", UNSEALED, '{"ropext": "0", ' + UNSEALED[1:]])
def test_a_folder_with_a_foreign_run_json_is_refused(tmp_path, content):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/run.json").write_text(content)
    with pytest.raises(InputError, match=r"out.run\.json is not as ropext wrote it"):
        place(tmp_path, "eval").check(True)
    (tmp_path / "out/run.json").write_text("{")
    with pytest.raises(InputError, match=r"run\.json cannot be read"):
        place(tmp_path, "eval").check(True)


@pytest.mark.parametrize("key", ["settings", "resolved", "run_key", "fitted"])
def test_a_folder_with_a_foreign_manifest_json_is_refused(tmp_path, key):
    folder = place(tmp_path, "run").folder
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps({key: {}}))
    (folder / "data.bin").write_text("mine")
    for command in ("run", "fit", "finetune"):
        with pytest.raises(OutputExists, match="holds something else"):
            place(tmp_path, command).check(True)
    assert (folder / "data.bin").is_file()


# --- by the commands themselves ---


@pytest.fixture
def interrupted(tmp_path, monkeypatch):
    """Make the folder of a fine-tuning that was stopped after its first checkpoint."""
    monkeypatch.chdir(tmp_path)
    manifest(tmp_path / "X.run", "finetune")
    (tmp_path / "X.run/tuned/checkpoint-3").mkdir(parents=True)
    (tmp_path / "X.run/tuned/checkpoint-3/complete").touch()
    return tmp_path / "X.run"


RECIPE = {
    "model": "ropext://demo",
    "extend": {"method": "yarn", "factor": 2, "no_verify": True},
}


@pytest.mark.parametrize("force", [False, True])
def test_run_and_fit_leave_an_interrupted_finetune_alone(interrupted, force):
    before = sorted(interrupted.rglob("*"))
    for command in (
        lambda: ropext.run(RECIPE, "X", force=force),
        lambda: ropext.fit("ropext://demo", "ropext://tuning", "X", factor=2, force=force),
        lambda: ropext.evaluate("ropext://demo", "X.run", tasks=("passkey",), force=force),
    ):
        with pytest.raises(OutputExists, match=r"^X\.run holds a run of ropext finetune, and"):
            command()
    assert sorted(interrupted.rglob("*")) == before


def test_finetune_leaves_a_finished_run_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ropext.run(RECIPE, "X")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match=r"X\.run/extended/X \(DIR\) is inside X\.run"):
        ropext.finetune("X.run/extended/X", "ropext://tuning", "X", steps=2, force=True)
    shutil.copytree("X.run/extended/X", "copy")
    with pytest.raises(OutputExists, match=r"^X\.run holds a run of ropext run, and ropext fine"):
        ropext.finetune("copy", "ropext://tuning", "X", steps=2, force=True)
    shutil.rmtree("copy")
    assert sorted(tmp_path.rglob("*")) == before
