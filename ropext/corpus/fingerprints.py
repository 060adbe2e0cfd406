"""What tells a text again, whatever file it stands in, whole or in part.

A passage is 64 characters without white space. Of all passages those are kept whose hash is among
the lowest 64th: the same ones wherever the text stands.
"""

import hashlib
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ropext.results.overlap import Hashes, unique

PASSAGE, EVERY = 64, 64
BLOCK = 2**20  # characters hashed at once
# An odd number has an inverse modulo 2^64, so that a sum over powers can be moved to power 0.
FACTOR = 0x9E3779B97F4A7C15
INVERSE = pow(FACTOR, -1, 2**64)
NONE = np.empty(0, np.uint64)


def normalised(text: str) -> str:
    """Its characters in one Unicode form, without white space: line ends and indents are a file's,
    not the text's."""
    return "".join(unicodedata.normalize("NFKC", text).split())


def content_hash(text: str) -> str:
    """SHA-256 of the normalised text."""
    return hashlib.sha256(normalised(text).encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True)
class Fingerprint:
    """Whole texts, by the beginnings of their hashes, and passages of what is read of them."""

    contents: tuple[int, ...] = ()
    passages: Hashes = field(default_factory=lambda: NONE)  # hashes
    places: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty(0))  # 0 start, 1 end

    def cut(self, share: float) -> "Fingerprint":
        """Of the first part of what is read."""
        if share >= 1:
            return self
        kept = self.places < share
        return Fingerprint(self.contents, self.passages[kept], self.places[kept] / share)


def fingerprint(text: str, read: str) -> Fingerprint:
    """Of a text, of which `read` is the beginning that is read."""
    plain = normalised(read)
    found = [*_passages(plain)]
    places = np.concatenate([at for at, _ in found]) if found else np.empty(0)
    passages = np.concatenate([own for _, own in found]) if found else NONE
    return Fingerprint((int(content_hash(text)[:16], 16),), passages, places / max(1, len(plain)))


def joined(parts: Iterable[Fingerprint]) -> Fingerprint:
    """Of several texts together."""
    own = list(parts)
    contents = tuple(content for part in own for content in part.contents)
    passages = unique([part.passages for part in own])
    return Fingerprint(contents, passages, np.zeros(len(passages)))


def _passages(plain: str) -> Iterator[tuple[npt.NDArray[np.intp], Hashes]]:
    """(place, hash) of those kept: a polynomial in the characters, rolled along the text."""
    size = min(BLOCK, len(plain))
    up = np.multiply.accumulate(np.full(size, FACTOR, np.uint64))
    down = np.multiply.accumulate(np.full(size, INVERSE, np.uint64))
    for start in range(0, len(plain) - PASSAGE + 1, BLOCK - PASSAGE + 1):
        block = plain[start : start + BLOCK].encode("utf-32-le", "surrogatepass")
        codes = np.frombuffer(block, "<u4").astype(np.uint64)
        sums = np.cumsum(codes * up[: len(codes)], dtype=np.uint64)
        sums[PASSAGE:] -= sums[:-PASSAGE].copy()
        hashes = _mixed(sums[PASSAGE - 1 :] * down[: len(codes) - PASSAGE + 1])
        kept = np.flatnonzero(hashes < np.uint64(2**64 // EVERY))
        yield kept + start, hashes[kept]


def _mixed(values: Hashes) -> Hashes:
    """Every bit depends on every other (the finaliser of SplitMix64, Steele et al. 2014)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values = (values ^ (values >> np.uint64(shift))) * np.uint64(factor)
    return values ^ (values >> np.uint64(31))
