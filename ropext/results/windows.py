"""Compute windows over a text as pure integers: the tokens that are read together, and the scored
ones among them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Window:
    """Tokens [begin, end) are read; the NLL of tokens [first, end) is taken."""

    begin: int
    end: int
    first: int


def strided_windows(num_tokens: int, size: int, stride: int) -> Iterator[Window]:
    """Return windows every `stride` tokens. The first window that holds a token scores it, once.
    Position 0 has nothing before it and is not scored."""
    if not 0 < stride <= size:
        raise ValueError(f"a stride of {stride} leaves gaps between windows of {size}")
    done = 1
    for begin in range(0, num_tokens, stride):
        end = min(begin + size, num_tokens)
        if end > done:
            yield Window(begin, end, done)
        done = max(done, end)
        if end == num_tokens:
            return


def short_windows(num_tokens: int, context: int) -> Iterator[Window]:
    """Return the windows of the short window: length L, stride L/2, the new half scored. So every
    token beyond the first window sees between L/2 and L tokens."""
    return strided_windows(num_tokens, context, max(1, context // 2))


def forward_tokens(windows: Iterable[Window]) -> int:
    """Return how many tokens are read in windows."""
    return sum(window.end - window.begin for window in windows)
