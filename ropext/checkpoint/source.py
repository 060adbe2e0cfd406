"""One way to write an output, whatever it is made of: a directory, a GGUF file, a model in memory.

All that can be refused is refused first; then everything is written into a staged folder, proved
there, and gets its name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from ropext.atomic import os_errors
from ropext.checkpoint.provenance import Record
from ropext.checkpoint.staging import Output, Staged, check_output, staged
from ropext.checkpoint.weights import WeightFile
from ropext.jsontext import JsonObject
from ropext.narration import Show, unseen
from ropext.options.fields import Link


@dataclass(frozen=True)
class WriteManner:
    """How an output is written; nothing of it decides a number there."""

    link: Link = "copy"
    force: bool = False
    hash_weights: bool = False
    no_verify: bool = False
    show: Show = unseen


@dataclass(frozen=True)
class Written:
    """What `write` wrote, and what the user should know of it."""

    output: Path
    record: Record
    notes: tuple[str, ...]
    left: Mapping[str, str]  # files of the base that were not carried over: reason
    proof: JsonObject | None
    files: tuple[str, ...]  # the names of all that was written


Weights = Mapping[str, WeightFile]


class OutputSource(Protocol):
    """What an output is made of, with all that is to become of it."""

    @property
    def inputs(self) -> Sequence[Path | str]:
        """What is read: no output lies over, in or around it."""

    @property
    def left(self) -> Mapping[str, str]:
        """The files that are not carried over, each with its reason."""

    def is_file(self, output: Path) -> bool:
        """Whether an output of this name is one file."""

    def written_in(self, place: Path) -> set[str] | None:
        """Return the files of an earlier output that are as ropext wrote them."""

    def check(self, output: Path, link: Link) -> None:
        """Refuse what can be refused before anything is written."""

    def weigh(self, manner: WriteManner) -> Weights:
        """Return what identifies the weights."""

    def put(self, stage: Staged, record: Record, output: Path, manner: WriteManner) -> Record:
        """Write all that is proved; return the record with what became of it."""

    def prove(self, directory: Path) -> JsonObject:
        """Hold what was written against what was planned; ProofFailed where it is not that."""

    def finish(
        self, stage: Staged, record: Record, output: Path, proof: JsonObject | None
    ) -> Record:
        """Write what tells of the whole, and of its proof; return the record as it is kept."""


def check_writable(source: OutputSource, output: Path, manner: WriteManner) -> None:
    """All that is refused before anything is written; changes nothing. (`staged` clears away what a
    killed run left before it looks at the output.)"""
    source.check(output, manner.link)
    check_output(_output_of(source, output, manner))


def _output_of(source: OutputSource, path: Path, manner: WriteManner) -> Output:
    return Output(
        path,
        force=manner.force,
        reads=source.inputs,
        is_file=source.is_file(path),
        written=source.written_in,
    )


def write(source: OutputSource, output: Path, record: Record, manner: WriteManner) -> Written:
    """Write `output` as a whole or not at all. `record` says what was done; its weights and its
    proof are filled in here."""
    source.check(output, manner.link)
    full = replace(record, weights=source.weigh(manner))
    with staged(_output_of(source, output, manner)) as stage:
        full = source.put(stage, full, output, manner)
        proof: JsonObject | None = None
        if not manner.no_verify:
            proof = source.prove(stage.directory)
        with os_errors(output):
            full = source.finish(stage, full, output, proof)
            files = stage.names()
    return Written(output, full, tuple(stage.notes), source.left, proof, files)
