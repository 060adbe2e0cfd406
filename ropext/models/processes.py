"""Coordinate the processes that share a command's work.

Functions return which process this is, wait for the others, and share rows, weights and values that
only one process knows.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from ropext.base.errors import InputError, Stopped, UsageError

if TYPE_CHECKING:
    from accelerate import FullyShardedDataParallelPlugin

Found = TypeVar("Found")
WAITING = 6 * 3600  # seconds that processes wait while one loads, reads or writes alone


def rank_and_count() -> tuple[int, int]:
    """Return the rank of this process and the number of processes that compute with the model, as
    `accelerate launch` and torchrun set them."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def wait_for_everyone() -> None:
    """Wait until every process that computes with the model has come here."""
    if rank_and_count()[1] == 1:
        return
    from accelerate import PartialState
    from torch import distributed

    try:
        PartialState(timeout=timedelta(seconds=WAITING))
        distributed.barrier()  # accelerate's barrier does not wait on CPUs
    except RuntimeError as error:  # the other process closed its connection
        raise Stopped("another process of this command has stopped") from error


def is_main() -> bool:
    """Return whether this process prints and writes; the others only compute with the model."""
    return rank_and_count()[0] == 0


def is_fsdp() -> bool:
    """Return whether accelerate shards the model in memory over its processes by FSDP."""
    return os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true")


def processes_of_each_row() -> int:
    """Return how many of the processes that share a model in memory share a row: with context
    parallelism each reads a piece of it."""
    return int(os.environ.get("PARALLELISM_CONFIG_CP_SIZE", "1"))


def readers() -> int:
    """Return the number of processes that read separate rows with the model in memory; processes
    that share a row count once."""
    return max(1, rank_and_count()[1] // processes_of_each_row())


def check_rows(rows: int, tokens: int, short: int = 0) -> None:
    """Raise InputError if the processes that share one model in memory cannot divide the rows among
    them, `short` windows of --keep-short included."""
    count = readers()
    pieces = 2 * processes_of_each_row()
    rows += short
    if rows % count:
        raise InputError(
            f"a step has {rows} rows, which {count} processes cannot share; set --batch-tokens to "
            f"a multiple of {count * tokens}"
            + (f", and --keep-short to one of {count}" if short else "")
        )
    if pieces > 2 and tokens % pieces:
        raise InputError(
            f"rows have {tokens} tokens, which context parallelism over {pieces // 2} processes "
            f"cannot share: it takes a multiple of {pieces} (twice the processes)"
        )


def check_fsdp(qlora: bool, train: str) -> None:
    """Raise UsageError if the launched processes cannot share one model in memory by FSDP, because
    of its config or these options."""
    if not is_fsdp():
        return
    wanted = {"FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
    if any(os.environ.get(name, "").lower() != value for name, value in wanted.items()):
        raise UsageError(
            "launched with FSDP: its config must set fsdp_version: 2 and "
            "fsdp_cpu_ram_efficient_loading: true, like the configs in ropext.training.launch"
        )
    if qlora or train != "lora":
        unshared = "--qlora" if qlora else f"--train {train}"
        raise UsageError(
            f"{unshared} is for one process or DDP, and this was launched with "
            "FSDP: leave it out, or launch with the config that ropext.training.launch calls ddp"
        )


def keep_float32(plugin: "FullyShardedDataParallelPlugin | None") -> None:
    """Have the processes that share a model in memory keep in float32 the numbers that accelerate's
    FSDP2 would round to bfloat16.

    They are the loss, and the gradients while they are added up over the processes.
    """
    if plugin is not None and plugin.mixed_precision_policy is not None:
        from torch import float32

        policy = plugin.mixed_precision_policy
        plugin.mixed_precision_policy = replace(policy, reduce_dtype=float32, output_dtype=None)


def from_first(value: Found) -> Found:
    """Return the value that the process of rank 0 has, in all processes that compute with the
    model."""
    if rank_and_count()[1] == 1:
        return value
    from torch import distributed

    wait_for_everyone()  # the processes know one another from here on
    values = [value]
    distributed.broadcast_object_list(values)
    return values[0]


def ask_first_process(ask: Callable[[], Found]) -> Found:
    """Return to all processes that share a model in memory the result of `ask`, which needs it:
    with FSDP only the first has its weights."""
    if not is_fsdp():
        return ask()
    # The others wait for it.
    return from_first(ask() if is_main() else None)  # type: ignore[return-value]
