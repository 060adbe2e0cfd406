"""Choose the scored tokens of a document: all of them, each with the tokens before it as context,
or the tokens of its tail that a mask hides.

Measuring and reporting ask these objects which of the two it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from ropext.base.jsontext import JsonObject
from ropext.base.lengths import length_text

Span = tuple[int, int] | tuple[int, int, int]  # positions [start, stop), read at a length [stop]


class TailLengths(Protocol):
    """The lengths that decide the tokens of a tail: the trained context, the tail and the longest
    length."""

    @property
    def context(self) -> int: ...

    @property
    def tail(self) -> int: ...

    @property
    def longest(self) -> int: ...


@dataclass(frozen=True)
class AllTokens:
    """Every token is scored, given all before it: one pass over a text serves all its lengths."""

    scores_all: ClassVar[bool] = True
    perplexity: ClassVar[str] = "perplexity"  # what exp of a mean loss is called
    passes: ClassVar[int] = 1  # over one window

    def tail(self, frame: TailLengths, length: int) -> Span:
        """Return the positions of the last N tokens before a length."""
        return max(1, length - frame.tail), length

    def inside(self, frame: TailLengths) -> Span:
        """Return the scored positions inside the trained context."""
        return 1, min(frame.context, frame.longest)

    def far_half(self, frame: TailLengths) -> Span:
        """Return the scored positions in the second half of the longest length."""
        return frame.longest // 2, frame.longest

    def tail_text(self, tail: int, lengths: Sequence[int]) -> str:
        """Say which tokens a tail has; a length shorter than it has no more than its own."""
        short = [length_text(length) for length in lengths if length < tail]
        text = f"the last {tail} tokens before each length"
        if short:
            text += f" (before {', '.join(short)} all there are)"
        return text

    def inside_text(self, context: int) -> str:
        """Say which tokens are scored inside the trained context."""
        return f"positions before {context}"

    def tokens_key(self, frame: TailLengths) -> object:
        """Return a key that is equal for two frames if they score the same tokens of a document."""
        return None


@dataclass(frozen=True)
class MaskedTail:
    """The tokens of a tail are scored, each masked once. Each length is a window of its own that
    ends with the document, and all of them score the same tokens."""

    scores_all: ClassVar[bool] = False
    perplexity: ClassVar[str] = "pseudo-perplexity"

    mask_stride: int  # every so many tokens are masked in one pass

    @property
    def passes(self) -> int:
        """The number of passes over one window."""
        return self.mask_stride

    def tail(self, frame: TailLengths, length: int) -> Span:
        """Return the positions of the tail, read in the window of a length."""
        return frame.longest - frame.tail, frame.longest, length

    def inside(self, frame: TailLengths) -> Span:
        """Return the tail in a window of the trained context."""
        return self.tail(frame, min(frame.context, frame.longest))

    def far_half(self, frame: TailLengths) -> Span:
        """Return the tail in the longest window."""
        return self.tail(frame, frame.longest)

    def tail_text(self, tail: int, lengths: Sequence[int]) -> str:
        """Say which tokens a tail has."""
        every = f"every {self.mask_stride}th masked in one pass"
        return f"the last {tail} tokens of each document, {every}"

    def inside_text(self, context: int) -> str:
        """Say which tokens are scored inside the trained context."""
        return f"the tail in windows of {context}"

    def tokens_key(self, frame: TailLengths) -> object:
        """Return a key that is equal for two frames if they score the same tokens of a document."""
        return self.mask_stride, frame.tail, frame.longest


Scoring = AllTokens | MaskedTail
ALL_TOKENS = AllTokens()


def read_scoring(results: JsonObject) -> Scoring:
    """Read what results.json has of it."""
    stride = int(results.get("mask_stride", 0))
    return MaskedTail(stride) if stride else ALL_TOKENS
