"""SIGKILL at every step of a run: afterwards the output is absent, the old one, or complete.

Each step is one event of Python's audit hooks (open, rename, link, remove, mkdir ...) or one call
that has none (fsync, copy_file_range, write, ftruncate), killed before it, and for a copy also in
the middle of it. A forked child does the run, so the hooks go with it.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from marked import checkpoint
from sample_checkpoint import CONFIG, card, make_model, record, tree

from ropext.checkpoint import open_snapshot
from ropext.checkpoint.writing import write_checkpoint
from ropext.errors import OutputExists

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
]

EVENTS = {
    "open",
    "os.mkdir",
    "os.rename",
    "os.link",
    "os.symlink",
    "os.remove",
    "os.rmdir",
    "os.truncate",
    "os.scandir",
    "fcntl.flock",
    "shutil.rmtree",
}


def extend(base: Path, out: Path, link: str, force: bool) -> None:
    snapshot = open_snapshot(str(base), weights=True)
    new = CONFIG | {"max_position_embeddings": 8192}
    write_checkpoint(
        snapshot,
        out,
        config=new,
        record=record(),
        card=card,
        link=link,
        force=force,
        prove=lambda directory: {"pairs": 2},
    )


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(tick: Callable[[], bool]) -> None:
    """Call `tick` at every step; in the middle of a copy, it may kill after half the bytes."""
    sys.addaudithook(lambda event, args: tick() and die() if event in EVENTS else None)
    copy, fsync, truncate = os.copy_file_range, os.fsync, os.ftruncate

    def half(source, target, length, at, to):
        if tick():
            copy(source, target, max(length // 2, 1), at, to)
            die()
        return copy(source, target, length, at, to)

    def stop_before(call):
        def wrapped(*args):
            if tick():
                die()
            return call(*args)

        return wrapped

    os.copy_file_range = half
    os.fsync = stop_before(fsync)
    os.ftruncate = stop_before(truncate)
    os.write = stop_before(os.write)


def run_and_kill(n: int, *args) -> bool:
    """Run in a child that dies at its n-th step; whether it got to the end instead."""
    child = os.fork()
    if child == 0:
        steps = iter(range(10**9))
        try:
            arm(lambda: next(steps) == n)
            extend(*args)
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return not os.WIFSIGNALED(status)


@pytest.mark.parametrize(("link", "force"), [("hard", False), ("copy", True)])
def test_killed_at_every_step(tmp_path: Path, link: str, force: bool):
    base = make_model(tmp_path / "base")
    before = tree(base)
    extend(base, tmp_path / "truth", link, False)
    complete = tree(tmp_path / "truth")
    old = tree(checkpoint(tmp_path / "old", "old"))
    counts = {"old": 0, "absent, kept aside": 0, "absent": 0, "complete": 0, "both": 0}
    for n in range(2000):
        work = tmp_path / f"run {n}"
        work.mkdir()
        out = work / "out"
        if force:
            checkpoint(out, "old")
        finished = run_and_kill(n, base, out, link, force)
        aside = next(work.glob(".out.ropext-*/old"), work / "absent")
        counts[look(out, aside, complete, old if force else None)] += 1
        assert tree(base) == before
        # A second run ends in the undisturbed result, whatever the first one left.
        try:
            extend(base, out, link, force)
        except OutputExists:
            assert not force
            assert tree(out) == complete
        assert tree(out) == complete
        assert tree(base) == before
        assert os.listdir(work) == ["out"]
        if finished:
            break
    print(f"{link}, force={force}: {n} kills, {counts}")
    assert n > 60
    assert counts["complete"] > 1
    assert counts["old" if force else "absent"] > 50
    if force:
        assert counts["absent, kept aside"] > 0
        assert counts["both"] > 0


def look(out: Path, aside: Path, complete: dict, old: dict | None) -> str:
    """Name the state after a kill; any state but these five is a failure."""
    if not out.exists():
        if old is None:
            assert not aside.exists()
            return "absent"
        assert tree(aside) == old
        return "absent, kept aside"
    if aside.exists():
        assert tree(out) == complete
        return "both"
    if old is not None and tree(out) == old:
        return "old"
    assert tree(out) == complete
    return "complete"
