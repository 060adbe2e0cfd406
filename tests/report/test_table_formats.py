"""The main tables for other programs: CSV as pandas reads it, LaTeX, Markdown; rows as dicts."""

import csv
import io
from dataclasses import replace

import pytest
from test_tables_of_rows import BASE, extended, lone, results

from ropext.base.table import Number, Table, as_csv, as_latex, as_text, in_format, records
from ropext.results.overlap import Overlap
from ropext.results.report import tables
from ropext.results.report.cells import Column, nats_cell, point_cell, table_of_values
from ropext.results.report.comparison import tidy_comparison_table

VALUE = ("value", "value low", "value high")


def read(text):
    return list(csv.DictReader(io.StringIO(text)))


def test_a_csv_has_a_row_for_each_length_and_model_with_the_whole_number_and_its_interval():
    run = results(base=BASE, yarn_2x=extended(0.125))
    rows = read(as_csv(tables.tidy_tables(run)))
    assert [(row["length"], row["model"]) for row in rows] == [
        ("256", "base"),
        ("256", "yarn-2x"),
        ("512", "base"),
        ("512", "yarn-2x"),
    ]
    assert (rows[3]["gain"], rows[3]["gain low"]) == ("0.125", repr(0.125 - 0.1))
    assert rows[3]["perplexity high"] == "8.6"
    assert rows[2]["gain"] == rows[2]["gain low"] == ""  # the base has no gain


def test_a_remark_has_its_own_column_so_that_a_model_has_one_name_in_every_table():
    seen = Overlap(8, 3, 0, ("a",), complete=True)
    model = replace(extended(0.125), overlap=seen)
    run = results(base=BASE, yarn_2x=model)
    assert "yarn-2x (3 of 8 trained on)" in as_text(tables.tidy_tables(run))
    for table in (*tables.tidy_tables(run), *tables.table_of_every_number(run)):
        found = records(table)
        assert {row["model"] for row in found} == {"base", "yarn-2x"}
        remarks = {row["model"]: row["remark"] for row in found}
        assert remarks == {"base": None, "yarn-2x": "3 of 8 trained on"}
        assert read(as_csv([table]))[-1]["remark"] == "3 of 8 trained on"
    assert "remark" not in records(tables.tidy_tables(results(base=BASE))[0])[0]


def test_several_factors_are_rows_of_a_csv():
    two = extended(0.2, method="yarn", factor=2.0)
    four = extended(0.4, method="yarn", factor=4.0)
    run = results(base=BASE, yarn_2x=two, yarn_4x=four)
    rows = read(as_csv(tables.tidy_tables(run)))
    gains = {row["model"]: row["gain"] for row in rows if row["length"] == "512"}
    assert gains == {"base": "", "yarn-2x": "0.2", "yarn-4x": "0.4"}


def test_every_number_has_a_row_of_its_own_in_a_csv():
    run = results(base=BASE, yarn_2x=extended(0.125))
    (table,) = tables.table_of_every_number(run)
    rows = read(as_csv([table]))
    assert list(rows[0]) == ["metric", "from", "length", "model", *VALUE]
    told = {(row["metric"], row["length"], row["model"]): row for row in rows}
    assert len(told) == len(rows)
    for label in run.models:
        for name, value in run.values(label).items():
            metric, _, length = name.partition("@")
            row = told[metric, length, label]
            assert [float(row[head]) for head in VALUE] == [value.value, *value.ci95]
    harness = {"yarn_2x": {"arc": {"acc": 0.123456, "alias": "arc"}}}
    run = replace(run, facts=replace(run.facts, lm_eval=harness))
    (table,) = tables.table_of_every_number(run)
    last = read(as_csv([table]))[-1]
    wanted = ("lm_eval.arc.acc", "", "yarn_2x", "0.123456")
    assert tuple(last[head] for head in ("metric", "length", "model", "value")) == wanted


def test_compared_answers_have_a_row_for_each_length_and_model_in_a_csv():
    differences = {
        "yarn": {"passkey@512": lone(0.25), "passkey@256": lone(-0.5), "vt@512": lone(1.0)},
        "pi": {"passkey@512": lone(0.125), "passkey_nll@512": lone(3.0)},
    }
    rows = read(as_csv([tidy_comparison_table(None, differences, "base")]))
    found = [(row["length"], row["model"], row["passkey"], row["vt"]) for row in rows]
    assert found == [
        ("256", "yarn", "-0.5", ""),
        ("512", "yarn", "0.25", "1.0"),
        ("512", "pi", "0.125", ""),
    ]


def test_records_of_a_table_hold_numbers_and_none():
    table = table_of_values(
        "t",
        "n",
        [("a", {"x": lone(1.25), "y": None}), ("b", {"y": lone(-0.5, half=0.25)})],
        [Column("x", "x", point_cell), Column("y", "y", nats_cell)],
    )
    assert records(table) == [
        {"model": "a", "x": 1.25, "x low": 1.15, "x high": 1.35}
        | dict.fromkeys(("y", "y low", "y high")),
        {"model": "b", "y": -0.5, "y low": -0.75, "y high": -0.25}
        | dict.fromkeys(("x", "x low", "x high")),
    ]


def test_a_head_that_occurs_twice_keeps_both_columns():
    table = Table("t", "n", ("", "gain", "gain"), (("a", Number("1", 1.0), Number("2", 2.0)),))
    assert records(table) == [{"model": "a", "gain": 1.0, "gain 2": 2.0}]


@pytest.mark.parametrize("name", ["=HYPERLINK(1)", "+1+cmd", "@x", "-a"])
def test_no_name_is_a_formula_of_a_spreadsheet(name):
    (row,) = read(as_csv([Table("t", "n", ("", "k"), ((name, "-0.5"),))]))
    assert row == {"model": f"'{name}", "k": "-0.5"}


def test_several_tables_of_a_csv_are_headed_by_their_titles():
    table = Table("Per\nplexity", "n", ("", "k"), (("a", "1"),))
    assert as_csv([table]) == "model,k\na,1"
    assert as_csv([table, table]) == "\n\n".join(["# Per plexity\nmodel,k\na,1"] * 2)


def test_a_latex_table_is_of_plain_tabular_and_booktabs():
    table = Table(
        "50 % of\nit",
        "",
        ("", "1k"),
        (("a_b & #1 {$x$} ~^\\", Number("-1.5 ±0.1", -1.5)), ("[seen]", "-")),
    )
    assert as_latex([table]).split("\n") == [
        "% 50 % of it",
        r"\begin{tabular}{lr}",
        r"\toprule",
        r" & 1k \\",
        r"\midrule",
        r"a\_b \& \#1 \{\$x\$\} \textasciitilde{}\textasciicircum{}\textbackslash{} & "
        r"$-$1.5 $\pm$0.1 \\",
        r"{}[seen] & - \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


def test_in_format_makes_csv_latex_and_markdown():
    table = Table("t", "n", ("", "k"), (("a", "1"),))
    firsts = []
    for name in ("csv", "latex", "markdown"):
        firsts.append(in_format([table], name).split("\n")[0])
    assert firsts == ["model,k", "% t", "## t"]
