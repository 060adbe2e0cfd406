"""`--data` -> documents to train on and documents held out to judge by: of finetune and of fit.

A document is held out by its content and the seed alone: its key is the hash of both, and every
key in the lowest tenth is drawn. Steps, batches, file names and the order of files decide nothing.
"""

import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ropext import corpus
from ropext.corpus import DocumentEncoder
from ropext.errors import InputError, UsageError
from ropext.results.overlap import NOTHING, Trained, trained
from ropext.results.values import FEWEST_DOCUMENTS
from ropext.tasks import Haystack, Text, mkey, noise
from ropext.tasks.item import derived_rng, occurs, until_unambiguous
from ropext.training.sequences import Flags, TrainingDocument

NO_LIMIT = 2**31 - 1
# Of the documents that can judge one in so many is held out, eight at least, but never more than
# one in so many.
SHARE, LARGEST_SHARE = 10, 4
DRAWN = f"{2**256 // SHARE:064x}"  # keys below it
# Tokens of DATA that are kept to train on where the run asks for fewer: 0.5 GB.
MOST_TOKENS = 2**26


@dataclass(frozen=True)
class Read:
    """One document, as the evaluator and as the training want it."""

    number: int  # in the order found
    key: str  # decides the division
    coded: corpus.Document
    scored: Flags | None

    def __len__(self) -> int:
        return len(self.coded)

    @property
    def trained(self) -> TrainingDocument:
        return TrainingDocument(self.coded.ids, self.scored)


@dataclass(frozen=True)
class TrainingData:
    """The two parts of DATA; no document is in both."""

    documents: tuple[TrainingDocument, ...]  # to train on, in the order found
    held_out: tuple[corpus.Document, ...]  # in the order of their keys
    read: int
    longest: int = 0  # tokens
    trained: Trained = NOTHING  # what the record will keep of the documents

    @property
    def tokens(self) -> int:
        return sum(len(document) for document in self.documents)

    def digest(self) -> str:
        """SHA-256 over ids and what the loss is taken on."""
        digest = hashlib.sha256()
        for document in self.documents:
            digest.update(document.ids.astype("<i4").tobytes())
            digest.update(np.packbits(document.mask()).tobytes())
        return digest.hexdigest()


def read(
    raw: Iterable[corpus.RawDocument],
    encoder: corpus.DocumentEncoder,
    *,
    wanted_tokens: int,
    row: int,
    target: int,
    judging: int,
    joined: bool = False,
    streamed: bool = False,
) -> TrainingData:
    """All documents, each in one of the parts; of more than `wanted_tokens` and MOST_TOKENS, in
    whole rows of `row` tokens, those with the smallest keys.

    Those that reach the target can be held out, all of them where those that judge are `joined`.
    `judging`: windows of the target's length that will be read, 0 holds none out. A stream is read
    until there is enough for both parts.
    """
    most = max(wanted_tokens, MOST_TOKENS)
    drawn, kept = corpus.Basket[Read](most), corpus.Basket[Read](most)
    least = 1 if joined else target
    seen: set[str] = set()
    count = held = longest = 0
    for own in raw:
        count += 1
        text = encoder.text_of(own)
        content = corpus.content_hash(text)
        if content in seen:
            continue
        seen.add(content)
        key = hashlib.sha256(f"{encoder.seed}\0{content}".encode()).hexdigest()
        is_drawn = judging > 0 and key < DRAWN
        if not is_drawn and not kept.admits(key):
            continue
        coded = encoder.document(own.name, text, NO_LIMIT)
        longest = max(longest, len(coded))
        document = Read(count, key, coded, scored_tokens(own, text, coded, encoder))
        if is_drawn and len(coded) >= least:
            if drawn.admits(key) and not (streamed and held >= judging * target):
                drawn.add(key, document, len(coded))
                held += min(len(coded), target)
        elif kept.admits(key):
            kept.add(key, document, len(coded) - len(coded) % row)
        if streamed and kept.tokens >= wanted_tokens and held >= judging * target:
            break
    if not count:
        raise InputError("--data holds no document")
    found = [*drawn.in_order(), *kept.in_order()]
    held_out = _held_out(found, len(drawn.held), least, len(seen)) if judging else []
    keys = {own.key for own in held_out}
    training = sorted((own for own in found if own.key not in keys), key=lambda own: own.number)
    return TrainingData(
        tuple(own.trained for own in training),
        tuple(own.coded for own in held_out),
        count,
        longest,
        trained(own.coded.known_by[1:] for own in training),
    )


def _held_out(found: Sequence[Read], drawn: int, least: int, seen: int) -> list[Read]:
    """Those that were drawn, which come first; where they are fewer than eight, those with the next
    keys too; never more than a quarter."""
    able = [own for own in found if len(own) >= least]
    # Of text that was not kept nobody knows how long it is, and there is enough of it.
    most = (len(able) if len(found) == seen else seen) // LARGEST_SHARE
    return able[: min(max(drawn, FEWEST_DOCUMENTS), most)]


