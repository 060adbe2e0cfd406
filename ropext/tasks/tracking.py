"""RULER's variable tracking: a chain of assignments in noise (Hsieh et al. 2024, section 3.2).

There is one chain of four hops, behind a short one with its answer. The answer must name all five
variables.
"""

import itertools
import random
import string

from ropext.tasks.asking import (
    TaskWording,
    TextQuestion,
    TextRequest,
    with_needle_sentences,
    worded_task,
)
from ropext.tasks.needles import NOISE

HOPS = 4
LETTERS = 5
ROOM = 30
EXAMPLE = 2  # lines of noise


def tracking_questions(request: TextRequest) -> list[TextQuestion]:
    """Ask for the variables of one chain of assignments (task `vt`); it is in five places, so the
    question has no depth."""
    example = _chain_question(EXAMPLE, request.rng)
    return [_chain_question(request.units, request.rng).after(example)]


def _chain_question(lines: int, rng: random.Random) -> TextQuestion:
    """Return the question of the task `vt` about one chain of assignments in so many lines of
    noise."""
    names = list[str]()
    while len(names) <= HOPS:
        name = "".join(rng.choices(string.ascii_uppercase, k=LETTERS))
        if name not in names:
            names.append(name)
    value = rng.randrange(10_000, 100_000)
    assignments = [f"VAR {names[0]} = {value}"]
    for before, name in itertools.pairwise(names):
        assignments.append(f"VAR {name} = VAR {before}")
    places = sorted(rng.random() for _ in assignments)
    text = "\n".join(with_needle_sentences([NOISE] * lines, assignments, places))
    return TextQuestion(
        instruction="The text below assigns variables, some of them by way of others.\n\n",
        text=f"{text}\n\n",
        question=f"Which variables hold the value {value}?",
        opening=f"In the text above {len(names)} variables hold the value {value}:",
        references=tuple(names),
    )


TASK = worded_task(
    TaskWording("vt", tracking_questions, ROOM),
    "a chain of assignments in noise",
    "four hops; all five variables are to be named",
)
