"""Error bars: the document is the sampling unit, against numbers worked out without a bootstrap."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ropext.base.jsontext import read_values, values_json
from ropext.results.retrieval import ItemScore, difference_of_answers
from ropext.results.values import Bootstrap, Value, effective_count, student_t, wilson_share


def clustered(rng, n=40, tokens=200, between=0.3, within=1.0):
    """Draw per-document sums and counts of NLLs whose document means vary by `between`."""
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


# Kept from a real evaluation, which the file names: nats per token of 64 documents.
LOSSES = json.loads(Path(__file__).with_name("tail_losses.json").read_text(encoding="utf-8"))
BASE, YARN, UNTOUCHED = (np.array(LOSSES[label]) for label in ("base", "yarn-4x", "untouched"))
DRAWS = 2000


def drawn(name, n, seed=0):
    """Draw `n` documents, many times; return them and the distribution's mean."""
    rng = np.random.default_rng([seed, n])
    if name == "normal":
        return rng.normal(2, 0.5, (DRAWS, n)), 2.0
    if name.startswith("lognormal"):
        sigma = float(name.removeprefix("lognormal "))
        return rng.lognormal(0, sigma, (DRAWS, n)), math.exp(sigma**2 / 2)
    if name == "t3":
        return rng.standard_t(3, (DRAWS, n)), 0.0
    if name == "far":  # one document of ten is five standard deviations up
        return rng.normal(0, 1, (DRAWS, n)) + 5 * (rng.random((DRAWS, n)) < 0.1), 0.5
    real = {"losses": YARN, "lost": UNTOUCHED, "gain": BASE - YARN}[name]
    return rng.choice(real, (DRAWS, n)), real.mean()


def coverage(name, n):
    """Return how often the interval holds the truth."""
    numbers, truth = drawn(name, n)
    bootstrap, one = Bootstrap(), np.ones(n)
    ends = [bootstrap.ratio(own, one, np.exp).ci95 for own in numbers]
    return np.mean([low <= math.exp(truth) <= high for low, high in ends])


@pytest.mark.parametrize("n", [8, 12, 32])
@pytest.mark.parametrize("name", ["normal", "losses", "lost", "gain", "t3"])
def test_95_percent_means_95_percent(name, n):
    """Through the exponential, as a perplexity's interval is."""
    assert 0.93 <= coverage(name, n) <= 0.98


# Without a widening for skew these were .83, .90, .70, .81, .92.
@pytest.mark.parametrize(
    ("name", "n", "least"),
    [
        ("lognormal 1", 8, 0.86),
        ("lognormal 1", 32, 0.94),
        ("lognormal 1.5", 8, 0.81),
        ("lognormal 1.5", 32, 0.93),
        ("far", 32, 0.94),
    ],
)
def test_an_interval_reaches_for_the_far_documents_that_were_not_drawn(name, n, least):
    assert least <= coverage(name, n) <= 0.98


@pytest.mark.parametrize(
    ("name", "n", "most"),
    [
        *(("normal", n, 0.07) for n in (8, 16)),
        *(("losses", n, 0.07) for n in (8, 16)),
        ("lognormal 1", 32, 0.06),  # without a widening for skew .13
    ],
)
def test_a_one_sided_end_errs_in_one_of_twenty(name, n, most):
    numbers, truth = drawn(name, n)
    wrong = np.mean([Bootstrap().upper(own, np.ones(n)) < truth for own in numbers])
    assert 0.02 <= wrong <= most


