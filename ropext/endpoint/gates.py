"""Check gates on a server's shares: `found@32k < 0.9`."""

from dataclasses import dataclass

from ropext.results import BASE
from ropext.results.gates import Metrics
from ropext.results.retrieval import FOUND
from ropext.tasks import RULER, THIRTEEN


@dataclass(frozen=True)
class PortMetrics(Metrics):
    """The metrics that an evaluation of a server will have."""

    reads_text: bool = False

    def metrics(self, variant: str | None, run: str | None = None) -> tuple[list[str], list[str]]:
        """Return the metrics that an evaluation of a server measures at every length: the share of
        each task, and of all together."""
        tasks = self.options.tasks
        at = list[str]()
        whole = list[str]()
        if self.reads_text:
            self._text_metrics(variant, run, at, whole)
        if BASE in (variant, run):  # the base gets no questions
            return at, whole
        at += tasks
        at.append(FOUND)
        if len(set(tasks).intersection(THIRTEEN)) > 1:
            at.append(RULER)
        return at, whole
