"""Questions over passages: RULER's two question-answering tasks, and several over one set.

`qa_1` asks for what one passage tells, `qa_2` for what two tell together, each with passages of its
own around (Hsieh et al. 2024, section 3.4, where they come from SQuAD and HotpotQA); `passages`
asks several questions over the same ones. Without a file of the user's the passages are about
people and houses that do not exist, so that no model knows an answer by heart.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ropext.errors import UsageError
from ropext.tasks.asking import Asked, Order, Worded, planted, worded
from ropext.tasks.item import NOUNS, Task

ROOM = 32
_FIRST = """
    Ada Anton Beata Bruno Celia Dora Edgar Elsa Felix Flora Greta Hugo Ida Jonas Karl Linus Magda
    Nora Otto Paula Rosa Silas Stella Theo Ursula Viktor Walter Yara
"""
_SYLLABLES = "bar bel cor dal fal gar hol kel lam mar mel nor per ros sel tan ved wil zan"
_TRADES = "baker carpenter chemist engraver gardener miller printer sailor tailor weaver"
FIRST, SYLLABLES, TRADES = (tuple(text.split()) for text in (_FIRST, _SYLLABLES, _TRADES))


@dataclass(frozen=True)
class KnownAnswer:
    """A question, what answers it, and the passages that it needs."""

    question: str
    answers: tuple[str, ...]
    passages: tuple[str, ...]

    @property
    def hops(self) -> int:
        """One passage, or two and more."""
        return min(2, len(self.passages))


@dataclass(frozen=True)
class OverPassages:
    """Questions of one or two hops; `known` are the user's, none: they are made."""

    hops: int = 1
    known: tuple[KnownAnswer, ...] = ()

    def __call__(self, order: Order) -> list[Asked]:
        rng = order.rng
        fitting = [known for known in self.known if known.hops == self.hops]
        # One question of a passage: planted for two, it would stand at two depths.
        apart = {known.passages: known for known in rng.sample(fitting, len(fitting))}
        made_here = [made(self.hops, rng) for _ in order.depths]
        questions = list(apart.values())[: len(order.depths)] if self.known else made_here
        gold = [text for known in questions for text in known.passages]
        # What a question needs first stands at its depth, the rest anywhere.
        places = [
            rng.random() if k else depth
            for known, depth in zip(questions, order.depths, strict=True)
            for k, _ in enumerate(known.passages)
        ]
        every = planted(self._others(order.units, gold, rng), gold, places)
        text = "\n\n".join(f"Passage {number}:\n{text}" for number, text in enumerate(every, 1))
        brief = "Answer by the passages {}, as briefly as you can.\n\n"
        text = f"{brief.format('below')}{text}\n\n{brief.format('above')}"
        return [
            Asked(
                *(text, f"Question: {known.question}", "Answer:", known.answers, depth), part=True
            )
            for known, depth in zip(questions, order.depths, strict=True)
        ]

    def _others(self, count: int, gold: Sequence[str], rng: random.Random) -> list[str]:
        if not self.known:  # a second passage about whom or what is asked for would tell another
            subjects = {_subject(text) for text in gold}
            others = list[str]()
            while len(others) < count:
                text = rng.choice(made(2, rng).passages)
                others += [] if _subject(text) in subjects else [text]
            return others
        texts = dict.fromkeys(text for known in self.known for text in known.passages)
        return rng.sample([text for text in texts if text not in gold], count)


def made(hops: int, rng: random.Random) -> KnownAnswer:
    """A question about a person; with two hops a house alone says about whom."""
    name = f"{rng.choice(FIRST)} {_name(rng)}"
    town = f"{_name(rng)}ton"
    trade = rng.choice(TRADES)
    thing = rng.choice(NOUNS)
    year = str(rng.randrange(1700, 1950))
    house = f"{_name(rng)} House"
    person = (
        f"{name}, a {trade} by training, was born in {town}. In {year} {name} moved away and began "
        f"a collection of everything that has to do with the {thing}, which neighbours came to see."
    )
    building = (
        f"{house} stands at the end of a lane lined with old trees. It was built by {name} and is "
        f"known for a {rng.choice(NOUNS)} carved over its door; visitors may enter on Sundays."
    )
    if hops == 2:
        question = f"In which town was the builder of {house} born?"
        return KnownAnswer(question, (town,), (building, person))
    question, answer = rng.choice(
        [
            (f"In which town was {name} born?", town),
            (f"What was the trade of {name}?", trade),
            (f"In which year did {name} move away?", year),
        ]
    )
    return KnownAnswer(question, (answer,), (person,))


def _subject(text: str) -> str:
    """The person or house that a made passage begins with."""
    return " ".join(text.split(maxsplit=2)[:2]).rstrip(",")


def _name(rng: random.Random) -> str:
    return "".join(rng.choices(SYLLABLES, k=3)).capitalize()


HOPS = {"qa_1": 1, "qa_2": 2, "passages": 1}
TASKS = (
    worded("qa_1", "a question that one of many passages answers", OverPassages(), ROOM),
    worded("qa_2", "a question that two of many passages answer", OverPassages(2), ROOM),
    worded(
        *("passages", "several questions over one set of passages", OverPassages(), ROOM),
        per_haystack=10,
        ruler=False,
    ),
)


def over(task: Task, known: tuple[KnownAnswer, ...]) -> Task:
    """The same task over the user's passages, if it is one over passages."""
    if task.name not in HOPS:
        return task
    hops = HOPS[task.name]
    size = task.per_haystack
    groups = {each.passages for each in known if each.hops == hops}
    texts = {text for each in known for text in each.passages}
    most = len(texts) - sum(sorted(map(len, groups))[-size:])
    if len(groups) < size or most < 1:
        raise UsageError(
            f"--passages asks about {len(groups)} {('passages', 'pairs')[hops - 1]} of "
            f"{len(texts)} passages; the task {task.name} needs {size} and more passages"
        )
    return replace(task, maker=Worded(task.name, OverPassages(hops, known), ROOM, most=most))
