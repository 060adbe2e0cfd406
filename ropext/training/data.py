"""`--data` -> documents to train on and documents held out for evaluation."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ropext import corpus
from ropext.errors import InputError
from ropext.training.sequences import Document, Flags

# Enough text for the run is enough: a stream of the whole web is not read to its end.
NO_LIMIT = 2**31 - 1
# One document in so many is held out for the evaluations, where --eval names no other data.
HELD_OUT = 10


@dataclass(frozen=True)
class Data:
    """What is trained on; `held_out` are raw documents for the evaluator, in the order found."""

    documents: tuple[Document, ...]
    held_out: tuple[corpus.RawDocument, ...]
    read: int

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
    least: int,
    hold_out: int,
    count_held: int,
) -> Data:
    """Documents that hold `wanted_tokens` tokens in whole rows of `least` tokens, or all.

    Of the documents that reach `hold_out` tokens every tenth by its content is held out, and all
    that come after there is enough to train on, until `count_held` are (0: none is needed).
    """
    taken: list[tuple[corpus.RawDocument, Document]] = []
    held: list[corpus.RawDocument] = []
    seen: set[str] = set()
    tokens = count = 0
    for own in raw:
        count += 1
        text = encoder.text_of(own)
        key = encoder.key(text)
        if key in seen:
            continue
        seen.add(key)
        coded = encoder.document(own.name, text, NO_LIMIT)
        enough = tokens >= wanted_tokens
        drawn = enough or int(key[:8], 16) % HELD_OUT == 0
        if len(held) < count_held and drawn and len(coded) >= hold_out:
            held.append(own)
        elif not enough:
            document = Document(coded.ids, scored_tokens(own, text, coded, encoder))
            taken.append((own, document))
            tokens += len(document) - len(document) % least  # in whole rows
        if tokens >= wanted_tokens and len(held) >= count_held:
            break
    if not count:
        raise InputError("--data holds no document")
    if count_held and not held:
        held = _last_long(taken, hold_out, least)
    return Data(tuple(document for _, document in taken), tuple(held), count)


def _last_long(
    taken: list[tuple[corpus.RawDocument, Document]], hold_out: int, least: int
) -> list[corpus.RawDocument]:
    """Move the last document that is long enough out of the training, unless it is the only one."""
    usable = [at for at, (_, document) in enumerate(taken) if len(document) >= least]
    long = [at for at in usable if len(taken[at][1]) >= hold_out]
    if not long or len(usable) < 2:
        return []
    return [taken.pop(long[-1])[0]]


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
