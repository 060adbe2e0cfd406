"""The folder of a step: when it is done, and when it is not done again."""

import json
from contextlib import suppress

import pytest

from ropext.base.stepdir import (
    Step,
    StepDir,
    StepRecord,
    files_of_step,
    has_finished_step,
    step_record,
)
from ropext.base.workdir import Workdir


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


RECORD = "stages/extend/run.json"  # the file in which a run keeps the step's outcome


def test_a_step_runs_once_and_again_if_its_key_or_its_files_changed(tmp_path):
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
    assert said[-1].endswith("skipped (torch 2, now 3; to repeat it: --from extend)")


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


def test_a_killed_step_resumes_or_is_reused(tmp_path):
    own = StepDir.of(step(tmp_path, base="a"), tmp_path)
    with pytest.raises(ZeroDivisionError):
        StepDir.of(step(tmp_path, kind=Killed, base="a"), tmp_path).do()
    assert step_record(tmp_path, "extend") == StepRecord({"base": "a"}, None)
    assert not has_finished_step(tmp_path)
    begun = (tmp_path / RECORD).read_bytes()
    said = []
    assert own.do(said.append)
    assert said == ["extend: resumes after an interrupt"]
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


def test_a_step_that_was_never_begun_needs_no_key(tmp_path):
    """All weights may be read for a key."""
    own = step(tmp_path, base="a")
    own.key = lambda: pytest.fail("its key was asked for")
    assert files_of_step(own, tmp_path) is None
    done = step(tmp_path, base="a")
    StepDir.of(done, tmp_path).do()
    assert files_of_step(done, tmp_path) == {"made": '{"base": "a"}'}
    assert files_of_step(step(tmp_path, base="b"), tmp_path) is None


def test_the_folders_of_steps_go_with_a_run_that_kept_nothing(tmp_path):
    """They hold files that the run wrote, and no work of hours."""
    own = Workdir(tmp_path / "out", "run", {})
    with suppress(ZeroDivisionError), own.claimed(False):
        StepDir.of(step(tmp_path, kind=Killed, base="a"), own.folder).do()
    assert list(tmp_path.iterdir()) == []
