"""How much memory may be taken: page cache is free, a container's limit holds, processes share."""

import pytest
import torch

from ropext.evaluation import loading

CPU = torch.device("cpu")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of 100 kB of which 10 are untouched and 80 available; no container."""
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemFree: 10 kB\nMemAvailable: 80 kB\n")
    monkeypatch.setattr(loading, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(loading, "CGROUP", tmp_path)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return tmp_path


def test_page_cache_counts_as_free(machine):
    assert loading.free_memory(CPU) == 80 * 1024


def test_a_containers_limit_holds(machine):
    (machine / "memory.max").write_text("50000\n")
    (machine / "memory.current").write_text("20000\n")
    assert loading.free_memory(CPU) == 30000
    (machine / "memory.stat").write_text("anon 5000\ninactive_file 7000\n")
    assert loading.free_memory(CPU) == 37000
    (machine / "memory.max").write_text("max\n")
    assert loading.free_memory(CPU) == 80 * 1024


def test_processes_share_their_machine(machine, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert loading.free_memory(CPU) == 20 * 1024


def test_without_proc_the_untouched_pages_are_what_there_is(machine):
    (machine / "meminfo").unlink()
    assert loading.free_memory(CPU) > 1 << 20
