"""Trainings as tests ask for them: options by their names, in one call."""

import os
import signal
from contextlib import contextmanager

import pytest
from command_line import Forked

from ropext.base.narration import NOBODY
from ropext.options.fields import documents_as_place
from ropext.options.training import Finetune, Fit
from ropext.training import trainer
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


def kill_at_step(number, call, folder):
    """Train in another process, and kill it before a step; keep what it prints in a folder."""
    step = trainer._Trainer.training_step

    def dies(self, *args, **kwargs):
        if self.state.global_step == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer._Trainer, "training_step", dies)
        assert Forked(call, folder).wait()[0] == -signal.SIGKILL
