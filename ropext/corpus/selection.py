"""Which documents are read: those that a text is split into, and of them a deterministic choice of
those that are long enough, in bounded memory."""

import hashlib
import heapq
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np

from ropext.corpus.encoding import CUT_MARGIN, Document, DocumentEncoder, joined
from ropext.corpus.sources import RawDocument
from ropext.errors import InputError
from ropext.lengths import length_text
from ropext.results.values import FEWEST_DOCUMENTS

# A tokenizer may put a few tokens around a text; apart from them it gives at most one per byte.
EXTRA_TOKENS = 8
# Of a stream so many documents that are long enough are read for each that is taken.
STREAMED = 16
# Tokens of very much data that are kept, to train on or to choose by: 0.5 GB.
MOST_TOKENS = 2**26

T = TypeVar("T")


@dataclass(frozen=True)
class Wanted:
    """What is asked of a corpus. With `given` every length must be reached; otherwise the longest
    length that eight documents reach is taken, from the grid."""

    lengths: tuple[int, ...]
    given: bool
    max_documents: int
    streamed: bool = False  # perhaps without an end


@dataclass(frozen=True)
class Corpus:
    """The documents taken, all cut to the longest length, and what was left out."""

    documents: tuple[Document, ...]
    lengths: tuple[int, ...]
    num_read: int
    num_short: int
    num_duplicates: int
    num_spare: int  # long enough, but more than --max-docs
    reaching: Mapping[int, int] = field(default_factory=dict)  # documents, by length asked about

    def to_json(self) -> dict[str, Any]:
        """Counts for results.json."""
        return {
            "used": len(self.documents),
            "read": self.num_read,
            "too_short": self.num_short,
            "duplicates": self.num_duplicates,
            "beyond_max_docs": self.num_spare,
        }


@dataclass
class DistinctTexts:
    """The different texts of a source, one after another, each with its key and its document."""

    raw: Iterable[RawDocument]
    encoder: DocumentEncoder
    key: Callable[[str], str]  # hexadecimal; a text whose key was there is left out
    least: int = 0  # bytes of a text that is looked at
    read: int = 0  # documents, with those that are left out
    different: int = 0
    duplicates: int = 0
    longest: tuple[str, str] = ("", "")  # name and text

    def __iter__(self) -> Iterator[tuple[str, str, RawDocument]]:
        seen = set[int]()
        for document in self.raw:
            self.read += 1
            text = self.encoder.text_of(document)
            if len(text) > len(self.longest[1]):
                self.longest = document.name, text
            if len(text.encode("utf-8", "replace")) < self.least:
                continue
            key = self.key(text)
            if (short := int(key[:16], 16)) in seen:
                self.duplicates += 1
                continue
            seen.add(short)
            self.different += 1
            yield key, text, document
        if not self.read:
            raise InputError("--data holds no document")


@dataclass
class Basket(Generic[T]):
    """What has the smallest keys (hexadecimal) and together so many tokens; where each counts as
    one, so many documents."""

    wanted: int
    heap: list[tuple[int, int]] = field(default_factory=list)
    held: dict[int, T] = field(default_factory=dict)
    tokens: int = 0

    def admits(self, key: str) -> bool:
        return self.tokens < self.wanted or -int(key, 16) > self.heap[0][0]

    def add(self, key: str, document: T, tokens: int) -> None:
        """Put in what has a key that is not in it."""
        number = int(key, 16)
        self.held[number] = document
        heapq.heappush(self.heap, (-number, tokens))
        self.tokens += tokens
        while self.heap and self.tokens - self.heap[0][1] >= self.wanted:
            largest, left_out = heapq.heappop(self.heap)
            del self.held[-largest]
            self.tokens -= left_out

    def in_order(self) -> list[T]:
        """By their keys."""
        return [self.held[number] for number in sorted(self.held)]


def choose_documents(
    raw: Iterable[RawDocument], encoder: DocumentEncoder, wanted: Wanted
) -> Corpus:
    """Read every document once, keep at most `max_documents` per length, pick the longest length.

    A document with fewer bytes than the shortest useful length is not even encoded, so a million
    short documents cost no more memory than one.
    """
    limit = wanted.lengths[-1]
    useful = limit if wanted.given else wanted.lengths[0]
    pools = {length: Basket[Document](wanted.max_documents) for length in wanted.lengths}
    reaching = dict.fromkeys(wanted.lengths, 0)
    texts = DistinctTexts(raw, encoder, encoder.key, useful - EXTRA_TOKENS)
    for key, text, raw_document in texts:
        document = encoder.document(raw_document.name, text, limit)
        for length, pool in pools.items():
            if len(document) >= length:
                reaching[length] += 1
                if pool.admits(key):
                    pool.add(key, document, 1)
        if wanted.streamed and reaching[limit] >= STREAMED * wanted.max_documents:
            break
    longest = _reached(reaching, wanted)
    if longest is None:
        raise _too_short(encoder, wanted, texts)
    documents = tuple(document.cut(longest) for document in pools[longest].in_order())
    return Corpus(
        documents=documents,
        lengths=tuple(length for length in wanted.lengths if length <= longest),
        num_read=texts.read,
        num_short=texts.read - texts.duplicates - reaching[longest],
        num_duplicates=texts.duplicates,
        num_spare=reaching[longest] - len(documents),
        reaching=reaching,
    )


