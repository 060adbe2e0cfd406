"""Define the steps of a run: each is done once, and done again if its key or its files changed.

OUT.run/stages/STEP/run.json  holds the step's key under "decides", and the digests of its files
                              under "files", wherever they are; nothing before it has finished
"""

import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

from ropext.base import guard
from ropext.base.atomic import os_errors
from ropext.base.errors import InputError
from ropext.base.jsontext import JsonObject, digest
from ropext.base.locks import release, run_folder
from ropext.base.narration import Say, kept_after_interrupt, no_messages
from ropext.base.staging import recover, remove_output
from ropext.base.workdir import (
    SCHEMA,
    STEPS,
    Flat,
    differences,
    first_of,
    remove,
    sealed,
    write_manifest,
)
from ropext.files.checkpoint.digests import check_unchanged
from ropext.files.checkpoint.provenance import TRAINED_ON, read_record, replace_section, versions
from ropext.models.processes import from_first, is_main
from ropext.options.fields import (
    CONTENT,
    FILES,
    NUMBERS,
    Options,
    Role,
    option_role,
    places_in_option,
)
from ropext.pipeline.run_context import USED, RunContext
from ropext.pipeline.run_digests import RunDigests
from ropext.results.overlap import joined_training, read_training_documents, recorded_training

VERSIONS = "versions"  # in a manifest, of the libraries


class Step(ABC):
    """A piece of a run that is done only once. `make` leaves the files that `look` finds, each file
    and folder whole or not at all.

    The run holds the lock, so no other process comes into the folder of the step.
    """

    name: ClassVar[str]
    schema: ClassVar[int]  # goes up if the same key gives another result
    everyone: ClassVar[bool] = False  # under accelerate launch all processes take part
    run_folder: Path

    @abstractmethod
    def key(self) -> Flat:
        """Return everything that decides the result of a step of a recipe, such as fit or evaluate,
        by name."""

    @abstractmethod
    def look(self) -> Flat | None:
        """Return the digests of the files that a step of a recipe wrote; None if one is missing or
        incomplete."""

    @abstractmethod
    def make(self) -> None:
        """Do the step of a recipe, such as fit or evaluate."""

    def clear(self) -> None:  # noqa: B027
        """Delete the files that another run of the recipe's step left."""

    def tidy(self) -> None:  # noqa: B027
        """Delete the files that a kill left next to a complete output of a recipe's step."""

    @cached_property
    def decides(self) -> Flat:
        """Return the key and schema of a recipe's step, as its manifest has them: computed once,
        since the key may need all weights and documents."""
        return {SCHEMA: self.schema, **self.key()}

    def finished_files(self) -> Flat | None:
        """Return the digests of the step's files if it need not run again: schema and key are the
        same, and the files are unchanged. Else return None.

        A step that has begun counts if all its files exist: each file gets its name in one step.
        The key of a step that has never begun is not computed: this could fetch and read all
        weights and documents.
        """
        manifest = _step_manifest(self.run_folder, self.name)
        if manifest is None or self._changed(manifest):
            return None
        seen = self.look()
        return seen if manifest.get(guard.FILES, seen) == seen else None

    def do_once(self, say: Say = no_messages, again: bool = False) -> bool:
        """Do the step of a recipe if it was not done, or if the user asked for it `again`. Return
        whether it was done now. Of several processes only the first computes the key, decides and
        writes; the others wait for it."""
        done = None
        if is_main() and not again:
            done = self.finished_files()
        done = from_first(done)  # a disk that is shared may show another process less
        if done is not None:
            if is_main() and self._is_half_done():
                with os_errors(_step_folder(self.run_folder, self.name)):
                    self.tidy()
                self._write_manifest(done)
            say(f"{self.name}: done before, skipped{self._newer_libraries()}")
            return False
        if is_main():
            self._begin(again, say)
        if is_main() or self.everyone:
            self.make()
        if is_main():
            self._write_manifest(self.look())
        from_first(None)
        return True

    def _changed(self, manifest: Flat) -> list[str]:
        """Return the names of the values in a step's manifest that are different now."""
        return differences(manifest["decides"], self.decides)

    def _newer_libraries(self) -> str:
        """Return which libraries changed since a recipe's step, such as fit, was done; ropext
        prints this, and does not repeat the step for it."""
        then = (_step_manifest(self.run_folder, self.name) or {}).get(VERSIONS, {})
        now = versions()
        other = list[str]()
        for name in differences(then, now):
            before = then.get(name) or "absent"
            other.append(f"{name} {before}, now {now.get(name) or 'absent'}")
        if not other:
            return ""
        return f" ({', '.join(other)}; to repeat it: --from {self.name})"

    def _is_half_done(self) -> bool:
        """Return whether this very step of a recipe has begun and not finished."""
        manifest = _step_manifest(self.run_folder, self.name)
        return manifest is not None and guard.FILES not in manifest and not self._changed(manifest)

    def _begin(self, is_asked: bool, say: Say) -> None:
        """Clear the files of another run of the recipe's step away, and note that this one has
        begun."""
        begun = self._manifest(None)  # it reads the inputs: a change after this line is noticed
        folder = _step_folder(self.run_folder, self.name)
        with os_errors(folder):
            if self._is_half_done() and not is_asked:
                say(f"{self.name}: resumes after an interrupt")
            else:
                say(f"{self.name}: {self._why(is_asked)}")
                self.clear()
            write_manifest(folder, begun)

    def _why(self, is_asked: bool) -> str:
        """Return why a recipe's step is done: it begins, the user asked for it, or something
        changed."""
        manifest = _step_manifest(self.run_folder, self.name)
        if manifest is None:
            return "begins"
        if is_asked:
            return "again, as asked"
        names = self._changed(manifest)
        if SCHEMA in names:
            return "again (this ropext does it in another way)"
        if names:
            return f"again (changed: {first_of(names)})"
        return "again, what it wrote is gone or was edited"

    def _write_manifest(self, files: Flat | None) -> None:
        """Write the manifest of a recipe's step into its folder, with its files if it has
        finished."""
        write_manifest(_step_folder(self.run_folder, self.name), self._manifest(files))

    def _manifest(self, files: Flat | None) -> Flat:
        """Return the manifest of a recipe's step, such as fit or evaluate; `files` is None until
        the step has finished."""
        manifest = {"command": _command_of(self.name), "decides": self.decides}
        manifest[VERSIONS] = versions()
        if files is not None:
            manifest[guard.FILES] = files
        return manifest


