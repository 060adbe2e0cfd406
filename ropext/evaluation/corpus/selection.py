"""Split texts into documents, and draw the documents to read.

The draw is deterministic, keeps documents that are long enough, and uses bounded memory.
"""

import hashlib
import heapq
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from ropext.base.errors import InputError
from ropext.base.jsontext import Json
from ropext.base.lengths import length_text
from ropext.evaluation.corpus.encoding import CUT_MARGIN, Document, DocumentEncoder, joined
from ropext.evaluation.corpus.sources import RawDocument, Source, read_documents
from ropext.results.values import FEWEST_DOCUMENTS

# A tokenizer may put a few tokens around a text; apart from them it gives at most one per byte.
EXTRA_TOKENS = 8
# Number of sufficiently long documents to read from a stream for each document to take.
STREAMED = 16
# Tokens that are kept of very much data, for training or a choice: 0.5 GB.
MOST_TOKENS = 2**26


@dataclass(frozen=True)
class Wanted:
    """The lengths and the number of documents that a command wants from a corpus.

    With `given` every length must be reached; otherwise ropext takes the longest length of the grid
    that eight documents reach.
    """

    lengths: tuple[int, ...]
    given: bool
    max_documents: int
    streamed: bool = False  # perhaps without an end
    shorter: str = "shorter --lengths"  # the remedy if no document is long enough


@dataclass(frozen=True)
class Corpus:
    """The documents that were taken, all cut to the longest length, and counts of the documents
    left out."""

    documents: tuple[Document, ...]
    lengths: tuple[int, ...]
    num_read: int
    num_short: int
    num_duplicates: int
    num_spare: int  # long enough, but more than --max-docs
    reaching: Mapping[int, int] = field(default_factory=dict)  # documents, by wanted length

    def to_json(self) -> dict[str, Json]:
        """Return the counts of the documents that the corpus took and left out, for
        results.json."""
        return {
            "used": len(self.documents),
            "read": self.num_read,
            "too_short": self.num_short,
            "duplicates": self.num_duplicates,
            "beyond_max_docs": self.num_spare,
        }


@dataclass
class SmallestKeys:
    """The documents with the smallest keys (hexadecimal) that together have `wanted` tokens.

    If each counts as one token, it holds `wanted` documents.
    """

    wanted: int
    heap: list[tuple[int, int, Document]] = field(default_factory=list)  # -key, tokens, document
    tokens: int = 0

    def admits(self, key: str) -> bool:
        """Return whether `add` would keep a document with this key."""
        return self.tokens < self.wanted or -int(key, 16) > self.heap[0][0]

    def add(self, key: str, document: Document, tokens: int) -> None:
        """Keep a document, whose key must be new, unless the documents with smaller keys are
        enough."""
        heapq.heappush(self.heap, (-int(key, 16), tokens, document))
        self.tokens += tokens
        while self.heap and self.tokens - self.heap[0][1] >= self.wanted:
            self.tokens -= heapq.heappop(self.heap)[1]

    def in_order(self) -> list[Document]:
        """Return the kept documents in the order of their keys."""
        return [document for _, _, document in sorted(self.heap, reverse=True)]


@dataclass
class DistinctTexts:
    """The different texts of a source, in its order, each identified by its key."""

    raw: Iterable[RawDocument]
    encoder: DocumentEncoder
    key: Callable[[str], str]  # hexadecimal; a text with a key seen before is left out
    least: int = 0  # fewest bytes of a text to draw
    read: int = 0  # documents, including any left out
    different: int = 0
    duplicates: int = 0
    longest: tuple[str, str] = ("", "")  # name and text

    def drawn(self) -> Iterator[tuple[str, RawDocument, str]]:
        """Yield the different documents of --data that are long enough, each with its key and its
        text; the caller keeps some of them.

        Only this loop draws documents: their content and a seed decide, in bounded memory, which
        are kept. A caller stops early if the source may have no end.
        """
        seen = set[int]()
        for document in self.raw:
            self.read += 1
            text = self.encoder.text_of(document)
            if len(text) > len(self.longest[1]):
                self.longest = document.name, text
            if len(text.encode("utf-8", "replace")) < self.least:
                continue
            key = self.key(text)
            short = int(key[:16], 16)
            if short in seen:
                self.duplicates += 1
                continue
            seen.add(short)
            self.different += 1
            yield key, document, text
        if not self.read:
            raise InputError("--data holds no document")


