"""The HTML file: self-contained, with a policy, and with everything from elsewhere escaped."""

import base64

import pytest
from pages import check

from ropext.base.table import Table, as_markdown, as_text, columns
from ropext.results.report.cells import fixed_digits, value_cell
from ropext.results.report.html import Page, page_html
from ropext.results.values import Value

HOSTILE = '<script>alert(1)</script>"><img src=http://x.example/a onerror=alert(2)>'
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)


@pytest.fixture
def html():
    table = Table(HOSTILE, HOSTILE, (HOSTILE, "1k"), ((HOSTILE, "3.1"),))
    page = Page(HOSTILE, HOSTILE, [HOSTILE], [HOSTILE], [table, table], HOSTILE)
    return page_html(page, {HOSTILE: PNG})


def test_nothing_hostile_becomes_markup_and_nothing_is_fetched(html):
    # It is there, as text.
    assert check(html).text.count("<script>alert(1)</script>") >= 8


def test_each_line_of_a_note_is_a_paragraph():
    text = as_markdown([Table("t", "gain: more\n- tax: less", ("a",), (("1",),))])
    assert text == "## t\n\ngain: more\n\n\\- tax: less\n\n| a |\n|---|\n| 1 |"


def test_markdown_cells_cannot_break_out():
    text = as_markdown([Table("t", "n", ("a|b",), (("<img src=x>|`x`",),))])
    row = text.splitlines()[-1]
    assert row == "| &lt;img src=x&gt;\\|\\`x\\` |"


def test_value_cell_rounds_numbers_for_readers():
    assert value_cell(Value(8.4123, 0.05, (8.31, 8.51), 9)) == "8.412 ±0.100"
    assert value_cell(Value(0.25, 0.1, (0.1, 0.4), 9), 2, sign=True) == "+0.25 ±0.15"
    assert value_cell(Value(8.4, None, None, 3, (8.1, 9.0))) == "8.400 (8.100…9.000)"
    assert value_cell(None) == "-"
    assert fixed_digits(123456.0) == "1.23e+05"
    assert fixed_digits(float("inf")) == "inf"
    assert fixed_digits(float("nan")) == "?"


def test_text_tables_line_up():
    text = as_text([Table("Title", "", ("", "1k"), (("base", "4.2 ±0.1"), ("yarn", "14.2 ±0.1")))])
    assert text.splitlines()[0] == "Title"
    assert len({len(line.rstrip()) for line in text.splitlines()[2:]}) <= 2
    noted = as_text([Table("Title", "what " * 30, ("", "1k"), (("base", "4.2 ±0.1"),))])
    assert [line[:6] for line in noted.splitlines()[4:]] == ["  what", "  what"]  # under it
    assert max(map(len, noted.splitlines())) <= 120


def test_a_column_of_signed_numbers_is_aligned_to_the_right() -> None:
    text = columns(("model", "gain"), [("a", "+0.5"), ("b", "-10.25 (-11…-9)"), ("c", "-")])
    assert text.splitlines()[2] == f"a      {'+0.5':>15}"
    assert columns(("word",), [("-x",), ("--long",)]).splitlines()[2] == "-x"