def _step_folder(run: Path, name: str) -> Path:
    """Return the folder of a recipe's step inside the folder of its run."""
    return run / STEPS / name


def _command_of(step: str) -> str:
    """Return the command that the manifest of a recipe's step records, such as `fit of a run`."""
    return f"{step} of a run"


def _step_manifest(run: Path, name: str) -> Flat | None:
    """Return the manifest of a step of a run; None if it is missing or unreadable, so that the step
    runs again."""
    try:
        manifest = sealed(_step_folder(run, name))
    except InputError:
        return None
    return manifest if manifest and manifest["command"] == _command_of(name) else None


@dataclass(frozen=True)
class StepRecord:
    """The record of one step of a run."""

    inputs: Flat  # its key
    outputs: Flat | None  # digests of its files; None if it has only begun


def step_record(run: Path, name: str) -> StepRecord | None:
    """Return the record of a step of a run, by its name; None if it has never begun."""
    manifest = _step_manifest(run, name)
    if manifest is None:
        return None
    inputs = {key: value for key, value in manifest["decides"].items() if key != SCHEMA}
    return StepRecord(inputs, manifest.get(guard.FILES))


def has_finished_step(run: Path) -> bool:
    """Return whether the run keeps the result of a recipe's step, which need not be computed
    again."""
    for folder in (run / STEPS).glob("*"):
        record = step_record(run, folder.name)
        if record is not None and record.outputs is not None:
            return True
    return False


def section_key(name: str, options: Options | None, digests: RunDigests, *words: str) -> Flat:
    """Return the options of a recipe's section that decide its result, by dotted key.

    Without `words` these are numbers and files. If an option names documents or files of questions,
    their digests decide.
    """
    if options is None:
        return {}
    how: dict[str, Any] = {"mode": "json", "by_alias": True, "exclude_none": True}
    key = options.deciding(*words or (NUMBERS, FILES), **how)
    key |= {k: digests.of_data(place) for k, place in options.deciding(CONTENT, **how).items()}
    for field, info in type(options).model_fields.items():
        if option_role(info) is Role.TASKS:
            files = places_in_option(getattr(options, field))
            key["questions"] = [digests.of_data(place) for place in files]
    return {f"{name}.{k}": value for k, value in key.items() if value != []}


def resumable_run(output: Path) -> AbstractContextManager[None]:
    """Return a context in which `run` does the stages of a recipe. After an interrupt its error
    names the folder of the finished ones."""
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
        """Return the stages of a recipe whose checkpoints decide this one.

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
        return section_key(self.name, getattr(self.work.recipe, self.name), self.work.digests)


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
