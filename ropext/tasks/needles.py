"""RULER's eight needles in a haystack (Hsieh et al. 2024, section 3.1 and appendix B).

Keys and values, numbers or UUIDs, in noise, in a book, or among other keys and values. The design
and the numbers are theirs, the wording and the book are not.
"""

import random
import uuid
from dataclasses import dataclass

from ropext.tasks.asking import Asked, Order, planted, sentences, worded
from ropext.tasks.item import NOUNS, SENTENCES, Task

NOISE = " ".join(sentence.strip() for sentence in SENTENCES)
DIGITS = 7
ROOM = 128
PAIRED = 20_000  # keys of two words at most, of which there are 181 * 180


@dataclass(frozen=True)
class Needles:
    """One of the eight; `value` is what is asked for, by a name of two words or by a UUID."""

    around: str = "book"  # or noise, or needles
    value: str = "number"  # or UUID
    by_uuid: bool = False
    keys: int = 1
    values: int = 1  # of each key
    asked: int = 1  # keys in one question

    def __call__(self, order: Order) -> list[Asked]:
        rng = order.rng
        several = self.values * self.asked > 1
        others = order.units if self.around == "needles" else 0
        stating = {
            key: [self._value(rng) for _ in range(self.values)]
            for key in self._keys(self.keys + others, rng)
        }
        stated = [
            f"The secret {self.value} of {key} is {value}."
            for key, values in stating.items()
            for value in values
        ]
        needles = stated[: self.keys * self.values]
        lines = stated[self.keys * self.values :]
        places = [] if several else list(order.depths)
        places += [rng.random() for _ in needles[len(places) :]]
        hay = planted(lines or self._filler(order.units, rng), needles, places)
        joined = (" " if self.around == "book" else "\n").join(hay)
        text = (
            f"Some secret {self.value}s are told in the text below. Keep them in mind: a question "
            f"about them follows.\n\n{joined}\n\n"
        )
        if not several:
            return [
                Asked(
                    text,
                    f"What is the secret {self.value} of {key}?",
                    f"As the text tells, the secret {self.value} of {key} is",
                    tuple(values),
                    depth,
                )
                for (key, values), depth in zip(stating.items(), order.depths, strict=False)
            ]
        names = list(stating)[: self.asked]
        key = f"{', '.join(names[:-1])} and {names[-1]}" if names[1:] else names[0]
        return [
            Asked(
                text,
                f"List the secret {self.value}s of {key}, all of them.",
                f"As the text tells, the secret {self.value}s of {key} are",
                tuple(value for name in names for value in stating[name]),
            )
        ]

    def _keys(self, count: int, rng: random.Random) -> list[str]:
        keys = dict[str, None]()
        words = 2 if count <= PAIRED else 3
        while len(keys) < count:
            keys[_uuid(rng) if self.by_uuid else "-".join(rng.sample(NOUNS, words))] = None
        return list(keys)

    def _value(self, rng: random.Random) -> str:
        low = 10 ** (DIGITS - 1)
        return _uuid(rng) if self.value == "UUID" else str(rng.randrange(low, 10 * low))

    def _filler(self, count: int, rng: random.Random) -> list[str]:
        """Noise, or the book from a random sentence on; behind the last comes the first."""
        if self.around == "noise":
            return [NOISE] * count
        book = sentences()
        start = rng.randrange(len(sentences()))
        return [book[(start + k) % len(book)] for k in range(count)]


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _task(name: str, summary: str, needles: Needles, per_haystack: int = 1) -> Task:
    return worded(f"niah_{name}", summary, needles, ROOM, per_haystack=per_haystack)


# Where a haystack holds several keys, as many are asked for, one by one.
TASKS = (
    _task("single_1", "one number in noise", Needles("noise")),
    _task("single_2", "one number in a book", Needles()),
    _task("single_3", "one UUID in a book", Needles(value="UUID")),
    _task("multikey_1", "four keys in a book", Needles(keys=4), 4),
    _task("multikey_2", "a key among lines like its own", Needles("needles", keys=10), 10),
    _task(
        "multikey_3", "a UUID among lines of them", Needles("needles", "UUID", True, keys=10), 10
    ),
    _task("multivalue", "four values of one key in a book", Needles(values=4)),
    _task("multiquery", "four keys at once in a book", Needles(keys=4, asked=4)),
)
