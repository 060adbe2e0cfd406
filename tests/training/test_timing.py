"""How long work takes here: a step is timed, and scaled by FLOPs."""

import json
from dataclasses import replace

import pytest
import torch
from command_line import run

from ropext.checkpoint import open_snapshot
from ropext.evaluation import timing
from ropext.evaluation.costs import Shape, shape_of
from ropext.training.models import skeleton


def timed(monkeypatch, took):
    """The demo's model, of which ten rows of 512 tokens are to be read."""
    lengths = []

    def seconds(step, model, tokens, vocabulary):
        step(model, torch.zeros(1, tokens, dtype=torch.long))
        lengths.append(tokens)
        return took(tokens)

    monkeypatch.setattr(timing, "_seconds", seconds)
    found = timing.timed(
        skeleton(open_snapshot("ropext://demo")),
        torch.device("cpu"),
        torch.float32,
        512,
        lambda shape: 10 * shape.flops(512),
        Shape.flops,
        lambda model: lambda _, ids: model(input_ids=ids),
        "a row",
    )
    return found, lengths


def test_ten_rows_take_ten_times_what_one_takes(monkeypatch):
    found, lengths = timed(monkeypatch, lambda tokens: 0.5)
    assert found.seconds == pytest.approx(5.0)
    assert lengths == [256, 256, 512]  # the first one is not counted
    assert found.sentence == (
        "about 5 s on this machine (a row of 512 tokens through the whole model took 0.5 s)"
    )


def test_a_step_that_is_long_enough_is_not_lengthened(monkeypatch):
    found, lengths = timed(monkeypatch, lambda tokens: 60.0)
    assert lengths == [256, 256]
    shape = shape_of(skeleton(open_snapshot("ropext://demo")))
    assert found.seconds == pytest.approx(600 * shape.flops(512) / shape.flops(256))


def test_where_the_model_does_not_fit_one_layer_is_scaled_up(monkeypatch):
    monkeypatch.setattr(timing, "free_memory", lambda device: 0)
    found, _ = timed(monkeypatch, lambda tokens: 1.0)
    assert "through one of its 4 layers" in found.sentence
    whole = shape_of(skeleton(open_snapshot("ropext://demo")))
    one = replace(whole, layers=1, body_parameters=whole.body_parameters // 4)
    assert found.seconds == pytest.approx(10 * whole.flops(512) / one.flops(512), rel=0.01)


FIT = ("fit", "ropext://demo", "--factor", "2", "--steps", "1", "--data", "ropext://tuning")


@pytest.mark.parametrize(
    "words",
    [
        FIT,
        ("eval", "ropext://demo", "--data", "ropext://held-out"),
        ("extend", "ropext://demo", "--factor", "2", "--method", "yarn", "--finetune",
         "ropext://tuning", "finetune.control=true", "finetune.steps=9000"),
    ],
)  # fmt: skip
def test_a_dry_run_says_how_long_the_run_takes_here(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    code, heard = run(*words, "--dry-run", "--time", "--json", capsys=capsys)
    told = json.loads(heard.out)
    if "cells" in told:
        told = told["cells"][0]["stages"]["finetune"]
        assert "(warning: from 8 passes on" in told["said"][0]
        assert told["time"]["seconds"] > 9000 * told["time"]["took"]  # several rows a step
        assert " h on this machine" in told["said"][1]
    assert (code, told["time"]["seconds"] > 0, list(tmp_path.iterdir())) == (0, True, [])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*FIT, "-o", "out"), "it goes with --dry-run"),
        (("run", "smoke-test", "-o", "out"), "it goes with --dry-run"),
        (("extend", "ropext://demo", "--factor", "2", "--dry-run"), "--time is for more"),
        (("extend", "ropext://demo", "--factor", "2", "--method", "auto", "--data",
          "ropext://held-out", "-o", "out", "--dry-run"), "--budget 2h limits it"),
    ],
)  # fmt: skip
def test_time_is_refused_where_there_is_nothing_to_time(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    code, heard = run(*words, "--time", capsys=capsys)
    assert (code, said in heard.err, list(tmp_path.iterdir())) == (2, True, []), heard.err
