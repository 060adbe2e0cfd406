"""Which checkpoints of a training stay, and that nothing of a user's goes with the others."""

import pytest

from ropext.base import workdir
from ropext.training import judge, trainer

NAMES = ("adapter_model.safetensors", "optimizer.pt", "trainer_state.json", "complete")


@pytest.fixture
def folder(tmp_path):
    """Make the checkpoints of a run after its fifth one, and files that a user saved next to and in
    them."""
    folder = tmp_path / "out.run/tuned"
    for step in (2, 4, 6, 8, 10):
        (folder / f"checkpoint-{step}").mkdir(parents=True)
        for name in NAMES:
            (folder / f"checkpoint-{step}" / name).write_text("ropext's")
    for name in ("checkpoint-2-keep", "checkpoint-4-notes", "checkpoint-12-7"):
        (folder / name).mkdir()
        (folder / name / "complete").write_text("mine")
    (folder / "checkpoint-4/notes.txt").write_text("mine")
    return folder


@pytest.mark.parametrize(
    ("best", "kept"),
    [(None, {6, 8, 10}), ("checkpoint-2", {2, 8, 10}), ("checkpoint-10", {6, 8, 10})],
)
def test_the_last_checkpoints_and_the_best_one_stay(folder, best, kept):
    trainer.rotate_checkpoints(folder, best and str(folder / best))
    left = [path.parent.name for path in folder.glob("checkpoint-*/optimizer.pt")]
    steps = {int(name.removeprefix("checkpoint-")) for name in left}
    assert steps == kept
    assert (folder / "checkpoint-4/notes.txt").read_text() == "mine"
    for name in ("checkpoint-2-keep", "checkpoint-4-notes", "checkpoint-12-7"):
        assert (folder / name / "complete").read_text() == "mine"
    assert trainer.last_checkpoint(folder).name == "checkpoint-10"


def test_files_of_a_judged_step_have_names_of_ropext():
    """Else the folder of a finished fit would stay."""
    assert workdir.OURS.fullmatch(f"steps/yarn/1/{judge.KNOBS}")
