"""How far a planted sentence is from its depth: docs/reference/tasks.md states it.

The oracle counts characters of the book; the prompts are then measured by their text alone.
"""

import random
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from ropext.tasks import find_task
from ropext.tasks.asking import TextRequest

PAGE = (Path(__file__).parents[2] / "docs/reference/tasks.md").read_text("utf-8")
BOOK = Path(__file__).parents[2] / "ropext/tasks/alice.txt"
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
ROWS = ("sentences of the book", "largest distance", "95 % are within")
UNITS, LARGEST, USUAL = (
    [
        float(cell.replace(",", ""))
        for cell in re.search(rf"\| {row} \|(.*) \|\n", PAGE)[1].split("|")
    ]
    for row in ROWS
)
SHARES = {
    "niah_single_1": r"at most (\S+) in noise",
    "niah_multikey_2": r"Among needles it is at most (\S+) at the default depths",
    "niah_multikey_3": r"Among needles it is at most (\S+) at the default depths",
}


@cache
def sizes():
    """Return the characters of every sentence of the book, with the space behind it."""
    book = BOOK.read_text("utf-8")
    parts = re.split(r"(?<=[.!?’])\s+(?=[A-Z‘“])|\n", book)
    return np.array([len(part) + 1 for part in parts if part], float)


def shares(units):
    """Yield, for every beginning in the book, the share of its text before each of its places, with
    no and with three of four needles of 50 characters before the place."""
    total = np.concatenate([[0], np.cumsum(np.tile(sizes(), units // len(sizes()) + 2))])
    for start in range(len(sizes())):
        before = total[start : start + units + 1] - total[start]
        whole = before[-1] + 4 * 50
        yield before / whole, (before + 3 * 50) / whole


def distances(name, units, seed, depths):
    """Yield the distance of each needle from its depth in a prompt, by its text alone."""
    request = TextRequest(units, depths, 4096, random.Random(seed))
    for asked in find_task(name).maker.make(request):
        (key,) = re.findall(r"secret \w+ of (\S+)\?", asked.question)
        (place,) = [own.start() for own in re.finditer(rf"The secret \w+ of {key} is ", asked.text)]
        yield abs(place / len(asked.text) - asked.depth)


@pytest.mark.parametrize("column", range(len(UNITS)))
def test_the_table_has_the_largest_and_the_usual_distance_in_the_book(column):
    units = int(UNITS[column])
    places = np.arange(units + 1)
    nearest = np.maximum(0, (places - 0.5) / units)
    farthest = np.minimum(1, (places + 0.5) / units)
    largest = 0.0
    usual = []
    for first, last in shares(units):
        largest = max(largest, (last - nearest).max(), (farthest - first).max())
        usual += [abs(first[round(depth * units)] - depth) for depth in DEPTHS]
    assert LARGEST[column] - 0.01 < largest <= LARGEST[column]
    assert USUAL[column] - 0.01 < np.quantile(usual, 0.95) <= USUAL[column]


@pytest.mark.parametrize("units", [20, 27, 36, 50, 100, 137, 200, 1000])
def test_no_needle_in_the_book_is_farther_from_its_depth_than_the_page_says(units):
    said = np.interp(units, UNITS, LARGEST)
    rng = random.Random(units)
    every = []
    for seed in range(20_000 // units):
        depths = tuple(rng.random() for _ in range(4))
        every += distances("niah_multikey_1", units, seed, depths)
        every += distances("niah_single_3", units, seed, depths[:1])
    assert said / 3 < max(every) <= said


@pytest.mark.parametrize("name", SHARES)
def test_among_lines_of_one_kind_a_needle_is_near_its_depth(name):
    said = float(re.search(SHARES[name], PAGE)[1].rstrip("."))
    depths = (DEPTHS * 2)[: find_task(name).per_haystack]
    rng = random.Random(0)
    farthest = 0.0
    for units in (20, 33, 100, 400):
        for seed in range(100):
            given = depths if len(depths) > 1 else (rng.random(),)
            farthest = max(farthest, *distances(name, units, seed, given))
    assert said - 0.02 < farthest <= said