def test_skew_moves_the_end_on_the_side_of_the_far_document_alone():
    """The numbers were computed by hand.

    The mean of 0, 0, 0, 0, 0, 0, 0, 8 (tenths) is 1 and the deviation sqrt(7). The skewness is (7 *
    -1 + 7^3) / 8 / 7^1.5 = 2.2678. For eight documents it is multiplied by sqrt(56)/6, less the
    standard error sqrt(6 * 56 / (6 * 9 * 11)).
    """
    skew = 2.2678 * math.sqrt(56) / 6 - math.sqrt(6 * 56 / (6 * 9 * 11))
    numbers = [0.0] * 7 + [0.8]
    moved = Bootstrap().ratio(numbers, [1] * 8)
    means = np.concatenate([draw @ numbers / 8 for draw in Bootstrap().fresh_draws(8)])
    widening = 2.364624 / 1.959964 * math.sqrt(8 / 7)
    low, high = 0.1 + widening * (np.quantile(means, [0.025, 0.975]) - 0.1)
    assert moved.ci95[0] == pytest.approx(low, rel=2e-3)
    reach = (moved.ci95[1] - 0.1) / (high - 0.1)
    assert reach == pytest.approx(1 + 4 * skew / math.sqrt(8), rel=2e-3)
    # Seen from the other side it is the lower end, and of a sample without skew neither.
    mirrored = Bootstrap().ratio([-own for own in numbers], [1] * 8)
    assert mirrored.ci95 == pytest.approx((-moved.ci95[1], -moved.ci95[0]))
    even = [-0.3, -0.2, -0.1, -0.05, 0.05, 0.1, 0.2, 0.3]
    means = np.concatenate([draw @ even / 8 for draw in Bootstrap().fresh_draws(8)])
    ends = widening * np.quantile(means, [0.025, 0.975])
    assert Bootstrap().mean(even).ci95 == pytest.approx(ends, rel=2e-3)


# By the tables of Student's t.
@pytest.mark.parametrize(
    ("risk", "degrees", "t"),
    [
        (0.025, 1, 12.706205),
        (0.05, 1, 6.313752),
        (0.025, 2, 4.302653),
        (0.025, 7, 2.364624),
        (0.025, 31, 2.039513),
        (0.05, 7, 1.894579),
        (0.001, 7, 4.785290),
    ],
)
def test_student_t_equals_the_published_table(risk, degrees, t):
    assert student_t(risk, degrees) == pytest.approx(t, rel=1e-3)


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
def test_wilson_share_gives_wilsons_interval(successes, n, low, high):
    value = wilson_share(successes, n)
    assert value.value == successes / n
    assert value.ci95 == pytest.approx((low, high), abs=1e-4)
    assert value.n == n


def test_questions_of_one_group_are_worth_fewer_where_groups_differ():
    # By hand: 4 groups of 5, shares 1, 1, 0, 0. Spread 4/3 * 4 * 2.5^2 / 400 = 1/12; of independent
    # items 1/4 / 20 = 1/80, so the effect is 80/12; ten answers of the fewer kind say so, and one
    # assumed one 3.8. Student's t with three degrees is 3.1824.
    effect = (10 * 80 / 12 + 3.8) / 11
    worth = 20 / (1 + (3.1824 / 1.95996) ** 2 * (effect - 1))
    assert effective_count([5, 5, 0, 0], [5] * 4) == pytest.approx(worth, rel=5e-3)
    assert wilson_share(10, 20, 3).ci95 == pytest.approx(wilson_share(5, 10, 3).ci95)
    assert wilson_share(10, 20, 3).ci95[0] < wilson_share(10, 20).ci95[0] - 0.1
    assert wilson_share(10, 20, 3).n == 20
    # Each question for itself.
    assert effective_count([1, 0, 1, 1], [1] * 4) == 4
    # Where nothing can tell, a correlation of .7 is assumed: 1 + 4 * .7 and 1 + 9 * .7.
    assert effective_count([5, 5], [5, 5]) == pytest.approx(10 / 3.8)
    assert effective_count([0, 0], [5, 5]) == effective_count([5, 5], [5, 5])
    assert effective_count([3], [10]) == pytest.approx(10 / 7.3)
    # Alike by less than chance: spread 8/7 * 8 * 0.5^2 / 1600 = 1/700, for independent answers
    # 1/160. Ten answers were of the rarer kind, so the effect is (20 * 160/700 + 3.8) / 21 < 1.
    assert effective_count([3, 2] * 4, [5] * 8) == 40


