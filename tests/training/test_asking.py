"""Rows that ask: exact, answerable, loss on answers alone, nothing shared with an evaluation."""

import numpy as np
import pytest

from ropext.base.errors import UsageError
from ropext.evaluation.corpus import Document
from ropext.options.training import Finetune
from ropext.tasks import mkey, repetition
from ropext.tasks.item import NOUNS
from ropext.training.rows import ControlRows, FullRows, KeyRows, PoseRows, TrainingRows


class Characters:
    """One token a character: the functions of an encoder that the questions need."""

    bos = None

    def encode(self, text):
        return [ord(c) for c in text]


class WithBos(Characters):
    bos = 1


PROSE = "The keys of a piano are struck, those of a lock are turned. " * 60
LENGTH = 1200


def questions(share=0.2, seed=0, encoder=Characters):
    documents = [Document(np.array([ord(c) for c in PROSE]))]
    return KeyRows(encoder(), documents, share, seed)


def asked(document):
    """Return (question text, answer text) of each scored run, and the text before the first
    question."""
    mask = document.mask()
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
    text = "".join(chr(i) for i in document.ids)
    runs = list(zip(edges[::2], edges[1::2], strict=True))
    pairs, end = [], None
    for start, stop in runs:
        begin = text.rindex("\nThe key of ", 0, start)
        end = begin if end is None else end
        pairs.append((text[begin:start], text[start:stop]))
    return pairs, text[:end]


@pytest.mark.parametrize("number", range(6))
def test_every_question_can_be_answered_from_the_row_and_only_answers_are_scored(number):
    document = questions().question_document(number, LENGTH)
    assert len(document) == LENGTH
    pairs, before = asked(document)
    assert len(pairs) == 16
    names = [question.split(" ")[3] for question, _ in pairs]
    assert len(set(names)) == 16
    assert set(names) <= set(NOUNS)
    for question, answer in pairs:
        assert len(answer.strip()) == mkey.DIGITS
        assert before.count(question + answer + ".\n") == 1


def test_a_short_row_has_fewer_keys_and_one_without_room_is_refused():
    pairs, _ = asked(questions().question_document(0, 320))
    assert len(pairs) == 5
    with pytest.raises(UsageError, match=r"--retrieval-share: a row of questions takes \d+ tokens"):
        questions().question_document(0, 40)


def test_a_bos_comes_first_and_is_never_a_target():
    document = questions(encoder=WithBos).question_document(0, LENGTH)
    assert len(document) == LENGTH
    assert document.ids[0] == 1
    assert not document.mask()[0]
    assert len(asked(document)[0]) == 16


def test_a_row_follows_from_seed_number_and_length_alone():
    one, other = (
        questions().question_document(3, LENGTH),
        questions(seed=1).question_document(3, LENGTH),
    )
    again = questions().question_document(3, LENGTH)
    assert np.array_equal(one.ids, again.ids)
    assert not np.array_equal(one.ids, other.ids)
    assert not np.array_equal(one.ids, questions().question_document(4, LENGTH).ids)


def test_keys_and_haystacks_are_none_of_an_evaluation_with_the_same_seed():
    depths = (0.0, 0.25, 0.5, 0.75, 1.0)
    evaluated = {
        tuple(item.answer)
        for index in range(8)
        for item in mkey.TASK.build(
            Characters(),
            repetition(Characters()),
            length=LENGTH,
            depths=depths,
            index=index,
            seed=0,
        )
    }
    rows = [asked(questions().question_document(number, LENGTH)) for number in range(8)]
    trained = {tuple(ord(c) for c in answer) for pairs, _ in rows for _, answer in pairs}
    assert len(trained & evaluated) <= 3  # two sets of 128 and 40 out of 10,000 by chance
    assert not [before for _, before in rows if "The grass is green" in before]


def test_the_share_of_rows_with_questions_is_the_requested_one():
    for share, expected in ((0.2, 20), (0.5, 50), (0.07, 7), (0.0, 0)):
        own = questions(share)
        assert sum(own.asks_in_row(number) for number in range(100)) == expected


def rows(strategy, share=0.25):
    document = Document(np.arange(4096) % 97)
    return TrainingRows([document], strategy, 8, 0, KeyRows(Characters(), [document], share, 0))


def test_rows_of_text_are_unchanged_without_questions():
    mixed, plain = (
        rows(FullRows(1024)),
        TrainingRows([Document(np.arange(4096) % 97)], FullRows(1024), 8, 0),
    )
    asking = [number for number in range(8) if mixed.questions.asks_in_row(number)]
    assert asking == [3, 7]
    for number in range(8):
        same = np.array_equal(mixed[number].ids, plain[number].ids)
        assert same == (number not in asking)
        assert mixed[number].scored.all() == (number not in asking)
        assert np.array_equal(mixed[number].positions, np.arange(1024))


def test_pose_moves_the_second_part_of_questions_too():
    row = rows(PoseRows(512, 4096))[3]
    steps = np.diff(row.positions)
    assert len(row.ids) == 512
    assert (steps != 1).sum() <= 1
    assert row.positions[-1] < 4096
    assert 0 < row.scored.sum() < 100


def test_the_control_gets_windows_that_hold_the_answers():
    own = rows(FullRows(1024))
    control = ControlRows(own, 256)
    assert len(control) == 4 * 8
    for number in range(3 * 4, 4 * 4):
        pairs, before = asked(Document(control[number].ids, control[number].scored))
        assert len(control[number].ids) == 256
        assert len(pairs) == 4
        assert all(before.count(question + answer + ".\n") == 1 for question, answer in pairs)
    assert len({tuple(control[number].ids) for number in range(12, 16)}) == 4
    assert control[0].scored.all()


def test_a_share_outside_its_range_is_refused():
    for share in (-0.1, 1.0, float("nan")):
        with pytest.raises(UsageError, match="--retrieval-share"):
            Finetune(retrieval_share=share)
