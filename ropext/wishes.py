"""What all dataclasses of options share: a field's name is its flag, and its values are checked."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from ropext.errors import UsageError

# Of a count that costs nothing by itself; products of two still fit into 64 bits.
LARGEST = 10**9
LARGEST_SEED = 2**63 - 1  # what every generator of random numbers takes

Ranges = Mapping[str, tuple[int, int]]  # field -> least and most

_FLAGS = {"for_loaders": "--for", "evaluate": "--eval"}


def flag(name: str) -> str:
    """The flag of a field."""
    return _FLAGS.get(name, "--" + name.replace("_", "-"))


def check_choices(options: Any, known: Mapping[str, Sequence[str]]) -> None:
    """Every field named here holds one of its words, or None."""
    for name, words in known.items():
        value = getattr(options, name)
        if value is not None and value not in words:
            raise UsageError(f"{flag(name)} is one of {', '.join(words)}, was {value!r}")


def check_ranges(options: Any, ranges: Ranges) -> None:
    """Every field named here holds a number within its bounds, or None."""
    for name, (least, most) in ranges.items():
        value = getattr(options, name)
        if value is not None and value < least:
            raise UsageError(f"{flag(name)} must be at least {least}, was {value}")
        if value is not None and value > most:
            raise UsageError(f"{flag(name)} must be at most {most}, was {str(value)[:40]}")


def check_positive(options: Any, name: str) -> None:
    """A number above 0 that is finite, or None."""
    value = getattr(options, name)
    if value is not None and not 0 < value < math.inf:
        raise UsageError(f"{flag(name)} must be finite and above 0, was {value}")


def check_share(options: Any, name: str) -> None:
    """At least 0 and below 1."""
    value = getattr(options, name)
    if not 0 <= value < 1:
        raise UsageError(f"{flag(name)} must be at least 0 and below 1, was {value:g}")


def known_values(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """What was given; a key that is no field is refused with those that are."""
    known = [wish.name for wish in fields(kind)]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise UsageError(f"unknown option {unknown[0]!r}; known are {', '.join(known)}")
    return {key: value for key, value in values.items() if value is not None}
