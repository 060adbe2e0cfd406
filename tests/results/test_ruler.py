"""RULER's mean and its interval, unmeasurable tasks, and gates on them."""

import math
from dataclasses import replace

import numpy as np
import pytest

from ropext.base.errors import UsageError
from ropext.options.evaluate import Evaluate
from ropext.results.gates import GateMetrics, parse_gate
from ropext.results.measurement import MeasuredModel, item_differences
from ropext.results.model_index import _figures_of_metrics
from ropext.results.report.comparison import answer_difference_table
from ropext.results.report.tables import score_text
from ropext.results.retrieval import (
    ItemScore,
    mean_of_tasks,
    retrieval_values,
    ruler_tasks,
    share_of_answers,
    unmeasurable_tasks,
)
from ropext.results.values import Bootstrap, Value, wilson_share
from ropext.tasks import THIRTEEN

CONTEXT = 4096
MODELS = {"yarn-4x": MeasuredModel()}


def scored(task, length, score, index=0):
    return ItemScore(
        *(task, length, None, index, 1.0, 3, score == 1, f"{task}{length}{index}", (1,), (1,)),
        score=score,
        said="",
    )


def answers(shares, tasks=THIRTEEN, count=20):
    """Return so many questions of each task at each length, with a share of right answers."""
    return [
        scored(task, length, float(k < share * count), k)
        for task in tasks
        for length, share in shares.items()
        for k in range(count)
    ]


def test_the_mean_gives_each_task_the_same_weight():
    items = answers({4096: 1.0}, ["vt"], 4) + answers({4096: 0.5}, ["cwe", "fwe"], 20)
    value = retrieval_values(items, CONTEXT, Bootstrap())["ruler@4096"]
    assert value.value == pytest.approx((1 + 0.5 + 0.5) / 3)
    assert value.n == 44
    assert "ruler@4096" not in retrieval_values(items[:4], CONTEXT, Bootstrap())


def test_the_interval_of_the_mean_of_tasks_covers_95_percent():
    """Over 2,000 draws of thirteen tasks with 20 questions each, 94 to 99 % hold the truth."""
    rng = np.random.default_rng(0)
    truth = np.linspace(0.4, 1.0, 13)
    held, widths = 0, []
    for _ in range(2000):
        value = mean_of_tasks([wilson_share(int(rng.binomial(20, p)), 20) for p in truth])
        held += value.ci95[0] <= truth.mean() <= value.ci95[1]
        widths.append(value.ci95[1] - value.ci95[0])
        assert 0 <= value.ci95[0] <= value.value <= value.ci95[1] <= 1
    assert 0.94 < held / 2000 < 0.99
    exact = 2 * 1.96 * math.sqrt((truth * (1 - truth) / 20).sum()) / 13
    assert 0.9 * exact < np.mean(widths) < 1.2 * exact


def test_a_share_of_the_references_is_a_share_of_a_point():
    items = [scored("cwe", 4096, score, k) for k, score in enumerate((0.1, 0.5, 0.9, 1.0))]
    value = share_of_answers(items)
    assert value.value == pytest.approx(2.5 / 4)
    assert value.ci95 == pytest.approx(wilson_share(2.5, 4).ci95)


def test_both_rules_of_an_effective_context():
    shares = {4096: 0.95, 8192: 0.9, 16384: 0.85, 32768: 0.5}
    values = retrieval_values(answers(shares), CONTEXT, Bootstrap())
    assert values["effective_context.ruler"].value == 16384  # 0.85 of 0.95 is 0.81
    assert values["ruler_context"].value == 8192  # 0.856
    # A threshold for all thirteen says nothing about twelve.
    values = retrieval_values(answers(shares, THIRTEEN[1:]), CONTEXT, Bootstrap())
    assert values["effective_context.ruler"].value == 16384
    assert "ruler_context" not in values


def test_a_mean_over_tasks_is_of_those_that_every_length_has():
    """The easy tasks alone fit 1k: their mean there is no measure of the others' elsewhere."""
    items = answers({1024: 1.0, 4096: 1.0, 8192: 1.0}, ["vt", "fwe"])
    items += answers({4096: 0.5, 8192: 0.5}, ["cwe", "qa_1"])
    values = retrieval_values(items, CONTEXT, Bootstrap())
    # Means of all that is there would be 1, 0.75, 0.75: the threshold 0.85 * 1, the answer 1024.
    assert [values[f"ruler@{length}"].value for length in (1024, 4096, 8192)] == [1, 1, 1]
    assert values["effective_context.ruler"].value == 8192
    assert ruler_tasks(values) == (["vt", "fwe"], ["cwe", "qa_1"])
    right = answers({1024: 0.5, 4096: 0.5, 8192: 0.5}, ["vt", "fwe"])
    right += answers({4096: 0.5, 8192: 0.5}, ["cwe", "qa_1"])
    found = item_differences(items, right, Bootstrap())
    assert [found[f"ruler@{length}"].value for length in (1024, 4096, 8192)] == [0.5] * 3
    # One task alone has every length: no mean of it.
    only = retrieval_values(
        answers({1024: 1.0, 4096: 1.0}, ["vt"]) + answers({4096: 1.0}, ["cwe"]), 4096, Bootstrap()
    )
    assert not {"ruler@1024", "ruler@4096", "ruler_context"} & set(only)


