"""Copy: a span of random tokens, filler, the span's beginning; the rest of the span is the answer.

The induction test of Olsson et al. 2022. It needs no wording, so base models and tiny ones that
fail at passkeys still give a signal here.
"""

import random

from ropext.tasks.item import (
    Encoder,
    Haystack,
    Item,
    Request,
    Task,
    Tokens,
    noise,
    occurs,
    one_per_depth,
    room_for_filler,
    until_unambiguous,
)

NAME = "copy"
CUE = 4
"""Tokens of the span that the prompt repeats: enough to tell the span from anything else."""
SPAN = 20


def one_item(
    haystack: Haystack,
    source: Haystack,
    *,
    length: int,
    depth: float,
    rng: random.Random,
    span: int = SPAN,
    cue: int = CUE,
) -> tuple[Tokens, Tokens]:
    """Prompt and answer; `source` gives the span, `haystack` what surrounds it."""
    room = room_for_filler(NAME, length, 2 * span)

    def draw() -> tuple[Tokens, list[int]]:
        return tuple(source(span, rng)), haystack(room, rng)

    def clear(drawn: tuple[Tokens, list[int]]) -> bool:
        planted, filler = drawn
        begin = planted[:cue]
        return not occurs(begin, filler) and not occurs(begin, planted[1:])

    planted, filler = until_unambiguous(NAME, draw, clear)
    cut = round(depth * room)
    return (*filler[:cut], *planted, *filler[cut:], *planted[:cue]), planted[cue:]


def make(encoder: Encoder, haystack: Haystack, wanted: Request) -> list[Item]:
    source = noise(encoder)

    def ask(depth: float, rng: random.Random) -> tuple[Tokens, Tokens]:
        return one_item(haystack, source, length=wanted.length, depth=depth, rng=rng)

    return one_per_depth(NAME, ask, wanted)


TASK = Task(NAME, "a span of random words, to be repeated from its first tokens on", make)
