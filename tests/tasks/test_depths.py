"""How far a planted sentence is from its depth: docs/reference/tasks.md states it."""

import random
import re
from pathlib import Path

import pytest

from ropext.tasks.asking import TextRequest
from ropext.tasks.needles import Needles

PAGE = Path(__file__).parents[2] / "docs/reference/tasks.md"
SAID = re.search(
    r"can be (\S+) of the text away from its depth with 20 to 50 sentences, and (\S+) with 1,000 "
    r"\(over 20 places in the book\)\.\nIn noise and among needles it can be (\S+) away\.",
    PAGE.read_text("utf-8"),
)


def farthest(around, units):
    """Return the share of the text between a needle and its depth, at the worst of 20 places."""
    worst = 0.0
    for seed in range(20):
        for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
            request = TextRequest(units, (depth,), 4096, random.Random(seed))
            asked = Needles(around=around)(request)[0]
            body, key = asked.text, asked.question.split(" of ")[1].rstrip("?")
            worst = max(worst, abs(body.index(f"The secret number of {key}") / len(body) - depth))
    return worst


@pytest.mark.parametrize(
    ("around", "units", "place"),
    [("book", (20, 50), 1), ("book", (1000,), 2), ("noise", (20,), 3), ("needles", (20,), 3)],
)
def test_depths_count_sentences_and_the_page_says_how_far_that_is_off(around, units, place):
    far = max(farthest(around, count) for count in units)
    assert far <= float(SAID[place]) + 0.005
    if around != "noise":
        assert far > float(SAID[place]) - 0.01
