"""Checkpoints on the disk: read a base's small files and headers, write an extended one.

The order of the modules, from the bottom: weights, snapshot, hub, tokenizer, digests, provenance,
card, writing, push.
"""

from ropext.families.config import check_foreign_parts
from ropext.files.checkpoint.snapshot import (
    OTHER_SET,
    VARIANT,
    Snapshot,
    open_snapshot,
    with_weights,
)

__all__ = [
    "OTHER_SET",
    "VARIANT",
    "Snapshot",
    "check_foreign_parts",
    "open_snapshot",
    "with_weights",
]
