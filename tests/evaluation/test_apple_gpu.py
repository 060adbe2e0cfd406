"""`--device mps`: simulated (see apple_gpu.py); nobody has run it on Apple's GPU."""

import json
import re

import numpy as np
import pytest
import torch
from apple_gpu import AppleGpu
from command_line import run
from torch.overrides import _pop_mode_temporarily
from torch.utils._pytree import tree_flatten

from ropext.base.errors import Stopped, UsageError
from ropext.models.load import device_of, free_memory, load_model, memory_errors, out_of_memory
from ropext.options.training import Finetune
from ropext.training import models

WORDS = ("--data", "ropext://held-out", "--max-docs", "1", "--lengths", "128,512", "--tasks")
WORDS += ("passkey,mkey", "--items", "1", "--json")


@pytest.fixture
def memory(monkeypatch):
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 6 << 30)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 5 << 30)


def test_the_mps_substitute_has_no_float64_and_does_not_mix():
    there = torch.ones(3)
    with AppleGpu():
        assert there.device.type == "mps"
        assert there.cpu().device.type == "cpu"
        assert there.cpu().double().sum() == 3
        for wrong in (there.double, lambda: torch.zeros(2, dtype=torch.float64, device="mps")):
            with pytest.raises(TypeError, match="float64"):
                wrong()
        with pytest.raises(RuntimeError, match="one device"):
            there + torch.ones(3)
        assert (there + torch.ones(3).to("mps")).device.type == "mps"


def evaluated(folder, capsys):
    command = ("eval", "ropext://demo", "--method", "yarn,self-extend", "--factor", "2", *WORDS)
    code, heard = run(*command, "-o", str(folder), capsys=capsys)
    assert code == 0, heard.err
    losses = {path.relative_to(folder): np.load(path) for path in folder.rglob("*.npy")}
    return json.loads(heard.out), losses


def test_an_evaluation_on_the_device_equals_the_one_on_a_cpu(tmp_path, monkeypatch, capsys, memory):
    right, losses = evaluated(tmp_path / "cpu", capsys)

    def loaded(*words):
        with _pop_mode_temporarily():  # a tensor read from the disk is there at once
            return load_model(*words)

    for room in ("models.load", "evaluation.evaluation"):
        monkeypatch.setattr(f"ropext.{room}.device_of", lambda options: "cpu")
    monkeypatch.setattr("ropext.evaluation.evaluation.load_model", loaded)
    with AppleGpu():
        found, there = evaluated(tmp_path / "mps", capsys)
    assert losses
    assert losses.keys() == there.keys()
    for name, array in losses.items():  # Self-Extend takes another way if there is no CPU
        np.testing.assert_allclose(there[name], array, rtol=1e-5, atol=1e-5)
    tables = [tree_flatten(said["variants"])[0] for said in (right, found)]
    for own, other in zip(*tables, strict=True):
        assert other == (pytest.approx(own, rel=1e-4, abs=1e-5) if type(own) is float else own)


def test_free_memory_of_mps_is_at_most_the_machines(memory):
    left = free_memory(torch.device("mps"))
    assert left <= 1 << 30
    assert left <= free_memory(torch.device("cpu"))


@pytest.mark.parametrize(
    "said",
    [
        "MPS backend out of memory (MPS allocated: 8.00 GiB, other allocations: 1.00 GiB)",
        "[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: not enough memory: you tried",
    ],
)
def test_an_error_of_mps_about_memory_becomes_a_sentence(said):
    sentence = out_of_memory("a document")
    with pytest.raises(Stopped, match="smaller --chunk"), memory_errors(sentence):
        raise RuntimeError(said)


def test_a_missing_apple_gpu_is_refused_in_one_sentence(capsys):
    if not torch.backends.mps.is_available():
        with pytest.raises(UsageError, match="finds no Apple GPU"):
            device_of("mps")
    for command in ("finetune", "fit"):  # there or not
        words = ("ropext://demo", "--data", "ropext://tuning", "--device", "mps", "-o", "never")
        code, heard = run(command, *words, capsys=capsys)
        assert code == 2
        (line,) = heard.err.splitlines()
        assert line.startswith("error: ")
        assert {"mps", "cpu"} <= {*re.findall(r"\w+", line)}


def test_mps_is_used_only_if_it_is_named(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of("auto") == "cpu"
    assert device_of("mps") == "mps"
    assert models.training_device(Finetune()) == torch.device("cpu")
