"""Define a stage of a run: its key, its outputs and its work."""

import time
from abc import abstractmethod
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from ropext.base.errors import InputError
from ropext.base.jsontext import JsonObject, digest
from ropext.base.locks import release, run_folder
from ropext.base.narration import kept_after_interrupt
from ropext.base.staging import recover, remove_output
from ropext.base.workdir import Flat, remove
from ropext.files.checkpoint.digests import check_unchanged
from ropext.files.checkpoint.provenance import TRAINED_ON, read_record, replace_section
from ropext.options.fields import (
    CONTENT,
    FILES,
    NUMBERS,
    Options,
    Role,
    option_role,
    places_in_option,
)
from ropext.pipeline.hashes import Hashes
from ropext.pipeline.step import Step, has_finished_step
from ropext.pipeline.work import USED, RunContext
from ropext.results.overlap import joined_training, read_training_documents, recorded_training


def section_key(name: str, options: Options | None, hashes: Hashes, *words: str) -> Flat:
    """Return the options of a section that decide its result, by dotted key.

    Without `words` these are numbers and files. If an option names documents or files of questions,
    their digests decide.
    """
    if options is None:
        return {}
    how: dict[str, Any] = {"mode": "json", "by_alias": True, "exclude_none": True}
    key = options.deciding(*words or (NUMBERS, FILES), **how)
    key |= {k: hashes.of_data(place) for k, place in options.deciding(CONTENT, **how).items()}
    for field, info in type(options).model_fields.items():
        if option_role(info) is Role.TASKS:
            files = places_in_option(getattr(options, field))
            key["questions"] = [hashes.of_data(place) for place in files]
    return {f"{name}.{k}": value for k, value in key.items() if value != []}


def resumable(output: Path) -> AbstractContextManager[None]:
    """Return a context that prints, after an interrupt, the folder of the finished stages."""
    folder = run_folder(output)
    remains = f"finished stages are kept in {folder}; run the same command to resume"
    return kept_after_interrupt(remains, partial(has_finished_step, folder))


class Stage(Step):
    """A stage of a run."""

    def __init__(self, work: RunContext) -> None:
        self.work = work
        self.run_folder = work.folder

    @property
    def starts_from(self) -> tuple[str, ...]:
        """Return the stages whose checkpoints decide this one.

        If one of them is done again, this stage is too.
        """
        return ()

    @abstractmethod
    def counts(self) -> JsonObject:
        """Return the estimated work, by the options alone: a sentence under `what`, then the
        numbers."""

    @abstractmethod
    def do(self) -> None:
        """Do the stage, and leave the files that `look` finds."""

    def make(self) -> None:
        """Do the stage, and log how long it took."""
        begun = time.monotonic()
        self.do()
        try:
            check_unchanged(self.work.base, "read by this run")
        except InputError:
            self.clear()  # the output mixes two models
            raise
        self.work.note(f"{self.name}: took {time.monotonic() - begun:.1f} s")

    def section(self) -> Flat:
        """Return the key of the section with this stage's name."""
        return section_key(self.name, getattr(self.work.recipe, self.name), self.work.hashes)


class CheckpointStage(Stage):
    """A stage that makes a checkpoint.

    After a choice of the method, its record holds the documents of the choice and of the verdict.
    """

    schema = 1

    @property
    def place(self) -> Path:
        """Return the path of the checkpoint."""
        return self.work.checkpoint(self.name)

    @abstractmethod
    def content(self) -> Flat:
        """Return the key that decides the checkpoint."""

    @abstractmethod
    def write(self) -> None:
        """Write the checkpoint."""

    @property
    def used(self) -> Any:
        """Return which documents a choice used."""
        choice = self.work.recipe.source.choice
        return choice and choice[USED]

    def key(self) -> Flat:
        """Return everything that decides the checkpoint of a stage, with the documents that a
        choice of the method used."""
        if self.used:
            return self.content() | {USED: digest(self.used)}
        return self.content()

    def look(self) -> Flat | None:
        """Return the digests of the checkpoint that the stage left, or None."""
        return self.work.checkpoint_digest(self.name)

    def do(self) -> None:
        """Write the stage's checkpoint, and record the documents that chose its method."""
        self.write()
        if self.used and (record := read_record(self.place)) is not None:
            known = joined_training(recorded_training(record), read_training_documents(self.used))
            replace_section(self.place, TRAINED_ON, known and known.to_json())

    def clear(self) -> None:
        """Delete the checkpoint of a stage, and the training's own folder next to it."""
        remove(run_folder(self.place))  # a training's own checkpoints, of other weights or settings
        remove_output(self.place)

    def tidy(self) -> None:
        """Delete the files that a kill left next to the checkpoint of a stage."""
        remove(run_folder(self.place))
        release(run_folder(self.place), self.place)
        recover(self.place)
