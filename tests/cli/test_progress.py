"""What is said of the time that is left."""

import pytest

from ropext.cli import progress
from ropext.cli.output import Out


@pytest.fixture
def clock(monkeypatch):
    """A clock that is set by hand."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(("before", "left"), [(0, "3 min"), (40, "80 s")])
def test_the_time_left_counts_from_the_first_piece_of_this_work(clock, capsys, before, left):
    """A run evaluates long after it began, a grid several times, and some was done before. At two
    seconds a piece 80 of 100 pieces are left, or 40."""
    bar = progress.Bar(Out())
    for number in range(2):
        clock[0] += 600  # of other work
        bar.show(before, 100, f"evaluation {number}")
        clock[0] += 40
        bar.show(before + 20, 100, "half a minute later")
        assert f"about {left} left  half" in capsys.readouterr().err
        bar.show(100, 100, "last")


def test_a_log_gets_a_line_now_and_then(clock, capsys):
    bar = progress.Bar(Out())
    for done in range(101):
        bar.show(done, 100, "piece")
        clock[0] += 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert lines[0] == " 30 %  about 70 s left  piece"
    assert lines[-1] == " 90 %  about 10 s left  piece"


def test_quiet_is_quiet(clock, capsys):
    bar = progress.Bar(Out(quiet=True))
    for done in range(0, 101, 50):
        bar.show(done, 100, "piece")
        clock[0] += 100
    assert capsys.readouterr().err == ""
