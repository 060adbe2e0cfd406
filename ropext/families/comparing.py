"""What changed from one config to another."""

from collections.abc import Mapping
from typing import Any

from ropext.families.model import ABSENT, Edit


def diff(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Edit]:
    """Every value that changed, by path; lists and rope dicts of other types count as one value."""
    edits: list[Edit] = []
    for key in [*old, *(k for k in new if k not in old)]:
        before, after = old.get(key, ABSENT), new.get(key, ABSENT)
        if isinstance(before, dict) and isinstance(after, dict):
            edits += [Edit((key, *e.path), e.before, e.after) for e in diff(before, after)]
        elif before != after or type(before) is not type(after):
            edits.append(Edit((key,), before, after))
    return edits
