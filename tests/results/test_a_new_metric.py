"""A metric that an existing method computes is added in one place, a column of the printed table in
one: all else follows."""

import re
from pathlib import Path

import numpy as np
import pytest

from ropext.base.errors import UsageError
from ropext.options.evaluate import Measuring
from ropext.results import BASE, metrics, rundir
from ropext.results.gates import GateMetrics, parse_gate
from ropext.results.measurement import MeasuredModel, Measurement
from ropext.results.numbers import ModelNumbers
from ropext.results.perplexity import LossStatistics, MeasuredDocuments, Reading
from ropext.results.report import tables
from ropext.results.report.cells import value_cell
from ropext.results.values import Bootstrap

FRAME = LossStatistics(64, (64,), 16, Bootstrap(3))
FIRST = metrics.Metric(
    "first",
    "nll",
    span=lambda frame, length: (1, 2),
    compares=True,
    gate_rules=metrics.GateRules("{model} loses {value:.3g} nats on its first token"),
)


def model(label, loss):
    """Make a model that loses so many nats on every token of ten documents."""
    rows = [np.full(64, loss + k / 10, np.float32) for k in range(10)]
    reading = Reading(label, {64: rows})
    values = metrics.text_values(metrics.ReadText(FRAME, reading))
    return MeasuredModel(reading=reading, numbers=ModelNumbers(values))


def test_a_metric_needs_one_entry_and_a_column_another(monkeypatch):
    monkeypatch.setattr(metrics, "TEXT_METRICS", (*metrics.TEXT_METRICS, FIRST))
    hashes = tuple({64: str(k)} for k in range(10))
    documents = MeasuredDocuments(tuple(map(str, range(10))), hashes, (np.ones(64, np.int64),) * 10)
    models = {"a": model("a", 2.0), "b": model("b", 3.0)}
    run = Measurement(FRAME, models, documents)
    assert run.values("a")["first@64"].value == np.float32(2.45)
    assert run.results["variants"]["b"]["metrics"]["first@64"]["n"] == 10
    assert run.difference("b", run.only("a"))["first@64"].value == 1.0
    gate = parse_gate("a:first@64 > 1")
    GateMetrics(Measuring(data="texts", max_docs=10), models, [64]).check([gate])
    (outcome,) = rundir.judge_gates(run, [gate])
    assert not outcome.passed
    assert metrics.gate_rules_of("first@64") is FIRST.gate_rules
    (every,) = tables.table_of_every_number(run)
    assert [row[0] for row in every.rows].count("first") == 2
    column = tables.MAIN_COLUMNS[0]
    assert "first token" not in tables.main_tables(run)[0].header
    added = type(column)("first token", "first", value_cell, "nats")
    monkeypatch.setattr(tables, "MAIN_COLUMNS", (*tables.MAIN_COLUMNS, added))
    (table,) = tables.main_tables(run)
    assert "first token" in table.header
    assert "first token: nats" in table.note


def test_only_losses_and_perplexities_are_compared():
    """A difference is always of two mean losses: of any other number it would be another number."""
    for metric in metrics.TEXT_METRICS + metrics.WHOLE_METRICS:
        assert not metric.compares or metric.method in ("nll", "perplexity", "difference"), metric


def test_the_page_names_every_metric_and_which_have_a_difference():
    page = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
    compares = dict[str, bool]()
    for names, answer in re.findall(
        r"^\| (`.*`) \|.*\| (yes|no) \|$", page.read_text("utf-8"), re.M
    ):
        for name in re.findall(r"`(\w+)(?:@LENGTH)?`", names):
            compares[name] = answer == "yes"
    for metric in metrics.TEXT_METRICS + metrics.WHOLE_METRICS:
        assert compares[metric.name] is metric.compares, metric.name


@pytest.mark.parametrize("metric", ["bpb@64", "gain@64", "effective_context"])
def test_a_gate_on_a_difference_that_does_not_exist(metric):
    models = {"base": MeasuredModel(BASE), "a": MeasuredModel()}
    known = GateMetrics(Measuring(data="texts", max_docs=10), models, [64])
    known.check([parse_gate(f"a:{metric} > 1")])
    name = metric.partition("@")[0]
    there = "there are tail@LENGTH, tail_nll@LENGTH, cumulative@LENGTH, short_tax"
    with pytest.raises(UsageError, match=f"{name} has no difference to another model; .*{there}"):
        known.check([parse_gate(f"a:{metric} > 1 vs base")])
    with pytest.raises(UsageError, match="no such metric"):
        known.check([parse_gate("a:tail > 1 vs base")])
