"""Two processes on CPU, for real: DDP through the whole run, FSDP2 over the same model and loss.

accelerate turns FSDP2 on CPU into DDP without a word, so FSDP2 is tested with torch's fully_shard.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_finetune import ROOT, RUN

from ropext.errors import UsageError
from ropext.training import launch

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("two_processes.py")


def launched(config):
    """`accelerate launch` with a config that the package ships, for two processes."""
    words = ("--num_processes", "2", "--main_process_port", "0")
    start = (sys.executable, "-m", "accelerate.commands.launch", "--config_file")
    return [*start, str(launch.config(config)), *words]


@pytest.fixture(scope="module")
def two(extended, stories, tmp_path_factory):
    """What each of two processes saw, and where their run lies."""
    output = tmp_path_factory.mktemp("two") / "out"
    done = subprocess.run(
        [
            *launched("ddp"),
            *(str(SCRIPT), str(extended), str(stories), str(output), json.dumps(RUN)),
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
    """The same run in one process."""
    from ropext.training import run_finetune

    output = tmp_path_factory.mktemp("one") / "out"
    return run_finetune(extended, str(stories), output, **RUN), output


def test_ddp_really_runs_and_agrees_with_one_process(two, one):
    found, output = two
    for own in found:
        assert own["ddp"]["world"] == 2
        assert own["ddp"]["wrapper"] == "DistributedDataParallel"
        assert own["ddp"]["accelerate"] == "DistributedType.MULTI_CPU"
    alone, alone_output = one
    for mine, theirs in zip(alone.losses, found[0]["ddp"]["losses"], strict=True):
        assert theirs["loss"] == pytest.approx(mine["loss"], abs=1e-5)
        assert theirs["grad_norm"] == pytest.approx(mine["grad_norm"], abs=1e-5)
    for mine, theirs in zip(alone.evaluations, found[1]["ddp"]["evaluations"], strict=True):
        assert theirs["tail_nll"] == pytest.approx(mine["tail_nll"], abs=1e-5)
    merged = load_file(output / "model.safetensors")
    for name, tensor in load_file(alone_output / "model.safetensors").items():
        assert torch.allclose(merged[name], tensor, atol=1e-5), name


def test_fsdp2_gives_the_loss_and_gradients_of_one_process(two):
    for own in two[0]:
        fsdp2 = own["fsdp2"]
        assert fsdp2["shared_loss"] == pytest.approx(fsdp2["loss"], abs=1e-5)
        assert fsdp2["compared"] == 2 * 7 * 2
        assert fsdp2["worst"] < 1e-5
        assert fsdp2["largest"] > 1e-3
        assert fsdp2["local_share"] == pytest.approx(0.5, abs=0.02)


@pytest.mark.skipif(torch.cuda.is_available(), reason="FSDP2 would really run")
def test_fsdp2_on_a_cpu_is_refused_where_accelerate_would_make_ddp_of_it(
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
    assert "error: launched with FSDP, but on a CPU" in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_shipped_configs_are_what_accelerate_reads():
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
