"""Copy: a span of random tokens, filler, the span's beginning; the rest of the span is the answer.

The induction test of Olsson et al. 2022. It needs no wording, so base models and tiny ones that
fail at passkeys still give a signal here.
"""

import random
from dataclasses import dataclass

from ropext.tasks.item import (
    ATTEMPTS,
    Encoder,
    Haystack,
    Item,
    ItemRequest,
    Task,
    Tokens,
    ambiguous_haystack_error,
    holds_tokens,
    noise,
    one_per_depth,
    room_for_filler,
    with_needles,
)

NAME = "copy"
SPAN = 20  # tokens
CUE = 4  # tokens of the span that the prompt repeats: enough to tell it from anything else


@dataclass(frozen=True)
class RepeatedSpan:
    """A span to be repeated: tokens of `source`; the prompt repeats the first `cue` of them."""

    source: Haystack
    size: int = SPAN
    cue: int = CUE


def copy_prompt(
    haystack: Haystack, span: RepeatedSpan, *, length: int, depth: float, rng: random.Random
) -> tuple[Tokens, Tokens]:
    """Return prompt and answer of one item of the task `copy`; the haystack surrounds the span."""
    room = room_for_filler(NAME, length, 2 * span.size)
    for _ in range(ATTEMPTS):
        tokens = tuple(span.source(span.size, rng))
        filler = haystack(room, rng)
        cue = tokens[: span.cue]
        if not holds_tokens(filler, cue) and not holds_tokens(tokens[1:], cue):
            return with_needles(filler, [tokens], [depth]) + cue, tokens[span.cue :]
    raise ambiguous_haystack_error(NAME)


def copy_items(encoder: Encoder, haystack: Haystack, wanted: ItemRequest) -> list[Item]:
    """Build an item of the task `copy` for each depth, with spans of random nouns."""
    span = RepeatedSpan(noise(encoder))

    def ask(depth: float, rng: random.Random) -> tuple[Tokens, Tokens]:
        """Return prompt and answer of the item of the task `copy` at one depth."""
        return copy_prompt(haystack, span, length=wanted.length, depth=depth, rng=rng)

    return one_per_depth(NAME, ask, wanted)


TASK = Task(
    NAME,
    "a span of random words, to be repeated from its first tokens on",
    copy_items,
    details="Olsson et al. 2022",
)
