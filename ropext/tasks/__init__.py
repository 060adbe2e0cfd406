"""Retrieval tasks, one file each: how an item is built from token ids, a length, depths and a seed.

Pure: a tokenizer comes in through `Encoder`, and what is made of the items is not known here.
A new task is one file and one entry in `TASKS`.
"""

from ropext.errors import UsageError
from ropext.tasks import copy, mkey, passkey
from ropext.tasks.item import (
    MOST_ITEMS,
    Encoder,
    Haystack,
    Item,
    Noise,
    Task,
    Text,
    check_amount,
    noise,
    repetition,
)

TASKS: tuple[Task, ...] = (passkey.TASK, mkey.TASK, copy.TASK)


def find_task(name: str) -> Task:
    for task in TASKS:
        if task.name == name:
            return task
    known = ", ".join(task.name for task in TASKS)
    raise UsageError(f"there is no retrieval task {name!r}; --tasks takes {known}")


__all__ = [
    "MOST_ITEMS",
    "TASKS",
    "Encoder",
    "Haystack",
    "Item",
    "Noise",
    "Task",
    "Text",
    "check_amount",
    "find_task",
    "noise",
    "repetition",
]
