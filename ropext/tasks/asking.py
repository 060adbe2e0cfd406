"""Define tasks asked in words: a prompt of text that fits a budget of tokens, and the score of an
answer.

A prompt is encoded as a whole, as its reader would encode it, and is never cut: it holds as many
sentences, words or passages as the budget allows. The budget includes the room for the answer.
"""

import functools
import hashlib
import operator
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import resources

from ropext.base.errors import UsageError
from ropext.tasks.item import (
    SENTENCES,
    Haystack,
    Item,
    ItemRequest,
    PromptEncoder,
    Task,
    Tokens,
    common_prefix,
    derived_rng,
    room_for_filler,
)

ENDLESS = 10**9  # units of a text that can be made as long as wanted
SURELY = 20  # items whose sizes tell what any of a task takes
FILLED = 0.9  # least share of the budget; below it the material is too little for the length
SENTENCE_END = re.compile(r"(?<=[.!?’])\s+(?=[A-Z‘“])|\n")


@dataclass(frozen=True)
class TextQuestion:
    """One question over a text; `opening` begins the answer, in completion and in chat form.

    A truncated prompt keeps the instruction, the end of the text and the question.
    """

    text: str  # questions may share it
    question: str
    opening: str
    references: tuple[str, ...]
    depth: float | None = None  # None: the answer is in several places
    answer: str = ""  # as it would be written; the references with commas, if empty
    part: bool = False  # one reference is enough
    instruction: str = ""  # comes before the text

    @property
    def prompt(self) -> str:
        """Return the prompt of a retrieval question: the instruction, the text and the question."""
        return f"{self.instruction}{self.text}{self.question}"

    @property
    def written(self) -> str:
        """Return the right answer of a retrieval question, as it follows the opening."""
        if self.answer:
            return self.answer
        if self.part:
            return self.references[0]
        return ", ".join(self.references)

    @property
    def digest(self) -> str:
        """Return a digest that tells this retrieval question in words from any other."""
        return hashlib.sha256(self.prompt.encode()).hexdigest()[:32]

    def after(self, example: "TextQuestion") -> "TextQuestion":
        """Return the same retrieval question behind an example with its answer."""
        shown = f"{example.prompt}\n{example.opening} {example.written}\n\n"
        return replace(self, instruction=shown + self.instruction)


def match(answer: str, references: Sequence[str], part: bool) -> float:
    """Return the score of an answer to a retrieval question by RULER's string match: the share of
    the references in it.

    If a part is enough, return 1 if the answer contains any reference, else 0. Case does not count.
    """
    text = answer.lower()
    hits = sum(reference.lower() in text for reference in references)
    if part:
        return float(hits > 0)
    return hits / len(references)


@dataclass(frozen=True)
class TextRequest:
    """The input of a task's wording: a number of units of context, and a depth for each
    question."""

    units: int
    depths: Sequence[float]
    length: int
    rng: random.Random
    hay: Sequence[str] = ()  # sentences around keys, in place of the task's own

    @property
    def is_long(self) -> bool:
        """Return whether a task has RULER's numbers for 4096 tokens or more; a BOS may be one of
        these tokens."""
        return self.length >= 4095


