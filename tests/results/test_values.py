"""Error bars: the document is the sampling unit, against numbers worked out without a bootstrap."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from ropext.files import values_json
from ropext.results.values import Bootstrap, Value, student, wilson, worth_of


def clustered(rng, n=40, tokens=200, between=0.3, within=1.0):
    """Per-document sums and counts of NLLs whose document means vary by `between`."""
    means = rng.normal(2.0, between, n)
    return means[:, None] + rng.normal(0, within, (n, tokens))


def test_standard_error_of_clustered_data_is_the_analytic_one():
    nll = clustered(np.random.default_rng(3))
    value = Bootstrap(seed=1).ratio(nll.sum(1), np.full(40, 200))
    of_means = nll.mean(1).std(ddof=1) / math.sqrt(40)
    assert value.value == pytest.approx(nll.mean(), abs=1e-12)
    assert value.se == pytest.approx(of_means, rel=0.06)
    # Tokens taken as independent would give less than half of it.
    assert nll.std() / math.sqrt(nll.size) < 0.5 * value.se
    assert value.ci95[0] == pytest.approx(nll.mean() - 1.96 * of_means, abs=0.25 * of_means)
    assert value.ci95[1] == pytest.approx(nll.mean() + 1.96 * of_means, abs=0.25 * of_means)


def test_ratio_weighs_documents_by_their_tokens():
    # (10 * 1.0 + 30 * 3.0) / 40, not the mean of 1 and 3.
    value = Bootstrap().ratio([10.0, 90.0], [10, 30])
    assert value.value == 2.5
    assert value.se is None
    assert value.ci95 is None
    assert value.range == (1.0, 3.0)
    assert value.n == 2


def test_linearised_standard_error_of_unequal_documents():
    rng = np.random.default_rng(5)
    counts = rng.integers(50, 400, 64).astype(float)
    sums = counts * rng.normal(2, 0.2, 64)
    ratio = sums.sum() / counts.sum()
    # Delta method: residuals of the ratio estimator over the mean count.
    residuals = sums - ratio * counts
    delta = residuals.std(ddof=1) / math.sqrt(64) / counts.mean()
    assert Bootstrap().ratio(sums, counts).se == pytest.approx(delta, rel=0.07)


# Kept from a real evaluation, which the file names: nats a token of 64 documents.
LOSSES = json.loads(Path(__file__).with_name("tail_losses.json").read_text(encoding="utf-8"))
BASE, YARN, UNTOUCHED = (np.array(LOSSES[label]) for label in ("base", "yarn-4x", "untouched"))
DRAWS = 2000


def drawn(name, n, seed=0):
    """So many documents, many times, and the mean of what they are drawn from."""
    rng = np.random.default_rng([seed, n])
    if name == "normal":
        return rng.normal(2, 0.5, (DRAWS, n)), 2.0
    if name == "lognormal":
        return rng.lognormal(0, 0.7, (DRAWS, n)), math.exp(0.7**2 / 2)
    real = {"losses": YARN, "lost": UNTOUCHED, "gain": BASE - YARN}[name]
    return rng.choice(real, (DRAWS, n)), real.mean()


def coverage(name, n):
    """How often the interval holds the truth."""
    numbers, truth = drawn(name, n)
    bootstrap, one = Bootstrap(), np.ones(n)
    ends = [bootstrap.ratio(own, one, np.exp).ci95 for own in numbers]
    return np.mean([low <= math.exp(truth) <= high for low, high in ends])


@pytest.mark.parametrize("n", [8, 12, 16, 32])
@pytest.mark.parametrize(
    ("name", "least"),
    [("normal", 0.93), ("losses", 0.93), ("lost", 0.93), ("gain", 0.93), ("lognormal", 0.88)],
)
def test_95_percent_means_95_percent(name, least, n):
    """Through the exponential, as a perplexity's interval is."""
    if name == "lognormal" and n >= 16:
        least = 0.90
    assert least <= coverage(name, n) <= 0.97


@pytest.mark.parametrize("n", [8, 16])
@pytest.mark.parametrize("name", ["normal", "losses"])
def test_a_one_sided_end_errs_in_one_of_twenty(name, n):
    numbers, truth = drawn(name, n)
    wrong = np.mean([Bootstrap().upper(own, np.ones(n)) < truth for own in numbers])
    assert 0.03 <= wrong <= 0.07


# By the tables of Student's t.
@pytest.mark.parametrize(
    ("risk", "degrees", "t"),
    [(0.025, 7, 2.364624), (0.025, 31, 2.039513), (0.05, 7, 1.894579), (0.001, 7, 4.785290)],
)
def test_student(risk, degrees, t):
    assert student(risk, degrees) == pytest.approx(t, rel=1e-3)


