"""Define retrieval tasks, one file each: draw haystacks and questions, in token ids or in words,
and match answers.

Pure: a tokenizer comes in through `Encoder`, and the use of the items is not known here. A new task
is one file and one entry in `TASKS`.
"""

from collections.abc import Sequence

from ropext.base.errors import UsageError
from ropext.tasks import copy, counting, mkey, needles, passages, passkey, shots, tracking
from ropext.tasks.asking import TaskWithWording, TaskWording
from ropext.tasks.item import (
    MOST_ITEMS,
    Encoder,
    Haystack,
    Item,
    Task,
    check_amount,
    noise,
    repetition,
    running_text,
)
from ropext.tasks.own import NAME, SUFFIX, OwnTask, own_task

TASKS: tuple[Task, ...] = (
    passkey.TASK,
    mkey.TASK,
    copy.TASK,
    *needles.TASKS,
    tracking.TASK,
    *counting.TASKS,
    *passages.TASKS,
    shots.TASK,
)
RULER = "ruler"  # all thirteen of Hsieh et al. 2024, and the name of their mean
# The possible parts before the @ of a retrieval metric.
TASK_NAMES = frozenset([RULER, *(task.name for task in TASKS)])
THIRTEEN = tuple(task.name for task in TASKS if task.ruler)


def find_task(name: str) -> Task:
    """Return the retrieval task of a name."""
    for task in TASKS:
        if task.name == name:
            return task
    known = ", ".join(task.name for task in TASKS)
    raise UsageError(
        f"there is no retrieval task {name!r}; --tasks takes {known}, {RULER} (its "
        f"{len(THIRTEEN)} together), and files of your own questions (FILE{SUFFIX})"
    )


def is_in_words(name: str) -> bool:
    """Return whether a retrieval task asks in text, by its name; the user's own questions do."""
    for task in TASKS:
        if task.name == name:
            return task.in_words
    return True


def wording_of(name: str) -> TaskWording:
    """Return the wording of a retrieval task for a server, which takes words and no token ids."""
    task = find_task(name)
    if isinstance(task.maker, TaskWording):
        return task.maker
    if isinstance(task, TaskWithWording):
        return task.wording
    raise UsageError(
        f"the task {name} consists of token ids, and a server takes text: leave it out of --tasks"
    )


def named_tasks(words: Sequence[object]) -> tuple[str, ...]:
    """Return the retrieval tasks that `--tasks` names, each once; `ruler` means its thirteen."""
    named = dict[str, str]()
    for word in words:
        task = own_task(word, TASK_NAMES)
        if task == RULER:
            named |= dict.fromkeys(THIRTEEN, "")
        elif isinstance(task, OwnTask):
            before = named.get(task)
            if isinstance(before, OwnTask) and before.source != task.source:
                raise UsageError(
                    f"--tasks: {before.source_name} and {task.source_name} are both called {task}; "
                    f"name one of them: NAME=FILE{SUFFIX}"
                )
            named[task] = task
        else:
            named[find_task(str(task)).name] = ""
    return tuple(task or name for name, task in named.items())


__all__ = [
    "MOST_ITEMS",
    "NAME",
    "RULER",
    "TASKS",
    "THIRTEEN",
    "Encoder",
    "Haystack",
    "Item",
    "OwnTask",
    "Task",
    "TaskWithWording",
    "TaskWording",
    "check_amount",
    "find_task",
    "is_in_words",
    "named_tasks",
    "noise",
    "repetition",
    "running_text",
    "wording_of",
]
