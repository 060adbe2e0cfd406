"""The processes that share a command's work: which one this is, and how they wait for another."""

import os
from datetime import timedelta

from ropext.errors import Stopped

WAITING = 6 * 3600  # seconds that processes wait while one loads, reads or writes alone


def processes() -> tuple[int, int]:
    """(rank, how many) as `accelerate launch` and torchrun set them."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def wait_for_everyone() -> None:
    """Wait until every process of the command has come here."""
    if processes()[1] == 1:
        return
    from accelerate import PartialState
    from torch import distributed

    try:
        PartialState(timeout=timedelta(seconds=WAITING))
        distributed.barrier()  # that of accelerate waits for nobody on CPUs
    except RuntimeError as error:  # its connection is closed
        raise Stopped("another process of this command has stopped") from error
