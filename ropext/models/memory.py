"""Memory: what is free, what was used, and the sentence where it runs out."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ropext.atomic import run_errors
from ropext.errors import Stopped
from ropext.narration import Say
from ropext.report.text import size
from ropext.systems import peak_memory

if TYPE_CHECKING:
    import torch

CGROUP = Path("/sys/fs/cgroup")
# What a bare RuntimeError says where memory ran out.
OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "MPS backend out of memory",
    "CUDA error: out of memory",
    "_ALLOC_FAILED",
)


@contextmanager
def memory_errors(sentence: str) -> Iterator[None]:
    """Out of memory becomes a sentence, which names the options that help."""
    import torch

    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise Stopped(sentence) from error
    except RuntimeError as error:
        # The CPU's allocator, Apple's and CUDA's libraries raise a bare RuntimeError.
        if not any(words in str(error) for words in OUT_OF_MEMORY):
            raise
        raise Stopped(sentence) from error


def out_of_memory(what: str, remains: str = "finished documents are kept") -> str:
    """The sentence of an evaluation."""
    return (
        f"out of memory while reading {what}; {remains}: run again with a smaller --chunk (e.g. "
        "2048), a smaller --slice-memory, or --dtype bfloat16"
    )


def free_memory(device: "torch.device") -> int:
    """Bytes that this process may still take; on a CPU a share of what its machine has left.

    Page cache counts as free, for the kernel gives it back; a container's own limit counts too.
    """
    import psutil  # accelerate needs it
    import torch

    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "mps":  # its memory is the machine's
        left = torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
        return min(int(left), free_memory(torch.device("cpu")))
    limits = [int(psutil.virtual_memory().available)]
    limit = CGROUP / "memory.max"
    used = CGROUP / "memory.current"
    most = ""
    if limit.exists() and used.exists():
        most = limit.read_text("ascii").strip()
    if most.isdigit():  # else "max": no limit
        cached = _entries(CGROUP / "memory.stat").get("inactive_file", 0)
        limits.append(int(most) - int(used.read_text("ascii")) + cached)
    return min(limits) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def tell_used(
    log: Path | None, say: Say, device: "torch.device | str", what: str, seconds: float
) -> None:
    """Say what the first unit of a long piece of work took, and keep it in a log, which no
    comparison of runs reads."""
    import torch

    on_gpu = torch.device(device).type == "cuda"
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else peak_memory()
    say(f"{what} took {seconds:.2g} s, and {size(peak)} of memory at the peak")
    if log is None:
        return
    with run_errors(log), log.open("a", encoding="utf-8") as out:
        out.write(json.dumps({"what": what, "seconds": seconds, "peak_bytes": peak}) + "\n")


def _entries(path: Path) -> dict[str, int]:
    """Lines `name: number unit` or `name number`; nothing where there is no such file."""
    entries = dict[str, int]()
    if not path.exists():
        return entries
    for line in path.read_text("ascii").replace(":", " ").splitlines():
        parts = line.split()
        if len(parts) > 1:
            entries[parts[0]] = int(parts[1])
    return entries