def choose_documents(
    raw: Iterable[RawDocument], encoder: DocumentEncoder, wanted: Wanted
) -> Corpus:
    """Read every document of --data once, keep at most `max_documents` per length, choose the
    longest length.

    A document with fewer bytes than the shortest useful length is not even encoded, so a million
    short documents cost no more memory than one.
    """
    first = wanted.lengths[0]
    longest = wanted.lengths[-1]
    useful = longest if wanted.given else first
    texts = DistinctTexts(raw, encoder, encoder.key, useful - EXTRA_TOKENS)
    kept = {length: SmallestKeys(wanted.max_documents) for length in wanted.lengths}
    reaching = dict.fromkeys(wanted.lengths, 0)
    for key, found, text in texts.drawn():
        document = encoder.document(found.name, text, longest)
        for length, smallest in kept.items():
            if len(document) >= length:
                reaching[length] += 1
                smallest.add(key, document, 1)
        if wanted.streamed and reaching[longest] >= STREAMED * wanted.max_documents:
            break
    if not reaching[useful]:
        raise _too_short(encoder, wanted, texts)
    if not wanted.given:
        enough = min(FEWEST_DOCUMENTS, wanted.max_documents, reaching[first])
        longest = max(length for length, count in reaching.items() if count >= enough)
    documents = tuple(document.cut(longest) for document in kept[longest].in_order())
    return Corpus(
        documents=documents,
        lengths=tuple(length for length in wanted.lengths if length <= longest),
        num_read=texts.read,
        num_short=texts.read - texts.duplicates - reaching[longest],
        num_duplicates=texts.duplicates,
        num_spare=reaching[longest] - len(documents),
        reaching=reaching,
    )


def _too_short(encoder: DocumentEncoder, wanted: Wanted, texts: DistinctTexts) -> InputError:
    """Return the error if no document of --data reaches the longest length that the user gave, or
    the shortest default length."""
    needed = wanted.lengths[-1] if wanted.given else wanted.lengths[0]
    tokens = len(encoder.document(*texts.longest, limit=needed))
    return InputError(
        f"none of the {texts.read} documents reaches {length_text(needed)} tokens; the longest "
        f"({texts.longest[0]}) has {tokens}: give {wanted.shorter}, or longer documents"
    )


def glue_documents(
    documents: Iterable[Document], length: int, count: int, separator: int | None = None
) -> tuple[Document, ...]:
    """Return at most `count` sequences of `length` tokens, each joined from whole documents except
    its last.

    The rest of a sequence's last document is left out. No document is in two sequences, so an
    interval may take the sequences as its units. `separator` follows each document.
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
    """Return a document of the corpus with the separator after its tokens, before it is glued to
    others; unchanged if there is no separator."""
    if separator is None:
        return document
    ids = np.append(document.ids, np.int32(separator))
    return replace(document, ids=ids, token_bytes=np.append(document.token_bytes, np.int32(0)))


def _joined(parts: list[Document]) -> Document:
    """Return one document made of several of the corpus, with their tokens and fingerprints."""
    name = parts[0].name
    if len(parts) > 1:
        name = f"{name} … {parts[-1].name}"
    return Document(
        ids=np.concatenate([part.ids for part in parts]),
        token_bytes=np.concatenate([part.token_bytes for part in parts]),
        name=name,
        key=hashlib.sha256("".join(part.key for part in parts).encode()).hexdigest(),
        has_bos=parts[0].has_bos,
        fingerprint=joined(part.fingerprint for part in parts),
    )


BLANK_LINES = "blank-lines"
WINDOWS = "windows"
REMEDY = (
    f"--split-documents makes several documents of one text ({BLANK_LINES}, a separator, or "
    f"{WINDOWS})"
)
# More tokens than any text has.
NO_LIMIT = 2**31 - 1


def texts_of(source: Source, encoder: DocumentEncoder, length: int) -> Iterator[RawDocument]:
    """Return the documents of a --data source, split if --split-documents is given; windows have
    `length` tokens."""
    found = read_documents(source)
    if source.pieces is None:
        return found
    return split_documents(found, source.pieces, encoder, length)


def split_documents(
    raw: Iterable[RawDocument], how: str, encoder: DocumentEncoder, length: int
) -> Iterator[RawDocument]:
    """Split the documents of --data at blank lines, at a separator, or into windows of `length`
    tokens; conversations stay whole."""
    for document in raw:
        if not isinstance(document.content, str):
            yield document
            continue
        pieces = [piece for piece in _pieces(document, how, encoder, length) if piece.strip()]
        for number, piece in enumerate(pieces, 1):
            name = f"{document.name}#{number}" if len(pieces) > 1 else document.name
            yield RawDocument(name, piece)


def _pieces(
    document: RawDocument, how: str, encoder: DocumentEncoder, length: int
) -> list[str] | Iterator[str]:
    """Return the pieces of a document that --split-documents makes."""
    text = encoder.text_of(document)
    if how == WINDOWS:
        return _windows(document.name, text, encoder, length)
    if how == BLANK_LINES:
        return re.split(r"\n[^\S\n]*\n\s*", text)
    return text.split(how.replace("\\n", "\n").replace("\\t", "\t"))


def _windows(name: str, text: str, encoder: DocumentEncoder, length: int) -> Iterator[str]:
    """Yield consecutive windows of a document for --split-documents; each is a little longer,
    because a cut can change a token."""
    coded = encoder.document(name, text, NO_LIMIT)
    ends = np.concatenate([[0], np.cumsum(coded.token_bytes)])
    data = text.encode("utf-8", "replace")
    for start in range(0, max(1, len(coded) - length + 1), length):
        stop = min(start + length + CUT_MARGIN, len(coded))
        yield data[ends[start] : ends[stop]].decode("utf-8", "ignore")
