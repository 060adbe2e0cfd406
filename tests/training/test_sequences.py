"""Rows: their tokens and positions, and that they follow from seed and number alone."""

import numpy as np
import pytest

from ropext.base.errors import InputError
from ropext.evaluation.corpus import Document
from ropext.training.rows import ControlRows, FullRows, PoseRows, TrainingRows, join_documents


def counting(size, start=0):
    """Return a document whose ids are their own places in it."""
    return Document(np.arange(start, start + size))


def test_full_rows_are_runs_of_one_document_and_a_pass_reads_every_token_once():
    rows = TrainingRows([counting(40), counting(33, 1000)], FullRows(8), 9, seed=3)
    assert rows.per_pass == 5 + 4
    starts = sorted(int(rows[i].ids[0]) for i in range(9))
    read = np.concatenate([rows[i].ids for i in range(9)])
    assert len(set(read.tolist())) == 72
    for i in range(9):
        row = rows[i]
        assert np.array_equal(row.ids, np.arange(row.ids[0], row.ids[0] + 8))
        assert row.positions.tolist() == list(range(8))
        assert row.scored.all()
    assert starts[:5] == [0, 8, 16, 24, 32]
    # 33 tokens hold 4 rows, from offset 0 or 1 on.
    assert starts[5] in (1000, 1001)


def test_a_row_depends_on_seed_and_number_alone():
    documents = [counting(300)]
    one, two = (TrainingRows(documents, PoseRows(16, 128), 50, seed=1) for _ in range(2))
    backwards = [two[i] for i in reversed(range(50))][::-1]
    assert all(np.array_equal(one[i].ids, backwards[i].ids) for i in range(50))
    other = TrainingRows(documents, PoseRows(16, 128), 50, seed=2)
    assert any(not np.array_equal(one[i].positions, other[i].positions) for i in range(50))
    assert not np.array_equal(one[0].ids, one[1].ids)


def test_the_second_pass_has_another_order():
    rows = TrainingRows([counting(80)], FullRows(8), 20, seed=0)
    first, second = ([int(rows[i].ids[0]) for i in range(a, a + 10)] for a in (0, 10))
    assert sorted(first) == sorted(second)
    assert first != second


def test_pose_skips_positions_once_up_to_the_target_and_masks_the_label_after_the_jump():
    rows = TrainingRows([counting(1000)], PoseRows(16, 128), 400, seed=0)
    last, firsts = [], []
    for i in range(400):
        row = rows[i]
        steps = np.diff(row.positions)
        jump = np.flatnonzero(~row.scored)
        assert len(row.ids) == 16
        assert len(jump) == 1
        firsts.append(int(jump[0]))
        assert 1 <= jump[0] <= 8
        assert (np.delete(steps, jump[0] - 1) == 1).all()
        assert row.positions[0] == 0
        last.append(int(row.positions[-1]))
        # The document is longer than the target: the text is as far apart as the positions say.
        assert np.array_equal(np.diff(row.ids), steps)
    assert min(last) == 15
    assert max(last) == 127
    assert set(firsts) == set(range(1, 9))
    # Uniform gaps: the mean of the last position is (15 + 127) / 2, its sd 32.6 / sqrt(400).
    assert abs(np.mean(last) - 71) < 5


def test_pose_reaches_the_target_from_documents_shorter_than_it():
    rows = TrainingRows([counting(40)], PoseRows(16, 128), 300, seed=0)
    last = [int(rows[i].positions[-1]) for i in range(300)]
    assert max(last) == 127
    assert all(rows[i].ids.min() >= 0 and rows[i].ids.max() < 40 for i in range(300))


def test_pose_of_a_longrope_stays_beyond_its_short_set():
    rows = TrainingRows([counting(1000)], PoseRows(16, 128, beyond=64), 200, seed=0)
    assert min(int(rows[i].positions[-1]) for i in range(200)) == 64


def test_rows_score_only_the_scored_tokens_of_a_document():
    scored = np.zeros(40, bool)
    scored[10:20] = True
    document = Document(np.arange(40), scored)
    row = TrainingRows([document], FullRows(40), 1, seed=0)[0]
    assert row.scored.tolist() == scored.tolist()
    for i in range(20):
        row = TrainingRows([document], PoseRows(16, 32), 20, seed=0)[i]
        assert all(10 <= token < 20 for token in row.ids[row.scored])


def test_the_control_reads_the_same_tokens_in_short_windows():
    rows = TrainingRows([counting(90)], FullRows(20), 4, seed=0)
    pieces = ControlRows(rows, 8)
    assert len(pieces) == 12
    for at in range(4):
        own = [pieces[3 * at + i] for i in range(3)]
        assert [len(piece.ids) for piece in own] == [8, 8, 4]
        assert np.array_equal(np.concatenate([piece.ids for piece in own]), rows[at].ids)
        assert all(piece.positions[0] == 0 for piece in own)


def test_the_control_of_pose_has_no_jump_in_its_positions():
    rows = TrainingRows([counting(90)], PoseRows(8, 64), 4, seed=0)
    piece = ControlRows(rows, 16)[2]
    assert np.array_equal(piece.ids, rows[2].ids)
    assert piece.positions.tolist() == list(range(8))
    assert piece.scored.tolist() == rows[2].scored.tolist()


def test_glued_documents_are_all_there_with_separators():
    whole = join_documents([counting(5), counting(7, 100)], 2, seed=0)
    assert len(whole) == 1
    assert len(whole[0]) == 14
    assert sorted(whole[0].ids.tolist()) == sorted([*range(5), *range(100, 107), 2, 2])


def test_short_documents_are_counted_and_none_long_enough_is_an_error_with_both_lengths():
    assert TrainingRows([counting(5), counting(50)], FullRows(10), 1, seed=0).too_short == 1
    with pytest.raises(InputError, match=r"at least 64 tokens.*of 2 has 50.*--strategy pose"):
        TrainingRows([counting(5), counting(50)], FullRows(64), 1, seed=0)
    with pytest.raises(InputError, match=r"--window 64.*has 50"):
        TrainingRows([counting(5), counting(50)], PoseRows(64, 128), 1, seed=0)
