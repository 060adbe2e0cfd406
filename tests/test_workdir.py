"""One run's folder is never another's: claimed, gone on with, begun anew, or refused by name."""

import hashlib
import json
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from marked import manifest

import ropext
from ropext import workdir
from ropext.errors import InputError, OutputExists, UsageError
from ropext.results import rundir
from ropext.workdir import (
    Step,
    StepDir,
    StepRecord,
    Workdir,
    has_finished_step,
    left_by,
    step_record,
)

COMMANDS = ("eval", "fit", "finetune", "run")
KEPT = "readings/base/short/0a.npy"  # a name that a training gives


def place(tmp_path, command, output="out", **decides):
    return Workdir(tmp_path / output, command, decides)


def work(own, force=False):
    """A run that keeps something and is interrupted."""
    with suppress(KeyboardInterrupt), own.claimed(force):
        (own.folder / KEPT).parent.mkdir(parents=True, exist_ok=True)
        (own.folder / KEPT).write_text("kept")
        raise KeyboardInterrupt


def named(own, command):
    """Where another command would have the same folder."""
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
    assert (old.folder / KEPT).read_text() == "kept"
    assert workdir.read(old.folder)["command"] == theirs


@pytest.mark.parametrize("command", COMMANDS)
def test_the_same_run_goes_on_and_another_one_begins_anew_when_asked(tmp_path, command):
    first = place(tmp_path, command, data="a", sizes=(1, 2), model={"config": "c", "seed": 1})
    work(first)
    assert first.has_begun()
    work(first)  # goes on: it is there still, and its tuples are lists
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
def test_what_another_version_does_otherwise_is_not_gone_on_with(tmp_path, command):
    """Its values are the same, and what they give is not."""
    work(place(tmp_path, command, schema=1, seed=1))
    newer = place(tmp_path, command, schema=2, seed=1)
    with pytest.raises(OutputExists, match=r"which does this in another way; give .*--force to"):
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
    assert own.has_begun()


USERS = ("documents-2024/a.txt", "report.docx", "plots/mine", "plots/mine.png", "tuned/notes.md")


@pytest.mark.parametrize("command", ["eval", "fit", "finetune"])
@pytest.mark.parametrize("name", USERS)
def test_force_keeps_and_names_what_a_user_put_there(tmp_path, command, name):
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
    """A run to its end: what a model read, and a report."""
    with own.claimed(False):
        (own.folder / READ).parent.mkdir(parents=True, exist_ok=True)
        (own.folder / READ).write_text("read")
        own.write_results()
        (own.folder / MADE).write_text("made")


def listed(own):
    return json.loads((own.folder / "run.json").read_text())["files"]


@pytest.mark.parametrize("command", LISTING)
def test_what_a_run_wrote_stands_in_its_manifest(tmp_path, command):
    own = place(tmp_path, command)
    finished(own)
    digests = {MADE: b"made", READ: b"read"}
    wanted = {name: hashlib.sha256(text).hexdigest() for name, text in digests.items()}
    assert listed(own) == wanted
    before = (own.folder / "run.json").read_bytes()
    finished(own)
    assert (own.folder / "run.json").read_bytes() == before
    assert workdir.read(own.folder) == {"command": command, "decides": {}}


@pytest.mark.parametrize("command", LISTING)
@pytest.mark.parametrize("name", [MADE, READ, "plots/tail.png"])
def test_what_a_user_edited_or_added_is_kept_until_force(tmp_path, command, name):
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
    rundir.keep_only(own.folder, [])
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


def test_while_another_run_is_cleared_away_it_is_known_whose_folder_it_is(tmp_path, monkeypatch):
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
def test_what_is_no_manifest_of_ours_is_something_else(tmp_path, content):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/run.json").write_text(content)
    with pytest.raises(
        OutputExists, match=r"ropext eval would keep its run in .*, which holds something"
    ):
        place(tmp_path, "eval").check(True)
    (tmp_path / "out/run.json").write_text("{")
    with pytest.raises(InputError, match=r"run\.json cannot be read"):
        place(tmp_path, "eval").check(True)


@pytest.mark.parametrize("key", ["settings", "resolved", "run_key", "fitted"])
def test_a_stranger_s_manifest_makes_no_folder_ours(tmp_path, key):
    folder = place(tmp_path, "run").folder
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps({key: {}}))
    (folder / "data.bin").write_text("mine")
    for command in ("run", "fit", "finetune"):
        with pytest.raises(OutputExists, match="holds something else"):
            place(tmp_path, command).check(True)
    assert (folder / "data.bin").is_file()


class Written(Step):
    """A step that leaves one file with what its key says."""

    name = "extend"

    def __init__(self, place, schema, key):
        self.path = place / "made"
        self.schema = schema
        self.inputs = key

    def key(self):
        return self.inputs

    def look(self):
        return {"made": self.path.read_text()} if self.path.is_file() else None

    def make(self):
        self.path.write_text(json.dumps(self.inputs))


class Shared(Written):
    """One in which all processes take part."""

    everyone = True

    def make(self):
        self.taken.append("part")


