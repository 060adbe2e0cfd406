"""What the stages of a run have in common: what decides one, what it leaves, and how it is done."""

import time
from abc import abstractmethod
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ropext.base.errors import InputError
from ropext.base.jsontext import JsonObject, digest
from ropext.base.narration import kept_after_interrupt
from ropext.base.stepdir import Step, has_finished_step
from ropext.base.workdir import Flat, beside, release, remove
from ropext.files.checkpoint.provenance import TRAINED_ON, read_record, rewrite
from ropext.files.checkpoint.staging import recover, remove_output
from ropext.files.checkpoint.unchanged import check_unchanged
from ropext.options.fields import CONTENT, FILES, NUMBERS, Options
from ropext.pipeline.hashes import Hashes
from ropext.pipeline.work import USED, Work
from ropext.results.overlap import both, from_json, trained_in


def section_key(name: str, options: Options | None, hashes: Hashes, *words: str) -> Flat:
    """What a section decides (if not said otherwise numbers and files), by dotted key; of what it
    names the content."""
    if options is None:
        return {}
    how: dict[str, Any] = {"mode": "json", "by_alias": True, "exclude_none": True}
    key = options.deciding(*words or (NUMBERS, FILES), **how)
    key |= {k: hashes.of_data(place) for k, place in options.deciding(CONTENT, **how).items()}
    return {f"{name}.{k}": value for k, value in key.items() if value != []}


def resumable(output: Path) -> AbstractContextManager[None]:
    """Say of an interrupt where finished stages are kept."""
    folder = beside(output)
    remains = f"finished stages are kept in {folder}; run the same command to resume"
    return kept_after_interrupt(remains, partial(has_finished_step, folder))


class Stage(Step):
    """A stage of a run."""

    def __init__(self, work: Work) -> None:
        self.work = work

    @property
    def starts_from(self) -> tuple[str, ...]:
        """Name the stages whose checkpoints decide this one: if one of them is done again, so is
        this one."""
        return ()

    @abstractmethod
    def counts(self) -> JsonObject:
        """Count what it takes, by the options alone: a sentence under `what`, the numbers behind
        it."""

    @abstractmethod
    def do(self) -> None:
        """Do it, and leave what `look` finds."""

    def make(self) -> None:
        """Do it, and log how long it took."""
        begun = time.monotonic()
        self.do()
        try:
            check_unchanged(self.work.base, "read by this run")
        except InputError:
            self.clear()  # what was made of two models in part
            raise
        self.work.note(f"{self.name}: took {time.monotonic() - begun:.1f} s")

    def section(self) -> Flat:
        """What the section of this name decides."""
        return section_key(self.name, getattr(self.work.recipe, self.name), self.work.hashes)


class CheckpointStage(Stage):
    """A stage that makes a checkpoint. After a choice of the method its record holds which
    documents chose, and which will give the verdict."""

    schema = 1

    @property
    def place(self) -> Path:
        """Where its checkpoint is."""
        return self.work.checkpoint(self.name)

    @abstractmethod
    def content(self) -> Flat:
        """What decides the checkpoint."""

    @abstractmethod
    def write(self) -> None:
        """Make it."""

    @property
    def used(self) -> Any:
        """Which documents a choice used."""
        choice = self.work.recipe.source.choice
        return choice and choice[USED]

    def key(self) -> Flat:
        if self.used:
            return self.content() | {USED: digest(self.used)}
        return self.content()

    def look(self) -> Flat | None:
        return self.work.left(self.name)

    def do(self) -> None:
        self.write()
        if self.used and (record := read_record(self.place)) is not None:
            known = both(trained_in(record), from_json(self.used))
            more = dict(record.more) | {TRAINED_ON: known and known.to_json()}
            rewrite(replace(record, more=more), self.place)

    def clear(self) -> None:
        remove(beside(self.place))  # a training's own checkpoints, of other weights or settings
        remove_output(self.place)

    def tidy(self) -> None:
        remove(beside(self.place))
        release(beside(self.place), self.place)
        recover(self.place)
