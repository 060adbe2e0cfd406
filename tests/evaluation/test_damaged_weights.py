"""A weight file that a broken download left short: both ways of loading say so in a sentence."""

import pytest
from tiny_checkpoints import write_checkpoint

from ropext.base.errors import InputError
from ropext.files.checkpoint import open_snapshot
from ropext.models.load import load_model, loading_of
from ropext.options.evaluate import Evaluate as EvaluationOptions
from ropext.options.training import Finetune
from ropext.training import models


@pytest.fixture
def short(tmp_path):
    model = write_checkpoint(tmp_path / "model")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return open_snapshot(str(model))


def test_eval_names_damaged_weights(short):
    with pytest.raises(InputError, match="cannot be loaded as a causal language model"):
        load_model(short, loading_of(EvaluationOptions(tasks=("passkey",))))


def test_a_training_names_damaged_weights(short):
    with pytest.raises(InputError, match="cannot be loaded as a causal language model"):
        models.load_to_train(short, Finetune(device="cpu"))
