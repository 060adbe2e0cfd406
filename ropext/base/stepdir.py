"""Manage the folder of one step of a run: its files, and whether it must run again.

OUT.run/stages/STEP/run.json  holds the step's key under "decides", and the digests of its files
                              under "files", wherever they are; nothing before it has finished
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Self

from ropext.base import guard
from ropext.base.atomic import os_errors
from ropext.base.errors import InputError
from ropext.base.narration import Say, no_messages
from ropext.base.workdir import SCHEMA, STEPS, Flat, Workdir, differences, first_of, sealed

VERSIONS = "versions"  # in a manifest, of the libraries


class Step(ABC):
    """A piece of a run that is done only once: `make` leaves the files that `look` finds, each file
    and folder whole or not at all."""

    name: ClassVar[str]
    schema: ClassVar[int]  # goes up if the same key gives another result
    everyone: ClassVar[bool] = False  # under accelerate launch all processes take part

    @abstractmethod
    def key(self) -> Flat:
        """Everything that decides the step's result, by name."""

    @abstractmethod
    def look(self) -> Flat | None:
        """Return the digests of the step's files; None if one is missing or incomplete."""

    @abstractmethod
    def make(self) -> None:
        """Do the step."""

    def clear(self) -> None:  # noqa: B027
        """Delete the files that another run of the step left."""

    def tidy(self) -> None:  # noqa: B027
        """Delete the files that a kill left next to a complete output."""


@dataclass(frozen=True)
class StepDir(Workdir):
    """The folder of a step inside its run's folder. The run holds the lock, so no other process
    comes here.

    The folder holds only a manifest, which lists the step's files wherever they are.
    """

    step: Step = field(kw_only=True)

    takes_lock: ClassVar[bool] = False

    @classmethod
    def of(cls, step: Step, run: Path, versions: Mapping[str, str] = {}) -> Self:
        """Return the folder of a step that is to be done now; `versions` are the versions of the
        libraries."""
        decides = {SCHEMA: step.schema, **step.key()}
        about = {VERSIONS: versions}
        return cls(_step_folder(run, step.name), _command_of(step.name), decides, about, step=step)

    def left(self) -> Flat | None:
        """Return the digests of the step's files if it need not run again: schema and key are the
        same, and the files are unchanged. Else return None.

        A step that has begun counts if all its files exist: each file gets its name in one step.
        """
        manifest = _step_manifest(self)
        if manifest is None or self._other(manifest):
            return None
        seen = self.step.look()
        return seen if manifest.get(guard.FILES, seen) == seen else None

    def do(
        self,
        say: Say = no_messages,
        again: bool = False,
        rank: int = 0,
        from_first: Callable[[Flat | None], Flat | None] = lambda value: value,
    ) -> bool:
        """Do the step if it was not done, or if the user asked for it `again`; return whether it
        was done now.

        Of several processes the first one decides and writes: `from_first` waits for all, and gives
        them its value.
        """
        left = None
        if rank == 0 and not again:
            left = self.left()
        left = from_first(left)  # a disk that is shared may show another process less
        if left is not None:
            if rank == 0 and self._is_half_done():
                with os_errors(self.folder):
                    self.step.tidy()
                self._write_manifest(left, {})
            say(f"{self.step.name}: done before, skipped{self._hint()}")
            return False
        with self.claimed(again, rank, say=say):
            if rank == 0 or self.step.everyone:
                self.step.make()
        from_first(None)
        return True

    def _hint(self) -> str:
        """Return which libraries changed since; ropext prints this, and does not repeat the step
        for it."""
        then = (_step_manifest(self) or {}).get(VERSIONS, {})
        now = self.about[VERSIONS]
        other = list[str]()
        for name in differences(then, now):
            before = then.get(name) or "absent"
            other.append(f"{name} {before}, now {now.get(name) or 'absent'}")
        if not other:
            return ""
        return f" ({', '.join(other)}; to repeat it: --from {self.step.name})"

    def _is_half_done(self) -> bool:
        """Return whether this very step has begun and not finished."""
        manifest = _step_manifest(self)
        return manifest is not None and guard.FILES not in manifest and not self._other(manifest)

    def _begin(self, force: bool | None, say: Say) -> None:
        name = self.step.name
        if self._is_half_done() and not force:
            say(f"{name}: resumes after an interrupt")
        else:
            say(f"{name}: {self._why(force)}")
            self.step.clear()
        self._write_manifest(None, {})

    def _why(self, is_asked: bool | None) -> str:
        """Return what happens to the step and why: it begins, or runs again."""
        manifest = _step_manifest(self)
        if manifest is None:
            return "begins"
        if is_asked:
            return "again, as asked"
        names = self._other(manifest)
        if SCHEMA in names:
            return "again (this ropext does it in another way)"
        if names:
            return f"again (changed: {first_of(names)})"
        return "again, what it wrote is gone or was edited"

    def _give_up(self) -> None:
        """Keep the files of the step; the next call resumes from them."""

    def _finish(self, say: Say) -> None:
        self._write_manifest(self.step.look(), {})


def _step_folder(run: Path, name: str) -> Path:
    return run / STEPS / name


def _command_of(step: str) -> str:
    """Return the command that a step's manifest records."""
    return f"{step} of a run"


def _step_manifest(place: Workdir) -> Flat | None:
    """Return the manifest of a step; None if it is missing or unreadable, so that the step runs
    again."""
    try:
        manifest = sealed(place.folder)
    except InputError:
        return None
    return manifest if manifest and manifest["command"] == place.command else None


@dataclass(frozen=True)
class StepRecord:
    """The record of one step of a run."""

    inputs: Flat  # its key
    outputs: Flat | None  # digests of its files; None if it has only begun


def step_record(run: Path, name: str) -> StepRecord | None:
    """Return the record of a step of a run, by its name; None if it has never begun."""
    place = Workdir(_step_folder(run, name), _command_of(name), {})
    manifest = _step_manifest(place)
    if manifest is None:
        return None
    inputs = {key: value for key, value in manifest["decides"].items() if key != SCHEMA}
    return StepRecord(inputs, manifest.get(guard.FILES))


def files_of_step(step: Step, run: Path) -> Flat | None:
    """Return the digests of the files that a step left, if it need not run again.

    Do not compute the key of a step that has never begun: this could fetch and read all weights and
    documents.
    """
    if step_record(run, step.name) is None:
        return None
    return StepDir.of(step, run).left()


def has_finished_step(run: Path) -> bool:
    """Return whether the run keeps a result that need not be computed again."""
    for folder in (run / STEPS).glob("*"):
        record = step_record(run, folder.name)
        if record is not None and record.outputs is not None:
            return True
    return False