@pytest.mark.parametrize(
    ("right", "sizes"),
    [
        ([5, 4, 1, 5], [5, 5, 5, 5]),
        ([3, 0, 7, 2, 2], [3, 4, 7, 5, 2]),
        ([5, 4.5, 0.25], [5, 5, 5]),
        ([5, 5, 5, 5], [5, 5, 5, 5]),
        ([0, 0, 0], [4, 5, 6]),
        ([3], [10]),
        ([1, 0, 1], [1, 1, 1]),
    ],
)
def test_the_effective_count_is_that_of_the_page_of_statistics(right, sizes):
    """Copied from docs/reference/statistics.md; Student's t from a table of its 97.5 %."""
    n, k = sum(sizes), len(sizes)
    p = sum(right) / n
    d = 1 + 0.7 * (sum(m * m for m in sizes) / n - 1)
    f = 1.0
    rarer = min(sum(right), n - sum(right))
    if rarer > 0 and k > 1:
        spread = sum((r - p * m) ** 2 for r, m in zip(right, sizes, strict=True))
        observed = k / (k - 1) * spread / (n * p * (1 - p))
        d = (rarer * observed + 1 * d) / (rarer + 1)
        f = {2: 12.7062, 3: 4.30265, 4: 3.18245, 5: 2.77645}[k] / 1.959964
    expected = n / (1 + f**2 * max(0, d - 1))
    if max(sizes) == 1:
        expected = n
    assert effective_count(right, sizes) == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize(
    ("haystacks", "share", "likeness", "most"),
    [
        (4, 0.5, 0.7, 0.98),
        (4, 0.8, 0.7, 1.0),  # without the prior .73
        (8, 0.9, 0.7, 0.99),  # .73
        (8, 0.5, 0.0, 0.98),
        (16, 0.9, 0.5, 0.99),  # .91
        (16, 0.7, 0.0, 0.98),
    ],
)
def test_an_interval_of_a_share_holds_it_where_questions_of_a_haystack_are_alike(
    haystacks, share, likeness, most
):
    rng, held, draws = np.random.default_rng(haystacks), 0, 1500
    each = np.full((draws, haystacks), share)
    if likeness:
        total = 1 / likeness - 1
        each = rng.beta(share * total, (1 - share) * total, (draws, haystacks))
    for right in rng.binomial(5, each):
        worth = effective_count(right, [5] * haystacks)
        ends = wilson_share(int(right.sum()), 5 * haystacks, worth).ci95
        held += ends[0] <= share + 1e-9 and share <= ends[1] + 1e-9
    assert 0.93 <= held / draws <= most


def test_an_interval_of_grouped_questions_holds_the_truth_as_often_as_it_says():
    """Haystacks that are read well (.95) or badly (.35), 8 of them with 5 questions each."""
    rng, held, naive = np.random.default_rng(0), 0, 0
    for _ in range(2000):
        rights = rng.binomial(5, rng.choice([0.95, 0.35], 8))
        worth = effective_count(rights, [5] * 8)
        low, high = wilson_share(int(rights.sum()), 40, worth).ci95
        held += low <= 0.65 <= high
        low, high = wilson_share(int(rights.sum()), 40).ci95
        naive += low <= 0.65 <= high
    assert naive / 2000 < 0.85
    assert 0.93 < held / 2000 < 0.97


def test_values_survive_json_and_nothing_is_not_a_number_there():
    value = Value(1.5, 0.1, (1.3, 1.7), 9)
    assert read_values(Value, values_json(value), "x") == value
    infinite = values_json(Value(math.inf, math.nan, (1.0, math.inf), 9))
    assert infinite == {"value": None, "se": None, "ci95": [1.0, None], "n": 9}
    ranged = Value(2.0, None, None, 3, (1.0, 3.0))
    assert read_values(Value, values_json(ranged), "x") == ranged


def test_the_sign_of_a_value_follows_its_interval():
    assert Value(1, 0.1, (0.8, 1.2), 9).sign == 1
    assert Value(-1, 0.1, (-1.2, -0.8), 9).sign == -1
    assert Value(1, 1, (-0.8, 2.2), 9).sign == 0
    assert Value(1, None, None, 3, (0.5, 2)).sign == 0


def test_deciding_names_at_least_one_more_than_was_measured():
    value = Value(0.5, 0.1, (0.3, 0.7), 104)
    assert value.deciding(1.0, 1.0) == "110"  # 105 rounded up to two digits
    assert replace(value, n=160).deciding(1.01, 1.0) == "170"  # 160 * 1.0201 = 163.2
    assert replace(value, n=8).deciding(1.0, 1.0) == "9"
    assert replace(value, n=1000).deciding(2.0, 1.0) == "4,000"


def paired_difference(more, fewer, haystacks, questions=1):
    """Compare two models on the same questions: `more` found by the first alone, `fewer` by the
    second alone, in the first questions of the haystacks."""
    alike = haystacks * questions - more - fewer
    return difference_of_gaps([1.0] * more + [-1.0] * fewer + [0.0] * alike, questions)


