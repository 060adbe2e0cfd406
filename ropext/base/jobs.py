"""Define a job: work that is prepared once, then counted or done."""

from pathlib import Path
from typing import Protocol, TypeVar

from ropext.base.narration import Call

Counts = TypeVar("Counts", covariant=True)
Result = TypeVar("Result", covariant=True)


class Job(Protocol[Counts, Result]):
    """Prepared work: its inputs were opened, planned, read and checked. No weight was loaded."""

    def check(self, output: Path, call: Call) -> None:
        """Refuse at once an output path that the job's `make` would refuse late, and change
        nothing."""

    def counts(self) -> Counts:
        """Count the cost of the job for --dry-run."""

    def make(self, output: Path, call: Call) -> Result:
        """Do the job, or the part that an earlier call did not finish."""


def counted(job: Job[Counts, Result], output: Path | None, call: Call) -> Counts:
    """Return the counts that --dry-run shows of any command's job. Refuse an output path that the
    job would refuse."""
    if output is not None:
        job.check(output, call)
    return job.counts()
