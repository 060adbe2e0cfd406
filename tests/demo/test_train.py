"""The training script: its schedule, and that stopping and going on changes nothing."""

import pytest
import torch

from scripts.demo_checkpoint import train
from scripts.demo_checkpoint.bundle import DATA
from scripts.demo_checkpoint.rows import Row, RowMaker
from scripts.demo_checkpoint.train import Progress, Trainer, new_model, rate_at, rows_loss

PROSE = (DATA / "LICENSE-PSF.txt").read_text()


class Characters:
    def encode(self, text):
        return [ord(c) for c in text]


@pytest.fixture(scope="module")
def maker():
    lines = [line.strip() + "\n" for line in PROSE.splitlines() if 30 < len(line) < 80]
    return RowMaker(Characters(), [min(ord(c), 127) for c in PROSE], 128, lines)


def test_rate_warms_up_stays_and_falls_to_nothing():
    budget = 10_000_000
    assert rate_at(Progress(step=0, tokens=0), budget) == pytest.approx(2e-3 / 200)
    assert rate_at(Progress(step=99, tokens=600_000), budget) == pytest.approx(1e-3)
    assert rate_at(Progress(step=900, tokens=6_000_000), budget) == pytest.approx(2e-3)
    assert rate_at(Progress(step=1200, tokens=8_000_000), budget) == pytest.approx(1e-3)
    assert rate_at(Progress(step=1500, tokens=10_000_000), budget) == 0.0


def test_each_row_weighs_the_same_however_much_of_it_is_scored():
    model = new_model(0)
    many = Row(list(range(1, 33)), list(range(1, 32)))
    few = Row(list(range(40, 72)), [31])
    ids = torch.tensor([many.tokens])
    with torch.no_grad():
        both = float(rows_loss(model, model.model, [many, few]))
        apart = [float(rows_loss(model, model.model, [row])) for row in (many, few)]
        stock = float(model(input_ids=ids, labels=ids).loss)
    assert both == pytest.approx(sum(apart) / 2, abs=1e-6)
    assert apart[0] == pytest.approx(stock, abs=1e-5)


@pytest.mark.slow
def test_a_stopped_training_resumes_to_the_same_weights(maker, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "STEP_TOKENS", 512)
    monkeypatch.setattr(train, "STAGES", train.STAGES[1:])  # 64 characters hold no passkey
    straight = Trainer(tmp_path / "straight", maker, seed=3, budget=4 * 512)
    straight.out.mkdir()
    straight.run()
    first = Trainer(tmp_path / "parts", maker, seed=3, budget=4 * 512)
    first.out.mkdir()
    for _ in range(2):
        first.step()
    first.save()
    second = Trainer(tmp_path / "parts", maker, seed=3, budget=4 * 512)
    assert second.progress.step == 2
    second.run()
    for name, tensor in straight.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name]), name


@pytest.mark.slow
def test_the_window_grows_when_keys_are_found_and_not_before(maker, tmp_path, monkeypatch):
    trainer = Trainer(tmp_path, maker, seed=0, budget=10_000_000)
    trainer.progress.stage = 1
    trainer.progress.stage_tokens = 1000
    for found, stage in ((0.80, 1), (0.85, 2), (1.0, 2)):
        monkeypatch.setattr(train, "find_rate", lambda *_, found=found: found)
        trainer.check(1.0)
        assert trainer.progress.stage == stage
