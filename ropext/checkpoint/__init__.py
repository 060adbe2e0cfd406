"""Checkpoints on the disk: read a base's small files and headers, write an extended one.

The parts, from the bottom: jsontext (strict JSON), headers (safetensors without weights), inventory
(what is carried), snapshot and hub (reading), tokenizer and limits (length edits), transfer and
staging (one atomic directory), provenance and card (what goes beside the weights), writing (all of
it in order), comparing (verify's file side).
"""

from ropext.checkpoint.snapshot import Snapshot, open_snapshot, with_weights

__all__ = ["Snapshot", "open_snapshot", "with_weights"]
