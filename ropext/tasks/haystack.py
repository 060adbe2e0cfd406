"""What surrounds the needles: repeated sentences, random words, or the user's own text."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ropext.tasks.item import NOUNS, Encoder, Tokens

SENTENCES = (
    "The grass is green.",
    " The sky is blue.",
    " The sun is yellow.",
    " Here we go.",
    " There and back again.",
)
"""The filler of Mohtashami & Jaggi 2023 (Landmark Attention), which most passkey tests repeat."""


@dataclass(frozen=True)
class Repetition:
    """The same few sentences again and again, begun at a random one."""

    sentences: tuple[Tokens, ...]
    name: str = "repeat"

    def tokens(self, count: int, rng: random.Random) -> list[int]:
        start = rng.randrange(len(self.sentences))
        cycle = [t for s in self.sentences[start:] + self.sentences[:start] for t in s]
        return (cycle * (count // len(cycle) + 1))[:count]


@dataclass(frozen=True)
class Noise:
    """Tokens drawn one by one from a pool."""

    pool: Tokens
    name: str = "noise"

    def tokens(self, count: int, rng: random.Random) -> list[int]:
        return rng.choices(self.pool, k=count)


@dataclass(frozen=True)
class Text:
    """A run of the user's text, from a random place on; beyond its end it begins again."""

    stream: Sequence[int]
    name: str = "text"

    def tokens(self, count: int, rng: random.Random) -> list[int]:
        start = rng.randrange(len(self.stream))
        taken = [int(token) for token in self.stream[start : start + count]]
        while len(taken) < count:
            taken += [int(token) for token in self.stream[: count - len(taken)]]
        return taken


def repetition(encoder: Encoder, sentences: Sequence[str] = SENTENCES) -> Repetition:
    return Repetition(tuple(tuple(encoder.encode(sentence)) for sentence in sentences))


def noise(encoder: Encoder) -> Noise:
    """Noise out of the tokens of common nouns: ids that every tokenizer has."""
    ids = {token for noun in NOUNS for token in encoder.encode(" " + noun)}
    return Noise(tuple(sorted(ids)))
