"""Rows shorter than the target: a fit's rows, whose positions jump, and a training's windows of the
original length (--keep-short)."""

import numpy as np
import pytest
import torch
from test_finetune import RUN
from tiny_llama import CONTEXT
from trained import count_training, train

from ropext.base.errors import UsageError
from ropext.options.training import Finetune, Fit
from ropext.training import finetune, fit, models
from ropext.training.rows import ControlRows, RowsWithShortWindows

FIT = {"factor": 4, "start": "yarn", "steps": 5, "retrieval_items": 0, "held_out": 8}
POSE = FIT | {"strategy": "pose", "window": 32, "batch_tokens": 256, "retrieval_share": 0.0}


def test_rows_of_a_fit_reach_every_distance_up_to_the_target(base, stories):
    prepared = fit.prepare_fit(str(base), str(stories), Fit(**POSE | {"steps": 200}))
    distances = set()
    for row in prepared.rows:
        assert len(row.ids) == len(row.positions) == 32
        jumps = np.flatnonzero(np.diff(row.positions) != 1)
        assert len(jumps) <= 1
        assert row.positions[-1] < prepared.target == 256
        # The loss is on the second half, after the jump; at the border no token before it predicts
        # the first one.
        assert not row.scored[:16].any()
        assert row.scored[16] == (not len(jumps) or jumps[0] < 15)
        assert row.scored[17:].all()
        assert not len(jumps) or jumps[0] < 16
        distances |= set(row.positions[16:, None].flatten() - row.positions[0])
    assert len(distances) == 256 - 16  # all from 16 on


def test_questions_of_a_fit_in_short_rows_jump_too(base, stories):
    asked = POSE | {"window": 128, "retrieval_share": 0.5, "steps": 40}
    prepared = fit.prepare_fit(str(base), str(stories), Fit(**asked))
    rows = [row for row in prepared.rows if row.weight != 1]
    assert len(rows) == len(prepared.rows) // 2
    for row in rows:
        assert len(row.ids) == 128
        assert 0 < row.scored.sum() < 20
        assert row.scored[-1]
    assert max(int(np.diff(row.positions).max()) for row in rows) > 64


def test_the_rows_of_a_short_fit_do_not_grow_with_the_target(base, stories):
    near, far = (
        count_training("fit", base, str(stories), **POSE | {"factor": own}) for own in (4, 8)
    )
    assert (near.tokens, far.tokens) == (5 * 256, 5 * 256)
    assert count_training("fit", base, str(stories), **FIT).tokens > 5 * 256
    # One form is read at the target; a fit in whole windows would read them all.
    assert list(count_training("fit", base, str(stories), **POSE | {"start": None}).starts) == [
        "yarn"
    ]


def test_glued_documents_and_short_rows_exclude_each_other():
    with pytest.raises(UsageError, match="--packing glued is for --strategy full"):
        Fit(strategy="pose", packing="glued")


KEEP = RUN | {"keep_short": 2, "strategy": "pose", "window": 32, "batch_tokens": 96, "steps": 3}


def test_every_step_of_a_finetuning_has_its_windows_of_the_original_length(extended, stories):
    options = Finetune(**KEEP)
    prepared = finetune.prepare_finetune(str(extended), str(stories), options)
    assert prepared.settings.per_step == 3 + 2
    assert prepared.settings.tokens == 3 * (3 * 32 + 2 * CONTEXT)
    mixed = RowsWithShortWindows(prepared.rows, 3, prepared.rows.documents, CONTEXT, options)
    assert len(mixed) == 15
    shorts = [row for number, row in enumerate(mixed) if number % 5 < 2]
    assert all(np.array_equal(row.positions, np.arange(CONTEXT)) for row in shorts)
    assert all(row.scored.all() for row in shorts)
    assert len({row.ids.tobytes() for row in shorts}) == 6
    rest = [row.ids.tobytes() for number, row in enumerate(mixed) if number % 5 >= 2]
    assert rest == [row.ids.tobytes() for row in prepared.rows]
    # The control reads the same windows.
    control = ControlRows(prepared.rows, CONTEXT)
    also = RowsWithShortWindows(
        control, 3 * control.per_row, prepared.rows.documents, CONTEXT, options
    )
    for number, row in enumerate(shorts):
        step, at = divmod(number, 2)
        assert also[step * also.per_step + at].ids.tobytes() == row.ids.tobytes()


def test_a_dry_run_counts_the_windows_that_are_kept(extended, stories):
    planned = count_training("finetune", extended, str(stories), **KEEP)
    assert planned.to_json()["tokens"] == 3 * (3 * 32 + 2 * CONTEXT)


def test_a_dry_run_counts_the_bytes_of_weights_and_of_the_optimisers_state(extended, stories):
    options = Finetune(**KEEP)
    planned = count_training("finetune", extended, str(stories), **KEEP)
    model = models.load_to_train(planned.snapshot, options)
    assert planned.needs.weight_bytes == sum(own.nbytes for own in model.parameters())
    joined = models.add_adapter(model, options, planned.settings)
    optimiser = torch.optim.AdamW(own for own in joined.parameters() if own.requires_grad)
    joined(input_ids=torch.ones(1, 8, dtype=torch.long)).logits.sum().backward()
    optimiser.step()
    learned = optimiser.param_groups[0]["params"]
    kept = [own for state in optimiser.state.values() for own in state.values() if own.ndim]
    kept += [own for weight in learned for own in (weight, weight.grad)]
    assert planned.part.moving_bytes == sum(own.nbytes for own in kept)


@pytest.mark.slow
def test_a_fit_in_short_rows_is_written_and_proved(base, stories, tmp_path):
    """It never sees a row of the target's length, and is judged at its end alone."""
    from ropext.verifying import verification

    done = train("fit", base, str(stories), tmp_path / "out", **POSE | {"steps": 4})
    assert list(done.judgements) == [4]
    assert done.tokens == done.counted["tokens"] == 4 * 256
    assert len(done.by_step) == 4
    assert verification.verify(tmp_path / "out").passed


@pytest.mark.slow
def test_glued_documents_are_trained_on(base, extended, stories, tmp_path):
    from ropext.verifying import verification

    glued = {"packing": "glued", "steps": 2}
    train("fit", base, str(stories), tmp_path / "fit", **FIT | glued)
    train("finetune", extended, str(stories), tmp_path / "tuned", **RUN | glued)
    for name in ("fit", "tuned"):
        assert verification.verify(tmp_path / name).passed
