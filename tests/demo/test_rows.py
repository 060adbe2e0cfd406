"""Training rows: exact windows, and a loss on the tokens that the row alone determines."""

import re

import pytest

from ropext.tasks.item import derived_rng
from scripts.demo_checkpoint import rows
from scripts.demo_checkpoint.bundle import DATA
from scripts.demo_checkpoint.rows import Mixture, RowMaker, batch_rows, draw_distance

PROSE = (DATA / "LICENSE-PSF.txt").read_text()


class Characters:
    def encode(self, text):
        return [ord(c) for c in text]


@pytest.fixture(scope="module")
def maker():
    lines = [line.strip() + "\n" for line in PROSE.splitlines() if len(line) > 30]
    return RowMaker(Characters(), [min(ord(c), 127) for c in PROSE], 128, lines)


def text_of(tokens):
    return "".join(chr(token) for token in tokens)


@pytest.mark.parametrize("kind", ["text", "dense", "passkey", "repeat"])
@pytest.mark.parametrize("window", [128, 256])
def test_rows_fill_their_window_and_score_something(maker, kind, window):
    for step in range(40):
        row = maker.row(kind, window, 0.5, derived_rng(kind, step))
        assert len(row.tokens) == window
        assert row.scored == sorted(set(row.scored))
        assert row.scored[0] >= 1
        assert row.scored[-1] < window
        assert all(0 <= token < 128 for token in row.tokens)


def test_text_rows_are_runs_of_the_text(maker):
    row = maker.row("text", 200, 0.0, derived_rng(0))
    assert text_of(row.tokens) in text_of([min(ord(c), 127) for c in PROSE * 2])
    assert row.scored == list(range(1, 200))


def test_passkey_rows_state_the_answer_before(maker):
    for step in range(40):
        row = maker.row("passkey", 256, 1.0, derived_rng(step))
        answer = text_of(row.tokens[row.scored[0] :]).strip()
        assert re.fullmatch(r"\d{5}", answer)
        assert answer in text_of(row.tokens[: row.scored[0]])


def test_dense_rows_ask_only_about_stated_facts(maker):
    for step in range(40):
        row = maker.row("dense", 600, 0.0, derived_rng(step))
        groups = [[row.scored[0]]]
        for position in row.scored[1:]:
            if position == groups[-1][-1] + 1:
                groups[-1].append(position)
            else:
                groups.append([position])
        for group in groups:
            answer = text_of([row.tokens[position] for position in group]).strip()
            assert answer in text_of(row.tokens[: group[0]])


def test_repeat_rows_score_the_earlier_text(maker):
    for step in range(40):
        row = maker.row("repeat", 256, 0.0, derived_rng(step))
        answer = text_of(row.tokens[row.scored[0] :])
        assert answer in text_of(row.tokens[: row.scored[0]])


def test_held_out_wording_and_sentences_are_not_trained():
    trained = " ".join(t.statement + t.ask for t in (*rows.PASSKEYS, *rows.MANY_KEYS))
    assert "safe" not in trained
    assert "opens" not in trained


def test_rows_depend_on_seed_and_step_alone(maker):
    mixture = Mixture(0.25, 0.25, 0.25, 0.25)
    first = batch_rows(maker, mixture, 128, 8, 0.3, 0, 5)
    batch_rows(maker, mixture, 128, 8, 0.3, 0, 6)
    assert batch_rows(maker, mixture, 128, 8, 0.3, 0, 5) == first
    assert batch_rows(maker, mixture, 128, 8, 0.3, 1, 5) != first


def test_long_distances_come_more_often_late_in_training():
    def long_share(progress):
        rng = derived_rng(progress)
        return sum(draw_distance(rng, progress) > 0.6 for _ in range(4000)) / 4000

    # early: half uniform (0.4 above 0.6), half log-uniform over 1/256..1 (ln(1/0.6)/ln 256)
    assert long_share(0.0) == pytest.approx(0.5 * 0.4 + 0.5 * 0.0921, abs=0.03)
    assert long_share(1.0) == pytest.approx(0.4 + 0.6 * 0.246, abs=0.03)
