"""Write the files of a fit.

OUT/                    the base's weights, the new config, record and card, as `extend` writes
OUT/pair-factors.json   the file that --method longrope --pair-factors reads
OUT/fit/                numbers.json, losses.json, result.json, pair-factors.png, positions.png,
                        used.log
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from ropext.base.jsontext import JsonObject
from ropext.files.checkpoint import provenance
from ropext.files.checkpoint.card import Card, card_of
from ropext.files.checkpoint.provenance import Record, record_of
from ropext.files.checkpoint.writing import DirectorySource, WriteOptions, write
from ropext.training.report import TrainingSummary, write_files
from ropext.training.result import Fitted
from ropext.verifying import proof


def write_fitted(
    done: Fitted,
    extras: Mapping[str, bytes],
    story: TrainingSummary,
    command: tuple[str, ...],
    manner: WriteOptions,
    finish: Callable[[Path], None] | None,
) -> None:
    """Write and verify OUT of a fit, as a whole or not at all; `extras` are files of OUT, and
    `finish` adds more."""
    plan = done.plan
    output = done.output
    snapshot = done.training.snapshot

    def prove(directory: Path) -> JsonObject:
        """Write the files of OUT/fit, and verify the fitted checkpoint with transformers."""
        write_files(directory, extras)
        return proof.prove_plan(directory, plan, snapshot.config)

    def card_with_numbers(written: Record, title: str) -> Card:
        """Return the model card of a fitted checkpoint, with the numbers of its fit."""
        plain = card_of(plan, written, title)
        return replace(plain, summary=plain.summary + story.summary, numbers=story.numbers)

    record = record_of(plan, provenance.base_of(snapshot), command)
    source = DirectorySource(snapshot, plan.config, prove, card_with_numbers, finish)
    full = replace(record, more=dict(record.more) | story.sections("fit"))
    write(source, output, full, manner)
