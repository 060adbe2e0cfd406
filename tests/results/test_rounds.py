"""The leader of a choice, the ties, and the final sentence, on readings computed by hand."""

import numpy as np
import pytest

from ropext.base.jsontext import values_json
from ropext.results import UNTOUCHED
from ropext.results.measurement import MeasuredModel, Measurement
from ropext.results.numbers import ModelNumbers
from ropext.results.perplexity import LossStatistics, Reading
from ropext.results.rules import auto_verdict, choice_reason, loss_standing
from ropext.results.values import Bootstrap, Value

FRAME = LossStatistics(8, (16,), 4, Bootstrap(0))


def reading(label, *losses):
    """Return a reading with one document for each loss, all its tokens alike."""
    return Reading(label, {16: [np.full(16, loss, np.float32) for loss in losses]})


def measured(**losses):
    models = {label: MeasuredModel(reading=reading(label, *own)) for label, own in losses.items()}
    return Measurement(FRAME, models)


def test_loss_standing_sorts_models_by_loss():
    done = loss_standing(measured(a=[3, 3, 3, 3], b=[1, 2, 1, 2], c=[2, 2, 2, 2], d=[9, 9, 9, 9]))
    assert done.documents == 4
    assert list(done.behind) == ["b", "c", "a", "d"]
    assert [own.value for own in done.behind.values()] == [0, 0.5, 1.5, 7.5]


def test_a_model_that_is_surely_behind_is_not_tied():
    close = [1.1, 0.9] * 4  # the mean of a, spread about it
    done = loss_standing(measured(a=[1.0] * 8, b=close, c=[1.004] * 8, d=[3.0] * 8))
    assert set(done.alike) == {"a", "b"}  # c is always 0.004 behind


def test_a_difference_below_a_thousandth_is_a_tie():
    done = loss_standing(measured(a=[1.0] * 8, b=[1.0009] * 8, c=[1.0011] * 8))
    assert done.alike == ("a", "b")


def test_a_tie_is_within_half_a_percent_of_the_lowest_loss():
    noisy = [1.0 + 0.2 * (-1) ** k for k in range(8)]
    own = measured(a=[1.0] * 8, near=[x + 0.004 for x in noisy], far=[x + 0.006 for x in noisy])
    done = loss_standing(own)
    assert set(done.tied) == {"a", "near", "far"}  # none is surely behind
    assert done.alike == ("a", "near")


def test_choice_reason_names_the_loss_and_the_runner_up():
    done = loss_standing(measured(a=[1.0] * 8, b=[1.5] * 8))
    assert choice_reason(done, "a") == (
        "lowest loss at the target on 8 documents, 0.5000 nats per token below b"
    )
    assert choice_reason(done, "b") == "as low as a on 8 documents, and the plainer rope type"


def measured_fit(gain, ci95, tax=0.0):
    se = None if ci95 is None else (ci95[1] - ci95[0]) / 4
    values = {"gain@4096": Value(gain, se, ci95, 8), "short_tax": Value(tax, 0.1, (0, 0), 8)}
    model = MeasuredModel(numbers=ModelNumbers(values))
    return Measurement(FRAME, {"fitted": model})


LEAVE = "leave this model as it is: without scaling it is as good at 4k"


@pytest.mark.parametrize(
    ("taken", "gain", "ci95", "said"),
    [
        ("yarn", 0.1, [0.05, 0.15], "extended by yarn, then a fitted spectrum: because of that"),
        # By hand: 8 * (0.178 / 0.048)^2 = 110.01, rounded up to two digits.
        (
            "yarn",
            0.048,
            [-0.13, 0.226],
            "+0.048 (-0.130 to +0.226) nats per token on 8 documents; about 120 documents would",
        ),
        # The margin is farther from it than zero: 8 * (0.0199 / 0.008)^2 = 49.5.
        ("yarn", 0.002, [-0.018, 0.0219], "about 50 documents would decide); extended by yarn"),
        # A skewed interval counts by the end that has to come nearer: 8 * (0.018 / 0.008)^2 = 40.5.
        ("yarn", 0.008, [-0.01, 0.05], "about 41 documents would decide); extended by yarn"),
        ("yarn", -0.02, [-0.05, 0.01], "about 9 documents would decide)"),
        ("yarn", 0.001, [-0.005, 0.0099], "as well, within 0.01 nats per token; ropext wrote"),
        ("yarn", -0.1, [-0.15, -0.05], "the base predicts the last tokens before 4k better;"),
        ("yarn", 0.1, None, "not known whether extending gains anything over truncation at 4k (8"),
        (UNTOUCHED, 0.1, [0.05, 0.15], LEAVE),
        (UNTOUCHED, 0.1, [-0.05, 0.25], LEAVE),
        (UNTOUCHED, 0.0, [-0.005, 0.005], LEAVE),
        (UNTOUCHED, 0.1, None, LEAVE),
        (UNTOUCHED, -0.1, [-0.15, -0.05], "the base predicts the last tokens before 4k better;"),
    ],
)
def test_the_verdict_follows_the_gain(taken, gain, ci95, said):
    choice = {"taken": taken, "target": 4096, "because": "because of that"}
    measured = measured_fit(gain, ci95, tax=0.02)
    start = auto_verdict(choice, measured, "fitted", fit_is_kept=False)
    assert "then a fitted spectrum" not in start.sentence  # it wrote the form that it began at
    found = auto_verdict(choice, measured, "fitted")
    assert said in found.sentence
    assert found.gain.value == gain
    assert values_json(found)["short_tax"]["value"] == 0.02
