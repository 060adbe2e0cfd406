"""Choose the scored tokens of a document: all of them, each with the tokens before it as context,
or the tokens of its tail that a mask hides."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ropext.base.jsontext import IF_ANY
from ropext.base.lengths import length_text

Span = tuple[int, int] | tuple[int, int, int]  # positions [start, stop), read at a length [stop]


@dataclass(frozen=True)
class Scoring:
    """The scored tokens of a document, as results.json records them.

    Without masks every token is scored, given all before it: one pass over a text serves all its
    lengths. With masks only the tail is scored, each token masked once. Each length is then a
    window of its own that ends with the document, and all of them score the same tokens.
    """

    # One pass masks one of so many tokens; 0: without masks.
    mask_stride: int = field(default=0, metadata=IF_ANY)

    @property
    def scores_all(self) -> bool:
        """Return whether every token is scored, not only the masked tokens of a tail."""
        return not self.mask_stride

    @property
    def perplexity(self) -> str:
        """Return the name of exp of a mean loss in tables: perplexity or pseudo-perplexity."""
        if self.scores_all:
            return "perplexity"
        return "pseudo-perplexity"

    @property
    def passes(self) -> int:
        """Return the number of forward passes over one window of an evaluation."""
        return self.mask_stride or 1

    def tail_text(self, tail: int, lengths: Sequence[int]) -> str:
        """Say in the title of a table which tokens a tail has; a length shorter than it has no more
        than its own."""
        if not self.scores_all:
            every = f"every {self.mask_stride}th masked in one pass"
            return f"the last {tail} tokens of each document, {every}"
        text = f"the last {tail} tokens before each length"
        short = [length_text(length) for length in lengths if length < tail]
        if short:
            text += f" (before {', '.join(short)} all there are)"
        return text

    def inside_text(self, context: int) -> str:
        """Say in the note of a table which tokens are scored inside the trained context."""
        if self.scores_all:
            return f"positions before {context}"
        return f"the tail in windows of {context}"


ALL_TOKENS = Scoring()
