"""How much memory may be taken: page cache is free, a container's limit holds, processes share."""

import psutil
import pytest
import torch

from ropext.models.load import free_memory

CPU = torch.device("cpu")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Simulate a machine of 100 kB of which 10 are untouched and 80 available; no container."""
    names = ["Buffers", "Cached", "Shmem", "Active", "Inactive", "SReclaimable"]
    lines = ["MemTotal: 100 kB", "MemFree: 10 kB", "MemAvailable: 80 kB"]
    lines += [f"{name}: 0 kB" for name in names]
    (tmp_path / "meminfo").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    monkeypatch.setattr("ropext.models.load.CGROUP", tmp_path)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return tmp_path


def test_page_cache_counts_as_free(machine):
    assert free_memory(CPU) == 80 * 1024


def test_free_memory_respects_a_containers_limit(machine):
    (machine / "memory.max").write_text("50000\n")
    (machine / "memory.current").write_text("20000\n")
    assert free_memory(CPU) == 30000
    (machine / "memory.stat").write_text("anon 5000\ninactive_file 7000\n")
    assert free_memory(CPU) == 37000
    (machine / "memory.max").write_text("max\n")
    assert free_memory(CPU) == 80 * 1024


def test_processes_share_their_machine(machine, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert free_memory(CPU) == 20 * 1024
