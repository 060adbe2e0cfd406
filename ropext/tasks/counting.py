"""RULER's aggregation: common and frequent words (Hsieh et al. 2024, section 3.3).

One task asks for the ten common words of a numbered list; each occurs ten times as often as any
other. The second asks for the three most frequent coded words, whose numbers follow a zeta
distribution.
"""

import functools
import math
import random
import re
import string

from ropext.tasks.asking import (
    TaskWording,
    TextQuestion,
    TextRequest,
    sentences,
    worded_task,
)
from ropext.tasks.item import NOUNS

TEN = 10
CODED = 6  # letters
ALPHA = 2.0
ZETA = math.pi**2 / 6
LEAST_CODED = 73  # from here on the counts of the third and the fourth word differ


@functools.cache
def list_words() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the words for the lists of the task `cwe`: the words of the bundled book with three
    letters or more, and for the longest lists nouns put together."""
    book = set(re.findall(r"[a-z]{3,}", " ".join(sentences()).lower()))
    pairs = list[str]()
    for shift in range(len(NOUNS)):
        for first, second in zip(NOUNS, NOUNS[shift:] + NOUNS[:shift], strict=True):
            if first + second not in book:
                pairs.append(first + second)
    return tuple(sorted(book)), tuple(pairs)


def common_words_questions(request: TextRequest) -> list[TextQuestion]:
    """Ask for the ten common words of one list (task `cwe`), behind a short list with its answer;
    RULER has fewer occurrences below 4096 tokens."""
    if request.is_long:
        example = _list_question(30, 10, 3, request.rng)
        asked = _list_question(request.units, 30, 3, request.rng)
    else:
        example = _list_question(10, 3, 1, request.rng)
        asked = _list_question(request.units, 6, 1, request.rng)
    return [asked.after(example)]


def _list_question(others: int, often: int, seldom: int, rng: random.Random) -> TextQuestion:
    """Return the question of the task `cwe` about one numbered list: ten common words, each
    `often`, and so many others, each `seldom`."""
    book, pairs = list_words()
    count = others + TEN
    missing = max(0, count - len(book))
    drawn = rng.sample(book + pairs[:missing], count)
    wanted = drawn[:TEN]
    words = wanted * often + drawn[TEN:] * seldom
    rng.shuffle(words)
    return TextQuestion(
        instruction="Some words of the numbered list below stand in it more often than the "
        "others.\n\n",
        text=f"{_numbered_words(words)}\n\n",
        question="Which ten words of the list above are the most common?",
        opening="The ten most common words of the list are:",
        references=tuple(wanted),
        answer=_numbered_words(wanted),
    )


def _numbered_words(words: list[str]) -> str:
    """Return words as the task `cwe` lists them: `1. apple 2. tree`."""
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def frequent_words_questions(request: TextRequest) -> list[TextQuestion]:
    """Ask for the most frequent words of one coded text (task `fwe`), whose most frequent sign is
    noise and no word."""
    words = list[str]()
    text = list[str]()
    for rank in range(1, max(5, request.length // 50) + 1):
        word = "".join(request.rng.choices(string.ascii_lowercase, k=CODED))
        if rank == 1:
            word = "..."
        words.append(word)
        text += [word] * int(request.units * rank**-ALPHA / ZETA)
    request.rng.shuffle(text)
    asked = TextQuestion(
        instruction="The text below is in code. Count how often each coded word stands in it; dots "
        "are no word.\n\n",
        text=f"{' '.join(text)}\n\n",
        question="Which three coded words are the most frequent?",
        opening="The three most frequent coded words of the text are:",
        references=tuple(words[1:4]),
    )
    return [asked]


CWE = TaskWording("cwe", common_words_questions, room=120, least=TEN, most=20_000)
FWE = TaskWording("fwe", frequent_words_questions, room=50, least=LEAST_CODED)
TASKS = (
    worded_task(
        CWE,
        "the ten common words of a list",
        "30 times each, the others 3 times; 6 and 1 below 4096 tokens",
    ),
    worded_task(FWE, "the three frequent words of a code", "counts by a zeta distribution, α = 2"),
)