def scored_tokens(
    raw: corpus.RawDocument, text: str, coded: corpus.Document, encoder: corpus.DocumentEncoder
) -> Flags | None:
    """Of a conversation the assistant's turns alone."""
    if isinstance(raw.content, str):
        return None
    ends = np.cumsum(coded.token_bytes)
    scored = np.zeros(len(coded), bool)
    for begin, end in assistant_turns(raw, text, encoder.tokenizer):
        first = len(text[:begin].encode("utf-8", "replace"))
        last = first + len(text[begin:end].encode("utf-8", "replace"))
        scored |= (ends > first) & (ends <= last)
    return scored


def assistant_turns(
    raw: corpus.RawDocument, text: str, tokenizer: Any
) -> Iterator[tuple[int, int]]:
    """Where each of the assistant's turns stands in the rendered text, its end mark included.

    Rendered once more up to the turn and once with it; where the template renders a shorter
    conversation differently, the turn's own words are looked for.
    """
    at = 0
    messages = list(raw.content)
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") != "assistant":
            continue
        begin, end = _by_rendering(messages, index, text, tokenizer)
        if end <= begin:
            words = str(message.get("content", "")).strip()
            begin = text.find(words, at)
            end = begin + len(words)
        if begin < 0 or end <= begin:
            raise InputError(
                f"--data {raw.name}: the chat template renders turn {index + 1} so that it cannot "
                "be found in the whole conversation; give plain text (--column)"
            )
        at = end
        yield begin, end


def _by_rendering(messages: list[Any], index: int, text: str, tokenizer: Any) -> tuple[int, int]:
    """Where a turn stands, as the template itself shows; (0, 0) where it does not."""
    if index == 0:
        return 0, 0  # templates refuse an empty conversation
    before = tokenizer.apply_chat_template(
        messages[:index], tokenize=False, add_generation_prompt=True
    )
    after = tokenizer.apply_chat_template(messages[: index + 1], tokenize=False)
    if text.startswith(before) and text.startswith(after):
        return len(before), len(after)
    return 0, 0


SPACE = 64  # tokens of a row for each key
MOST = 16  # keys of a row


class QuestionRows:
    """Every so many rows one that asks; each follows from the seed and its number alone."""

    def __init__(
        self,
        encoder: DocumentEncoder,
        documents: Sequence[TrainingDocument],
        share: float,
        seed: int,
    ) -> None:
        self.encoder, self.documents, self.share, self.seed = encoder, documents, share, seed
        self.words = noise(encoder)

    def falls_on(self, number: int) -> bool:
        """Whether the row of this number asks."""
        return int((number + 1) * self.share) > int(number * self.share)

    def document(self, number: int, length: int) -> TrainingDocument:
        """Exactly `length` tokens: keys in a haystack, then every question with its answer."""
        rng = derived_rng("questions", self.seed, length, number)
        ids = [] if self.encoder.bos is None else [self.encoder.bos]
        count = max(1, min(MOST, length // SPACE))
        needles, filler = self._drawn(length - len(ids), count, rng)
        depths = sorted(rng.random() for _ in needles)
        ids += mkey.shared_prefix(filler, [stated for stated, _, _ in needles], depths)
        scored = [False] * len(ids)
        for _, question, answer in rng.sample(needles, len(needles)):
            ids += [*question, *answer]
            scored += [False] * len(question) + [True] * len(answer)
        return TrainingDocument(np.asarray(ids, np.int32), np.asarray(scored))

    def _drawn(
        self, length: int, count: int, rng: random.Random
    ) -> tuple[list[mkey.Needle], list[int]]:
        def draw() -> tuple[list[mkey.Needle], list[int]]:
            needles = mkey.draw_needles(self.encoder, mkey.PLAIN, count, rng)
            fixed = sum(len(part) for needle in needles for part in needle)
            return needles, self._haystack(rng).tokens(_room(length, fixed), rng)

        def clear(drawn: tuple[list[mkey.Needle], list[int]]) -> bool:
            needles, filler = drawn
            return not any(occurs(answer, filler) for _, _, answer in needles)

        return until_unambiguous(mkey.NAME, draw, clear)

    def _haystack(self, rng: random.Random) -> Haystack:
        """Words, or text of a document that is trained on."""
        return self.words if rng.random() < 0.5 else Text(rng.choice(self.documents).ids.tolist())


def _room(length: int, fixed: int) -> int:
    if length < fixed:
        raise UsageError(
            f"--retrieval-share: a row of questions takes {fixed} tokens of this tokenizer, and "
            f"rows have {length}; leave the option out, or give a larger --window or target"
        )
    return length - fixed
