"""Test when a step of a run is done, and when it is not done again."""

import json
from contextlib import suppress

import pytest

from ropext.base.workdir import Workdir
from ropext.pipeline.stage import Step, StepRecord, has_finished_step, step_record


class Written(Step):
    """A step that leaves one file with what its key says."""

    name = "extend"

    def __init__(self, place, schema, key):
        self.run_folder = place
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


RECORD = "stages/extend/run.json"  # the file in which a run keeps the step's outcome


def test_a_step_runs_once_and_again_if_its_key_or_its_files_changed(tmp_path, monkeypatch):
    said = []

    def done(again=False, torch="2", **more):
        monkeypatch.setattr("ropext.pipeline.stage.versions", lambda: {"torch": torch})
        made = step(tmp_path, **more).do_once(said.append, again)
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
    assert said[-1].endswith("skipped (torch 2, now 3; to repeat it: --from extend)")


def test_the_first_process_decides_for_all_whether_a_step_is_done(tmp_path, monkeypatch):
    unseen = tmp_path / "not-seen-yet"
    sent, taken = [], []

    def done(kind, place, receive, rank="0"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setattr("ropext.pipeline.stage.from_first", receive)
        own = step(place, kind=kind, base="a")
        own.taken = taken
        if rank != "0":
            own.key = lambda: pytest.fail("another process read the inputs")
        return own.do_once()

    first = lambda left: sent.append(left) or left  # noqa: E731
    assert done(Written, tmp_path, first)
    assert sent == [None, None]
    assert not done(Shared, tmp_path, first)
    # Another process does as the first says, whatever it sees itself.
    assert not done(Shared, unseen, lambda left: sent[-1], "1")
    assert done(Shared, tmp_path, lambda left: None, "1")
    assert taken == ["part"]
    assert not unseen.exists()


def test_a_killed_step_resumes_or_is_reused(tmp_path):
    own = step(tmp_path, base="a")
    with pytest.raises(ZeroDivisionError):
        step(tmp_path, kind=Killed, base="a").do_once()
    assert step_record(tmp_path, "extend") == StepRecord({"base": "a"}, None)
    assert not has_finished_step(tmp_path)
    begun = (tmp_path / RECORD).read_bytes()
    said = []
    assert own.do_once(said.append)
    assert said == ["extend: resumes after an interrupt"]
    assert step_record(tmp_path, "extend").outputs == {"made": '{"base": "a"}'}
    assert has_finished_step(tmp_path)
    finished = (tmp_path / RECORD).read_bytes()
    (tmp_path / RECORD).write_bytes(begun)  # killed when all was written
    assert not own.do_once()
    assert (tmp_path / RECORD).read_bytes() == finished
    edited = finished.decode().replace('"a"', '"b"')
    for torn in ("{", "[]", '{"schema": 1}', edited):
        (tmp_path / RECORD).write_text(torn)
        assert step_record(tmp_path, "extend") is None
        assert own.finished_files() is None


def test_a_step_that_was_never_begun_needs_no_key(tmp_path):
    """All weights may be read for a key."""
    own = step(tmp_path, base="a")
    own.key = lambda: pytest.fail("its key was asked for")
    assert own.finished_files() is None
    done = step(tmp_path, base="a")
    done.do_once()
    assert done.finished_files() == {"made": '{"base": "a"}'}
    assert step(tmp_path, base="b").finished_files() is None


def test_an_input_that_cannot_be_read_is_no_error_of_the_steps_folder(tmp_path):
    own = step(tmp_path, base="a")
    unread = OSError(5, "Input/output error", "documents.txt")

    def key():
        raise unread

    own.key = key
    with pytest.raises(OSError, match="Input/output error") as raised:
        own.do_once()
    assert raised.value is unread


def test_a_run_that_kept_nothing_removes_its_step_folders(tmp_path):
    """They hold files that the run wrote, and no work of hours."""
    own = Workdir(tmp_path / "out", "run", {})
    with suppress(ZeroDivisionError), own.claimed(False):
        step(own.folder, kind=Killed, base="a").do_once()
    assert list(tmp_path.iterdir()) == []
