"""The stages of a run, and the rule by which one is skipped.

A stage is skipped when its schema and inputs are those of its record and its outputs are there as
they were left. One whose record was begun with the same inputs goes on from what is there.
"""

import json
import os
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropext import bundled
from ropext.checkpoint import Snapshot, provenance, weights
from ropext.checkpoint.provenance import digest
from ropext.corpus.sources import READERS
from ropext.files import write_json
from ropext.narration import Show, unseen
from ropext.workdir import Flat, Ledger, Piece

# A number goes up when what a stage does with the same inputs changes.
SCHEMAS = {"plan": 1, "extend": 1, "fit": 1, "finetune": 1, "evaluate": 2, "report": 2}
# Nanoseconds. What is written again within the coarsest clock of a file system, also where another
# file was deleted, can have the number, size and time of before.
CLOCK_GRAIN = 2 * 10**9


class Hashes:
    """SHA-256 of files, remembered by size and time of change, so that a second run reads none."""

    def __init__(self, path: Path, show: Show = unseen) -> None:
        self.path, self.show = path, show
        try:
            self.known: dict[str, list[Any]] = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError):
            self.known = {}

    def of(self, file: Path) -> str:
        """Hash one file's content."""
        by_name = weights.blob_digest(file)
        if by_name is not None:  # the hub's cache names a file by its hash
            return by_name
        status = os.stat(file)
        key = f"{status.st_dev}:{status.st_ino}"
        state = [status.st_size, status.st_mtime_ns]
        found = self.known.get(key)
        if found is None or found[:-1] != state:
            is_settled = time.time_ns() - status.st_mtime_ns > CLOCK_GRAIN
            found = [*state, weights.content_digest(file, self.show)]
            if is_settled:
                self.known[key] = found
        return str(found[-1])

    def save(self) -> None:
        """Keep what was hashed."""
        write_json(self.path, self.known)

    def of_tree(self, directory: Path, but: Collection[str] = ()) -> str | None:
        """Hash everything in a directory, by name, `but` some; None where it is none."""
        if not directory.is_dir():
            return None
        names = {str(file.relative_to(directory)): file for file in _files(directory)}
        return digest({name: self.of(file) for name, file in names.items() if name not in but})

    def of_model(self, snapshot: Snapshot) -> str:
        """Identify a checkpoint: the commit of a hub model, else a hash of what is carried."""
        if snapshot.commit is not None:
            return f"{snapshot.hub_id}@{snapshot.commit}"
        return digest({name: self.of(snapshot.path(name)) for name in snapshot.files})

    def of_data(self, source: str) -> str:
        """Identify documents: a hash of their files, or a dataset's name."""
        path = bundled.find_data(source) or Path(source)
        if path.is_file():
            return self.of(path)
        if path.is_dir():
            files = [file for file in _files(path) if file.suffix in (*READERS, ".arrow")]
            return digest({str(file.relative_to(path)): self.of(file) for file in files})
        return f"dataset {source}"


def _files(directory: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(directory):
        folders.sort()
        # A log differs from run to run, and nothing reads it.
        yield from (Path(folder, name) for name in sorted(names) if not name.endswith(".log"))


@dataclass(frozen=True)
class Stage:
    """One step of a run."""

    name: str
    inputs: Callable[[], Flat]  # what decides its result, by name
    look: Callable[[], Flat | None]  # digests of what it left, None where that is not whole
    do: Callable[[], None]
    clear: Callable[[], None] = lambda: None  # what another run of it left
    tidy: Callable[[], None] = lambda: None  # what a kill left beside an output that is whole
    everyone: bool = False  # under accelerate launch all processes take part
    schema: int | None = None  # where it is none of SCHEMAS

    def why_again(self, record: Piece, inputs: Flat) -> str | None:
        """Why a record is not of this very work; None where it is."""
        schema = SCHEMAS[self.name] if self.schema is None else self.schema
        return record.why_again(schema, inputs)

    def write(self, ledger: Ledger, inputs: Flat, outputs: Flat | None) -> None:
        """Begin (outputs None) or finish the record."""
        versions = provenance.versions()
        ledger.write(self.name, SCHEMAS[self.name], inputs, outputs, versions=versions)


def is_done(ledger: Ledger, stage: Stage, inputs: Flat | None = None) -> Flat | None:
    """What a stage left, where it need not be done again: the same schema and inputs, and the
    outputs as they were left.

    A record that was begun counts when all outputs are there: they get their names in one step.
    """
    record = ledger.read(stage.name)
    if record is None:
        return None
    if stage.why_again(record, stage.inputs() if inputs is None else inputs) is not None:
        return None
    seen = stage.look()
    return seen if record.outputs in (None, seen) else None


def any_finished(folder: Path) -> bool:
    """Whether a run directory keeps something that need not be done again."""
    ledgers = {path.parent for path in folder.glob("**/stages/*.json")}
    found = (Ledger(place).read(name) for place in ledgers for name in SCHEMAS)
    return any(record is not None and record.outputs is not None for record in found)


def other_versions(record: Piece) -> str:
    """Libraries that changed since; said, not silently a reason to do a stage again."""
    now, then = provenance.versions(), record.about.get("versions", {})
    lines = [
        f"{name} {then.get(name, 'absent')}, now {now.get(name, 'absent')}"
        for name in dict.fromkeys([*now, *then])
        if now.get(name) != then.get(name)
    ]
    return ", ".join(lines)