def difference_of_gaps(gaps, questions):
    name = "mkey" if questions > 1 else "passkey"
    items = [
        ItemScore(name, 64, None, place // questions, None, 1, True, str(place), (), ())
        for place in range(len(gaps))
    ]
    return difference_of_answers(gaps, items, Bootstrap())


# By hand, from Wilson's intervals: of 0 of 20 [0, .1611], 0 of 40 [0, .0876], 4 of 40
# [.0396, .2305], 10 of 40 [.1419, .4019], 5 of 40 [.0546, .2611]; the last two correlate by
# -sqrt(.25 * .125 / (.75 * .875)) = -.2182.
@pytest.mark.parametrize(
    ("more", "fewer", "count", "low", "high"),
    [
        (0, 0, 20, -0.1611, 0.1611),
        (4, 0, 40, 0.1 - math.hypot(0.0604, 0.0876), 0.1 + 0.1305),
        (
            10,
            5,
            40,
            0.125 - math.sqrt(0.1081**2 + 0.1361**2 + 0.4364 * 0.1081 * 0.1361),
            0.125 + math.sqrt(0.1519**2 + 0.0704**2 + 0.4364 * 0.1519 * 0.0704),
        ),
        (40, 0, 40, 1 - 0.0876 * math.sqrt(2), 1.0),
    ],
)
def test_a_difference_of_shares_is_known_no_better_than_the_shares(more, fewer, count, low, high):
    value = paired_difference(more, fewer, count)
    assert value.value == pytest.approx((more - fewer) / count)
    assert value.ci95 == pytest.approx((low, high), abs=3e-4)
    assert value.n == count
    turned = paired_difference(fewer, more, count)
    assert turned.ci95 == pytest.approx((-high, -low), abs=3e-4)


def test_questions_over_a_haystack_count_for_fewer_in_a_difference():
    """40 questions alike over eight haystacks are worth 40 / 3.8."""
    end = 3.8415 / (40 / 3.8 + 3.8415)
    assert paired_difference(0, 0, 8, 5).ci95 == pytest.approx((-end, end), abs=1e-4)
    assert paired_difference(0, 0, 7, 5).ci95 is None


# The bootstrap's intervals held these in .65, .35, .87, .76, .33 and .55 of the draws.
@pytest.mark.parametrize(
    ("haystacks", "questions", "lost", "whole"),
    [
        (20, 1, 0.05, False),
        (20, 1, 0.02, False),
        (40, 1, 0.05, False),
        (80, 1, 0.02, False),
        (8, 5, 0.05, True),
        (8, 5, 0.1, True),
        (16, 5, 0.05, True),
        (8, 5, 0.1, False),
    ],
)
def test_an_interval_of_a_difference_holds_it_though_one_model_finds_all(
    haystacks, questions, lost, whole
):
    rng = np.random.default_rng(haystacks)
    held, draws = 0, 400
    for _ in range(draws):
        if whole:
            found = np.repeat(rng.random(haystacks) >= lost, questions)
        else:
            found = rng.random(haystacks * questions) >= lost
        low, high = difference_of_gaps([1.0 - own for own in found], questions).ci95
        assert -1 <= low < high <= 1
        held += low <= lost <= high
    assert held / draws >= 0.93


# By hand: n / 3.8 independent answers end at the limit l where n is 3.8·z²·l·(1 - l)/(p - l)².
@pytest.mark.parametrize(
    ("right", "limit", "least"), [(40, 0.9, 132), (40, 0.8, 59), (38, 0.9, 526), (0, 0.1, 132)]
)
def test_deciding_questions_is_the_least_number_that_decides(right, limit, least):
    value = wilson_share(right, 40, 40 / 3.8)

    def passes(asked):
        low, high = asked.ci95
        return low >= limit if right else high <= limit

    told = int(value.deciding_questions(passes))
    assert least <= told <= least * 1.1
    assert passes(wilson_share(right / 40 * told, told, told / 3.8))
    fewer = told - 10
    assert fewer < least or not passes(wilson_share(right / 40 * fewer, fewer, fewer / 3.8))


def test_deciding_questions_of_a_difference_is_the_least_number():
    """Two models that answer 20 questions alike: Wilson's end z² / (n + z²) is .02 at 189."""
    value = paired_difference(0, 0, 20)
    assert value.deciding_questions(lambda asked: asked.ci95[0] >= -0.02) == "190"
    assert paired_difference(0, 0, 190).ci95[0] >= -0.02
    assert paired_difference(0, 0, 180).ci95[0] < -0.02
