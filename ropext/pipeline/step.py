"""Define a step of a run: it is done once, and done again if its key or its files changed.

OUT.run/stages/STEP/run.json  holds the step's key under "decides", and the digests of its files
                              under "files", wherever they are; nothing before it has finished
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from ropext.base import guard
from ropext.base.atomic import os_errors
from ropext.base.errors import InputError
from ropext.base.narration import Say, no_messages
from ropext.base.workdir import (
    SCHEMA,
    STEPS,
    Flat,
    differences,
    first_of,
    sealed,
    write_manifest,
)
from ropext.files.checkpoint.provenance import versions
from ropext.models.processes import from_first, is_main

VERSIONS = "versions"  # in a manifest, of the libraries


class Step(ABC):
    """A piece of a run that is done only once: `make` leaves the files that `look` finds, each file
    and folder whole or not at all.

    The run holds the lock, so no other process comes into the folder of the step.
    """

    name: ClassVar[str]
    schema: ClassVar[int]  # goes up if the same key gives another result
    everyone: ClassVar[bool] = False  # under accelerate launch all processes take part
    run_folder: Path

    @abstractmethod
    def key(self) -> Flat:
        """Return everything that decides the step's result, by name."""

    @abstractmethod
    def look(self) -> Flat | None:
        """Return the digests of the step's files; None if one is missing or incomplete."""

    @abstractmethod
    def make(self) -> None:
        """Do the step."""

    def clear(self) -> None:  # noqa: B027
        """Delete the files that another run of the step left."""

    def tidy(self) -> None:  # noqa: B027
        """Delete the files that a kill left next to a complete output of the step."""

    @cached_property
    def decides(self) -> Flat:
        """Return the step's key and schema, as its manifest has them: computed once, since the key
        may need all weights and documents."""
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
        """Do the step if it was not done, or if the user asked for it `again`; return whether it
        was done now. Of several processes only the first computes the key, decides and writes; the
        others wait for it."""
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
        """Return which libraries changed since the step was done; ropext prints this, and does not
        repeat the step for it."""
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
        """Return whether this very step has begun and not finished."""
        manifest = _step_manifest(self.run_folder, self.name)
        return manifest is not None and guard.FILES not in manifest and not self._changed(manifest)

    def _begin(self, is_asked: bool, say: Say) -> None:
        """Clear the files of another run of the step away, and note that this one has begun."""
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
        """Return why the step is done: it begins, the user asked for it, or something changed."""
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
        """Write the manifest of the step into its folder, with its files if it has finished."""
        write_manifest(_step_folder(self.run_folder, self.name), self._manifest(files))

    def _manifest(self, files: Flat | None) -> Flat:
        """Return the content of the step's manifest; `files` is None until it has finished."""
        manifest = {"command": _command_of(self.name), "decides": self.decides}
        manifest[VERSIONS] = versions()
        if files is not None:
            manifest[guard.FILES] = files
        return manifest


def _step_folder(run: Path, name: str) -> Path:
    """Return the folder of a step inside the folder of its run."""
    return run / STEPS / name


def _command_of(step: str) -> str:
    """Return the command that a step's manifest records."""
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
    """Return whether the run keeps a result that need not be computed again."""
    for folder in (run / STEPS).glob("*"):
        record = step_record(run, folder.name)
        if record is not None and record.outputs is not None:
            return True
    return False
