"""Multi-key needles: several named keys in one haystack, asked for one by one.

After RULER's niah_multikey (Hsieh et al. 2024). The haystack with all its needles is the shared
prefix of the items of one index, so a model reads it once for all questions.
"""

import random
from collections import Counter
from collections.abc import Sequence

from ropext.errors import UsageError
from ropext.tasks.asking import Asked, Order, Worded, planted, surrounding
from ropext.tasks.item import (
    NOUNS,
    SENTENCES,
    Encoder,
    Haystack,
    Item,
    Request,
    Task,
    Template,
    Tokens,
    derived_rng,
    occurs,
    room_for_filler,
    until_unambiguous,
)

NAME = "mkey"
DIGITS = 4

PLAIN = Template("\nThe key of {name} is {key}.\n", "\nThe key of {name} is {key}")

Needle = tuple[Tokens, Tokens, Tokens]
"""Statement, question, answer."""


def draw_needles(encoder: Encoder, count: int, rng: random.Random) -> list[Needle]:
    """Needles with different names and keys whose questions all take the same number of tokens.

    Equal sizes keep every item at its exact length behind one shared prefix.
    """
    names = rng.sample(NOUNS, len(NOUNS))
    keys = [f"{key:0{DIGITS}d}" for key in rng.sample(range(10**DIGITS), len(names))]
    questions = [PLAIN.question(encoder, key, name) for name, key in zip(names, keys, strict=True)]
    sizes = Counter(len(question) + len(answer) for question, answer in questions)
    size, available = max(sizes.items(), key=lambda entry: (entry[1], -entry[0]))
    if available < count:
        raise UsageError(
            f"the task {NAME} was asked for {count} needles in one haystack, but only {available}"
            " names take equally many tokens of this tokenizer: give fewer depths (--depths)"
        )
    chosen = [i for i, (q, a) in enumerate(questions) if len(q) + len(a) == size][:count]
    return [(PLAIN.state(encoder, keys[i], names[i]), *questions[i]) for i in chosen]


def shared_prefix(
    filler: Sequence[int], statements: Sequence[Tokens], depths: Sequence[float]
) -> Tokens:
    """The filler with each statement at its depth; equal depths keep their order."""
    prefix: list[int] = []
    done = 0
    for depth, statement in sorted(zip(depths, statements, strict=True), key=lambda pair: pair[0]):
        cut = round(depth * len(filler))
        prefix += [*filler[done:cut], *statement]
        done = cut
    return (*prefix, *filler[done:])


def make(encoder: Encoder, haystack: Haystack, wanted: Request) -> list[Item]:
    length = wanted.length
    depths = wanted.depths
    index = wanted.index
    seed = wanted.seed
    rng = derived_rng(seed, NAME, length, depths, index)

    def draw() -> tuple[list[Needle], list[int]]:
        needles = draw_needles(encoder, len(depths), rng)
        statements = sum(len(stated) for stated, _, _ in needles)
        fixed = statements + len(needles[0][1]) + len(needles[0][2])
        return needles, haystack(room_for_filler(NAME, length, fixed), rng)

    def clear(drawn: tuple[list[Needle], list[int]]) -> bool:
        needles, filler = drawn
        return not any(occurs(answer, filler) for _, _, answer in needles)

    needles, filler = until_unambiguous(NAME, draw, clear)
    prefix = shared_prefix(filler, [stated for stated, _, _ in needles], depths)
    return [
        Item(NAME, length, depth, index, seed, prefix + question, answer, shared=len(prefix))
        for depth, (_, question, answer) in zip(depths, needles, strict=True)
    ]


ROOM = 32  # tokens of an answer in words


def in_words(order: Order) -> list[Asked]:
    """One text with a key at each depth; each is asked for by its name."""
    hay = surrounding(order, [sentence.strip() for sentence in SENTENCES])
    names = order.rng.sample(NOUNS, len(order.depths))
    keys = [str(key) for key in order.rng.sample(range(10 ** (DIGITS - 1), 10**DIGITS), len(names))]
    stated = [f"The key of {name} is {key}." for name, key in zip(names, keys, strict=True)]
    text = " ".join(planted(hay, stated, order.depths))
    return [
        Asked(
            "Some keys are told in the text below. Keep them in mind: a question about one of "
            f"them follows.\n\n{text}\n\n",
            f"What is the key of {name}?",
            f"The key of {name} is",
            (key,),
            depth,
        )
        for name, key, depth in zip(names, keys, order.depths, strict=True)
    ]


WORDED = Worded(NAME, in_words, ROOM)
TASK = Task(
    NAME,
    "several named four-digit keys in one haystack, asked for one by one",
    make,
    one_haystack=True,
)
