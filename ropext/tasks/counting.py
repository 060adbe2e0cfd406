"""RULER's aggregation: common and frequent words (Hsieh et al. 2024, section 3.3).

The common ten of a numbered list, of which each stands ten times as often as any other; and the
three most frequent coded words, whose numbers follow a zeta distribution.
"""

import functools
import math
import random
import re
import string

from ropext.tasks.asking import Asked, Order, sentences, worded
from ropext.tasks.item import NOUNS

TEN = 10
LONG = 4096
OFTEN, SELDOM = 30, 3  # times each; 6 and 1 below a length of 4096
CODED = 6  # letters
ALPHA = 2.0
ZETA = math.pi**2 / 6
LEAST_CODED = 73  # from here on the counts of the third and the fourth word differ


@functools.cache
def vocabulary() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Words of the bundled book, and for the longest lists nouns put together."""
    book = dict.fromkeys(re.findall(r"[a-z]{3,}", " ".join(sentences()).lower()))
    count = len(NOUNS)
    pairs = (a + NOUNS[(at + k) % count] for k in range(count) for at, a in enumerate(NOUNS))
    return tuple(sorted(book)), tuple(pair for pair in pairs if pair not in book)


def common(order: Order) -> list[Asked]:
    """One list, behind a short one with its answer."""
    often, seldom = (OFTEN, SELDOM) if order.length >= LONG else (OFTEN // 5, 1)
    example = _list(TEN, 3, 1, order.rng)
    return [_list(order.units, often, seldom, order.rng).after(example)]


def _list(others: int, often: int, seldom: int, rng: random.Random) -> Asked:
    book, more = vocabulary()
    drawn = rng.sample(book + more[: max(0, others + TEN - len(book))], others + TEN)
    words = drawn[:TEN] * often + drawn[TEN:] * seldom
    rng.shuffle(words)
    return Asked(
        "Some words of the numbered list below stand in it more often than the others.\n\n"
        f"{_numbered(words)}\n\n",
        "Which ten words of the list above are the most common?",
        "The ten most common words of the list are:",
        tuple(drawn[:TEN]),
        answer=_numbered(drawn[:TEN]),
    )


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def frequent(order: Order) -> list[Asked]:
    """One coded text, whose most frequent sign is noise and no word."""
    ranks = range(1, max(5, order.length // 50) + 1)
    counts = [int(order.units * rank**-ALPHA / ZETA) for rank in ranks]
    words = ["".join(order.rng.choices(string.ascii_lowercase, k=CODED)) for _ in counts]
    words[0] = "..."
    text = [word for word, count in zip(words, counts, strict=True) for _ in range(count)]
    order.rng.shuffle(text)
    return [
        Asked(
            "The text below is in code. Count how often each coded word stands in it; dots are no "
            f"word.\n\n{' '.join(text)}\n\n",
            "Which three coded words are the most frequent?",
            "The three most frequent coded words of the text are:",
            tuple(words[1:4]),
        )
    ]


TASKS = (
    worded("cwe", "the ten common words of a list", common, 120, least=TEN, most=20_000),
    worded("fwe", "the three frequent words of a code", frequent, 50, least=LEAST_CODED),
)
