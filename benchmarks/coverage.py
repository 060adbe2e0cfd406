"""Count how often an interval holds the truth.

It covers means over documents, shares over haystacks, and differences of two models' shares.

    python benchmarks/coverage.py > benchmarks/results/coverage-DATE.md

It draws documents from populations with a known mean, and questions over haystacks whose answers
are alike. Then it counts how often the intervals of ropext.results.values hold the truth. It needs
numpy alone, some fifteen minutes of one core; `--only differences` takes one of the three parts.
"""

import argparse
import json
import math
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ropext.results.retrieval import ItemScore, difference_of_answers
from ropext.results.values import Bootstrap, effective_count, wilson_share

Floats = npt.NDArray[np.float64]
Drawn = tuple[Floats, float]  # documents, one row for each draw, and the mean of the population

LOSSES = json.loads(
    (Path(__file__).parents[1] / "tests/results/tail_losses.json").read_text(encoding="utf-8")
)
DOCUMENTS = (8, 12, 20, 32)
HAYSTACKS = (4, 8, 16, 32)
PAIRED_HAYSTACKS = (8, 16, 32)
SHARES = (0.5, 0.6, 0.7, 0.8, 0.9)
LIKENESSES = (0.0, 0.1, 0.3, 0.5, 0.7)
# The shares of the questions that only the first model answers, and only the second.
ALONE = (
    (0.02, 0.0),
    (0.05, 0.0),
    (0.1, 0.0),
    (0.3, 0.0),
    (0.8, 0.0),
    (0.05, 0.05),
    (0.2, 0.1),
    (0.25, 0.25),
    (0.5, 0.1),
)
PAIRED_LIKENESSES = (0.0, 0.1, 0.3, 0.5, 0.7, 1.0)  # 1: whole haystacks are lost
SINGLE = (20, 40, 80)  # haystacks of one question
QUESTIONS = 5  # over one haystack, as --depths has it
Draw = Callable[[np.random.Generator, tuple[int, int]], Drawn]


def lognormal(sigma: float) -> Draw:
    def draw(rng: np.random.Generator, shape: tuple[int, int]) -> Drawn:
        return rng.lognormal(0, sigma, shape), math.exp(sigma**2 / 2)

    return draw


def mixture(rate: float, distance: float, spread: float) -> Draw:
    """Return a population in which a share of the documents is so far above the others, which are
    normal."""

    def draw(rng: np.random.Generator, shape: tuple[int, int]) -> Drawn:
        far = rng.random(shape) < rate
        return rng.normal(0, spread, shape) + distance * far, rate * distance

    return draw


def student(degrees: int) -> Draw:
    def draw(rng: np.random.Generator, shape: tuple[int, int]) -> Drawn:
        return rng.standard_t(degrees, shape), 0.0

    return draw


def measured(losses: Floats) -> Draw:
    def draw(rng: np.random.Generator, shape: tuple[int, int]) -> Drawn:
        return rng.choice(losses, shape), float(losses.mean())

    return draw


def normal(rng: np.random.Generator, shape: tuple[int, int]) -> Drawn:
    return rng.normal(2, 0.5, shape), 2.0


YARN = np.array(LOSSES["yarn-4x"])
POPULATIONS: dict[str, Draw] = {
    "normal": normal,
    "Student t, 3 degrees": student(3),
    "Student t, 2 degrees": student(2),
    "tail losses, YaRN": measured(YARN),
    "tail losses, untouched": measured(np.array(LOSSES["untouched"])),
    "context gain, YaRN": measured(np.array(LOSSES["base"]) - YARN),
    "lognormal, sigma 0.7": lognormal(0.7),
    "lognormal, sigma 1": lognormal(1.0),
    "lognormal, sigma 1.5": lognormal(1.5),
    "10 % of documents 5 sd up": mixture(0.10, 5, 1),
    "5 % of documents 10 sd up": mixture(0.05, 10, 1),
    "gain: sd 0.02, 10 % of documents +1 nat": mixture(0.10, 1, 0.02),
}


def of_documents(draw: Draw, count: int, draws: int) -> tuple[float, float, float]:
    """Return how often the interval holds the mean, and how often a one-sided 95 % end is on its
    wrong side.

    The wrong side is below the mean for the upper end, and above it for the lower end.
    """
    rows, truth = draw(np.random.default_rng([11, count]), (draws, count))
    bootstrap, ones = Bootstrap(), np.ones(count)
    held = below = above = 0
    for row in rows:
        ends = bootstrap.ratio(row, ones).ci95
        upper, lower = bootstrap.upper(row, ones), bootstrap.upper(-row, ones)
        assert ends is not None
        assert upper is not None
        assert lower is not None
        held += ends[0] <= truth <= ends[1]
        below += upper < truth
        above += -lower > truth
    return held / draws, below / draws, above / draws