def _reached(reaching: dict[int, int], wanted: Wanted) -> int | None:
    """The longest length that is read, by the number of documents that reach each."""
    if wanted.given:
        return wanted.lengths[-1] if reaching[wanted.lengths[-1]] else None
    enough = min(FEWEST_DOCUMENTS, wanted.max_documents, reaching[wanted.lengths[0]])
    reached = [length for length, count in reaching.items() if count >= max(enough, 1)]
    return max(reached, default=None)


def _too_short(encoder: DocumentEncoder, wanted: Wanted, texts: DistinctTexts) -> InputError:
    needed = wanted.lengths[-1] if wanted.given else wanted.lengths[0]
    tokens = len(encoder.document(*texts.longest, limit=needed))
    return InputError(
        f"none of the {texts.read} documents reaches {length_text(needed)} tokens; the longest "
        f"({texts.longest[0]}) has {tokens}: give shorter --lengths, or longer documents"
    )


def glue_documents(
    documents: Iterable[Document], length: int, count: int, separator: int | None = None
) -> tuple[Document, ...]:
    """At most `count` sequences of `length` tokens, each of whole documents but for its last one,
    the rest of which is left out: no document is in two sequences, which an interval may so take
    for its units. `separator` is put behind each document.
    """
    glued: list[Document] = []
    parts: list[Document] = []
    filled = 0
    for document in documents:
        if len(glued) == count:
            break
        parts.append(_closed(document, separator).cut(length - filled))
        filled += len(parts[-1])
        if filled == length:
            glued.append(_joined(parts))
            parts = []
            filled = 0
    return tuple(glued)


def _closed(document: Document, separator: int | None) -> Document:
    if separator is None:
        return document
    ids = np.append(document.ids, np.int32(separator))
    return replace(document, ids=ids, token_bytes=np.append(document.token_bytes, np.int32(0)))


def _joined(parts: list[Document]) -> Document:
    return Document(
        f"{parts[0].name} … {parts[-1].name}" if len(parts) > 1 else parts[0].name,
        hashlib.sha256("".join(part.key for part in parts).encode()).hexdigest(),
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.token_bytes for part in parts]),
        parts[0].has_bos,
        joined(part.fingerprint for part in parts),
    )


BLANK_LINES = "blank-lines"
WINDOWS = "windows"
REMEDY = (
    f"--split-documents makes several documents of one text ({BLANK_LINES}, a separator, or "
    f"{WINDOWS})"
)
# More tokens than any text has.
NO_LIMIT = 2**31 - 1


def split_documents(
    raw: Iterable[RawDocument], how: str | None, encoder: DocumentEncoder, length: int
) -> Iterator[RawDocument]:
    """Texts cut at blank lines, at a separator, or into windows of `length` tokens; with None, and
    of conversations, what was found."""
    for document in raw:
        if how is None or not isinstance(document.content, str):
            yield document
            continue
        pieces = [piece for piece in _pieces(document, how, encoder, length) if piece.strip()]
        for number, piece in enumerate(pieces, 1):
            name = f"{document.name}#{number}" if len(pieces) > 1 else document.name
            yield RawDocument(name, piece)


def _pieces(
    document: RawDocument, how: str, encoder: DocumentEncoder, length: int
) -> list[str] | Iterator[str]:
    text = encoder.text_of(document)
    if how == WINDOWS:
        return _windows(document.name, text, encoder, length)
    if how == BLANK_LINES:
        return re.split(r"\n[^\S\n]*\n\s*", text)
    return text.split(how.replace("\\n", "\n").replace("\\t", "\t"))


def _windows(name: str, text: str, encoder: DocumentEncoder, length: int) -> Iterator[str]:
    """Windows that follow one another; each a little longer, for a cut can change a token."""
    coded = encoder.document(name, text, NO_LIMIT)
    ends = np.concatenate([[0], np.cumsum(coded.token_bytes)])
    data = text.encode("utf-8", "replace")
    for start in range(0, max(1, len(coded) - length + 1), length):
        stop = min(start + length + CUT_MARGIN, len(coded))
        yield data[ends[start] : ends[stop]].decode("utf-8", "ignore")
