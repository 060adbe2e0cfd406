"""An evaluation as `ropext eval` prepares it, for tests that look into it."""

from ropext.base.narration import NOBODY
from ropext.evaluation.lineup import line_up
from ropext.evaluation.request import EvaluationRequest, prepare
from ropext.options.evaluate import Evaluate


def evaluation_of(model, **options):
    """Prepare an evaluation as far as possible without loading weights."""
    asked = Evaluate(**options)
    return prepare(asked, line_up(str(model), None, asked), needs_target=True)


def costs_of(model, **options):
    """Return the counts of a dry run."""
    with EvaluationRequest(str(model), Evaluate(**options)).prepared(None, NOBODY) as job:
        return job.counts()
