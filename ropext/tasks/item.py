"""The items of retrieval tasks, the text around their needles, and the steps that every task
shares.

An item is a prompt, the answer that should follow it (both token ids), and its origin. Its length
(prompt and answer together) is exact by construction: filler is cut to the space that the fixed
parts leave, never the other way round. An item that does not fit is an error. Randomness comes from
`derived_rng` alone, so an item is the same whichever others are built before it.
"""

import hashlib
import operator
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ropext.base.errors import UsageError

# For one task and length: 1,000 give a share to within 3 points, and more only cost.
MOST_ITEMS = 1000
MOST_TOKENS = 2**29  # of all items together, which are kept in memory: four gigabytes

Tokens = tuple[int, ...]


class Encoder(Protocol):
    """Any tokenizer, reduced to the needs of a task: text to ids, no special tokens added."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, for a retrieval task."""
        ...


class PromptEncoder(Encoder, Protocol):
    """A tokenizer that tasks in words need."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, with which a retrieval task checks the right answer to the
        question that it draws."""
        ...

    @property
    def bos(self) -> int | None:
        """Return the token for which a retrieval task leaves room, because a reader puts it before
        an item's prompt; None if there is none."""
        ...

    def render(self, content: str, opening: str, between: str = "\n") -> str:
        """Return the prompt of a question that a retrieval task draws in words, whose answer begins
        with `opening`: plain, with `between` before it, or through a chat template, which has its
        own separator."""
        ...


Haystack = Callable[[int, random.Random], list[int]]
"""What surrounds a needle: exactly so many ids."""


@dataclass(frozen=True)
class Item:
    """One question: greedy decoding after `prompt` should give `answer`, or name `references`."""

    task: str
    length: int
    depth: float | None  # None: the answer is in several places
    index: int
    seed: int
    prompt: Tokens
    answer: Tokens
    shared: int = 0
    """How many leading prompt tokens the other items of the same (task, length, index) have too:
    they can be read once. 0: none."""
    references: tuple[str, ...] = ()
    """What the text that greedy decoding gives must name; none: the answer's tokens decide."""
    part: bool = False  # one reference is enough
    room: int = 0  # tokens that may be generated
    text_hash: str = ""  # identifies a question in words, whoever encodes it
    text: tuple[int, int] = (0, 0)
    """The span of the text in the prompt, between instruction and question. (0, 0): the whole
    prompt, which ends with a short question."""
    whole: str = ""  # hash of the whole prompt, if this one is truncated

    @property
    def identity(self) -> dict[str, object]:
        """Return the fields of a drawn item of a retrieval task that identify its answer: all
        except the fields that only truncation needs."""
        fields = dict(vars(self))
        del fields["text"], fields["whole"]
        return fields

    @property
    def prompt_hash(self) -> str:
        """Return the hash of the prompt of a retrieval task's item, which identifies it whether its
        text is truncated or not."""
        if self.whole:
            return self.whole
        packed = struct.pack(f"<{len(self.prompt)}i", *self.prompt)
        return hashlib.sha256(packed).hexdigest()[:32]

    @property
    def size(self) -> int:
        """Return how many tokens a retrieval item needs: its prompt, and the room for its
        answer."""
        return len(self.prompt) + max(len(self.answer), self.room)

    @property
    def most_read(self) -> int:
        """Return the largest number of tokens that a model reads for this retrieval item.

        If an answer is generated, the question is read first with the right answer, and then with
        the generated one.
        """
        once = len(self.prompt) + len(self.answer)
        if not self.room:
            return once
        if self.shared:
            return once + len(self.prompt) - self.shared + self.room
        return once + 1 + self.room


FEWEST_READ = 2  # tokens of a truncated prompt, or of an own question's


def truncated(items: Sequence[Item], window: int) -> tuple[Item, ...]:
    """Return the retrieval items over one haystack with its beginning removed, so that each fits a
    window.

    The end of the text is kept, and so are the instruction before it and the question after it. If
    a window is too short for instruction and question, the end of the prompt is kept. Return
    nothing if the answers alone fill the window.
    """
    longest = max(items, key=operator.attrgetter("size"))
    surplus = longest.size - window
    if surplus <= 0:
        return tuple(items)
    begin = longest.text[0]
    for item in items:
        if surplus > len(item.prompt) - FEWEST_READ:
            return ()
        if begin + surplus > (item.text[1] or len(item.prompt)):
            begin = 0
    kept = list[Item]()
    for item in items:
        prompt = item.prompt[:begin] + item.prompt[begin + surplus :]
        shared = max(0, item.shared - surplus)
        kept.append(replace(item, prompt=prompt, shared=shared, whole=item.prompt_hash))
    return tuple(kept)


@dataclass(frozen=True)
class ItemRequest:
    """The items to build: one for each depth at a length; another index or seed gives other
    items."""

    length: int
    depths: tuple[float, ...]
    index: int
    seed: int


