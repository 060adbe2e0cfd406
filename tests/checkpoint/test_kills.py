"""SIGKILL at every step of a run: afterwards the output is absent, the old one, or complete.

Each step is one call that changes a file, as the campaigns of tests/reliability count them.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from marked import checkpoint
from reliability.layer import Ended, Wish, forked
from sample_checkpoint import CONFIG, card, make_model, record, tree

from ropext.base.errors import OutputExists
from ropext.files.checkpoint import open_snapshot
from ropext.files.checkpoint.writing import DirectorySource, WriteOptions, write

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
]


def extend(base: Path, out: Path, link: str, force: bool) -> None:
    snapshot = open_snapshot(str(base), weights=True)
    new = CONFIG | {"max_position_embeddings": 8192}
    source = DirectorySource(snapshot, new, lambda directory: {"pairs": 2}, card)
    write(source, out, record(), WriteOptions(link=link, force=force))


def disturbed(steps: list[str]) -> Iterator[Wish]:
    """Yield a kill before every call that changes a file, and one in the middle of every write."""
    for at, kind in enumerate(steps):
        yield Wish(at, "before")
        if kind == "write":
            yield Wish(at, "middle")


@pytest.mark.parametrize(("link", "force"), [("hard", False), ("copy", True)])
def test_extend_killed_at_any_system_call_leaves_a_whole_output_or_none(
    tmp_path: Path, link: str, force: bool
):
    base = make_model(tmp_path / "base")
    before = tree(base)
    extend(base, tmp_path / "truth", link, False)
    complete = tree(tmp_path / "truth")
    old = tree(checkpoint(tmp_path / "old", "old"))

    def run(name: str, wish: Wish | None = None) -> tuple[Path, Ended]:
        work = tmp_path / name
        work.mkdir()
        if force:
            checkpoint(work / "out", "old")
        return work, forked(lambda: extend(base, work / "out", link, force), work, wish)

    _, whole = run("undisturbed")
    assert whole.code == 0, whole.said
    counts = {"old": 0, "absent, kept aside": 0, "absent": 0, "complete": 0, "both": 0}
    for n, wish in enumerate(disturbed(whole.steps)):
        work, ended = run(f"run {n}", wish)
        assert ended.code is None, (wish, ended.said)
        out = work / "out"
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
    print(f"{link}, force={force}: {n + 1} kills, {counts}")
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