def test_same_seed_same_numbers_and_blocks_change_nothing():
    rng = np.random.default_rng(0)
    sums, counts = rng.normal(200, 5, 9), np.full(9, 100.0)
    assert Bootstrap(4).ratio(sums, counts) == Bootstrap(4).ratio(sums, counts)
    assert Bootstrap(4).ratio(sums, counts) != Bootstrap(5).ratio(sums, counts)
    large = rng.normal(200, 5, 5000)
    value = Bootstrap(4).ratio(large, np.full(5000, 100.0))  # 800 draws to a block
    assert value.se == pytest.approx(large.std() / 100 / math.sqrt(5000), rel=0.1)


def test_a_perplexity_is_the_exponential_of_the_mean():
    nll = clustered(np.random.default_rng(7))
    plain = Bootstrap().ratio(nll.sum(1), np.full(40, 200))
    shown = Bootstrap().ratio(nll.sum(1), np.full(40, 200), np.exp)
    assert shown.value == pytest.approx(math.exp(plain.value))
    assert shown.ci95 == pytest.approx((math.exp(plain.ci95[0]), math.exp(plain.ci95[1])), rel=1e-3)
    assert shown.se == pytest.approx(shown.value * plain.se, rel=0.05)


def test_seven_documents_have_no_interval_and_eight_have():
    assert Bootstrap().mean(range(7)).ci95 is None
    assert Bootstrap().mean(range(7)).range == (0, 6)
    assert Bootstrap().mean(range(8)).ci95 is not None
    assert Bootstrap().upper([1.0] * 7, [1] * 7) is None


def test_one_sided_end_is_below_the_two_sided_one():
    numbers = np.random.default_rng(2).normal(0, 1, 30)
    two_sided = Bootstrap().mean(numbers).ci95[1]
    upper = Bootstrap().upper(numbers, np.ones(30))
    assert numbers.mean() < upper < two_sided
    assert Bootstrap().upper(numbers, np.ones(30), 0.025) == pytest.approx(two_sided)
    assert Bootstrap().upper(numbers, np.ones(30), 0.005) > two_sided


# Worked out from Wilson's formula by hand; the first two are in every textbook.
@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(20, 20, 0.8389, 1.0), (10, 10, 0.7225, 1.0), (0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634)],
)
def test_wilson(successes, n, low, high):
    value = wilson(successes, n)
    assert value.value == successes / n
    assert value.ci95 == pytest.approx((low, high), abs=1e-4)
    assert value.n == n


def test_questions_of_one_group_are_worth_fewer_where_groups_differ():
    # By hand: 4 groups of 5, shares 1, 1, 0, 0. Spread 4/3 * 4 * 2.5^2 / 400 = 1/12; of independent
    # items 1/4 / 20 = 1/80. So 20 items are worth 20 / (80 / 12) = 3.
    assert worth_of([5, 5, 0, 0], [5] * 4) == pytest.approx(3)
    assert wilson(10, 20, 3).ci95 == pytest.approx(wilson(5, 10, 3).ci95)
    assert wilson(10, 20, 3).ci95[0] < wilson(10, 20).ci95[0] - 0.1
    assert wilson(10, 20, 3).n == 20
    # Alike by chance or less: each for itself. Where nothing can tell: the same.
    assert worth_of([3, 2, 3, 2], [5] * 4) == 20
    assert worth_of([1, 0, 1, 1], [1] * 4) == 4
    assert worth_of([5, 5], [5, 5]) == worth_of([0, 0], [5, 5]) == worth_of([3], [10]) == 10


def test_an_interval_of_grouped_questions_holds_the_truth_as_often_as_it_says():
    """Haystacks that are read well (.95) or badly (.35), 8 of them with 5 questions each."""
    rng, held, naive = np.random.default_rng(0), 0, 0
    for _ in range(2000):
        rights = rng.binomial(5, rng.choice([0.95, 0.35], 8))
        worth = worth_of(rights, [5] * 8)
        low, high = wilson(int(rights.sum()), 40, worth).ci95
        held += low <= 0.65 <= high
        low, high = wilson(int(rights.sum()), 40).ci95
        naive += low <= 0.65 <= high
    assert naive / 2000 < 0.85
    assert 0.93 < held / 2000 < 0.97


def test_values_survive_json_and_nothing_is_not_a_number_there():
    value = Value(1.5, 0.1, (1.3, 1.7), 9)
    assert Value.from_json(values_json(value)) == value
    infinite = values_json(Value(math.inf, math.nan, (1.0, math.inf), 9))
    assert infinite == {"value": None, "se": None, "ci95": [1.0, None], "n": 9}
    ranged = Value(2.0, None, None, 3, (1.0, 3.0))
    assert Value.from_json(values_json(ranged)) == ranged


def test_on_which_side_of_zero_an_interval_lies():
    assert Value(1, 0.1, (0.8, 1.2), 9).sign == 1
    assert Value(-1, 0.1, (-1.2, -0.8), 9).sign == -1
    assert Value(1, 1, (-0.8, 2.2), 9).sign == 0
    assert Value(1, None, None, 3, (0.5, 2)).sign == 0
