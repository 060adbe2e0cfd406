"""Gates on a server's shares: `found@32k < 0.9`."""

from ropext.results.gates import Metrics
from ropext.results.retrieval import FOUND
from ropext.tasks import RULER, THIRTEEN


class PortMetrics(Metrics):
    """What an evaluation of a server is going to measure."""

    def metrics(self, variant: str | None, run: str | None = None) -> tuple[list[str], list[str]]:
        """Name what is measured at every length: the share of each task, and of all together."""
        tasks = [*self.options.tasks]
        at = [*tasks, FOUND]
        if len({*tasks} & {*THIRTEEN}) > 1:
            at.append(RULER)
        return at, []
