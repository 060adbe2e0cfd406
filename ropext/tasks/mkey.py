"""Multi-key needles: several named keys in one haystack, asked for one by one.

After RULER's niah_multikey (Hsieh et al. 2024). The haystack with all its needles is the shared
prefix of the items of one index, so a model reads it once for all questions.
"""

import random
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from ropext.base.errors import UsageError
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
    NOUNS,
    Encoder,
    Haystack,
    Item,
    ItemRequest,
    Template,
    Tokens,
    ambiguous_haystack_error,
    derived_rng,
    holds_tokens,
    room_for_filler,
    with_needles,
)

NAME = "mkey"
DIGITS = 4

PLAIN = Template("\nThe key of {name} is {key}.\n", "\nThe key of {name} is {key}")


class Needle(NamedTuple):
    """A key with its name, in token ids."""

    statement: Tokens
    question: Tokens
    answer: Tokens

    @property
    def size(self) -> int:
        """Return the tokens that asking for a needle takes: question and answer."""
        return len(self.question) + len(self.answer)


def draw_needles(encoder: Encoder, count: int, rng: random.Random) -> list[Needle]:
    """Draw needles for a haystack of `mkey`, with different names and keys, whose questions all
    take equally many tokens.

    Equal sizes keep every item at its exact length behind one shared prefix.
    """
    names = rng.sample(NOUNS, len(NOUNS))
    numbers = rng.sample(range(10**DIGITS), len(names))
    keys = dict[str, str]()
    questions = dict[str, tuple[Tokens, Tokens]]()
    for name, number in zip(names, numbers, strict=True):
        keys[name] = f"{number:0{DIGITS}d}"
        questions[name] = PLAIN.question(encoder, keys[name], name)
    sizes = Counter(len(question) + len(answer) for question, answer in questions.values())
    available = max(sizes.values())
    size = min(size for size, times in sizes.items() if times == available)
    if available < count:
        raise UsageError(
            f"the task {NAME} needs {count} names for {count} needles in one haystack, but only"
            f" {available} names have equally many tokens in this tokenizer: give fewer --depths"
        )
    needles = list[Needle]()
    for name, (question, answer) in questions.items():
        if len(needles) < count and len(question) + len(answer) == size:
            statement = PLAIN.state(encoder, keys[name], name)
            needles.append(Needle(statement, question, answer))
    return needles


def mkey_items(encoder: Encoder, haystack: Haystack, wanted: ItemRequest) -> list[Item]:
    """Build the items of `mkey`: one haystack with a key at each depth, and a question for each."""
    rng = derived_rng(wanted.seed, NAME, wanted.length, wanted.depths, wanted.index)
    for _ in range(ATTEMPTS):
        needles = draw_needles(encoder, len(wanted.depths), rng)
        fixed = sum(len(needle.statement) for needle in needles) + needles[0].size
        filler = haystack(room_for_filler(NAME, wanted.length, fixed), rng)
        if not any(holds_tokens(filler, needle.answer) for needle in needles):
            return _items_of_needles(needles, filler, wanted)
    raise ambiguous_haystack_error(NAME)


def _items_of_needles(
    needles: Sequence[Needle], filler: Sequence[int], wanted: ItemRequest
) -> list[Item]:
    """Return one item of the task `mkey` for each needle, behind the haystack that all of them
    share."""
    statements = [needle.statement for needle in needles]
    prefix = with_needles(filler, statements, wanted.depths)
    items = list[Item]()
    for depth, needle in zip(wanted.depths, needles, strict=True):
        item = Item(
            task=NAME,
            length=wanted.length,
            depth=depth,
            index=wanted.index,
            seed=wanted.seed,
            prompt=prefix + needle.question,
            answer=needle.answer,
            shared=len(prefix),
        )
        items.append(item)
    return items


ROOM = 32  # tokens of an answer in words


def mkey_questions(request: TextRequest) -> list[TextQuestion]:
    """Write one text of the task `mkey` with a key at each depth, and ask for each key by its
    name."""
    hay = filler_sentences(request)
    names = request.rng.sample(NOUNS, len(request.depths))
    keys = request.rng.sample(range(10 ** (DIGITS - 1), 10**DIGITS), len(names))
    statements = [f"The key of {name} is {key}." for name, key in zip(names, keys, strict=True)]
    joined = " ".join(with_needle_sentences(hay, statements, request.depths))
    questions = list[TextQuestion]()
    for name, key, depth in zip(names, keys, request.depths, strict=True):
        asked = TextQuestion(
            instruction="Some keys are told in the text below. Keep them in mind: a question about "
            "one of them follows.\n\n",
            text=f"{joined}\n\n",
            question=f"What is the key of {name}?",
            opening=f"The key of {name} is",
            references=(str(key),),
            depth=depth,
        )
        questions.append(asked)
    return questions


TASK = TaskWithWording(
    NAME,
    "several named four-digit keys in one haystack, asked for one by one",
    mkey_items,
    one_haystack=True,
    details="RULER, Hsieh et al. 2024",
    wording=TaskWording(NAME, mkey_questions, ROOM),
)