@dataclass(frozen=True)
class Task:
    """An entry in the list of tasks."""

    name: str
    summary: str
    maker: Callable[[PromptEncoder, Haystack, ItemRequest], list[Item]]
    per_haystack: int = 0
    """Questions over one haystack at most, in a task asked in words; 0: each index asks at all
    depths."""
    ruler: bool = False  # one of RULER's thirteen
    one_haystack: bool = False  # all depths of one index share one haystack
    details: str = ""  # for docs/reference/tasks.md: the source, or the surroundings

    @property
    def in_words(self) -> bool:
        """Return whether the task asks in text, so that answers are generated and matched."""
        return self.per_haystack > 0

    def build(
        self,
        encoder: PromptEncoder,
        haystack: Haystack,
        *,
        length: int,
        depths: Sequence[float],
        index: int,
        seed: int,
    ) -> list[Item]:
        """Build one retrieval item for each depth."""
        if not depths:
            raise self._depth_error("no depth")
        for depth in depths:
            if not 0.0 <= depth <= 1.0:
                raise self._depth_error(str(depth))
        return self.maker(encoder, haystack, ItemRequest(length, tuple(depths), index, seed))

    def _depth_error(self, given: str) -> UsageError:
        """Return the error for --depths without a depth, or with one outside of 0 to 1."""
        return UsageError(
            f"the task {self.name} places needles at depths between 0 (start) and 1 (end);"
            f" found {given} (--depths)"
        )

    def groups(self, depths: Sequence[float], items: int) -> list[tuple[int, tuple[float, ...]]]:
        """Return index and depths of every haystack of the task; each depth has `items`
        questions."""
        if not self.in_words:
            return [(index, tuple(depths)) for index in range(items)]
        remaining = tuple(depths) * items
        groups = list[tuple[int, tuple[float, ...]]]()
        while remaining:
            groups.append((len(groups), remaining[: self.per_haystack]))
            remaining = remaining[self.per_haystack :]
        return groups


@dataclass(frozen=True)
class Template:
    """The wording around a key: a statement of it, and the beginning of the same that asks for it.

    Both hold `{key}`; wordings for several keys hold `{name}` too. `ask` ends with the key.
    """

    statement: str
    ask: str

    def state(self, encoder: Encoder, key: str, name: str = "") -> Tokens:
        """Encode the sentence that states a key in the haystack of a retrieval item."""
        return tuple(encoder.encode(self.statement.format(key=key, name=name)))

    def question(self, encoder: Encoder, key: str, name: str = "") -> tuple[Tokens, Tokens]:
        """Encode the question of a retrieval item about a key and its answer together, and split
        them at the place at which they part.

        Encoded apart, the answer could get ids that no text gives (a digit run or a space merges
        differently at its start).
        """
        whole = tuple(encoder.encode(self.ask.format(key=key, name=name)))
        opening = self.ask[: self.ask.index("{key}")].rstrip(" ").format(name=name)
        cut = common_prefix(whole, tuple(encoder.encode(opening)))
        return whole[:cut], whole[cut:]


def common_prefix(left: Tokens, right: Tokens) -> int:
    """Return how many tokens two prompts or answers of retrieval items share at their
    beginning."""
    for position, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return position
    return min(len(left), len(right))


def derived_rng(*origin: object) -> random.Random:
    """Return the random generator of a retrieval item, seeded by `origin` alone: by no other item,
    process or hash seed."""
    digest = hashlib.sha256(repr(origin).encode()).digest()
    return random.Random(int.from_bytes(digest[:16], "big"))


def holds_tokens(hay: Sequence[int], needle: Sequence[int]) -> bool:
    """Return whether the tokens of a needle occur, one after the other, in those of a haystack or
    of another text of a retrieval item."""
    wanted = list(needle)
    size = len(wanted)
    for start in range(len(hay) - size + 1):
        # The first token alone rules most places out, and costs no slice.
        if hay[start] == wanted[0] and list(hay[start : start + size]) == wanted:
            return True
    return False


def with_needles(
    filler: Sequence[int], needles: Sequence[Tokens], depths: Sequence[float]
) -> Tokens:
    """Return the tokens of a retrieval item's haystack with each needle at its depth: 0 before all
    filler, 1 behind it. Equal depths keep their order."""
    prompt = list[int]()
    done = 0
    pairs = zip(depths, needles, strict=True)
    for depth, needle in sorted(pairs, key=operator.itemgetter(0)):
        cut = round(depth * len(filler))
        prompt += filler[done:cut]
        prompt += needle
        done = cut
    prompt += filler[done:]
    return tuple(prompt)


class LengthTooShort(UsageError):
    """A length that holds no item of a task."""

    def __init__(self, task: str, length: int, needed: int) -> None:
        """Say how many tokens one item of the retrieval task needs."""
        super().__init__(
            f"the task {task} at length {length}: one item of it takes at least"
            f" {needed} tokens of this tokenizer: give lengths of {needed} or more (--lengths), or"
            " leave it out of --tasks"
        )
        self.needed = needed