def test_a_task_that_no_model_solves_in_its_window_is_not_measurable():
    unable = answers({2048: 0.05, 4096: 0.05, 8192: 0.0}, ["vt"])
    assert list(unmeasurable_tasks({"m": unable}, CONTEXT)) == ["vt"]
    assert "5% right" in unmeasurable_tasks({"m": unable}, CONTEXT)["vt"]
    # One model that can do it shows that the other lost it.
    able = answers({4096: 0.2}, ["vt"])
    assert unmeasurable_tasks({"m": unable, "untouched": able}, CONTEXT) == {}
    # No length inside the window was measured: zeros beyond it tell nothing, other scores do.
    (said,) = unmeasurable_tasks({"m": answers({8192: 0.0, 16384: 0.0}, ["vt"])}, CONTEXT).values()
    assert "no length inside the trained context of 4096 tokens was asked" in said
    assert unmeasurable_tasks({"m": answers({8192: 0.0, 16384: 0.4}, ["vt"])}, CONTEXT) == {}
    # Questions that are answered by token ids keep their zeros, whose loss says more.
    passkey = [ItemScore("passkey", 64, 0.5, 0, 9.0, 5, False, "", (1,), (2,))]
    assert unmeasurable_tasks({"m": passkey}, CONTEXT) == {}


def test_gates_on_the_mean_of_ruler_need_all_thirteen_tasks():
    metrics = GateMetrics(Evaluate(tasks=("vt", "cwe")), MODELS, (4096,))
    metrics.check([parse_gate("ruler@4k<0.85")])
    # A threshold for all thirteen says nothing about two; a step of a grid has no interval.
    for text in ("ruler_context < 4k", "ruler_context.value < 4k", "effective_context.ruler < 4k"):
        with pytest.raises(UsageError, match=r"no such metric|ask for its \.value"):
            metrics.check([parse_gate(text)])
    whole = GateMetrics(Evaluate(tasks=THIRTEEN), MODELS, (4096,))
    whole.check([parse_gate("ruler_context.value < 4k")])
    with pytest.raises(UsageError, match="ruler is asked only where --tasks names it"):
        GateMetrics(Evaluate(tasks=("vt",)), MODELS, (4096,)).check([parse_gate("ruler@4k<0.85")])
    with pytest.raises(UsageError, match="none of the lengths"):
        metrics.check([parse_gate("ruler@32k<0.85")])


def test_a_comparison_is_over_the_same_questions():
    left, right = answers({4096: 0.9}), answers({4096: 0.6})
    found = item_differences(left, right, Bootstrap())
    assert found["ruler@4096"].value == pytest.approx(0.3)
    low, high = found["ruler@4096"].ci95
    assert 0.2 < low < 0.3 < high < 0.4
    assert high - low < found["vt@4096"].ci95[1] - found["vt@4096"].ci95[0]


@pytest.mark.parametrize("task", sorted({*THIRTEEN, "passkey"}))
def test_a_score_that_counts_parts_is_not_called_exact(task):
    """This holds in the default table, in a comparison, and in a card, which shows every task."""
    items = [replace(own, task=task) for own in answers({4096: 0.5}, ["vt"])]
    values = retrieval_values(items, CONTEXT, Bootstrap())
    (figure,) = _figures_of_metrics(values, "DATA", None, None)
    differences = answer_difference_table(
        {"m": item_differences(items, items, Bootstrap())}, "base"
    )
    told = [score_text([task]), differences.note, figure.name]
    assert figure.dataset == f"ropext {task}"
    for said in told:
        assert ("exact" in said) == (task == "passkey")
        assert ("not comparable with published RULER" in said) == (task in THIRTEEN)


def test_the_mean_of_tasks_has_no_interval_if_one_task_has_none():
    values = [Value(0.5, None, None, 3, (0, 1)), wilson_share(5, 10)]
    assert mean_of_tasks(values).ci95 is None
