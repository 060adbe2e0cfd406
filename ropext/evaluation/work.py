"""Do units of work: shared out over processes, resumable, interruptible between any two."""

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from ropext.errors import Interrupted, NothingKept
from ropext.evaluation.reading import Unit, complete
from ropext.narration import Show

POLL_SECONDS = 0.2


def processes() -> tuple[int, int]:
    """(rank, how many) as `accelerate launch` and torchrun set them; no process group is needed,
    since units are independent and every process writes its own files."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Worker:
    """This process's share of the units; `total` are the forward tokens of all processes."""

    def __init__(
        self,
        total: int,
        show: Show,
        stop: Callable[[], bool],
        kept_in: Path | None,
        used: Callable[[str, float], None],  # told what the first unit took, in seconds
    ) -> None:
        self.rank, self.world = processes()
        self.total, self.done, self.show = total // self.world, 0, show
        self.stop, self.kept_in, self.used = stop, kept_in, used
        self.finished, self.resumed, self.begun = 0, 0, time.time()
        self.units: list[Path] = []

    def do(self, units: Iterable[Unit]) -> None:
        """Every `world`-th unit, those excepted whose file is there already."""
        for number, unit in enumerate(units):
            self.units.append(unit.path)
            if unit.path.exists():
                # What another process finishes meanwhile was not found here.
                self.resumed += unit.path.stat().st_mtime < self.begun
                self.total -= unit.tokens // self.world
            elif number % self.world == self.rank:
                if self.stop():
                    raise self.stopped()
                if not self.done:  # the clock of the time left begins
                    self.show(0, self.total, unit.what)
                begun = time.monotonic()
                complete(unit)
                self.finished += 1
                if self.finished == 1 and self.rank == 0:
                    self.used(f"the first unit ({unit.what})", time.monotonic() - begun)
                self.done += unit.tokens
                self.total = max(self.total, self.done)
                self.show(self.done, self.total, unit.what)

    def stopped(self) -> Interrupted:
        """The error of an interrupt, with what was kept."""
        kept = self.finished + self.resumed
        if self.kept_in is None or not kept:
            return NothingKept("interrupted; nothing was kept (-o RUN keeps what is finished)")
        return Interrupted(
            f"interrupted; {kept} finished pieces are kept in {self.kept_in}: run the same command "
            "again to go on from there"
        )

    def wait_for_others(self) -> None:
        """Until the other processes have written their units."""
        missing = self.units if self.world > 1 else []
        while missing := [path for path in missing if not path.exists()]:
            if self.stop():
                raise self.stopped()
            time.sleep(POLL_SECONDS)


def wait_for(path: Path, ready: Callable[[], bool], stop: Callable[[], bool]) -> None:
    """Until the first process has prepared the run directory."""
    while not (path.exists() and ready()):
        if stop():
            raise NothingKept("interrupted before anything was finished")
        time.sleep(POLL_SECONDS)
