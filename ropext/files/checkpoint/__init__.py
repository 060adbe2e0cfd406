"""Checkpoints on the disk: read a base's small files and headers, write an extended one.

The order of the modules, from the bottom: foreign_parts, snapshot, hub, tokenizer, headers,
weights, digests, staging, provenance, card, writing, push.
"""

from ropext.files.checkpoint.foreign_parts import check_foreign_parts
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
