"""Ranges of versions, compared as far as both are written: 5 is any 5.x."""

import re
import sys
from dataclasses import dataclass

Version = tuple[int, ...]
NEVER: Version = (sys.maxsize,)  # later than every version


def version_of(text: str) -> Version:
    """Return the numbers of a version; none where the text has none."""
    return tuple(int(part) for part in re.findall(r"\d+", text))


def after(version: Version) -> Version:
    """Return the first version that does not begin with these numbers: 5.24 after 5.23."""
    if not version:
        return NEVER
    return (*version[:-1], version[-1] + 1)


@dataclass(frozen=True)
class VersionSpan:
    """All versions from `first` on and before `end`."""

    first: Version
    end: Version

    def overlaps(self, other: "VersionSpan") -> bool:
        """Whether a version lies in both."""
        return self.first < other.end and other.first < self.end


def span_of(version: str) -> VersionSpan:
    """Return all versions that begin with this one."""
    numbers = version_of(version)
    return VersionSpan(numbers, after(numbers))


def spans_in(label: str) -> tuple[VersionSpan, ...]:
    """Return the versions that a label begins with ("0.30-0.33 (source)"); none of a commit."""
    first, dash, last = label.split()[0].partition("-")
    if not re.fullmatch(r"[\d.]+", first + last):
        return ()
    if not dash:
        return (span_of(first),)
    return (VersionSpan(version_of(first), after(version_of(last))),)
