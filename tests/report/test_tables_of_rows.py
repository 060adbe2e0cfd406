"""What a terminal shows of an evaluation: one table, its columns explained, methods by factors."""

from dataclasses import replace

import pytest

from ropext.base.table import as_text
from ropext.results.measurement import MeasuredModel, Measurement
from ropext.results.numbers import EvaluationFacts, ModelNumbers, ModelSource, RulerTasks
from ropext.results.perplexity import LossStatistics
from ropext.results.report import tables
from ropext.results.report.cells import value_cell
from ropext.results.values import Bootstrap, Value, wilson_share


def lone(value, half=0.1, n=16):
    return Value(value, half / 2, (value - half, value + half), n)


def variant(kind, retrieval=(), method=None, factor=None, **numbers):
    metrics = {name.replace("_at_", "@"): value for name, value in numbers.items()}
    verdicts = ("a sentence",) if kind == "extended" else ()
    target = factor and int(factor * 256)
    return MeasuredModel(
        kind,
        source=ModelSource(target=target, info={"method": method, "factor": factor}),
        numbers=ModelNumbers(metrics, retrieval=dict.fromkeys(retrieval, ()), verdicts=verdicts),
    )


def results(lengths=(256, 512), **variants):
    models = {label.replace("_", "-"): model for label, model in variants.items()}
    return Measurement(LossStatistics(256, lengths, 64, Bootstrap(0)), models)


BASE = variant("base", tail_at_256=lone(9), tail_at_512=lone(8), tail_at_1024=lone(7))


def extended(gain, retrieval=(), **more):
    gains = {"gain_at_256": lone(-0.5), "gain_at_512": lone(gain)}
    return variant(
        "extended",
        tail_at_512=lone(8.5),
        short_tax=lone(0.04),
        retrieval=retrieval,
        **gains,
        **more,
    )


def test_verdict_lines_has_a_line_for_each_extended_model():
    both = results(base=BASE, pi_2x=extended(-1.0), yarn_2x=extended(0.3))
    assert tables.verdict_lines(both) == ["a sentence", "a sentence"]
    assert tables.verdict_lines(both, "yarn-2x") == ["a sentence"]


def test_one_table_has_a_column_for_each_task_and_the_short_tax_at_the_trained_context():
    asked = {"mkey_at_256": wilson_share(0, 10), "mkey_at_512": wilson_share(0, 12)}
    asked |= {"passkey_at_256": wilson_share(9, 10), "passkey_at_512": wilson_share(3, 12)}
    models = {f"m{number}": extended(0.1, ("mkey", "passkey"), **asked) for number in range(2)}
    (table,) = tables.main_tables(results(base=BASE, **models))
    assert table.header == ("length", "model", "perplexity", "gain", "mkey", "passkey", "short tax")
    assert table.rows[:2] == (
        ("256", "base", "9.000", "-", "-", "-", "-"),
        ("", "m0", "-", "-0.5000 ±0.1000", "0.00", "0.90", "+0.0400 ±0.1000"),
    )
    assert table.rows[4] == ("", "m0", "8.500", "+0.1000 ±0.1000", "0.00", "0.25", "-")
    explained = [line.partition(":")[0] for line in table.note.splitlines()]
    assert explained == ["gain", "short tax", "±", "mkey, passkey"]
    assert table.note.endswith("of 10 or 12 questions")
    assert as_text([table]).splitlines()[9].startswith("  gain: ")  # under it
    (plain,) = tables.main_tables(results(base=BASE))
    assert plain.header == ("length", "model", "perplexity")
    assert plain.note == ""


def test_many_of_rulers_tasks_share_the_column_of_their_mean():
    names = ("passkey", "niah_single_1", "niah_single_2", "vt", "cwe")
    asked = {f"{name}_at_512": wilson_share(5, 10) for name in (*names, "ruler")}
    for own, wanted in ((names, ["passkey", "ruler"]), (names[:4], [*names[:4]])):
        facts = EvaluationFacts(ruler=RulerTasks(names))
        found = replace(results(m=extended(0.1, own, **asked)), facts=facts)
        (table,) = tables.main_tables(found)
        assert [head for head in table.header if head in asked_names(asked)] == wanted


def asked_names(asked):
    return {name.partition("_at_")[0] for name in asked}


def test_each_factor_in_the_table_by_method_has_its_own_target():
    def at(method, factor, tail, gain):
        length = int(factor * 256)
        numbers = {f"tail_at_{length}": lone(tail), f"gain_at_{length}": lone(gain)}
        elsewhere = {"tail_at_256": lone(99)}
        return variant("extended", (), method, factor, **numbers, **elsewhere)

    models = {
        "pi_2x": at("pi", 2.0, 8.5, -0.1),
        "pi_4x": at("pi", 4.0, 9.5, -0.4),
        "yarn_2x": at("yarn", 2.0, 7.5, 0.1),
    }
    grid = results((256, 512, 1024), base=BASE, **models)
    table = tables.main_tables(grid)[0]
    assert table.header == ("", "2x (512)", "gain", "4x (1k)", "gain")
    assert table.rows == (
        ("base", "8.000", "-", "7.000", "-"),
        ("pi", "8.500", "-0.1000 ±0.1000", "9.500", "-0.4000 ±0.1000"),
        ("yarn", "7.500", "+0.1000 ±0.1000", "-", "-"),
    )
    assert "99" not in as_text(tables.main_tables(grid))
    short = tables.main_tables(results((256, 512), base=BASE, **models))[0]
    assert [row[:3] for row in short.rows[1:4]] == [
        ("", "pi-2x", "99.000"), ("", "pi-4x", "99.000"), ("", "yarn-2x", "99.000"),
    ], "where one was not read at its target, every length is shown"  # fmt: skip


@pytest.mark.parametrize(
    ("ends", "text"),
    [
        ((10.47, 20.91), "14.990 [10.470, 20.910]"),  # 4.52 below and 5.92 above
        ((10.0, 20.0), "14.990 ±5.000"),
        ((14.98999, 14.990001), "14.990 ±0.000"),  # nothing that is printed is skewed
    ],
)
def test_a_skewed_interval_is_printed_by_its_ends(ends, text):
    assert value_cell(Value(14.99, 1.0, ends, 16)) == text
