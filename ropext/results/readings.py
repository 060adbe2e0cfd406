"""What one model made of every document: NLL by position, and the sums that every number needs.

An array holds one float32 per token: the NLL of token t given all tokens before it; position 0 is
not-a-number, for nothing precedes it. Sums are float64.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ropext.lengths import length_at_least
from ropext.results.values import Floats

TokenNll = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Reading:
    """One model's reading of all documents, in their order.

    `passes` maps a pass length to one array per document. With a static spectrum one pass at the
    longest length serves every length; a spectrum that depends on the length needs its own pass for
    each regime, and a length is read from the shortest pass that reaches it.
    """

    label: str
    passes: Mapping[int, Sequence[TokenNll]]

    def sums(self, start: int, stop: int, length: int | None = None) -> tuple[Floats, Floats]:
        """Per document: sum of NLL and number of scored tokens at positions [start, stop).

        `length` is the length as whose reader the positions are read (default: `stop`).
        """
        arrays = self.passes[length_at_least(tuple(self.passes), length or stop)]
        parts = [np.asarray(array[max(start, 1) : stop], np.float64) for array in arrays]
        return np.array([part.sum() for part in parts]), np.array([float(len(p)) for p in parts])

    def subset(self, order: Sequence[int]) -> "Reading":
        """The same reading of some of the documents, in the given order."""
        picked = {at: [arrays[k] for k in order] for at, arrays in self.passes.items()}
        return Reading(self.label, picked)


@dataclass(frozen=True)
class Documents:
    """The documents that were read: who they are and how many bytes each of their tokens covers."""

    names: tuple[str, ...]
    # Per document: SHA-256 of its first C tokens, for every measured length C.
    prefix_hashes: tuple[Mapping[int, str], ...]
    token_bytes: tuple[npt.NDArray[np.int64], ...]

    def __len__(self) -> int:
        return len(self.names)

    def bytes_before(self, length: int) -> Floats:
        """Per document: bytes of text that the scored tokens before `length` stand for."""
        return np.array([float(counts[1:length].sum()) for counts in self.token_bytes])
