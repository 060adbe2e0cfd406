"""Parse and choose lengths: `128k` as tokens, the measured grid, the tail before a length, the
buckets of positions, the windows over a text."""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ropext.base.errors import UsageError

LONGEST_TAIL = 1024
_LENGTH = re.compile(r"(\d+(?:\.\d+)?)\s*([kKmM]?)")
_UNITS = {"": 1, "k": 1024, "m": 1024**2}


def parse_length(text: str, flag: str = "--lengths") -> int:
    """Read a length in tokens from an option: `4096`, `4k` (4 x 1024) or `1m` (1024 x 1024)."""
    match = _LENGTH.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{flag} {text[:60]!r} is not a number of tokens; write 4096, 4k or 1m")
    tokens = float(match[1]) * _UNITS[match[2].lower()]
    if not tokens.is_integer() or tokens < 2:
        raise UsageError(f"{flag} {text[:60]!r} must be a whole number of tokens, at least 2")
    return int(tokens)


def parse_lengths(text: str, flag: str = "--lengths") -> tuple[int, ...]:
    """Read the ascending list of lengths of an option, separated by commas."""
    lengths = tuple(parse_length(part, flag) for part in text.split(",") if part.strip())
    if not lengths:
        raise UsageError(f"{flag} is empty; write e.g. {flag} 4k,8k,16k")
    for shorter, longer in itertools.pairwise(lengths):
        if longer <= shorter:
            raise UsageError(f"{flag} {text} must ascend, each length longer than the one before")
    return lengths


def length_text(tokens: int) -> str:
    """Write a length in tokens as `4k` for 4096; write the plain number if it is no multiple of
    1024."""
    if tokens and tokens % 1024**2 == 0:
        return f"{tokens // 1024**2}m"
    if tokens and tokens % 1024 == 0:
        return f"{tokens // 1024}k"
    return str(tokens)


def lengths_text(lengths: Sequence[int]) -> str:
    """Write lengths in tokens as `1k, 2k, 4k`."""
    return ", ".join(map(length_text, lengths))


def tail_tokens(context: int) -> int:
    """Return how many tokens the tail before a length has: N = min(1024, L/4), L being the trained
    context, so that N is the same at every length."""
    return max(1, min(LONGEST_TAIL, context // 4))


def doubling_grid(context: int, limit: int) -> tuple[int, ...]:
    """Return the lengths to measure: double from a quarter of the trained context up to `limit`. If
    doubling misses the limit, the limit itself is the last length."""
    length = max(2, context // 4)
    if limit < length:
        return ()
    grid = list[int]()
    while length < limit:
        grid.append(length)
        length *= 2
    grid.append(limit)
    return tuple(grid)


def octaves(context: int, longest: int, parts: int = 1) -> tuple[tuple[int, int], ...]:
    """Split positions into buckets [start, stop): octaves that meet at the trained context, from
    an eighth of it.

    `parts` cuts every octave into so many steps of equal ratio, for plots. Position 0 is never
    scored (nothing precedes it), so the first bucket starts at 1.
    """
    above = max(0, math.ceil(math.log2(longest / context)))  # octaves above the context
    edges = {1, longest}
    for step in range(-3 * parts, (1 + above) * parts):
        edge = round(context * 2 ** (step / parts))
        if 1 < edge < longest:
            edges.add(edge)
    return tuple(itertools.pairwise(sorted(edges)))


def length_at_least(lengths: Sequence[int], wanted: int) -> int:
    """Return the shortest of these lengths in tokens that reaches `wanted`, or the longest if none
    does."""
    reaching = [length for length in lengths if length >= wanted]
    if not reaching:
        return max(lengths)
    return min(reaching)


@dataclass(frozen=True)
class Window:
    """Tokens [begin, end) are read; the NLL of tokens [first, end) is taken."""

    begin: int
    end: int
    first: int


def strided_windows(num_tokens: int, size: int, stride: int) -> Iterator[Window]:
    """Yield windows over the tokens of a text, one every `stride` tokens. The first window that
    holds a token scores it, once. Position 0 has nothing before it and is not scored."""
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
    """Yield the windows of the truncated baseline over a text: length L, stride L/2, the new half
    scored. So every token beyond the first window sees between L/2 and L tokens."""
    return strided_windows(num_tokens, context, max(1, context // 2))


def forward_tokens(windows: Iterable[Window]) -> int:
    """Return how many tokens are read in all windows over a text together."""
    return sum(window.end - window.begin for window in windows)
