"""The messages about the time that is left."""

import io
import itertools
import os
import signal

import pytest

from ropext.base import narration
from ropext.base.narration import interruptible
from ropext.cli.output import Bar, Out
from ropext.evaluation.reader import Progress, read_units
from ropext.evaluation.workload import Unit
from ropext.files.checkpoint import weights, writing
from ropext.results.measurement import Store


@pytest.fixture
def now():
    """Return a clock that is set by hand."""
    return [1000.0]


@pytest.fixture
def show(now):
    return Bar(Out(), lambda: now[0]).show


@pytest.mark.parametrize(("before", "left"), [(0, "3 min"), (40, "80 s")])
def test_the_time_left_counts_from_the_first_piece_of_this_work(now, show, capsys, before, left):
    """A run evaluates long after it began, a grid several times, and some was done before. At two
    seconds a piece 80 of 100 pieces are left, or 40."""
    for number in range(2):
        now[0] += 600  # of other work
        show(before, 100, f"evaluation {number}")
        now[0] += 40
        show(before + 20, 100, "half a minute later")
        percent = (
            f"{before + 20} % ({before + 20} of 100 tokens), about {left} left: half a minute later"
        )
        assert capsys.readouterr().err == f"{percent}\n"
        show(100, 100, "last")


def test_a_log_gets_a_line_after_the_first_unit_and_then_every_half_minute(now, show, capsys):
    for done in range(0, 100_001, 1000):
        show(done, 100_000, "piece")
        now[0] += 1
    assert capsys.readouterr().err.splitlines() == [
        "1 % (1,000 of 100,000 tokens), about 2 min left: piece",
        "31 % (31,000 of 100,000 tokens), about 69 s left: piece",
        "61 % (61,000 of 100,000 tokens), about 39 s left: piece",
        "91 % (91,000 of 100,000 tokens), about 9 s left: piece",
    ]


def test_many_short_pieces_of_work_are_reported_once_in_half_a_minute(now, show, capsys):
    for number in range(40):
        for done in range(3):
            show(done, 2, f"piece {number}")
            now[0] += 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition(" ")[2] for line in lines] == ["0", "10", "20", "30"]


def test_the_time_left_grows_for_a_minute_and_a_half_at_most_after_the_work_became_slower():
    """200 pieces, one a second; from the hundredth on each takes six seconds. The true rest is then
    ten minutes and falls. By the mean speed the estimate would grow for five minutes."""
    now, estimates = [0.0], []
    pace = narration.Pace(clock=lambda: now[0])
    for done in range(201):
        left = pace.left(done, 200)
        if left is not None:
            true = max(0, 100 - done) + 6 * min(100, 200 - done)
            number, unit = left.split()
            estimates.append((now[0], float(number) * {"s": 1, "min": 60}[unit], true))
        now[0] += 1 if done < 100 else 6
    grown = [after[0] for before, after in itertools.pairwise(estimates) if after[1] > before[1]]
    assert grown
    assert grown[-1] <= 100 + narration.RECENT + narration.SECONDS
    assert all(abs(left - true) < 31 for at, left, true in estimates if at > 190)


def test_stalled_work_reports_a_growing_time_and_no_error():
    now = [0.0]
    pace = narration.Pace(clock=lambda: now[0])
    said = []
    for done in (0, 10, *[20] * 6, 30):
        said.append(pace.left(done, 100))
        now[0] += 40
    assert [left is None for left in said] == [True] + [False] * 8


def test_the_estimate_of_time_leaves_out_reads_of_earlier_calls_and_other_processes(now, tmp_path):
    """Eight units of ten tokens, five seconds each. Two were read before, of the rest every second
    one is another process's: three are left, and the first line says ten seconds. What the other
    process finishes meanwhile was not found."""
    said = []
    hooks = narration.Hooks(show=narration.progress_lines(said.append, lambda: now[0]))
    progress, store = Progress(40, hooks, tmp_path, world=2), Store(tmp_path)

    def unit(number):
        return Unit(f"{number}.json", f"unit {number}", "whole", (10,))

    def read(own):
        now[0] += 5
        store.put("3.json", [])
        return {own.name: []}

    for kept in "01":
        store.put(f"{kept}.json", [])
        os.utime(tmp_path / f"{kept}.json", (0, 0))
    read_units(read, map(unit, range(8)), store, progress)
    assert said == ["33 % (10 of 30 tokens), about 10 s left: unit 2"]
    assert (progress.resumed, progress.finished) == (2, 3)


WORKS = {
    "copying": lambda one, two, show: writing.copy_file(one, two.with_name("copy"), show),
    "hashing": lambda one, two, show: weights.content_digest(one, show),
    "comparing": lambda one, two, show: weights.first_difference(two, one, show),
}


@pytest.mark.parametrize("verb", WORKS)
def test_a_slow_file_is_reported_once_in_half_a_minute(now, tmp_path, monkeypatch, verb):
    """100 pieces take two seconds each; a file that is done in five seconds is not mentioned."""
    one, two, said = tmp_path / "one", tmp_path / "two", []
    for path in (one, two):
        path.write_bytes(os.urandom(1) * 800)
    two.write_bytes(one.read_bytes())
    monkeypatch.setattr(weights, "CHUNK", 8)
    monkeypatch.setattr(writing, "CHUNK", 8)

    def clock():
        now[0] += 2
        return now[0]

    WORKS[verb](one, two, narration.file_progress(said.append, clock))
    assert said == [
        f"{percent} % (0.0 of 0.0 GB), about {left} left: {verb} one"
        for percent, left in ((3, "3 min"), (18, "3 min"), (33, "2 min"), (48, "2 min"))
    ] + [
        f"{percent} % (0.0 of 0.0 GB), about {left} left: {verb} one"
        for percent, left in ((63, "74 s"), (78, "44 s"), (93, "14 s"))
    ]
    said.clear()
    monkeypatch.setattr(weights, "CHUNK", 400)
    monkeypatch.setattr(writing, "CHUNK", 400)
    two.with_name("copy").unlink(missing_ok=True)
    WORKS[verb](one, two, narration.file_progress(said.append, clock))
    assert not said


def test_quiet_draws_no_progress_bar(now, capsys):
    bar = Bar(Out(quiet=True), lambda: now[0])
    for done in range(0, 101, 50):
        bar.show(done, 100, "piece")
        now[0] += 100
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_one_line_that_changes(now, show, capsys, monkeypatch):
    monkeypatch.setattr(Out, "animated", True)
    for done in range(0, 101, 50):
        show(done, 100, "piece")
        now[0] += 100
    assert capsys.readouterr().err == (
        "\r\x1b[2K 50 %  about 2 min left  piece\r\x1b[2K100 %  about 0 s left  piece\n"
    )


class Interrupting(io.RawIOBase):
    """A terminal in which the first line is interrupted while it is written."""

    def __init__(self):
        self.heard = b""

    def writable(self):
        return True

    def write(self, data):
        first, self.heard = not self.heard, self.heard + bytes(data)
        if first:
            signal.raise_signal(signal.SIGINT)
        return len(data)


def test_a_ctrl_c_while_a_line_is_written_is_answered():
    """Python's streams refuse a line within a line, with a RuntimeError."""
    terminal = Interrupting()
    with io.BufferedWriter(terminal) as stream:

        def say(text):
            stream.write(f"{text}\n".encode())
            stream.flush()

        with interruptible(say, "stopping") as stopped:
            say("first")
            say("second")
        assert stopped()
    assert terminal.heard == b"first\nsecond\n"
