"""Sliding windows as pure integers: what is read together, and which part of it is scored."""

from collections.abc import Iterator
from dataclasses import dataclass

HF_STRIDE = 512  # of the loop in the transformers documentation


@dataclass(frozen=True)
class Window:
    """Tokens [begin, end) are read; the NLL of tokens [first, end) is taken."""

    begin: int
    end: int
    first: int


def strided_windows(num_tokens: int, size: int, stride: int) -> Iterator[Window]:
    """Windows every `stride` tokens; each token is scored once, by the first window that holds it.

    Position 0 has nothing before it and is not scored.
    """
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
    """The short window: windows of L, stride L/2, the new half scored, so that every token beyond
    the first window sees between L/2 and L tokens."""
    return strided_windows(num_tokens, context, max(1, context // 2))


def hf_stride(size: int) -> int:
    """The documentation's stride, or half of a window that is shorter."""
    return min(HF_STRIDE, max(1, size // 2))
