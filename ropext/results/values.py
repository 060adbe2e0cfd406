"""A measured number with its error bar; the document (or the item) is the sampling unit.

Tokens of one document are correlated: error bars over tokens come out two to three times too small.
So sums and counts are kept per document, and whole documents are resampled.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from ropext.base.errors import UsageError
from ropext.base.jsontext import HIDDEN, Number

Floats = npt.NDArray[np.float64]

RESAMPLES = 2000
# Below this, a bootstrap interval claims more than it knows: a range is printed instead.
FEWEST_DOCUMENTS = 8
RISK = 0.025  # one side of a two-sided 95 % interval
Z95 = 1.959963984540054  # two-sided 95 % of the normal distribution
# How much an end is moved away for each unit of skew beyond chance, over sqrt(n): by simulation
# (benchmarks/coverage.py).
SKEW_REACH = 4.0
# Until answers tell how alike the questions over one haystack are: their correlation, and for how
# many answers that assumption counts.
LIKENESS = 0.7
LIKENESS_ANSWERS = 1.0
MOST_QUESTIONS = 10**9  # a search for a number that decides ends here
# Nats a token, 1 % of a perplexity: a gain that is surely smaller is none.
MARGIN = 0.01


@dataclass(frozen=True)
class Value:
    """A measured number.

    `ci95` is None if the sample is too small for an interval; `range` then holds the smallest and
    largest value of a single document. For a difference of shares `apart` holds the share that only
    the first model found, and the share that only the second found.
    """

    value: Number
    se: float | None
    ci95: tuple[Number, Number] | None
    n: int
    range: tuple[Number, Number] | None = None
    apart: "tuple[Value, Value] | None" = field(
        default=None, compare=False, repr=False, metadata=HIDDEN
    )

    @property
    def sign(self) -> int:
        """Return the side of zero on which a value's interval is: 0 if it holds zero, or if there
        is none."""
        if self.ci95 is None:
            return 0
        low, high = self.ci95
        if low > 0:
            return 1
        return -1 if high < 0 else 0

    @property
    def gains(self) -> bool | None:
        """Return True if the interval of this gain in nats is above zero, False if it is below
        MARGIN, and None (not known) if it is neither or there is none."""
        if self.ci95 is None or (self.ci95[0] <= 0 and self.ci95[1] >= MARGIN):
            return None
        return self.ci95[0] > 0

    @property
    def why_not_known(self) -> str:
        """Return the sentence that says how many documents would decide whether this value is a
        gain.

        If the truth is this value, its interval excludes zero or MARGIN once its end there is
        nearer than that: the distance shrinks with the square root of the number of documents.
        """
        if self.ci95 is None or not self.se:
            return f"{self.n} documents give no interval ({FEWEST_DOCUMENTS} or more do)"
        low, high = self.ci95
        above = (self.value - low) / self.value if self.value > 0 else math.inf
        below = (high - self.value) / (MARGIN - self.value) if self.value < MARGIN else math.inf
        return (
            f"{self.value:+.3f} ({low:+.3f} to {high:+.3f}) nats per token on {self.n} documents; "
            f"about {self.deciding(min(above, below), 1.0)} documents would decide"
        )

    def deciding(self, reach: float, distance: float) -> str:
        """Return as text how many documents would shrink the reach of an interval, from the value
        to its end, below a distance: it shrinks with the square root of their number. Both are
        differences of logarithms for a perplexity."""
        return _two_digits(max(self.n + 1, self.n * (reach / distance) ** 2))

    def deciding_questions(self, passes: "Callable[[Value], bool]") -> str:
        """Say how many questions with such answers would give an interval that passes, of a share
        or a difference of two: near 0 and 1 it shrinks with their number, not its square root."""
        least = self.n
        most = self.n + 1
        while most < MOST_QUESTIONS and not passes(self.asked(most)):
            least = most
            most *= 2
        while most - least > 1:
            middle = (least + most) // 2
            if passes(self.asked(middle)):
                most = middle
            else:
                least = middle
        return _two_digits(most)

    def asked(self, n: int) -> "Value":
        """Return the same share, or difference of shares, of n questions that are alike to the same
        degree. An end e of Wilson's interval of a share p tells what its questions are worth:
        z²·e·(1 − e)/(p − e)²."""
        if self.apart is not None:
            more, fewer = self.apart
            return difference_of_shares(more.asked(n), fewer.asked(n))
        assert self.ci95 is not None
        low, high = self.ci95
        end = low if self.value > 0.5 else high
        worth = Z95**2 * end * (1 - end) / (self.value - end) ** 2
        return wilson_share(self.value * n, n, worth * n / self.n)


def _two_digits(least: float) -> str:
    """Return a number of documents or questions that would decide, with two digits and rounded up:
    fewer would not decide."""
    whole = math.ceil(least)
    unit = 10 ** max(0, len(str(whole)) - 2)
    return f"{math.ceil(whole / unit) * unit:,}"


Values = dict[str, Value]  # one model's, by the names of its metrics


def student_t(risk: float, degrees: int) -> float:
    """Return the value that Student's t exceeds with this risk, for the ends of intervals: exact
    for one and two degrees of freedom, within 0.2 % from three on, 0.1 % from seven on (Abramowitz
    and Stegun 1964, 26.7.5)."""
    if degrees == 1:
        return math.tan(math.pi * (0.5 - risk))
    if degrees == 2:
        return (1 - 2 * risk) / math.sqrt(2 * risk * (1 - risk))
    x = NormalDist().inv_cdf(1 - risk)
    terms = (
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
        (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / 92160,
    )
    return x + math.fsum(term / degrees**power for power, term in enumerate(terms, 1))


@lru_cache(maxsize=8)
def _cached_draws(seed: int, resamples: int, n: int) -> Floats:
    """Return the bootstrap draws of few documents, which fit in one block."""
    return next(iter(Bootstrap(seed, resamples).fresh_draws(n)))


@dataclass(frozen=True)
class Bootstrap:
    """A seeded resampling of whole documents; the same seed and documents give the same draws.

    The means of resampled documents spread by sqrt((n-1)/n) too little, and their percentiles take
    that spread for the true one, as a normal interval does. So the distances of an interval's ends
    from the value are widened by both (compare the expanded percentiles of Hesterberg 2015). The
    end on the side of the outlying documents moves further by their skew, because the population
    has more of them than the sample.
    """

    seed: int = 0
    resamples: int = RESAMPLES

    def fresh_draws(self, n: int) -> Iterator[Floats]:
        """Yield how often each of n documents was drawn in each bootstrap sample, (block, n) at a
        time to bound memory."""
        rng = np.random.default_rng(self.seed)
        block = max(1, min(self.resamples, 4_000_000 // n))
        for start in range(0, self.resamples, block):
            size = min(block, self.resamples - start)
            yield rng.multinomial(n, np.full(n, 1 / n), size=size).astype(np.float64)

    def _draws(self, n: int) -> Iterator[Floats]:
        """Yield the bootstrap draws; keep the draws of few documents, because many numbers use
        them."""
        if n * self.resamples > 1_000_000:
            yield from self.fresh_draws(n)
        else:
            yield _cached_draws(self.seed, self.resamples, n)

    def ratio(
        self,
        sums: npt.ArrayLike,
        counts: npt.ArrayLike,
        transform: Callable[[Floats], Floats] | None = None,
    ) -> Value:
        """Return the sum of `sums` over the sum of `counts` with its bootstrap interval, e.g. NLL
        over tokens, through a rising `transform`.

        Documents with a count of zero take no part. The interval is widened before the transform.
        """
        top = np.asarray(sums, np.float64)
        bottom = np.asarray(counts, np.float64)
        if top.ndim != 1 or top.shape != bottom.shape:
            raise UsageError(
                "sums and counts are two lists with a number for each document, were of shapes "
                f"{top.shape} and {bottom.shape}"
            )
        top = top[bottom > 0]
        bottom = bottom[bottom > 0]
        if not len(top):
            return Value(math.nan, None, None, 0)
        shape = transform or (lambda numbers: numbers)
        n = len(top)
        plain = top.sum() / bottom.sum()
        with np.errstate(over="ignore", invalid="ignore"):
            point = float(shape(np.asarray(plain)))
            if n < FEWEST_DOCUMENTS:
                each = shape(top / bottom)
                return Value(point, None, None, n, (float(each.min()), float(each.max())))
            drawn = self._ratios(top, bottom)
            skew = _skew_beyond_chance(top - plain * bottom)
            reach = _interval_widening(n) * np.array([_skew_reach(-skew, n), _skew_reach(skew, n)])
            low, high = shape(plain + reach * (np.quantile(drawn, [RISK, 1 - RISK]) - plain))
            se = float(shape(drawn).std(ddof=1)) * math.sqrt(n / (n - 1))
            return Value(point, se, (float(low), float(high)), n)

    def _ratios(self, top: Floats, bottom: Floats) -> Floats:
        """Return the ratio of each bootstrap draw."""
        return np.concatenate([(draw @ top) / (draw @ bottom) for draw in self._draws(len(top))])

    def mean(self, values: npt.ArrayLike) -> Value:
        """Return the mean over documents with its bootstrap interval, each document with the same
        weight."""
        numbers = np.asarray(values, np.float64)
        return self.ratio(numbers, np.ones_like(numbers))

    def upper(self, sums: npt.ArrayLike, counts: npt.ArrayLike, risk: float = 0.05) -> float | None:
        """Return the bound that the ratio exceeds with at most this risk; None below eight
        documents."""
        top = np.asarray(sums, np.float64)
        bottom = np.asarray(counts, np.float64)
        if len(top) < FEWEST_DOCUMENTS:
            return None
        n = len(top)
        plain = top.sum() / bottom.sum()
        end = np.quantile(self._ratios(top, bottom), 1 - risk)
        skew = _skew_beyond_chance(top - plain * bottom)
        reach = _interval_widening(n, risk) * _skew_reach(skew, n)
        return float(plain + reach * (end - plain))


def _interval_widening(n: int, risk: float = RISK) -> float:
    """Return the factor that widens a bootstrap interval: Student's t over the normal quantile,
    times sqrt(n/(n-1))."""
    ratio = student_t(risk, n - 1) / NormalDist().inv_cdf(1 - risk)
    return ratio * math.sqrt(n / (n - 1))


def _skew_beyond_chance(numbers: Floats) -> float:
    """Return the skewness of a sample of documents (G1 of Joanes and Gill 1998) minus one standard
    error of it in a normal sample; 0 if it is no larger."""
    n = len(numbers)
    centred = numbers - numbers.mean()
    deviation = math.sqrt(float((centred**2).mean()))
    if not math.isfinite(deviation) or deviation == 0:
        return 0.0
    skew = float(((centred / deviation) ** 3).mean()) * math.sqrt(n * (n - 1)) / (n - 2)
    error = math.sqrt(6 * n * (n - 1) / ((n - 2) * (n + 1) * (n + 3)))
    return math.copysign(max(0.0, abs(skew) - error), skew)


def _skew_reach(skew: float, n: int) -> float:
    """Return the factor by which the upper end of a skewed interval moves away.

    In a skewed population Student's t is off by a share of the skewness over sqrt(n) (Johnson
    1978). A small sample shows too little of that skewness.
    """
    return 1 + SKEW_REACH * max(0.0, skew) / math.sqrt(n)


def wilson_share(successes: float, n: int, worth: float | None = None) -> Value:
    """Return a share of n items with its 95 % score interval (Wilson 1927).

    It is honest at the ends: 20 of 20 is [0.84, 1.00], not 1.00 +- 0. The standard error is half
    the interval's width over 1.96. `worth` is the number of independent items that these n are
    worth.
    """
    if n == 0:
        return Value(math.nan, None, None, 0)
    share = successes / n
    z2 = Z95**2
    m = worth or n
    centre = (share + z2 / (2 * m)) / (1 + z2 / m)
    half = Z95 / (1 + z2 / m) * math.sqrt(share * (1 - share) / m + z2 / (4 * m * m))
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return Value(share, half / Z95, (low, high), n)


def difference_of_shares(more: Value, fewer: Value) -> Value:
    """Return the difference of two models' shares of right answers: found only by the first minus
    found only by the second, of the same questions.

    The distances of the two Wilson intervals' ends add up (MOVER, Zou and Donner 2008) with the
    correlation of two parts of one sample. So the interval has a width even if both models gave the
    same answers: other questions can tell them apart.
    """
    if more.ci95 is None or fewer.ci95 is None:
        return Value(math.nan, None, None, 0)
    value = more.value - fewer.value
    correlation = 0.0
    if more.value < 1 and fewer.value < 1:
        odds = more.value / (1 - more.value) * fewer.value / (1 - fewer.value)
        correlation = -math.sqrt(odds)
    low_more, high_more = more.ci95
    low_fewer, high_fewer = fewer.ci95
    below = _joined_distance(more.value - low_more, high_fewer - fewer.value, correlation)
    above = _joined_distance(high_more - more.value, fewer.value - low_fewer, correlation)
    ends = (max(-1.0, value - below), min(1.0, value + above))
    return Value(value, (below + above) / (2 * Z95), ends, more.n, apart=(more, fewer))


def _joined_distance(first: float, second: float, correlation: float) -> float:
    """Return how far the interval of a difference reaches, from the distances of two intervals'
    ends and their correlation."""
    return math.sqrt(first**2 + second**2 - 2 * correlation * first * second)


def effective_count(successes: npt.ArrayLike, sizes: npt.ArrayLike) -> float:
    """Return the effective number of independent questions in several groups, for an interval (Rao
    and Scott 1992).

    It is smaller if groups differ by more than chance. It is smaller still if there are few groups
    to estimate that from, as in Student's t. Answers unlike most of the others show how alike the
    items of a group are. If there are few such answers, or one group, the likeness is assumed.
    """
    right = np.asarray(successes, np.float64)
    count = np.asarray(sizes, np.float64)
    n = float(count.sum())
    groups = len(count)
    if count.max() == 1:
        return n
    share = float(right.sum()) / n
    effect = 1 + (float((count**2).sum()) / n - 1) * LIKENESS
    rarer = min(share, 1 - share) * n
    known = 1.0
    if groups > 1 and rarer > 0:
        spread = groups / (groups - 1) * float(((right - share * count) ** 2).sum()) / n**2
        measured = spread * n / (share * (1 - share))
        effect = (rarer * measured + LIKENESS_ANSWERS * effect) / (rarer + LIKENESS_ANSWERS)
        known = student_t(RISK, groups - 1) / Z95
    return n / (1 + known**2 * max(0.0, effect - 1))
