"""RULER's variable tracking: a chain of assignments in noise (Hsieh et al. 2024, section 3.2).

One chain of four hops, behind a short one with its answer; all five variables are to be named.
"""

import itertools
import random
import string

from ropext.tasks.asking import Asked, Order, planted, worded
from ropext.tasks.needles import NOISE

HOPS = 4
LETTERS = 5
ROOM = 30
EXAMPLE = 2  # lines of noise


def make(order: Order) -> list[Asked]:
    """One chain; it lies in five places, so no depth is its own."""
    example = _chain(EXAMPLE, order.rng)
    return [_chain(order.units, order.rng).after(example)]


def _chain(lines: int, rng: random.Random) -> Asked:
    names = dict[str, None]()
    while len(names) <= HOPS:
        names["".join(rng.choices(string.ascii_uppercase, k=LETTERS))] = None
    value = rng.randrange(10_000, 100_000)
    first, *_ = names
    stated = [f"VAR {first} = {value}"]
    stated += [f"VAR {name} = VAR {before}" for before, name in itertools.pairwise(names)]
    text = "\n".join(planted([NOISE] * lines, stated, sorted(rng.random() for _ in stated)))
    return Asked(
        f"The text below assigns variables, some of them by way of others.\n\n{text}\n\n",
        f"Which variables hold the value {value}?",
        f"In the text above {len(names)} variables hold the value {value}:",
        tuple(names),
    )


TASK = worded("vt", "a chain of assignments in noise", make, ROOM)