class Killed(Written):
    def make(self):
        raise ZeroDivisionError


def step(place, schema=1, kind=Written, **key):
    return kind(place, schema, key)


RECORD = "stages/extend/run.json"  # where a run keeps what became of the step


def test_a_step_is_done_once_and_again_where_its_key_or_what_it_left_changed(tmp_path):
    said = []

    def done(**more):
        asked = more.pop("again", False)
        versions = {"torch": more.pop("torch", "2")}
        made = StepDir.of(step(tmp_path, **more), tmp_path, versions).do(said.append, asked)
        return said[-1] if made else None

    assert done(base="a", sizes=(1, 2)) == "extend: begins"
    assert done(base="a", sizes=(1, 2)) is None
    assert said[-1] == "extend: done before, skipped"
    assert done(base="a", sizes=(1, 2), again=True) == "extend: again, as asked"
    assert done(base="b", more=None) == "extend: again (changed: base, more, sizes)"
    assert done(base="b", more=None, schema=2).endswith("(this ropext does it in another way)")
    (tmp_path / "made").write_text("edited")
    assert done(base="b", more=None, schema=2).endswith("what it wrote is gone or was edited")
    assert done(base="b", more=None, schema=2, torch="3") is None
    assert said[-1].endswith("skipped (torch 2, now 3; --from extend does it again)")


def test_the_first_process_decides_for_all_whether_a_step_is_done(tmp_path):
    unseen = tmp_path / "not-seen-yet"
    sent, taken = [], []
    shared = step(tmp_path, kind=Shared, base="a")
    shared.taken = taken
    first = lambda left: sent.append(left) or left  # noqa: E731
    assert StepDir.of(step(tmp_path, base="a"), tmp_path).do(from_first=first)
    assert sent == [None, None]
    assert not StepDir.of(shared, tmp_path).do(from_first=first)
    # Another process does as the first says, whatever it sees itself.
    assert not StepDir.of(shared, unseen).do(rank=1, from_first=lambda left: sent[-1])
    assert StepDir.of(shared, tmp_path).do(rank=1, from_first=lambda left: None)
    assert taken == ["part"]
    assert not unseen.exists()


def test_a_step_that_was_killed_goes_on_or_is_taken_as_it_is(tmp_path):
    own = StepDir.of(step(tmp_path, base="a"), tmp_path)
    with pytest.raises(ZeroDivisionError):
        StepDir.of(step(tmp_path, kind=Killed, base="a"), tmp_path).do()
    assert step_record(tmp_path, "extend") == StepRecord({"base": "a"}, None)
    assert not has_finished_step(tmp_path)
    begun = (tmp_path / RECORD).read_bytes()
    said = []
    assert own.do(said.append)
    assert said == ["extend: resumes where it was interrupted"]
    assert step_record(tmp_path, "extend").outputs == {"made": '{"base": "a"}'}
    assert has_finished_step(tmp_path)
    finished = (tmp_path / RECORD).read_bytes()
    (tmp_path / RECORD).write_bytes(begun)  # killed when all was written
    assert not own.do()
    assert (tmp_path / RECORD).read_bytes() == finished
    edited = finished.decode().replace('"a"', '"b"')
    for torn in ("{", "[]", '{"schema": 1}', edited):
        (tmp_path / RECORD).write_text(torn)
        assert step_record(tmp_path, "extend") is None
        assert own.left() is None


def test_of_a_step_that_was_never_begun_no_key_is_asked_for(tmp_path):
    """All weights may be read for a key."""
    own = step(tmp_path, base="a")
    own.key = lambda: pytest.fail("its key was asked for")
    assert left_by(own, tmp_path) is None
    done = step(tmp_path, base="a")
    StepDir.of(done, tmp_path).do()
    assert left_by(done, tmp_path) == {"made": '{"base": "a"}'}
    assert left_by(step(tmp_path, base="b"), tmp_path) is None


def test_the_folders_of_steps_go_with_a_run_that_kept_nothing(tmp_path):
    """They hold what the run wrote, and no work of hours."""
    own = place(tmp_path, "run")
    with suppress(ZeroDivisionError), own.claimed(False):
        StepDir.of(step(tmp_path, kind=Killed, base="a"), own.folder).do()
    assert list(tmp_path.iterdir()) == []


# --- by the commands themselves ---


@pytest.fixture
def interrupted(tmp_path, monkeypatch):
    """The folder of a fine-tuning that was stopped after its first checkpoint."""
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
    with pytest.raises(UsageError, match=r"X\.run/extended/X \(DIR\) lies inside X\.run"):
        ropext.finetune("X.run/extended/X", "ropext://tuning", "X", steps=2, force=True)
    shutil.copytree("X.run/extended/X", "copy")
    with pytest.raises(OutputExists, match=r"^X\.run holds a run of ropext run, and ropext fine"):
        ropext.finetune("copy", "ropext://tuning", "X", steps=2, force=True)
    shutil.rmtree("copy")
    assert sorted(tmp_path.rglob("*")) == before
