"""Trainings as tests ask for them: options by their names, in one call."""

from contextlib import contextmanager

from ropext.base.narration import NOBODY
from ropext.options.fields import documents_as_place
from ropext.options.training import Finetune, Fit
from ropext.training.request import TrainingRequest


@contextmanager
def asked(kind, model, data, output, call=NOBODY, *, revision=None, **options):
    """Yield a job of the kind "fit" or "finetune"."""
    if kind == "fit":
        request = TrainingRequest(str(model), documents_as_place(data), Fit(**options), revision)
    else:
        request = TrainingRequest(str(model), documents_as_place(data), Finetune(**options))
    with request.prepared(output, call) as job:
        yield job


def train(kind, model, data, output, call=NOBODY, **options):
    with asked(kind, model, data, output, call, **options) as job:
        return job.make(output, call)


def count_training(kind, model, data, output=None, call=NOBODY, **options):
    with asked(kind, model, data, output, call, **options) as job:
        if output is not None:
            job.check(output, call)
        return job.counts()
