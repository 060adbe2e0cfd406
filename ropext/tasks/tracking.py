"""RULER's variable tracking: a chain of assignments in noise (Hsieh et al. 2024, section 3.2).

There is one chain of four hops, behind an example with its answer. The answer must name all five
variables. RULER's example has as many lines of noise as fit into 500 tokens, about 15. Below 4096
tokens ropext's has two, so that the task fits short lengths.
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
ROOM = 30


def tracking_questions(request: TextRequest) -> list[TextQuestion]:
    """Ask for the variables of one chain of assignments (task `vt`); it is in five places, so the
    question has no depth."""
    lines = 15 if request.is_long else 2
    example = _chain_question(lines, 3, request.rng)
    return [_chain_question(request.units, 5, request.rng).after(example)]


def _chain_question(lines: int, letters: int, rng: random.Random) -> TextQuestion:
    """Return the question of the task `vt` about one chain of assignments in so many lines of
    noise; a variable's name has so many letters."""
    names = list[str]()
    while len(names) <= HOPS:
        name = "".join(rng.choices(string.ascii_uppercase, k=letters))
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
