"""A report's elements as a browser sees them, and the rules for them."""

import base64
import hashlib
import re
from html.parser import HTMLParser

from ropext.results.report.html import STYLE

TAGS = {
    *("html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "ul", "li"),
    *("div", "table", "thead", "tbody", "tr", "th", "td", "img", "pre"),
}


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

    @property
    def text(self):
        return "".join(self.words)


def check(html):
    """Check that no markup is foreign, nothing is fetched, and the policy comes before its
    subjects."""
    found = Elements(html)
    assert {tag for tag, _ in found.tags} <= TAGS
    for _, attrs in found.tags:
        assert not any(name.startswith("on") for name in attrs)
        assert not {"href", "action", "srcset", "style", "background"} & set(attrs)
        if "src" in attrs:
            assert attrs["src"].startswith("data:image/png;base64,")
    assert "@import" not in html
    assert "url(" not in html
    check_policy(html, found)
    return found


def check_policy(html, found):
    """Check that the policy allows only this style sheet and inline pictures."""
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
    assert html.index("Content-Security-Policy") < html.index("<style>")
