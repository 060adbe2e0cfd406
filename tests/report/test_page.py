"""The HTML file: self-contained, with a policy, and with everything from elsewhere escaped."""

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest

from ropext.report.measured import Table, as_markdown, as_text, number, shown
from ropext.report.page import STYLE, page
from ropext.results.values import Value

HOSTILE = '<script>alert(1)</script>"><img src=http://x.example/a onerror=alert(2)>'
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)


class Elements(HTMLParser):
    """Every start tag with its attributes, and all text."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.tags, self.words = [], []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words.append(data)


@pytest.fixture
def html():
    table = Table(HOSTILE, HOSTILE, (HOSTILE, "1k"), ((HOSTILE, "3.1"),))
    return page(HOSTILE, HOSTILE, [HOSTILE], [HOSTILE], [table, table], {HOSTILE: PNG}, HOSTILE)


def test_nothing_hostile_becomes_markup(html):
    found = Elements(html)
    tags = {tag for tag, _ in found.tags}
    assert tags <= {
        *("html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "ul", "li"),
        *("div", "table", "thead", "tbody", "tr", "th", "td", "img", "pre"),
    }
    assert not any(name.startswith("on") for _, attrs in found.tags for name in attrs)
    # It is there, as text.
    assert "".join(found.words).count("<script>alert(1)</script>") >= 8


def test_nothing_is_fetched_from_anywhere(html):
    found = Elements(html)
    for _, attrs in found.tags:
        assert attrs.get("src", "data:").startswith("data:image/png;base64,") or "src" not in attrs
        assert not {"href", "action", "srcset", "style", "background"} & set(attrs)
    assert "@import" not in html
    assert "url(" not in html


def test_the_policy_allows_this_style_sheet_and_inline_pictures_alone(html):
    found = Elements(html)
    (policy,) = [
        attrs["content"]
        for tag, attrs in found.tags
        if attrs.get("http-equiv") == "Content-Security-Policy"
    ]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["img-src"] == "data:"
    assert "unsafe" not in policy
    style = re.search(r"<style>(.*?)</style>", html, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert rules["style-src"] == f"'sha256-{digest}'"
    assert style == STYLE
    # The policy comes before anything that it should hold for.
    assert html.index("Content-Security-Policy") < html.index("<style>")


def test_markdown_cells_cannot_break_out():
    text = as_markdown([Table("t", "n", ("a|b",), (("<img src=x>|`x`",),))])
    row = text.splitlines()[-1]
    assert row == "| \\<img src=x>\\|\\`x\\` |"


def test_numbers_as_people_read_them():
    assert shown(Value(8.4123, 0.05, (8.31, 8.51), 9)) == "8.412 ±0.100"
    assert shown(Value(0.25, 0.1, (0.1, 0.4), 9), 2, sign=True) == "+0.25 ±0.15"
    assert shown(Value(8.4, None, None, 3, (8.1, 9.0))) == "8.400 (8.100…9.000)"
    assert shown(None) == "-"
    assert number(123456.0) == "1.23e+05"
    assert number(float("inf")) == "inf"
    assert number(float("nan")) == "?"


def test_text_tables_line_up():
    text = as_text([Table("Title", "", ("", "1k"), (("base", "4.2 ±0.1"), ("yarn", "14.2 ±0.1")))])
    assert text.splitlines()[0] == "Title"
    assert len({len(line.rstrip()) for line in text.splitlines()[2:]}) <= 2
