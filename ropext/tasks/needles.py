"""RULER's eight needles in a haystack (Hsieh et al. 2024, section 3.1 and appendix B).

Keys and values, numbers or UUIDs, in noise, in a book, or among other keys and values. The design
and the numbers are theirs, the wording and the book are not.
"""

import random
import uuid
from dataclasses import dataclass

from ropext.tasks.asking import (
    TaskWording,
    TextQuestion,
    TextRequest,
    cycled_sentences,
    sentences,
    with_needle_sentences,
    worded_task,
)
from ropext.tasks.item import NOUNS, SENTENCES, Task

NOISE = " ".join(sentence.strip() for sentence in SENTENCES)
DIGITS = 7
ROOM = 128
PAIRED = 20_000  # keys of two words at most, of which there are 181 * 180


@dataclass(frozen=True)
class Needles:
    """One of the eight tasks. A key is two words, or a UUID if `by_uuid`; each key has `values`
    values, which are numbers or UUIDs (`value`). A question asks for all values of `asked` keys."""

    around: str = "book"  # or noise, or needles
    value: str = "number"  # or UUID
    by_uuid: bool = False
    keys: int = 1
    values: int = 1  # of each key
    asked: int = 1  # keys in one question

    def __call__(self, request: TextRequest) -> list[TextQuestion]:
        """Write one haystack of RULER's needles, and a question about each key or about several
        keys together."""
        keys = self._needle_keys(request)
        values = dict[str, list[str]]()
        statements = list[str]()
        for key in keys:
            values[key] = [self._needle_value(request.rng) for _ in range(self.values)]
            for value in values[key]:
                statements.append(f"The secret {self.value} of {key} is {value}.")
        text = self._haystack_text(request, statements)
        if self._in_one_question:
            return [self._question_of_several_values(text, keys[: self.asked], values)]
        questions = list[TextQuestion]()
        for key, depth in zip(keys[: self.keys], request.depths, strict=False):
            questions.append(self._question_of_one_value(text, key, values[key], depth))
        return questions

    @property
    def _in_one_question(self) -> bool:
        """Return whether one question asks for several needles, which then have no depth."""
        return self.values * self.asked > 1

    @property
    def _instruction(self) -> str:
        """Return the instruction before a haystack of needles."""
        return (
            f"Some secret {self.value}s are told in the text below. Keep them in mind: a question "
            "about them follows.\n\n"
        )

    def _question_of_one_value(
        self, text: str, key: str, values: list[str], depth: float
    ) -> TextQuestion:
        """Return the question about the one value of a key in a haystack."""
        return TextQuestion(
            instruction=self._instruction,
            text=text,
            question=f"What is the secret {self.value} of {key}?",
            opening=f"As the text tells, the secret {self.value} of {key} is",
            references=tuple(values),
            depth=depth,
        )

    def _question_of_several_values(
        self, text: str, keys: list[str], values: dict[str, list[str]]
    ) -> TextQuestion:
        """Return the question about all values of one or several keys in a haystack."""
        named = keys[0]
        if len(keys) > 1:
            named = f"{', '.join(keys[:-1])} and {keys[-1]}"
        references = list[str]()
        for key in keys:
            references += values[key]
        return TextQuestion(
            instruction=self._instruction,
            text=text,
            question=f"List the secret {self.value}s of {named}, all of them.",
            opening=f"As the text tells, the secret {self.value}s of {named} are",
            references=tuple(references),
        )

    def _haystack_text(self, request: TextRequest, statements: list[str]) -> str:
        """Write the haystack around the needles, which are the first of the statements."""
        count = self.keys * self.values
        needles = statements[:count]
        places = list[float]()
        if not self._in_one_question:
            places += request.depths
        while len(places) < count:
            places.append(request.rng.random())
        filler = self._haystack_sentences(request, statements[count:])
        separator = " " if self.around == "book" else "\n"
        return f"{separator.join(with_needle_sentences(filler, needles, places))}\n\n"

    def _needle_keys(self, request: TextRequest) -> list[str]:
        """Draw different keys: those of the needles that questions are about, and for a haystack of
        needles one more for each of its lines."""
        count = self.keys
        if self.around == "needles":
            count += request.units
        words = 2 if count <= PAIRED else 3
        keys = dict[str, None]()
        while len(keys) < count:
            if self.by_uuid:
                key = _uuid(request.rng)
            else:
                key = "-".join(request.rng.sample(NOUNS, words))
            keys[key] = None
        return list(keys)

    def _needle_value(self, rng: random.Random) -> str:
        """Draw the secret number or UUID of a needle in a retrieval question."""
        if self.value == "UUID":
            return _uuid(rng)
        return str(rng.randrange(10 ** (DIGITS - 1), 10**DIGITS))

    def _haystack_sentences(self, request: TextRequest, others: list[str]) -> list[str]:
        """Return the sentences around the needles: noise, the other statements, or the book from a
        random sentence on."""
        if self.around == "noise":
            return [NOISE] * request.units
        if self.around == "needles":
            return others
        return cycled_sentences(sentences(), request.units, request.rng)


def _uuid(rng: random.Random) -> str:
    """Draw a UUID for a needle."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _needles_task(
    name: str, summary: str, details: str, needles: Needles, per_haystack: int = 1
) -> Task:
    """Return the entry in the list of retrieval tasks for one of RULER's eight with needles."""
    maker = TaskWording(f"niah_{name}", needles, ROOM)
    return worded_task(maker, summary, details, per_haystack=per_haystack)


# If a haystack holds several keys, it has as many questions, one for each.
AMONG_UUIDS = Needles("needles", "UUID", by_uuid=True, keys=10)
TASKS = (
    _needles_task(
        "single_1",
        "one number in noise",
        "RULER, Hsieh et al. 2024, as all up to `qa_2`",
        Needles("noise"),
    ),
    _needles_task(
        "single_2", "one number in a book", "Alice's Adventures in Wonderland", Needles()
    ),
    _needles_task("single_3", "one UUID in a book", "the same book", Needles(value="UUID")),
    _needles_task("multikey_1", "four keys in a book", "asked for one by one", Needles(keys=4), 4),
    _needles_task(
        "multikey_2",
        "a key among lines like its own",
        "nothing but needles",
        Needles("needles", keys=10),
        10,
    ),
    _needles_task(
        "multikey_3", "a UUID among lines of them", "nothing but needles", AMONG_UUIDS, 10
    ),
    _needles_task(
        "multivalue", "four values of one key in a book", "all are to be named", Needles(values=4)
    ),
    _needles_task(
        "multiquery",
        "four keys at once in a book",
        "all their values are to be named",
        Needles(keys=4, asked=4),
    ),
)
