"""`--data` -> documents to train on and documents held out to judge by: of finetune and of fit.

A document is held out by its content and the seed alone: its key is the hash of both, and every
key in the lowest tenth is drawn. Steps, batches, file names and the order of files decide nothing.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ropext import corpus
from ropext.corpus.selection import MOST_TOKENS, NO_LIMIT, REMEDY
from ropext.errors import InputError
from ropext.lengths import length_text
from ropext.options.training import Fit, TrainingOptions
from ropext.results.overlap import NO_DOCUMENTS, Trained, trained
from ropext.results.values import FEWEST_DOCUMENTS
from ropext.training.rows import Flags, TrainingDocument, glue

# Of the documents that can judge one in so many is held out, eight at least, but never more than
# one in so many.
SHARE = 10
LARGEST_SHARE = 4
DRAWN = f"{2**256 // SHARE:064x}"  # keys below it


@dataclass(frozen=True)
class _Coded:
    """One document, as the evaluator and as the training want it."""

    number: int  # in the order found
    key: str  # decides the division
    coded: corpus.Document
    scored: Flags | None

    def __len__(self) -> int:
        return len(self.coded)


@dataclass(frozen=True)
class TrainingData:
    """The two parts of DATA; no document is in both."""

    documents: tuple[TrainingDocument, ...]  # to train on, in the order found
    held_out: tuple[corpus.Document, ...]  # in the order of their keys
    read: int
    longest: int = 0  # tokens
    trained: Trained = NO_DOCUMENTS  # what the record will keep of the documents
    kept_out: int = 0  # documents that gave a verdict
    unread: tuple[str, ...] = ()  # what is to be said of files that are not read

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

    def judging(self, count: int, length: int) -> tuple[corpus.Document, ...]:
        """At most so many of those held out, cut to the length that is judged at."""
        return tuple(document.cut(length) for document in self.held_out[:count])


def read(
    source: str,
    options: TrainingOptions,
    encoder: corpus.DocumentEncoder,
    target: int,
    row: int,
    **how: Any,
) -> TrainingData:
    """Read DATA and divide it, `how` as `divide` says."""
    where = options.column, options.split, None, options.max_document_mib
    place = corpus.Source(source, *where, default_split="train")
    raw = corpus.read_documents(place)
    divided = divide(
        corpus.split_documents(raw, options.split_documents, encoder, target),
        encoder,
        row=1 if options.packing == "glued" else row,
        target=target,
        streamed=place.is_streamed,
        **how,
    )
    return replace(divided, unread=tuple(corpus.unread_files(place)))


def divide(
    raw: Iterable[corpus.RawDocument],
    encoder: corpus.DocumentEncoder,
    *,
    wanted_tokens: int,
    row: int,
    target: int,
    judging: int,
    joined: bool = False,
    streamed: bool = False,
    apart: Trained | None = None,
) -> TrainingData:
    """All documents, each in one of the parts; of more than `wanted_tokens` and MOST_TOKENS, in
    whole rows of `row` tokens, those with the smallest keys.

    Those that reach the target can be held out, all of them where those that judge are `joined`.
    `judging`: windows of the target's length that will be read, 0 holds none out. A stream is read
    until there is enough for both parts. Documents of `apart` are in neither.
    """
    most = max(wanted_tokens, MOST_TOKENS)
    drawn = corpus.Basket[_Coded](most)
    others = corpus.Basket[_Coded](most)
    least = 1 if joined else target
    held = longest = kept_out = 0
    texts = corpus.DistinctTexts(raw, encoder, encoder.content_key)
    for key, text, document in texts:
        is_drawn = judging > 0 and key < DRAWN
        if not is_drawn and not others.admits(key):
            continue
        coded = encoder.document(document.name, text, NO_LIMIT)
        if apart is not None and apart.holds(*coded.known_by[1:]):
            kept_out += 1
            continue
        longest = max(longest, len(coded))
        scored = scored_tokens(document, text, coded, encoder)
        entry = _Coded(texts.read, key, coded, scored)
        if is_drawn and len(coded) >= least:
            if drawn.admits(key) and not (streamed and held >= judging * target):
                drawn.add(key, entry, len(coded))
                held += min(len(coded), target)
        elif others.admits(key):
            others.add(key, entry, len(coded) - len(coded) % row)
        if streamed and others.tokens >= wanted_tokens and held >= judging * target:
            break
    entries = [*drawn.in_order(), *others.in_order()]
    held_out = _held_out(entries, len(drawn.held), least, texts.different) if judging else []
    keys = {entry.key for entry in held_out}
    training = sorted((e for e in entries if e.key not in keys), key=lambda entry: entry.number)
    return TrainingData(
        tuple(TrainingDocument(entry.coded.ids, entry.scored) for entry in training),
        tuple(entry.coded for entry in held_out),
        texts.read,
        longest,
        trained(entry.coded.known_by[1:] for entry in training),
        kept_out,
    )


def _held_out(entries: Sequence[_Coded], drawn: int, least: int, seen: int) -> list[_Coded]:
    """Those that were drawn, which come first; where they are fewer than eight, those with the next
    keys too; never more than a quarter."""
    able = [entry for entry in entries if len(entry) >= least]
    # Of text that was not kept nobody knows how long it is, and there is enough of it.
    most = (len(able) if len(entries) == seen else seen) // LARGEST_SHARE
    return able[: min(max(drawn, FEWEST_DOCUMENTS), most)]


def read_for_fit(
    source: str,
    options: Fit,
    encoder: corpus.DocumentEncoder,
    target: int,
    wanted_tokens: int,
    apart: Trained | None = None,
) -> TrainingData:
    """The documents as `finetune` divides them; of those held out --held-out judge at most, each a
    window of the target's length."""
    glued = options.packing == "glued"
    data = read(
        source,
        options,
        encoder,
        target,
        target,
        wanted_tokens=wanted_tokens,
        judging=options.held_out,
        joined=glued,
        apart=apart,
    )
    if glued:
        return _glued(data, encoder, options, target)
    if not data.held_out:
        raise _too_few(data, target)
    return replace(data, held_out=data.judging(options.held_out, target))


