"""Tasks asked in words: a prompt of text that fits a budget of tokens, and what an answer is worth.

A prompt is encoded as a whole, as its reader would encode it, and is never cut: it holds as many
sentences, words or passages as the budget takes. The budget holds the room for the answer too.
"""

import functools
import hashlib
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import resources

from ropext.errors import UsageError
from ropext.tasks.item import (
    Asker,
    Haystack,
    Item,
    Request,
    Task,
    Tokens,
    common_prefix,
    derived_rng,
    room_for_filler,
)

ENDLESS = 10**9  # units of a text that can be made as long as wanted
SURELY = 20  # items whose sizes tell what any of a task takes
FILLED = 0.9  # of the budget at least, else the material was too little for the length


@dataclass(frozen=True)
class Asked:
    """One question over a text; `opening` begins the answer, in completion and in chat form."""

    text: str  # the instruction and the context: what questions may share
    question: str
    opening: str
    references: tuple[str, ...]
    depth: float | None = None  # None: what is asked for lies in several places
    answer: str = ""  # as it would be written; the references with commas, if empty
    part: bool = False  # one reference is enough

    @property
    def written(self) -> str:
        """The answer, as it stands behind the opening."""
        return self.answer or (self.references[0] if self.part else ", ".join(self.references))

    @property
    def digest(self) -> str:
        """What tells this question in words from any other."""
        return hashlib.sha256(f"{self.text}{self.question}".encode()).hexdigest()[:32]

    def after(self, example: "Asked") -> "Asked":
        """The same behind an example with its answer."""
        shown = f"{example.text}{example.question}\n{example.opening} {example.written}\n\n"
        return replace(self, text=shown + self.text)


def match(said: str, references: Sequence[str], part: bool) -> float:
    """RULER's string match: the share of the references that were said; or, if a part is enough,
    whether any was. Case does not count."""
    hits = [reference.lower() in said.lower() for reference in references]
    return float(any(hits)) if part else sum(hits) / len(hits)


@dataclass(frozen=True)
class Order:
    """What a family is asked for: so many units of context, and a question at each depth."""

    units: int
    depths: Sequence[float]
    length: int
    rng: random.Random
    hay: Sequence[str] = ()  # sentences around keys, in place of the task's own


@dataclass(frozen=True)
class Worded:
    """Builds the items of a task that is asked in words."""

    name: str
    make: Callable[[Order], Sequence[Asked]]
    room: int  # tokens that an answer may take
    least: int = 1  # units of context: sentences, words, lines, passages
    most: int = ENDLESS

    def __call__(self, encoder: Asker, haystack: Haystack, wanted: Request) -> list[Item]:
        """The questions over the longest context that fits; what they have in common is shared."""
        length = wanted.length
        index = wanted.index
        seed = wanted.seed

        def count(question: Asked) -> int:
            return len(encoder.encode(_prompt(encoder, question))) + self._room(encoder, question)

        chosen = self.fitting(count, wanted)
        parts = [self._encoded(encoder, question) for question in chosen]
        first = parts[0][0]
        shared = min(common_prefix(first, prompt) for prompt, _ in parts) if parts[1:] else 0
        return [
            Item(
                *(self.name, length, question.depth, index, seed, prompt, answer, shared),
                *(question.references, question.part, self._room(encoder, question)),
                text_hash=question.digest,
            )
            for question, (prompt, answer) in zip(chosen, parts, strict=True)
        ]

    def fitting(
        self, count: Callable[[Asked], int], wanted: Request, hay: Sequence[str] = ()
    ) -> Sequence[Asked]:
        """The questions over the longest context that fits into a length. `count` is of the tokens
        of a question's prompt and of the room for its answer."""

        def drawn(units: int, index: int = wanted.index) -> Sequence[Asked]:
            rng = derived_rng(wanted.seed, self.name, wanted.length, index)
            return self.make(Order(units, wanted.depths, wanted.length, rng, hay))

        def needed(units: int, index: int = wanted.index) -> int:
            return max(count(question) for question in drawn(units, index))

        if needed(self.least) > wanted.length:  # refused, with what other items take as well
            others = range(wanted.index, wanted.index + SURELY)
            most = max(needed(self.least, other) for other in others)
            room_for_filler(self.name, wanted.length, most)
        return drawn(self._most_that_fits(needed, wanted.length))

    def _room(self, encoder: Asker, question: Asked) -> int:
        """The task's, or the answer's own size where a tokenizer cuts it into more tokens."""
        return max(self.room, len(encoder.encode(" " + question.written)))

    def _encoded(self, encoder: Asker, question: Asked) -> tuple[Tokens, Tokens]:
        """Prompt and answer, encoded together and cut where they part."""
        prompt = _prompt(encoder, question)
        whole = tuple(encoder.encode(f"{prompt} {question.written}"))
        cut = common_prefix(whole, tuple(encoder.encode(prompt)))
        back = encoder.decode(whole[cut:])
        if match(back, question.references, question.part) < 1:
            raise UsageError(
                f"the task {self.name} cannot be asked with this tokenizer: "
                f"it decodes {question.written[:60]!r} as {back[:60]!r}, so no answer would be "
                "right"
            )
        return whole[:cut], whole[cut:]

    def _most_that_fits(self, needed: Callable[[int], int], budget: int) -> int:
        """The largest number of units; what they need grows almost evenly."""
        low = self.least
        high = self.most + 1
        at_low = needed(low)
        guess = low + 8
        while high - low > 1:
            guess = min(max(guess, low + 1), high - 1)
            tokens = needed(guess)
            rate = (tokens - at_low) / (guess - low)
            if tokens > budget:
                high = guess
            else:
                low = guess
                at_low = tokens
            guess = low + int((budget - at_low) / max(1.0, rate))
        if low >= self.most and at_low < FILLED * budget:
            raise UsageError(
                f"the task {self.name} was asked for at length {budget}, but its material has only"
                f" {at_low} tokens: give shorter --lengths, or more passages if they are yours"
                " (--passages)"
            )
        return low


def worded(
    name: str,
    summary: str,
    make: Callable[[Order], Sequence[Asked]],
    room: int,
    *,
    per_haystack: int = 1,
    ruler: bool = True,
    least: int = 1,
    most: int = ENDLESS,
) -> Task:
    """An entry in the list of tasks."""
    return Task(name, summary, Worded(name, make, room, least, most), per_haystack, ruler)


def _prompt(encoder: Asker, question: Asked) -> str:
    return encoder.render(question.text + question.question, question.opening)


@functools.cache
def sentences() -> tuple[str, ...]:
    """Of Alice's Adventures in Wonderland (Carroll 1865), which is in the public domain."""
    return split_sentences(resources.files("ropext.tasks").joinpath("alice.txt").read_text("utf-8"))


def split_sentences(text: str) -> tuple[str, ...]:
    """The sentences of a text."""
    return tuple(s for s in re.split(r"(?<=[.!?’])\s+(?=[A-Z‘“])|\n", text) if s)


def surrounding(order: Order, otherwise: Sequence[str]) -> list[str]:
    """So many sentences from a random one on; behind the last comes the first."""
    source = order.hay or otherwise
    start = order.rng.randrange(len(source))
    return [source[(start + k) % len(source)] for k in range(order.units)]


def planted(filler: Sequence[str], needles: Sequence[str], depths: Sequence[float]) -> list[str]:
    """The filler with every needle at its depth, 0 before all of it and 1 behind it."""
    text = list(filler)
    for depth, needle in sorted(zip(depths, needles, strict=True), key=lambda pair: -pair[0]):
        text.insert(round(depth * len(filler)), needle)
    return text
