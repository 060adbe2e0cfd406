"""Undo `ropext.patch`."""

from ropext.models.patching import (
    unpatch,
)

__all__ = [
    "unpatch",
]
