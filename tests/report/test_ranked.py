"""The sentences about a ranking, and the command that follows from it."""

import shlex

import numpy as np
import pytest

from ropext.options import extend
from ropext.planning import make_plan
from ropext.results.measurement import MeasuredModel, Measurement
from ropext.results.perplexity import LossStatistics, Reading
from ropext.results.report.ranking import ranking_table, ranking_text, ranking_verdict
from ropext.results.rules import rank_methods
from ropext.results.values import Bootstrap

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "vocab_size": 100,
}
FRAME = LossStatistics(context=64, lengths=(256,), tail=16, bootstrap=Bootstrap(0))
LEVELS = np.linspace(2, 5, 10)
SWAY = np.array([0.3, -0.3] * 5)


def ranking(preference=(), base=None, **losses):
    def reading(label, levels):
        arrays = [np.full(256, level, np.float32) for level in levels]
        return Reading(label, {256: arrays})

    models = {label: MeasuredModel(reading=reading(label, own)) for label, own in losses.items()}
    if base is not None:
        models["base"] = MeasuredModel("base", reading("base", base))
    return rank_methods(Measurement(FRAME, models), preference)


def plan(**wishes):
    return make_plan(
        CONFIG, extend.parse_extend({"method": "yarn", "factor": 4.0} | wishes), "my model"
    )


@pytest.mark.parametrize(
    ("losses", "preference", "said"),
    [
        (
            {"yarn": LEVELS, "pi": LEVELS + 0.2},
            ("pi", "yarn"),
            "take yarn: the lowest at 95 % confidence, 0.2000 nats per token (0.2000 at least) "
            "below pi",
        ),
        (
            {"yarn": LEVELS, "pi": LEVELS + 0.2, "ntk": LEVELS + 0.1},
            (),
            "take yarn: the lowest at 95 % confidence, 0.1000 nats per token (0.1000 at least) "
            "below ntk, corrected for 2 comparisons",
        ),
        (
            {"low": LEVELS, "next": LEVELS + SWAY + 0.23}
            | {f"far{number}": LEVELS + 1 for number in range(8)},
            (),
            "take low: the lowest, below each other method by more than its interval, but not at "
            "95 % confidence below next: 0.2300 nats per token (-0.",
        ),
        (
            {"yarn": LEVELS, "pi": LEVELS + SWAY + 0.01},
            ("pi", "yarn"),
            "take pi: the data do not separate yarn, pi (0.0100 nats per token (",
        ),
        (
            {"yarn": LEVELS, "pi": LEVELS + SWAY + 0.01},
            ("yarn", "pi"),
            "take yarn: the lowest; the data do not separate yarn, pi, and of these",
        ),
        (
            {"yarn": LEVELS[:5], "pi": LEVELS[:5] + 1},
            ("pi", "yarn"),
            "take yarn: the lowest loss, by 1.0000 nats per token; 5 documents are too few",
        ),
        ({"yarn": LEVELS}, (), "yarn is the only method that can be written with these options"),
    ],
)
def test_the_verdict_says_which_and_how_sure(losses, preference, said):
    assert ranking_verdict(ranking(preference, **losses)).startswith(said)


def test_truncation_that_beats_the_best_is_reported():
    better = ranking(base=LEVELS - 0.5, yarn=LEVELS, pi=LEVELS + 0.2)
    shown = ranking_text(better, {"yarn": plan()}, {"llama3": "no reason"})
    lower = "the base on its last 64 tokens has a loss 0.5000 nats per token lower"
    assert lower in " ".join(shown.split())
    assert "not measured: llama3: no reason" in shown
    assert shown.endswith('ropext extend "my model" --method yarn --factor 4 -o OUT')
    worse = ranking(base=LEVELS + 0.5, yarn=LEVELS, pi=LEVELS + 0.2)
    assert "truncating the text is better" not in ranking_text(worse, {"yarn": plan()}, {})


def test_the_table_marks_the_chosen_method():
    ranked = ranking(base=LEVELS, yarn=LEVELS, pi=LEVELS + 0.2)
    rows = ranking_table(ranked).rows
    assert [row[0] for row in rows] == ["yarn*", "pi", "base"]
    in_csv = ranking_table(ranked, starred=False).rows
    assert [row[0] for row in in_csv] == ["yarn", "pi", "base"]
    assert in_csv[0][1:] == rows[0][1:]
    assert rows[0][2] == "-"
    assert rows[1][2] == "+0.2000 ±0.0000"


@pytest.mark.parametrize(
    "wishes",
    [
        {"beta_fast": 8.5, "truncate": False},
        {"factor": None, "target": 200, "for_loaders": ("vllm", "transformers")},
        {"temperature": 0.8, "context": 32, "even_so": True},
    ],
)
def test_the_command_asks_for_the_same_plan(wishes):
    from typer.main import get_command

    from ropext.cli.app import build

    made = plan(**wishes)
    words = shlex.split(made.command)
    command = get_command(build("extend")).commands["extend"]
    given = command.make_context("extend", words[2:]).params
    for name, value in wishes.items():
        if isinstance(value, tuple):
            value = ",".join(value)
        assert given[name] == value
    assert given["method"] == "yarn"
    assert str(given["output"]) == "OUT"