@dataclass(frozen=True)
class TaskWording:
    """The maker of the items of a task in words."""

    name: str
    make: Callable[[TextRequest], Sequence[TextQuestion]]
    room: int  # tokens that an answer may take
    least: int = 1  # units of context: sentences, words, lines, passages
    most: int = ENDLESS

    def __call__(
        self, encoder: PromptEncoder, haystack: Haystack, wanted: ItemRequest
    ) -> list[Item]:
        """Build the items of a retrieval task in words, over the longest context that fits; they
        share a common prefix."""

        def count(question: TextQuestion) -> int:
            """Return how many tokens a retrieval question needs: its prompt, and the room for its
            answer."""
            prompt = encoder.encode(encoder.render(question.prompt, question.opening))
            return len(prompt) + self._answer_room(encoder, question)

        items = list[Item]()
        for question in self.questions_that_fit(count, wanted):
            rendered = encoder.render(question.prompt, question.opening)
            prompt, answer = self._encoded_question(encoder, rendered, question)
            item = Item(
                task=self.name,
                length=wanted.length,
                depth=question.depth,
                index=wanted.index,
                seed=wanted.seed,
                prompt=prompt,
                answer=answer,
                references=question.references,
                part=question.part,
                room=self._answer_room(encoder, question),
                text_hash=question.digest,
                text=text_span(encoder, rendered, question.instruction, question.text),
            )
            items.append(item)
        if len(items) == 1:
            return items
        shared = min(common_prefix(items[0].prompt, item.prompt) for item in items)
        return [replace(item, shared=shared) for item in items]

    def questions_that_fit(
        self, count: Callable[[TextQuestion], int], wanted: ItemRequest, hay: Sequence[str] = ()
    ) -> Sequence[TextQuestion]:
        """Draw a retrieval task's questions over the longest context that fits into a length.
        `count` returns how many tokens a question needs: its prompt, and the room for its
        answer."""

        def draw(units: int, index: int) -> Sequence[TextQuestion]:
            """Draw the task's questions over so many units of context."""
            rng = derived_rng(wanted.seed, self.name, wanted.length, index)
            return self.make(TextRequest(units, wanted.depths, wanted.length, rng, hay))

        def needed(units: int, index: int) -> int:
            """Return the tokens that the longest of the task's questions takes."""
            return max(count(question) for question in draw(units, index))

        if needed(self.least, wanted.index) > wanted.length:
            # The refusal names a length that holds the next items too, not this one alone.
            indices = range(wanted.index, wanted.index + SURELY)
            most = max(needed(self.least, index) for index in indices)
            room_for_filler(self.name, wanted.length, most)
        units = self._most_units(lambda units: needed(units, wanted.index), wanted.length)
        return draw(units, wanted.index)

    def _answer_room(self, encoder: PromptEncoder, question: TextQuestion) -> int:
        """Return the tokens that a retrieval task leaves for an answer: its room, or the answer's
        size if a tokenizer needs more for it."""
        return max(self.room, len(encoder.encode(" " + question.written)))

    def _encoded_question(
        self, encoder: PromptEncoder, prompt: str, question: TextQuestion
    ) -> tuple[Tokens, Tokens]:
        """Encode prompt and answer of a retrieval question together, and split them at the place at
        which they part."""
        whole = tuple(encoder.encode(f"{prompt} {question.written}"))
        cut = common_prefix(whole, tuple(encoder.encode(prompt)))
        back = encoder.decode(whole[cut:])
        if match(back, question.references, question.part) < 1:
            raise UsageError(
                f"the task {self.name} does not work with this tokenizer: "
                f"it decodes {question.written[:60]!r} as {back[:60]!r}, so no answer would be "
                "right"
            )
        return whole[:cut], whole[cut:]

    def _most_units(self, needed: Callable[[int], int], budget: int) -> int:
        """Return the largest number of units of context (sentences, words, lines, passages) of a
        retrieval task that fits; their size grows almost evenly."""
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
                f"the task {self.name} at length {budget}: its material has only"
                f" {at_low} tokens: give shorter --lengths, or more passages if they are yours"
                " (--passages)"
            )
        return low


def text_span(encoder: PromptEncoder, prompt: str, instruction: str, text: str) -> tuple[int, int]:
    """Return the span of a retrieval question's text in the tokens of its prompt: first and end."""
    before, found, _ = prompt.partition(instruction + text)
    if not found:  # the chat template changed it
        return 0, 0
    before += instruction
    whole = tuple(encoder.encode(prompt))
    begin = common_prefix(whole, tuple(encoder.encode(before)))
    end = common_prefix(whole, tuple(encoder.encode(before + text)))
    return begin, end


@dataclass(frozen=True, kw_only=True)
class TaskWithWording(Task):
    """A task in token ids with a wording for a server, which takes words."""

    wording: TaskWording


def worded_task(
    maker: TaskWording, summary: str, details: str, *, per_haystack: int = 1, ruler: bool = True
) -> Task:
    """Return the entry in the list of retrieval tasks for a task in words."""
    return Task(maker.name, summary, maker, per_haystack, ruler, details=details)


@functools.cache
def sentences() -> tuple[str, ...]:
    """Return the sentences of Alice's Adventures in Wonderland (Carroll 1865, in the public
    domain), which surround the needles of a retrieval task."""
    book = resources.files("ropext.tasks").joinpath("alice.txt")
    return split_sentences(book.read_text("utf-8"))


def split_sentences(text: str) -> tuple[str, ...]:
    """Return the sentences of a text, which are to surround needles."""
    return tuple(filter(None, SENTENCE_END.split(text)))


def filler_sentences(request: TextRequest) -> list[str]:
    """Return the sentences around the needles of a task: the request's own, else SENTENCES, from a
    random one on."""
    hay = request.hay or [sentence.strip() for sentence in SENTENCES]
    return cycled_sentences(hay, request.units, request.rng)


def cycled_sentences(source: Sequence[str], count: int, rng: random.Random) -> list[str]:
    """Return so many sentences around the needles of a task, from a random one on; the first
    follows the last."""
    start = rng.randrange(len(source))
    return [source[(start + k) % len(source)] for k in range(count)]


def with_needle_sentences(
    filler: Sequence[str], needles: Sequence[str], depths: Sequence[float]
) -> list[str]:
    """Return the sentences of the filler with every needle at its depth: 0 before all filler, 1
    behind it."""
    text = list(filler)
    pairs = list(zip(depths, needles, strict=True))
    # Deepest first: an insertion then moves none of the places that are still to be filled.
    for depth, needle in sorted(pairs, key=operator.itemgetter(0), reverse=True):
        text.insert(round(depth * len(filler)), needle)
    return text