def of_haystacks(share: float, likeness: float, count: int, draws: int) -> float:
    """Return how often the interval of a share holds it: answers over one haystack are alike
    (beta-binomial, with a correlation)."""
    rng = np.random.default_rng([12, count, round(10 * share), round(10 * likeness)])
    each = np.full((draws, count), share)
    if likeness:
        total = 1 / likeness - 1
        each = rng.beta(share * total, (1 - share) * total, (draws, count))
    held = 0
    for right in rng.binomial(QUESTIONS, each).astype(np.float64):
        worth = effective_count(right, np.full(count, QUESTIONS))
        ends = wilson_share(float(right.sum()), count * QUESTIONS, worth).ci95
        assert ends is not None
        held += ends[0] <= share + 1e-9 and share <= ends[1] + 1e-9
    return held / draws


def of_differences(
    alone: tuple[float, float], likeness: float, shape: tuple[int, int], draws: int
) -> float:
    """Return how often the interval of a difference of two shares holds it.

    The outcomes of the questions over one haystack are alike (Dirichlet-multinomial, with a
    correlation).
    """
    more, fewer = alone
    count, questions = shape
    rng = np.random.default_rng([13, count, questions, round(100 * more), round(100 * fewer)])
    fates = np.array([more, fewer, 1 - more - fewer])
    items = [_item(index) for index in range(count) for _ in range(questions)]
    bootstrap = Bootstrap()
    held = 0
    for _ in range(draws):
        chances = np.tile(fates, (count, 1))
        if likeness == 1:
            chances = np.eye(3)[rng.choice(3, count, p=fates)]
        elif likeness:
            parts = rng.gamma(np.tile(fates * (1 / likeness - 1), (count, 1)))
            chances = parts / parts.sum(1, keepdims=True)
        drawn = rng.multinomial(questions, chances)
        gaps = np.concatenate([np.repeat([1.0, -1.0, 0.0], row) for row in drawn])
        ends = difference_of_answers(gaps.tolist(), items, bootstrap).ci95
        assert ends is not None
        assert -1 <= ends[0] < ends[1] <= 1, "an interval without width, or beyond 1"
        held += ends[0] - 1e-9 <= more - fewer <= ends[1] + 1e-9
    return held / draws


def _item(index: int) -> ItemScore:
    return ItemScore("mkey", 512, None, index, None, 1, True, "", (), ())


def print_means(draws: int) -> None:
    print("## Means over documents\n")
    print("95 % intervals that hold the mean / one-sided 95 % ends below it / above it.\n")
    rows = [["population", *(f"{count} documents" for count in DOCUMENTS)]]
    for name, draw in POPULATIONS.items():
        row = [name]
        for count in DOCUMENTS:
            row.append(" / ".join(f"{part:.3f}" for part in of_documents(draw, count, draws)))
        rows.append(row)
    print(table(rows))
    print("\nDraws that hold none of the far documents: no interval can know of these.\n")
    rows = [["far documents", *(f"{count} documents" for count in DOCUMENTS)]]
    for rate in (0.10, 0.05):
        absent = [f"{(1 - rate) ** count:.3f}" for count in DOCUMENTS]
        rows.append([f"{rate:.0%} of them", *absent])
    print(table(rows))


def print_shares(draws: int) -> None:
    print(f"## Shares, {QUESTIONS} questions over each haystack\n")
    rows = [["haystacks", "share", *(f"likeness {likeness}" for likeness in LIKENESSES)]]
    for count in HAYSTACKS:
        for share in SHARES:
            cells = [of_haystacks(share, likeness, count, draws) for likeness in LIKENESSES]
            rows.append([str(count), str(share), *(f"{cell:.3f}" for cell in cells)])
    print(table(rows))


def print_differences(draws: int) -> None:
    print("## Differences of two models' shares over the same questions\n")
    print("No interval has a width of zero, and none ends beyond 1 or -1.\n")
    heads = [f"likeness {likeness:g}" for likeness in PAIRED_LIKENESSES]
    rows = [["haystacks x questions", "found by the first alone, by the second alone", *heads]]
    for count in PAIRED_HAYSTACKS:
        for alone in ALONE:
            cells = list[str]()
            for likeness in PAIRED_LIKENESSES:
                held = of_differences(alone, likeness, (count, QUESTIONS), draws)
                cells.append(f"{held:.3f}")
            rows.append([f"{count} x {QUESTIONS}", f"{alone[0]}, {alone[1]}", *cells])
    for count in SINGLE:
        for alone in ALONE:
            cell = f"{of_differences(alone, 0.0, (count, 1), draws):.3f}"
            blanks = ["-"] * (len(PAIRED_LIKENESSES) - 1)
            rows.append([f"{count} x 1", f"{alone[0]}, {alone[1]}", cell, *blanks])
    print(table(rows))


PARTS = {"means": print_means, "shares": print_shares, "differences": print_differences}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--only", choices=PARTS)
    options = parser.parse_args()
    draws = options.draws
    print(f"# How often intervals hold the truth ({datetime.now():%d %B %Y})\n")
    only = f" --only {options.only}" if options.only else ""
    print(f"`python benchmarks/coverage.py --draws {draws}{only}`: {draws:,} draws a cell.")
    for name, print_part in PARTS.items():
        if options.only in (None, name):
            print()
            print_part(draws)


def table(rows: list[list[str]]) -> str:
    head, *rest = rows
    lines = [head, ["---"] * len(head), *rest]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
