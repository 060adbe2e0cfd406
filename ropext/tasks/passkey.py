"""Passkey: one key stated in a haystack and asked for at the end.

After Mohtashami & Jaggi 2023 (Landmark Attention). What differs: the key always has five digits,
the filler is cut by tokens and not by characters, and the depth is given rather than drawn.
"""

import random

from ropext.tasks.asking import (
    TaskWithWording,
    TaskWording,
    TextQuestion,
    TextRequest,
    filler_sentences,
    with_needle_sentences,
)
from ropext.tasks.item import (
    ATTEMPTS,
    Encoder,
    Haystack,
    Item,
    ItemRequest,
    Template,
    Tokens,
    ambiguous_haystack_error,
    holds_tokens,
    one_per_depth,
    room_for_filler,
    with_needles,
)

NAME = "passkey"
DIGITS = 5

TERSE = Template("\nThe pass key is {key}.\n", "\nThe pass key is {key}")
"""Short enough for a window of 64 tokens of a small tokenizer."""


def passkey_prompt(
    encoder: Encoder,
    haystack: Haystack,
    template: Template,
    *,
    length: int,
    depth: float,
    rng: random.Random,
) -> tuple[Tokens, Tokens]:
    """Return prompt and answer of one item of the task `passkey`: filler, the key, filler, the
    question."""
    for _ in range(ATTEMPTS):
        key = _passkey(rng)
        stated = template.state(encoder, key)
        question, answer = template.question(encoder, key)
        fixed = len(stated) + len(question) + len(answer)
        filler = haystack(room_for_filler(NAME, length, fixed), rng)
        if not holds_tokens(filler, answer[-DIGITS:]):
            return with_needles(filler, [stated], [depth]) + question, answer
    raise ambiguous_haystack_error(NAME)


def passkey_items(
    encoder: Encoder, haystack: Haystack, wanted: ItemRequest, template: Template = TERSE
) -> list[Item]:
    """Build an item of the task `passkey` for each depth."""

    def ask(depth: float, rng: random.Random) -> tuple[Tokens, Tokens]:
        """Return prompt and answer of the item of the task `passkey` at one depth."""
        return passkey_prompt(
            encoder, haystack, template, length=wanted.length, depth=depth, rng=rng
        )

    return one_per_depth(NAME, ask, wanted)


ROOM = 32  # tokens of an answer in words


def passkey_questions(request: TextRequest) -> list[TextQuestion]:
    """Write a text with one key in it for each depth, and ask for the key (task `passkey`)."""
    return [_passkey_question(request, depth) for depth in request.depths]


def _passkey_question(request: TextRequest, depth: float) -> TextQuestion:
    """Return the question of the task `passkey` about a text with its key at one depth."""
    hay = filler_sentences(request)
    key = _passkey(request.rng)
    while any(key in sentence for sentence in request.hay):
        key = _passkey(request.rng)
    text = " ".join(with_needle_sentences(hay, [f"The pass key is {key}."], [depth]))
    return TextQuestion(
        instruction="A pass key is told in the text below. Keep it in mind: a question about it "
        "follows.\n\n",
        text=f"{text}\n\n",
        question="What is the pass key?",
        opening="The pass key is",
        references=(key,),
        depth=depth,
    )


def _passkey(rng: random.Random) -> str:
    """Draw the five digits of a key for the task `passkey`."""
    return "".join(rng.choices("0123456789", k=DIGITS))


TASK = TaskWithWording(
    NAME,
    "one five-digit key in a haystack, asked for at the end",
    passkey_items,
    details="Mohtashami and Jaggi 2023, in short words",
    wording=TaskWording(NAME, passkey_questions, ROOM),
)
