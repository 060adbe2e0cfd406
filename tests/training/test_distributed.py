"""Two processes on CPU, for real: DDP through the whole run, FSDP2 over the same model and loss.

accelerate launches FSDP on accelerators only; its own preparation of the model runs here on gloo.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_finetune import OPEN, ROOT
from tiny_llama import new_llama, write_tokenizer

import ropext
from ropext.base.errors import UsageError
from ropext.training import launch

pytestmark = pytest.mark.slow

# Ended by its second evaluation, which the first process finds worse and the second one better.
STOPPED = OPEN | {"eval_every": 2, "patience": 1}
SCRIPT = Path(__file__).with_name("two_processes.py")


def launched(config):
    """Return `accelerate launch` with a config that the package ships, for two processes."""
    words = ("--num_processes", "2", "--main_process_port", "0")
    start = (sys.executable, "-m", "accelerate.commands.launch", "--config_file")
    return [*start, str(launch.config(config)), *words]


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    """Write an extended checkpoint whose head has weights of its own."""
    base = tmp_path_factory.mktemp("untied") / "base"
    new_llama(tie_word_embeddings=False).save_pretrained(base)
    write_tokenizer(base)
    ropext.extend(str(base), base.parent / "extended", method="yarn", factor=4, no_verify=True)
    return base.parent / "extended"


@pytest.fixture(scope="module")
def two(extended, untied, stories, tmp_path_factory):
    """Run two processes; return the findings of each, and the folder of their run."""
    output = tmp_path_factory.mktemp("two") / "out"
    done = subprocess.run(
        [
            *launched("ddp"),
            *(str(SCRIPT), str(extended), str(untied), str(stories), str(output)),
            json.dumps(STOPPED),
        ],
        env=os.environ | {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(output.with_name(f"out-{rank}.json").read_text()) for rank in (0, 1)]
    return found, output


@pytest.fixture(scope="module")
def one(extended, stories, tmp_path_factory):
    """Run the same training in one process."""
    from trained import train

    from ropext.results import rules

    output, values = tmp_path_factory.mktemp("one") / "out", iter((3.0, 3.5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "far_loss", lambda *_: next(values))
        return train("finetune", extended, str(stories), output, **STOPPED), output


def test_ddp_really_runs_and_agrees_with_one_process(two, one):
    found, output = two
    for own in found:
        assert own["ddp"]["world"] == 2
        assert own["ddp"]["wrapper"] == "DistributedDataParallel"
        assert own["ddp"]["accelerate"] == "DistributedType.MULTI_CPU"
    alone, alone_output = one
    assert (alone.steps, alone.kept_step) == (4, 2)
    for mine, theirs in zip(alone.by_step, found[0]["ddp"]["losses"], strict=True):
        assert theirs["loss"] == pytest.approx(mine["loss"], abs=1e-5)
        assert theirs["grad_norm"] == pytest.approx(mine["grad_norm"], abs=1e-5)
    for mine, theirs in zip(alone.evaluations, found[1]["ddp"]["evaluations"], strict=True):
        assert theirs["tail_nll"] == pytest.approx(mine["tail_nll"], abs=1e-5)
    merged = load_file(output / "model.safetensors")
    for name, tensor in load_file(alone_output / "model.safetensors").items():
        assert torch.allclose(merged[name], tensor, atol=1e-5), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head", ["tied", "untied"])
def test_fsdp2_gives_the_losses_and_the_weights_of_one_process(two, head, dtype):
    first, second = (own["fsdp2"][f"{head} {dtype}"] for own in two[0])
    # In bfloat16 the halves of a batch round their sums each for itself, and AdamW's first steps
    # are as long for the smallest gradients as for the largest.
    close, apart = (1e-5, 1e-5) if dtype == "float32" else (1e-4, 0.05)
    for count, share in (("one", 1.0), ("both", 0.5)):
        for own in (first, second):
            assert own[count]["losses"] == pytest.approx(own["losses"], abs=close)
            assert own[count]["share"] == pytest.approx(share, abs=0.02)
        assert len(first[count]["losses"]) == 3
        assert first[count]["moved"] > 1
        assert first[count]["apart"] < apart
        # Only one process holds the weights until they are distributed.
        assert (first[count]["devices"], second[count]["devices"]) == (["cpu"], ["meta"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="FSDP2 would really run")
def test_fsdp2_on_a_cpu_is_refused_if_accelerate_would_turn_it_into_ddp(
    extended, stories, tmp_path
):
    words = ("--data", str(stories), "-o", str(tmp_path / "out"), "--steps", "2")
    done = subprocess.run(
        [*launched("fsdp2"), "-m", "ropext", "finetune", str(extended), *words],
        env=os.environ | {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "error: launched with FSDP on a CPU" in done.stderr
    assert not list(tmp_path.iterdir())


def test_accelerate_reads_the_shipped_configs():
    from accelerate.commands.config.config_args import load_config_from_file

    for name, kind in (("ddp", "MULTI_GPU"), ("fsdp2", "FSDP"), ("fsdp2_cp", "FSDP")):
        found = load_config_from_file(str(launch.config(name)))
        assert found.distributed_type == kind
        if kind == "FSDP":
            assert found.fsdp_config["fsdp_version"] == 2
    parallel = found.parallelism_config
    sizes = [parallel[f"parallelism_config_{name}_size"] for name in ("dp_shard", "cp")]
    assert found.num_processes == sizes[0] * sizes[1] == 8
    with pytest.raises(UsageError, match="ddp, fsdp2, fsdp2_cp"):
        launch.config("deepspeed")
