"""One run's folder is never another's: claimed, gone on with, begun anew, or refused by name."""

import shutil
from contextlib import suppress
from pathlib import Path

import pytest

import ropext
from ropext import workdir
from ropext.errors import InputError, OutputExists
from ropext.files import write_json
from ropext.workdir import Ledger, Workdir

COMMANDS = ("eval", "fit", "finetune", "run", "demo")
EARLIER = Path(__file__).parent / "earlier_runs"  # as ropext left them before 22 November 2026


def place(tmp_path, command, output="out", **decides):
    return Workdir(tmp_path / output, command, decides)


def work(own, force=False):
    """A run that keeps something and is interrupted."""
    with suppress(KeyboardInterrupt), own.claimed(force):
        (own.folder / "kept").write_text("kept")
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
        with pytest.raises(OutputExists, match=rf"ropext {theirs}, which ropext {mine} does not"):
            own.check(force)
        with pytest.raises(OutputExists, match="delete the folder"), own.claimed(force):
            pytest.fail("it was claimed")
    assert (old.folder / "kept").read_text() == "kept"
    assert workdir.read(old.folder)["command"] == theirs


@pytest.mark.parametrize("command", COMMANDS)
def test_the_same_run_goes_on_and_another_one_begins_anew_when_asked(tmp_path, command):
    first = place(tmp_path, command, data="a", sizes=(1, 2), model={"config": "c", "seed": 1})
    work(first)
    assert first.has_begun()
    work(first)  # goes on: it is there still, and its tuples are lists
    assert (first.folder / "kept").is_file()
    other = place(tmp_path, command, data="a", sizes=(1, 2), model={"config": "c", "seed": 2})
    with pytest.raises(OutputExists, match=r"it differs in model\.seed\); repeat .*--force to"):
        other.check(False)
    with pytest.raises(OutputExists, match=r"give another -o$"):
        other.check(None)
    with other.claimed(True):
        assert not (other.folder / "kept").exists()
    # What was of use until the output had its name goes; an evaluation, a run and a demo stay.
    assert other.folder.exists() == (command in ("eval", "run", "demo"))


def test_a_run_that_failed_before_it_kept_anything_leaves_no_folder(tmp_path):
    own = place(tmp_path, "finetune", rank=9)
    with suppress(InputError), own.claimed(False):
        assert (own.folder / "run.json").is_file()
        raise InputError("--rank 9 is above 8")
    assert list(tmp_path.iterdir()) == []
    # Killed instead, it left a manifest alone: the corrected command takes that.
    write_json(own.folder / "run.json", {"command": "finetune", "decides": {"rank": 9}})
    place(tmp_path, "finetune", rank=8).check(False)


def test_of_several_processes_the_first_claims_and_none_is_cleared_away(tmp_path):
    own = place(tmp_path, "eval")
    with own.claimed(False, 1, 2):
        assert not own.folder.exists()
    with pytest.raises(InputError), own.claimed(False, 0, 2):
        raise InputError("of the first; the second may be about to write")
    assert own.has_begun()


def test_force_leaves_what_is_not_the_run_s_own(tmp_path):
    own = Workdir(tmp_path / "out", "eval", {"seed": 1}, owns=("variants", "report.*"))
    with own.claimed(False):
        (own.folder / "variants/base").mkdir(parents=True)
        (own.folder / "report.md").write_text("")
        (own.folder / "notes.txt").write_text("mine")
    with Workdir(tmp_path / "out", "eval", {"seed": 2}, owns=own.owns).claimed(True):
        assert {path.name for path in own.folder.iterdir()} == {"run.json", "notes.txt"}


def test_while_another_run_is_cleared_away_it_is_known_whose_folder_it_is(tmp_path, monkeypatch):
    work(place(tmp_path, "eval", seed=1))
    names, delete = [], workdir._delete
    monkeypatch.setattr(workdir, "_delete", lambda path: (names.append(path.name), delete(path)))
    with place(tmp_path, "eval", seed=2).claimed(True):
        assert names == ["kept"]


@pytest.mark.parametrize("content", ["[]", "{}", '{"command": "eval"}', '{"command": 5}'])
def test_what_is_no_manifest_of_ours_is_something_else(tmp_path, content):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/run.json").write_text(content)
    with pytest.raises(OutputExists, match="ropext eval would keep its run, and holds something"):
        place(tmp_path, "eval").check(True)
    (tmp_path / "out/run.json").write_text("{")
    with pytest.raises(InputError, match=r"run\.json cannot be read"):
        place(tmp_path, "eval").check(True)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_of_an_earlier_ropext_is_gone_on_with_or_refused(tmp_path, command):
    folder = place(tmp_path, command).folder
    shutil.copytree(EARLIER / command, folder)
    (folder / "kept").write_text("kept")
    found = workdir.read(folder)
    assert found["command"] == command
    with pytest.raises(OutputExists, match=f"holds a run of ropext {command}, which"):
        Workdir(folder, "demo" if command == "eval" else "eval", {}).check(True)
    own = place(tmp_path, command, **found["decides"])
    with suppress(KeyboardInterrupt), own.claimed(False):
        assert (folder / "kept").is_file()
        assert [path.name for path in folder.glob("*.json")] == ["run.json"]
        raise KeyboardInterrupt
    assert own.has_begun()
    if command != "run":  # in which the record of each stage decides
        with pytest.raises(OutputExists, match="holds another run"):
            place(tmp_path, command, **found["decides"], more=1).check(False)


def test_a_demo_of_an_earlier_ropext_is_refused_in_a_sentence(tmp_path):
    from ropext.narration import Hooks
    from ropext.pipeline.series import run_series

    shutil.copytree(EARLIER / "demo", tmp_path / "it")
    (tmp_path / "it/yarn-4x").mkdir()
    (tmp_path / "it/yarn-4x/config.json").write_text("{}")
    with pytest.raises(
        OutputExists, match=r"holds another run of ropext demo .*schema.*, give another -o$"
    ):
        run_series([], tmp_path / "it", Hooks())


def test_a_record_is_of_the_same_work_or_says_what_changed(tmp_path):
    ledger = Ledger(tmp_path)
    ledger.write("extend", 1, {"base": "a", "sizes": (1, 2)}, None, versions={"torch": "2"})
    begun = ledger.read("extend")
    assert (begun.outputs, begun.about) == (None, {"versions": {"torch": "2"}})
    assert begun.why_again(1, {"base": "a", "sizes": (1, 2)}) is None
    assert begun.why_again(1, {"base": "b", "more": None}) == "changed: base, more, sizes"
    assert begun.why_again(2, {}) == "this ropext does it in another way"
    for torn in ("{", "[]", '{"schema": 1}'):
        (tmp_path / "extend.json").write_text(torn)
        assert ledger.read("extend") is None
    ledger.forget("extend")
    ledger.forget("extend")
    assert list(tmp_path.iterdir()) == []


# --- by the commands themselves ---


@pytest.fixture
def interrupted(tmp_path, monkeypatch):
    """The folder of a fine-tuning that was stopped after its first checkpoint."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(EARLIER / "finetune", tmp_path / "X.run")
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
        with pytest.raises(OutputExists, match=r"^X\.run holds a run of ropext finetune, which"):
            command()
    assert sorted(interrupted.rglob("*")) == before


def test_finetune_leaves_a_finished_run_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ropext.run(RECIPE, "X")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OutputExists, match=r"^X\.run holds a run of ropext run, which ropext fine"):
        ropext.finetune("X.run/extended/X", "ropext://tuning", "X", steps=2, force=True)
    assert sorted(tmp_path.rglob("*")) == before
