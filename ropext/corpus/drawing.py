"""The one loop that draws documents: the different texts of a source by their keys, which their
content and a seed decide, in bounded memory."""

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

from ropext.corpus.encoding import Document, DocumentEncoder
from ropext.corpus.sources import RawDocument
from ropext.errors import InputError

# Tokens of very much data that are kept, to train on or to choose by: 0.5 GB.
MOST_TOKENS = 2**26


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
            short = int(key[:16], 16)
            if short in seen:
                self.duplicates += 1
                continue
            seen.add(short)
            self.different += 1
            yield key, text, document
        if not self.read:
            raise InputError("--data holds no document")


@dataclass
class Basket:
    """The documents with the smallest keys (hexadecimal) that have together so many tokens; where
    each counts as one, so many documents."""

    wanted: int
    heap: list[tuple[int, int]] = field(default_factory=list)
    held: dict[int, Document] = field(default_factory=dict)
    tokens: int = 0

    def admits(self, key: str) -> bool:
        return self.tokens < self.wanted or -int(key, 16) > self.heap[0][0]

    def add(self, key: str, document: Document, tokens: int) -> None:
        """Put in a document whose key is not in it."""
        number = int(key, 16)
        self.held[number] = document
        heapq.heappush(self.heap, (-number, tokens))
        self.tokens += tokens
        while self.heap and self.tokens - self.heap[0][1] >= self.wanted:
            largest, left_out = heapq.heappop(self.heap)
            del self.held[-largest]
            self.tokens -= left_out

    def in_order(self) -> list[Document]:
        """By their keys."""
        return [self.held[number] for number in sorted(self.held)]


class Pool(Protocol):
    """What keeps drawn documents for one use."""

    def admits(self, key: str) -> bool:
        """Whether a document of this key may be kept; no other one is encoded."""

    def add(self, key: str, document: Document) -> None:
        """Keep a document, or leave it out."""

    @property
    def is_full(self) -> bool:
        """Whether a stream, which may have no end, is read no further."""


def draw(
    texts: DistinctTexts,
    encode: Callable[[RawDocument, str], Document],
    pool: Pool,
    *,
    streamed: bool,
) -> None:
    """Encode every text that the pool admits, and add it with its place among those found."""
    for key, text, raw in texts:
        if not pool.admits(key):
            continue
        document = encode(raw, text)
        pool.add(key, replace(document, number=texts.read))
        if streamed and pool.is_full:
            break
