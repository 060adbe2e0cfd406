"""The losses and answers of one variant: one file for each unit of work, in a folder of its own.

A file is written beside its name and renamed, so one that is there is complete.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ropext.files import write_json, write_whole
from ropext.results.perplexity import Reading


def write_array(path: Path, array: npt.NDArray[Any]) -> None:
    """One .npy file (unlike .npz it holds no date)."""
    write_whole(path, lambda stream: np.save(stream, array, allow_pickle=False))


def array_name(regime: str, document_hash: str) -> str:
    """Name the file of what was read of a document in a regime."""
    return f"{regime}/{document_hash[:32]}.npy"


@dataclass(frozen=True)
class Store:
    """The folder of a variant, or memory alone. Of several processes that read the same, one writes
    the folder, and the others hold what they read."""

    folder: Path | None = None
    writes: bool = True
    held: dict[str, Any] = field(default_factory=dict)

    def file(self, name: str = "") -> Path:
        """Where a unit lies."""
        assert self.folder is not None, "a store in memory has no files"
        return self.folder / name

    def has(self, name: str) -> bool:
        return name in self.held or (self.folder is not None and self.file(name).exists())

    def is_older(self, name: str, time: float) -> bool:
        """Whether a unit was there at a time."""
        return self.folder is not None and self.file(name).stat().st_mtime < time

    def put(self, name: str, result: Any) -> None:
        """Keep an array, or answers as JSON."""
        if self.folder is None or not self.writes:
            self.held[name] = result
        elif name.endswith(".npy"):
            write_array(self.file(name), np.asarray(result))
        else:
            write_json(self.file(name), result)

    def get(self, name: str) -> Any:
        """Return what was kept."""
        if name in self.held or self.folder is None:
            return self.held[name]
        if name.endswith(".npy"):
            # Mapped: a header that claims more than its file holds is refused, not allocated.
            return np.array(np.load(self.file(name), "r", allow_pickle=False))
        return json.loads(self.file(name).read_text(encoding="utf-8"))

    def written(self, folder: Path) -> None:
        """Write all that is held into a folder."""
        for name, result in self.held.items():
            Store(folder).put(name, result)

    def reading(self, label: str, regimes: Mapping[str, int], hashes: Sequence[str]) -> Reading:
        """Return the arrays of documents by the pass length of each regime."""
        passes = {
            length: [self.get(array_name(regime, each)) for each in hashes]
            for regime, length in regimes.items()
        }
        return Reading(label, passes)
