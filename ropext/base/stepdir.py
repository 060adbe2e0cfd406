"""The folder of one step of a run: what the step left there, and whether it is to be done again.

OUT.run/stages/STEP/run.json  under "decides" the key of the step, under "files" the digests of
                              what it left, wherever that lies; nothing before it is finished
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Self

from ropext.base import guard
from ropext.base.atomic import os_errors
from ropext.base.errors import InputError
from ropext.base.narration import Say, silent
from ropext.base.workdir import SCHEMA, STEPS, Flat, Workdir, differences, first_of, sealed

VERSIONS = "versions"  # in a manifest, of the libraries


class Step(ABC):
    """A piece of a run that is not done twice: `make` leaves what `look` finds, each file and
    folder whole or not at all."""

    name: ClassVar[str]
    schema: ClassVar[int]  # goes up when what is done with the same key changes
    everyone: ClassVar[bool] = False  # under accelerate launch all processes take part

    @abstractmethod
    def key(self) -> Flat:
        """What decides its result, by name."""

    @abstractmethod
    def look(self) -> Flat | None:
        """Digests of what it left, None where that is not whole."""

    @abstractmethod
    def make(self) -> None:
        """Do it."""

    def clear(self) -> None:  # noqa: B027
        """Delete what another run of it left."""

    def tidy(self) -> None:  # noqa: B027
        """Delete what a kill left beside an output that is whole."""


@dataclass(frozen=True)
class StepDir(Workdir):
    """The folder of a step, in that of its run, which is claimed: no other process comes here. It
    holds a manifest alone, with what the step left, wherever that lies."""

    step: Step = field(kw_only=True)

    takes_lock: ClassVar[bool] = False

    @classmethod
    def of(cls, step: Step, run: Path, versions: Mapping[str, str] = {}) -> Self:
        """The folder of a step as it is to be done now; `versions` are those of the libraries."""
        decides = {SCHEMA: step.schema, **step.key()}
        about = {VERSIONS: versions}
        return cls(_step_folder(run, step.name), _command_of(step.name), decides, about, step=step)

    def left(self) -> Flat | None:
        """What the step left, where it need not be done again: the same schema and key, and what it
        wrote as it was left.

        A step that was begun counts when all is there: each file gets its name in one step.
        """
        manifest = _step_manifest(self)
        if manifest is None or self._other(manifest):
            return None
        seen = self.step.look()
        return seen if manifest.get(guard.FILES, seen) == seen else None

    def do(
        self,
        say: Say = silent,
        again: bool = False,
        rank: int = 0,
        from_first: Callable[[Flat | None], Flat | None] = lambda value: value,
    ) -> bool:
        """Do the step if it was not done, or where it is asked for `again`; whether it was done
        now. Of several processes the first decides that and writes: `from_first` waits for all, and
        gives what the first one has."""
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
        """Which libraries changed since; said, not silently a reason to do a step again."""
        then = (_step_manifest(self) or {}).get(VERSIONS, {})
        now = self.about[VERSIONS]
        other = list[str]()
        for name in differences(then, now):
            before = then.get(name) or "absent"
            other.append(f"{name} {before}, now {now.get(name) or 'absent'}")
        if not other:
            return ""
        return f" ({', '.join(other)}; --from {self.step.name} does it again)"

    def _is_half_done(self) -> bool:
        """Whether this very step was begun, and not finished."""
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
        """Why it does not go on from what is there."""
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
        """What is there is gone on with."""

    def _finish(self, say: Say) -> None:
        self._write_manifest(self.step.look(), {})


def _step_folder(run: Path, name: str) -> Path:
    return run / STEPS / name


def _command_of(step: str) -> str:
    """What a step's manifest says is done there."""
    return f"{step} of a run"


def _step_manifest(place: Workdir) -> Flat | None:
    """None where there is none, or one that cannot be read: then the step is done again."""
    try:
        manifest = sealed(place.folder)
    except InputError:
        return None
    return manifest if manifest and manifest["command"] == place.command else None


@dataclass(frozen=True)
class StepRecord:
    """What is known of a step of a run."""

    inputs: Flat  # its key
    outputs: Flat | None  # what it left; None where it was begun alone


def step_record(run: Path, name: str) -> StepRecord | None:
    """What is known of a step of a run, by its name; None where it was never begun."""
    place = Workdir(_step_folder(run, name), _command_of(name), {})
    manifest = _step_manifest(place)
    if manifest is None:
        return None
    inputs = {key: value for key, value in manifest["decides"].items() if key != SCHEMA}
    return StepRecord(inputs, manifest.get(guard.FILES))


def left_by(step: Step, run: Path) -> Flat | None:
    """What a step left, where it need not be done again. The key of one that was never begun is not
    asked for: all weights and documents may be fetched and read for it."""
    if step_record(run, step.name) is None:
        return None
    return StepDir.of(step, run).left()


def has_finished_step(run: Path) -> bool:
    """Whether something is kept that need not be done again."""
    for folder in (run / STEPS).glob("*"):
        record = step_record(run, folder.name)
        if record is not None and record.outputs is not None:
            return True
    return False