def room_for_filler(task: str, length: int, fixed: int) -> int:
    """Return the number of filler tokens that a retrieval item's length leaves after the `fixed`
    ones; raise if it is too short."""
    if length < fixed:
        raise LengthTooShort(task, length, fixed)
    return length - fixed


def check_amount(tokens: int, remedy: str) -> None:
    """Raise if the retrieval items together would not fit into memory, before the first is
    built."""
    if tokens > MOST_TOKENS:
        raise UsageError(
            f"the retrieval items asked for have {tokens} tokens together, and at most "
            f"{MOST_TOKENS} fit: {remedy}"
        )


ATTEMPTS = 200


def ambiguous_haystack_error(task: str) -> UsageError:
    """Return the error for a retrieval task whose haystack held the needle by chance in each of
    ATTEMPTS draws."""
    return UsageError(
        f"the task {task} drew {ATTEMPTS} needles, and its haystack holds each of them already;"
        " use another haystack (--haystack repeat or noise)"
    )


def one_per_depth(
    task: str, ask: Callable[[float, random.Random], tuple[Tokens, Tokens]], wanted: ItemRequest
) -> list[Item]:
    """Build a retrieval item with a haystack of its own for each depth; `ask` gives prompt and
    answer."""
    items = list[Item]()
    for depth in wanted.depths:
        rng = derived_rng(wanted.seed, task, wanted.length, depth, wanted.index)
        prompt, answer = ask(depth, rng)
        item = Item(task, wanted.length, depth, wanted.index, wanted.seed, prompt, answer)
        items.append(item)
    return items


_WORDS = """
    anchor apple arrow autumn badge barrel basket beacon bell bird blanket boat bottle
    branch bread bridge brush bucket button cabin cable camel candle canvas carpet castle
    chair cherry circle cloud coast coffee collar copper corner cotton cradle crystal
    curtain desert diamond dinner dragon drum eagle engine falcon feather field finger flame
    flower forest fountain fox frost garden garlic gate ginger glass globe glove guitar
    hammer harbor hat helmet hill honey horse island ivory jacket jungle kettle kitchen
    ladder lake lamp lantern lemon letter lion lizard magnet maple marble market meadow
    melon mirror moon mountain museum mushroom needle nest oak ocean olive onion orange
    orchard oven oyster palace panda paper parrot pearl pencil pepper piano picture pillow
    pilot planet pocket pond potato prairie puzzle rabbit radio rain ribbon river road
    rocket roof rose saddle sailor salmon sand scarf school seed shadow sheep ship silver
    snow socket spider spoon spring square stable star station stone storm sugar summer
    sunset table temple thunder tiger tower train tulip tunnel turtle valley velvet village
    violin wagon walnut water wheel whistle willow window winter wolf yarn zebra
"""

NOUNS: tuple[str, ...] = tuple(_WORDS.split())


SENTENCES = (
    "The grass is green.",
    " The sky is blue.",
    " The sun is yellow.",
    " Here we go.",
    " There and back again.",
)
"""The filler of Mohtashami & Jaggi 2023 (Landmark Attention), which most passkey tests repeat."""


def repetition(encoder: Encoder, sentences: Sequence[str] = SENTENCES) -> Haystack:
    """Return a haystack for a retrieval item: the same few sentences again and again, from a random
    one on."""
    parts = [encoder.encode(sentence) for sentence in sentences]

    def tokens(count: int, rng: random.Random) -> list[int]:
        """Return so many token ids of the repeated sentences in a haystack."""
        start = rng.randrange(len(parts))
        cycle = list[int]()
        for part in parts[start:] + parts[:start]:
            cycle += part
        return (cycle * (count // len(cycle) + 1))[:count]

    return tokens


def noise(encoder: Encoder) -> Haystack:
    """Return a haystack for a retrieval item: tokens of common nouns, drawn one by one. Every
    tokenizer has such tokens."""
    pool = set[int]()
    for noun in NOUNS:
        pool.update(encoder.encode(" " + noun))
    return drawn_from(sorted(pool))


def drawn_from(pool: Sequence[int]) -> Haystack:
    """Return a haystack for a retrieval item: tokens that are drawn one by one from a pool."""
    return lambda count, rng: rng.choices(pool, k=count)


def running_text(stream: Sequence[int]) -> Haystack:
    """Return a haystack for a retrieval item: a text from a random place on, which begins again
    beyond its end."""

    def tokens(count: int, rng: random.Random) -> list[int]:
        """Return so many token ids of the haystack's text, from a random place on."""
        start = rng.randrange(len(stream))
        ids = list(map(int, stream[start : start + count]))
        while len(ids) < count:
            ids += map(int, stream[: count - len(ids)])
        return ids

    return tokens
