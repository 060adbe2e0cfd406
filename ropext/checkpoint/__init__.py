"""Checkpoints on the disk: read a base's small files and headers, write an extended one.

The parts, from the bottom: snapshot and hub (reading), unchanged (whether it still is what was
read), tokenizer (lengths that cap the context), headers, weights (whether these are the base's),
staging (one directory, whole or not at all), provenance and card (what goes beside the weights),
writing (all of it in order; files copied, reflinked, hard-linked or symlinked), push.
"""

from ropext.checkpoint.asked import check_asked
from ropext.checkpoint.snapshot import OTHER_SET, VARIANT, Snapshot, open_snapshot, with_weights

__all__ = ["OTHER_SET", "VARIANT", "Snapshot", "check_asked", "open_snapshot", "with_weights"]
