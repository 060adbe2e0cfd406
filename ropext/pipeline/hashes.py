"""What a run reads and writes, by its content."""

import json
import os
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from ropext import bundled
from ropext.checkpoint import Snapshot, weights
from ropext.checkpoint.provenance import digest
from ropext.files import write_json
from ropext.narration import Show, unseen
from ropext.options.fields import DOCUMENTS

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
        entry = self.known.get(key)
        if entry is None or entry[:-1] != state:
            is_settled = time.time_ns() - status.st_mtime_ns > CLOCK_GRAIN
            entry = [*state, weights.content_digest(file, self.show)]
            if is_settled:
                self.known[key] = entry
        return str(entry[-1])

    def save(self) -> None:
        """Keep what was hashed."""
        write_json(self.path, self.known)

    def of_tree(self, directory: Path, but: Collection[str] = ()) -> str | None:
        """Hash everything in a directory, by name, `but` some; None where it is none."""
        if not directory.is_dir():
            return None
        names = {file.relative_to(directory).as_posix(): file for file in _files(directory)}
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
            files = [file for file in _files(path) if file.suffix in (*DOCUMENTS, ".arrow")]
            return digest({file.relative_to(path).as_posix(): self.of(file) for file in files})
        return f"dataset {source}"


def _files(directory: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(directory):
        folders.sort()
        # A log differs from run to run, and nothing reads it.
        yield from (Path(folder, name) for name in sorted(names) if not name.endswith(".log"))
