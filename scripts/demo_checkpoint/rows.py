"""Make training rows of the demo checkpoint: text, and three kinds that teach retrieval.

The retrieval rows come from the functions of the tasks, in other wordings and other fillers. Their
loss counts the answer tokens only: with loss everywhere the filler drowns the few answers, and tens
of millions of tokens teach no retrieval at all.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from ropext.tasks import copy, mkey, passkey
from ropext.tasks.item import (
    NOUNS,
    Encoder,
    Haystack,
    Template,
    derived_rng,
    drawn_from,
    repetition,
    running_text,
)

HELD_OUT_PASSKEY = Template(
    "\n# the safe opens with {key}, so they say\n", "\n# the safe opens with {key}"
)
HELD_OUT_SENTENCES = ("Time flies like an arrow;", " fruit flies like a banana.")
"""Never trained: this wording, these sentences, the words of `haystack.noise`, and all text of the
held-out packages. The card reports them beside what was trained."""

PASSKEYS = (
    passkey.TERSE,
    passkey.TERSE,
    Template("\npass key: {key}\n", "\npass key: {key}"),
    Template("\nThe secret number is {key}. Remember it.\n", "\nThe secret number is {key}"),
    Template("\nkey = {key}\n", "\nkey = {key}"),
    Template("\n# password {key}\n", "\n# password {key}"),
    Template("\nRemember the code {key}.\n", "\nRemember the code {key}"),
    Template('\n    return "{key}"\n', '\n    return "{key}'),
    Template("\nMy number is {key}, do not forget.\n", "\nMy number is {key}"),
    Template("\nself.code = {key}\n", "\nself.code = {key}"),
)
MANY_KEYS = (
    mkey.PLAIN,
    mkey.PLAIN,
    Template("\n{name}: {key}", "\n{name}: {key}"),
    Template("\n{name} = {key}", "\n{name} = {key}"),
    Template("\nThe number of {name} is {key}.", "\nThe number of {name} is {key}"),
    Template("\nset {name} to {key};", "\nset {name} to {key}"),
    Template('\n    "{name}": {key},', '\n    "{name}": {key}'),
    Template("\nThe {name} costs {key} coins.", "\nThe {name} costs {key}"),
)


@dataclass(frozen=True)
class Row:
    """Token ids, and which of them the loss is taken on (never the first)."""

    tokens: list[int]
    scored: list[int]


@dataclass(frozen=True)
class Mixture:
    """How often each kind of row is drawn."""

    text: float
    dense: float
    passkey: float
    repeat: float

    def draw(self, rng: random.Random) -> str:
        kinds = ("text", "dense", "passkey", "repeat")
        return rng.choices(kinds, weights=[getattr(self, kind) for kind in kinds])[0]


@dataclass
class RowMaker:
    """Makes rows from a tokenizer and the training text as one stream of ids."""

    encoder: Encoder
    stream: Sequence[int]
    vocabulary: int
    lines: Sequence[str]
    """Lines of training text, to be repeated as filler."""
    ordinary: Haystack = field(init=False)
    text: Haystack = field(init=False)

    def __post_init__(self) -> None:
        self.ordinary = drawn_from(range(1, self.vocabulary))  # 0 is the end of text
        self.text = running_text(self.stream)

    def row(self, kind: str, window: int, progress: float, rng: random.Random) -> Row:
        """Make a row of exactly `window` tokens; `progress` goes from 0 to 1 over the training."""
        if kind == "text":
            return Row(self.text(window, rng), list(range(1, window)))
        if kind == "dense":
            return self.dense(window, rng)
        if kind == "passkey":
            return self.passkey(window, progress, rng)
        return self.repeat(window, rng)

    def passkey(self, window: int, progress: float, rng: random.Random) -> Row:
        depth = 1.0 - draw_distance(rng, progress)
        template = rng.choice(PASSKEYS)
        prompt, answer = passkey.passkey_prompt(
            self.encoder, self.filler(rng), template, length=window, depth=depth, rng=rng
        )
        return Row([*prompt, *answer], list(range(len(prompt), window)))

    def dense(self, window: int, rng: random.Random) -> Row:
        """Make statements and questions in any order; a name occurs in one question at most."""
        template = rng.choice(MANY_KEYS)
        names = rng.sample(NOUNS, len(NOUNS))
        keys: dict[str, str] = {}  # stated and not asked for yet
        tokens = self.filler(rng)(rng.randrange(window // 4), rng)
        scored: list[int] = []
        asking = rng.uniform(0.3, 0.7)
        while len(tokens) < window:
            if keys and rng.random() < asking:
                name = rng.choice(list(keys))
                question, answer = template.question(self.encoder, keys.pop(name), name)
                tokens += question
                scored += range(len(tokens), len(tokens) + len(answer))
                tokens += answer
            else:
                name = names.pop()
                keys[name] = f"{rng.randrange(10**mkey.DIGITS):0{mkey.DIGITS}d}"
                tokens += template.state(self.encoder, keys[name], name)
        scored = [position for position in scored if position < window]
        if not scored:  # all statements and no question: rare, and useless
            return self.dense(window, rng)
        return Row(tokens[:window], scored)

    def repeat(self, window: int, rng: random.Random) -> Row:
        """Make a span of random or real tokens, filler or none, the span again."""
        longest = window // 2
        size = longest if rng.random() < 0.3 else rng.randrange(8, longest + 1)
        source: Haystack = self.ordinary if rng.random() < 0.6 else self.text
        depth = 1.0 - draw_distance(rng, 0.0)
        cue = min(rng.randrange(1, 5), size - 1)
        if source is self.text:
            cue = max(cue, 3)  # fewer tokens of real text do not tell a span from another
        span = copy.RepeatedSpan(source, size, cue)
        prompt, answer = copy.copy_prompt(
            self.filler(rng), span, length=window, depth=depth, rng=rng
        )
        return Row([*prompt, *answer], list(range(len(prompt), window)))

    def filler(self, rng: random.Random) -> Haystack:
        """Source text, a few repeated lines, or random tokens."""
        kind = rng.randrange(3)
        if kind == 0:
            return self.text
        if kind == 1:
            chosen = rng.sample(self.lines, rng.randrange(1, 5))
            return repetition(self.encoder, chosen)
        return self.ordinary


def draw_distance(rng: random.Random, progress: float) -> float:
    """Draw a share of the room: half log-uniform, half uniform; late in training more long ones."""
    if rng.random() < 0.4 * progress:
        return rng.uniform(0.6, 1.0)
    if rng.random() < 0.5:
        return float(256 ** (rng.random() - 1.0))
    return rng.random()


def batch_rows(
    maker: RowMaker,
    mixture: Mixture,
    window: int,
    count: int,
    progress: float,
    seed: int,
    step: int,
) -> list[Row]:
    """Make the rows of one training step: they depend on the seed and the step alone."""
    rng = derived_rng(seed, "rows", step)
    return [maker.row(mixture.draw(rng), window, progress, rng) for _ in range(count)]
