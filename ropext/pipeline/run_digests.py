"""Compute digests of the inputs and outputs of a run."""

import os
from collections.abc import Collection, Iterator
from pathlib import Path

from ropext.base import bundled
from ropext.base.jsontext import digest
from ropext.files.checkpoint import Snapshot
from ropext.files.checkpoint.digests import Digests
from ropext.options.fields import DOCUMENTS


class RunDigests(Digests):
    """Digests of whole folders, models and data."""

    def of_tree(self, directory: Path, but: Collection[str] = ()) -> str | None:
        """Return the digest of all files in the checkpoint of a recipe's stage, or in the output of
        `run`, by name, except `but`. None if the directory does not exist."""
        if not directory.is_dir():
            return None
        names = {file.relative_to(directory).as_posix(): file for file in _files(directory)}
        return digest({name: self.of(file) for name, file in names.items() if name not in but})

    def of_model(self, snapshot: Snapshot) -> str:
        """Return the digest of all files of the checkpoint from which the stages of a recipe start,
        independent of its path.

        A commit is not enough: files in the hub's cache may have been edited.
        """
        return self.of_files(snapshot, snapshot.files)

    def of_data(self, source: str) -> str:
        """Return the digest of the document files that a recipe names, or the name of a dataset."""
        path = bundled.find_bundled(source, "data") or Path(source)
        if path.is_file():
            return self.of(path)
        if path.is_dir():
            files = [file for file in _files(path) if file.suffix in (*DOCUMENTS, ".arrow")]
            return digest({file.relative_to(path).as_posix(): self.of(file) for file in files})
        return f"dataset {source}"


def _files(directory: Path) -> Iterator[Path]:
    """Yield the files of a folder that a stage hashes, without logs."""
    for folder, folders, names in os.walk(directory):
        folders.sort()
        # A log differs from run to run, and nothing reads it.
        yield from (Path(folder, name) for name in sorted(names) if not name.endswith(".log"))
