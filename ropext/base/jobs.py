"""A piece of work: prepared once, then counted or done."""

from pathlib import Path
from typing import Protocol, TypeVar

from ropext.base.narration import Call

Counts = TypeVar("Counts", covariant=True)
Result = TypeVar("Result", covariant=True)


class Job(Protocol[Counts, Result]):
    """Work that is prepared: what decides it was opened, planned and read, and what is wrong with
    it refused. No weight was loaded."""

    def check(self, output: Path, call: Call) -> None:
        """Refuse at once what `make` would refuse late, and change nothing."""

    def counts(self) -> Counts:
        """Count what it takes."""

    def make(self, output: Path, call: Call) -> Result:
        """Do it, or what an earlier call left of it to do."""


def counted(job: Job[Counts, Result], output: Path | None, call: Call) -> Counts:
    """Return what --dry-run shows of a job; an output that it would refuse is refused."""
    if output is not None:
        job.check(output, call)
    return job.counts()
