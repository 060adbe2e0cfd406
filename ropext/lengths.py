"""Lengths and positions: `128k` as tokens, the grid that is measured, the tail before a length, the
buckets."""

import itertools
import math
import re
from collections.abc import Sequence

from ropext.errors import UsageError

LONGEST_TAIL = 1024
_LENGTH = re.compile(r"(\d+(?:\.\d+)?)\s*([kKmM]?)")


def parse_length(text: str, flag: str = "--lengths") -> int:
    """`4096`, `4k` (4 x 1024) or `1m` (1024 x 1024) tokens."""
    match = _LENGTH.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{flag} {text[:60]!r} is not a number of tokens; write 4096, 4k or 1m")
    tokens = float(match[1]) * {"": 1, "k": 1024, "m": 1024**2}[match[2].lower()]
    if not tokens.is_integer() or tokens < 2:
        raise UsageError(f"{flag} {text[:60]!r} must be a whole number of tokens, at least 2")
    return int(tokens)


def parse_lengths(text: str, flag: str = "--lengths") -> tuple[int, ...]:
    """A comma-separated ascending list of lengths."""
    lengths = tuple(parse_length(part, flag) for part in text.split(",") if part.strip())
    if not lengths:
        raise UsageError(f"{flag} is empty; write e.g. {flag} 4k,8k,16k")
    if any(b <= a for a, b in itertools.pairwise(lengths)):
        raise UsageError(f"{flag} {text} must ascend, each length longer than the one before")
    return lengths


def length_text(tokens: int) -> str:
    """`4k` for 4096, the plain number where it is no multiple of 1024."""
    if tokens and tokens % 1024**2 == 0:
        return f"{tokens // 1024**2}m"
    return f"{tokens // 1024}k" if tokens and tokens % 1024 == 0 else str(tokens)


def lengths_text(lengths: Sequence[int]) -> str:
    """`1k, 2k, 4k`."""
    return ", ".join(map(length_text, lengths))


def tail_tokens(context: int) -> int:
    """N = min(1024, L/4), the same at every length."""
    return max(1, min(LONGEST_TAIL, context // 4))


def doubling_grid(context: int, limit: int) -> tuple[int, ...]:
    """From a quarter of the trained context, doubling, to the longest length up to `limit`.

    Where doubling misses the limit, the limit itself is the last length.
    """
    start = max(2, context // 4)
    if limit < start:
        return ()
    grid = [start << k for k in range(int(math.log2(limit / start)) + 1)]
    grid = [length for length in grid if length <= limit]
    return tuple(grid if grid[-1] == limit else [*grid, limit])


def octaves(context: int, longest: int, parts: int = 1) -> tuple[tuple[int, int], ...]:
    """Position buckets [start, stop): octaves split at the trained context, from an eighth of it.

    `parts` cuts every octave into so many steps of equal ratio, for plots. Position 0 is never
    scored (nothing precedes it), so the first bucket starts at 1.
    """
    first = -3 * parts
    steps = range(first, first + parts * (4 + max(0, math.ceil(math.log2(longest / context)))))
    inner = {round(context * 2 ** (step / parts)) for step in steps}
    edges = [1, *sorted(edge for edge in inner if 1 < edge < longest), longest]
    return tuple(itertools.pairwise(edges))


def length_at_least(lengths: Sequence[int], wanted: int) -> int:
    """The shortest of `lengths` that reaches `wanted`; the longest where none does."""
    reaching = [length for length in lengths if length >= wanted]
    return min(reaching) if reaching else max(lengths)