def _glued(
    data: TrainingData, encoder: corpus.DocumentEncoder, options: Fit, target: int
) -> TrainingData:
    """Documents joined after the division: no window holds text of both parts, and no document is
    in two windows of those that judge."""
    separator = separator_of(encoder)
    windows = corpus.glue_documents(data.held_out, target, options.held_out, separator)
    if not windows or data.tokens < target:
        held = sum(map(len, data.held_out))
        ways = "more text, or a smaller --factor" if data.read >= LARGEST_SHARE else REMEDY
        raise InputError(
            f"--packing glued: of {data.tokens + held} tokens in {data.read} documents {held} are "
            f"held out to judge the fit, and each part must reach {length_text(target)}: {ways}"
        )
    fitted = glue(data.documents, separator, options.seed)
    return replace(data, documents=tuple(fitted), held_out=windows)


def separator_of(encoder: corpus.DocumentEncoder) -> int | None:
    """Between joined documents: nothing where each begins with its BOS."""
    return encoder.tokenizer.eos_token_id if encoder.bos is None else None


def _too_few(data: TrainingData, target: int) -> InputError:
    long = sum(len(document) >= target for document in data.documents)
    ways = "longer documents, a smaller --factor, or --packing glued to join them"
    if data.read < LARGEST_SHARE:
        ways = f"more documents, or {REMEDY}"
    return InputError(
        f"{long or 'none'} of the {data.read} documents reaches {length_text(target)} tokens (the "
        f"longest has {data.longest}). A fit needs at least {LARGEST_SHARE}, one of them to "
        f"judge it: {ways}"
    )


def scored_tokens(
    raw: corpus.RawDocument, text: str, coded: corpus.Document, encoder: corpus.DocumentEncoder
) -> Flags | None:
    """Of a conversation the assistant's turns alone."""
    if isinstance(raw.content, str):
        return None
    ends = np.cumsum(coded.token_bytes)
    scored = np.zeros(len(coded), bool)
    for begin, end in assistant_turns(raw, text, encoder):
        first = len(text[:begin].encode("utf-8", "replace"))
        last = first + len(text[begin:end].encode("utf-8", "replace"))
        scored |= (ends > first) & (ends <= last)
    return scored


def assistant_turns(
    raw: corpus.RawDocument, text: str, encoder: corpus.DocumentEncoder
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
        begin, end = _by_rendering(messages, index, text, encoder)
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


def _by_rendering(
    messages: list[Any], index: int, text: str, encoder: corpus.DocumentEncoder
) -> tuple[int, int]:
    """Where a turn stands, as the template itself shows; (0, 0) where it does not."""
    if index == 0:
        return 0, 0  # templates refuse an empty conversation
    before = encoder.converse(messages[:index], opening=True)
    after = encoder.converse(messages[: index + 1])
    if text.startswith(before) and text.startswith(after):
        return len(before), len(after)
    return 0, 0
