"""Two runs on one output: the second is refused, and told who holds it."""

import os
import socket

import pytest
from reliability.commands import prepare

import ropext
from ropext.base.errors import OutputLocked
from ropext.base.locks import locked

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("two at once"))


def extended(inputs, out):
    ropext.extend(str(inputs / "base"), out, method="yarn", factor=2, no_verify=True, force=True)


def evaluated(inputs, out):
    from ropext.pipeline.public import evaluate

    evaluate(str(inputs / "ext"), out, data=str(inputs / "eval.jsonl"), lengths=(64,))


def finetuned(inputs, out):
    from trained import train

    train(
        "finetune", str(inputs / "ext"), str(inputs / "train.jsonl"), out, steps=1, eval_documents=0
    )


def ran(inputs, out):
    ropext.run(inputs / "recipe.yaml", out)


@pytest.mark.parametrize(
    ("command", "name"),
    [(extended, "out"), (evaluated, "out"), (finetuned, "out.run"), (ran, "out.run")],
)
def test_the_second_learns_who_holds_the_output(inputs, tmp_path, command, name):
    real = tmp_path / name
    with locked(real, real):
        with pytest.raises(OutputLocked) as refused:
            command(inputs, tmp_path / "out")
        # Only the lock exists.
        assert [path.name for path in tmp_path.iterdir()] == [f".{name}.ropext-lock"]
    assert f"process {os.getpid()} on {socket.gethostname()}" in str(refused.value)
    command(inputs, tmp_path / "out")  # and as soon as it is let go, it runs
    assert (tmp_path / "out").is_dir()
