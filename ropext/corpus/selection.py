"""Which documents are read: a deterministic choice among those long enough, in bounded memory."""

import heapq
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ropext.corpus.encoding import Document, DocumentEncoder
from ropext.corpus.sources import RawDocument
from ropext.errors import InputError
from ropext.results.lengths import length_text
from ropext.results.values import FEWEST_DOCUMENTS

# A tokenizer may put a few tokens around a text; apart from them it gives at most one per byte.
EXTRA_TOKENS = 8


@dataclass(frozen=True)
class Wanted:
    """What is asked of a corpus. With `given` every length must be reached; otherwise the longest
    length that eight documents reach is taken, from the grid."""

    lengths: tuple[int, ...]
    given: bool
    max_documents: int
    # What to do where no document is long enough, in the options of the command that asks.
    remedy: str = "give shorter --lengths, longer documents, or --pack to glue them"


@dataclass(frozen=True)
class Corpus:
    """The documents taken, all cut to the longest length, and what was left out."""

    documents: tuple[Document, ...]
    lengths: tuple[int, ...]
    num_read: int
    num_short: int
    num_duplicates: int
    num_spare: int  # long enough, but more than --max-docs
    packed: bool = False

    def to_json(self) -> dict[str, Any]:
        """Counts for results.json."""
        return {
            "used": len(self.documents),
            "read": self.num_read,
            "too_short": self.num_short,
            "duplicates": self.num_duplicates,
            "beyond_max_docs": self.num_spare,
            "packed": self.packed,
        }


@dataclass
class _Pool:
    """The documents with the smallest keys among those that reach one length."""

    size: int
    heap: list[tuple[int, int, Document]] = field(default_factory=list)
    seen: int = 0
    ticket: Iterator[int] = field(default_factory=itertools.count)

    def admits(self, key: str) -> bool:
        return len(self.heap) < self.size or -int(key, 16) > self.heap[0][0]

    def add(self, document: Document) -> None:
        entry = (-int(document.key, 16), next(self.ticket), document)
        if len(self.heap) < self.size:
            heapq.heappush(self.heap, entry)
        else:
            heapq.heappushpop(self.heap, entry)

    def documents(self) -> list[Document]:
        return sorted((document for _, _, document in self.heap), key=lambda own: own.key)


def choose_documents(
    raw: Iterable[RawDocument], encoder: DocumentEncoder, wanted: Wanted
) -> Corpus:
    """Read every document once, keep at most `max_documents` per length, pick the longest length.

    A document with fewer bytes than the shortest useful length is not even encoded, so a million
    short documents cost no more memory than one.
    """
    limit = wanted.lengths[-1]
    useful = limit if wanted.given else wanted.lengths[0]
    pools = {length: _Pool(wanted.max_documents) for length in wanted.lengths}
    longest_text, num_read, num_duplicates = ("", ""), 0, 0
    for own in raw:
        num_read += 1
        text = encoder.text_of(own)
        if len(text) > len(longest_text[1]):
            longest_text = own.name, text
        size = len(text.encode("utf-8", "replace")) + EXTRA_TOKENS
        if size < useful:
            continue
        key = encoder.key(text)
        if any(key == other.key for pool in pools.values() for _, _, other in pool.heap):
            num_duplicates += 1
            continue
        document = encoder.document(own.name, text, limit)
        for length, pool in pools.items():
            if len(document) >= length:
                pool.seen += 1
                if pool.admits(key):
                    pool.add(document)
    if not num_read:
        raise InputError("--data holds no document")
    longest = _reached(pools, wanted)
    if longest is None:
        raise _too_short(encoder, wanted, longest_text, num_read)
    pool = pools[longest]
    taken = tuple(document.cut(longest) for document in pool.documents())
    return Corpus(
        documents=taken,
        lengths=tuple(length for length in wanted.lengths if length <= longest),
        num_read=num_read,
        num_short=num_read - num_duplicates - pool.seen,
        num_duplicates=num_duplicates,
        num_spare=pool.seen - len(taken),
    )


def _reached(pools: dict[int, _Pool], wanted: Wanted) -> int | None:
    if wanted.given:
        return wanted.lengths[-1] if pools[wanted.lengths[-1]].seen else None
    enough = min(FEWEST_DOCUMENTS, wanted.max_documents, pools[wanted.lengths[0]].seen)
    reached = [length for length, pool in pools.items() if pool.seen >= max(enough, 1)]
    return max(reached, default=None)


def _too_short(
    encoder: DocumentEncoder, wanted: Wanted, longest: tuple[str, str], num_read: int
) -> InputError:
    needed = wanted.lengths[-1] if wanted.given else wanted.lengths[0]
    tokens = len(encoder.document(*longest, limit=needed))
    return InputError(
        f"none of the {num_read} documents reaches {length_text(needed)} tokens; the longest "
        f"({longest[0]}) has {tokens}: {wanted.remedy}"
    )


def pack_documents(raw: Iterable[RawDocument], encoder: DocumentEncoder, wanted: Wanted) -> Corpus:
    """Glue documents in their order, each with its BOS, into sequences of the longest length.

    What is read then says how a model holds up at far positions, nothing about the use of far text.
    """
    length = wanted.lengths[-1]
    packs: list[Document] = []
    parts: list[Document] = []
    num_read = filled = 0
    for own in raw:
        num_read += 1
        document = encoder.document(own.name, encoder.text_of(own), length - filled)
        parts.append(document)
        filled += len(document)
        if filled >= length:
            packs.append(_glue(parts, encoder))
            parts, filled = [], 0
            if len(packs) == wanted.max_documents:
                break
    if not packs:
        raise InputError(
            f"--pack: all {num_read} documents together have {filled} tokens, fewer than "
            f"{length_text(length)}; give more text, or a shorter length"
        )
    return Corpus(tuple(packs), wanted.lengths, num_read, 0, 0, 0, packed=True)


def _glue(parts: list[Document], encoder: DocumentEncoder) -> Document:
    ids = np.concatenate([part.ids for part in parts])
    return Document(
        f"{parts[0].name} … {parts[-1].name}" if len(parts) > 1 else parts[0].name,
        encoder.key("".join(part.key for part in parts)),
        ids,
        np.concatenate([part.token_bytes for part in parts]),
        parts[0].has_bos,
    )
