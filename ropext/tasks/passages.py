"""Questions over passages: RULER's two question-answering tasks, and several over one set.

One passage answers a question of `qa_1`, and two together answer one of `qa_2`. Each question has
passages of its own around (Hsieh et al. 2024, section 3.4, which takes them from SQuAD and
HotpotQA). `passages` asks several questions over the same passages. Unless the user gives a file,
the passages are about people and houses that do not exist, so that no model knows an answer by
heart.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ropext.base.errors import UsageError
from ropext.tasks.asking import (
    TaskWording,
    TextQuestion,
    TextRequest,
    with_needle_sentences,
    worded_task,
)
from ropext.tasks.item import NOUNS, Task

ROOM = 32
_FIRST_NAMES = """
    Ada Anton Beata Bruno Celia Dora Edgar Elsa Felix Flora Greta Hugo Ida Jonas Karl Linus Magda
    Nora Otto Paula Rosa Silas Stella Theo Ursula Viktor Walter Yara
"""
_SYLLABLES = "bar bel cor dal fal gar hol kel lam mar mel nor per ros sel tan ved wil zan"
_TRADES = "baker carpenter chemist engraver gardener miller printer sailor tailor weaver"
FIRST_NAMES = tuple(_FIRST_NAMES.split())
SYLLABLES = tuple(_SYLLABLES.split())
TRADES = tuple(_TRADES.split())


@dataclass(frozen=True)
class KnownAnswer:
    """A question, its answers, and the passages that it needs."""

    question: str
    answers: tuple[str, ...]
    passages: tuple[str, ...]

    @property
    def hops(self) -> int:
        """Return 1 if one passage answers the retrieval question, 2 if it takes two or more."""
        return min(2, len(self.passages))


@dataclass(frozen=True)
class PassageQuestions:
    """Questions of one or two hops: the user's `known` ones, or without these invented ones."""

    hops: int = 1
    known: tuple[KnownAnswer, ...] = ()

    def __call__(self, request: TextRequest) -> list[TextQuestion]:
        """Write one text of passages, and ask a question about it for each depth (tasks `qa_1`,
        `qa_2`, `passages`)."""
        rng = request.rng
        drawn = self._drawn_questions(rng)
        invented = [invent_question(self.hops, rng) for _ in request.depths]
        questions = drawn[: len(request.depths)] if self.known else invented
        needed = list[str]()
        places = list[float]()
        for known, depth in zip(questions, request.depths, strict=True):
            # The first passage of a question is at its depth, the others anywhere.
            needed += known.passages
            places.append(depth)
            places += (rng.random() for _ in known.passages[1:])
        passages = with_needle_sentences(
            self._other_passages(request.units, needed, rng), needed, places
        )
        text = ""
        for number, passage in enumerate(passages, 1):
            text += f"Passage {number}:\n{passage}\n\n"
        asked = list[TextQuestion]()
        for known, depth in zip(questions, request.depths, strict=True):
            one = TextQuestion(
                instruction="Answer by the passages below, as briefly as you can.\n\n",
                text=text,
                question="Answer by the passages above, as briefly as you can.\n\n"
                f"Question: {known.question}",
                opening="Answer:",
                references=known.answers,
                depth=depth,
                part=True,
            )
            asked.append(one)
        return asked

    def _drawn_questions(self, rng: random.Random) -> list[KnownAnswer]:
        """Draw from the user's questions (--passages), one of those over the same passages.

        A passage planted for two questions would have two depths.
        """
        same_hops = [known for known in self.known if known.hops == self.hops]
        by_passages = dict[tuple[str, ...], KnownAnswer]()
        for known in rng.sample(same_hops, len(same_hops)):
            by_passages[known.passages] = known
        return list(by_passages.values())

    def _other_passages(self, count: int, needed: Sequence[str], rng: random.Random) -> list[str]:
        """Draw passages that no question of the task needs, to surround the passages with the
        answers."""
        if self.known:
            texts = dict[str, None]()
            for known in self.known:
                texts |= dict.fromkeys(known.passages)
            return rng.sample([text for text in texts if text not in needed], count)
        # A second passage about a person or a house in a question would contradict the first.
        subjects = {_subject_of_passage(text) for text in needed}
        others = list[str]()
        while len(others) < count:
            text = rng.choice(invent_question(2, rng).passages)
            if _subject_of_passage(text) not in subjects:
                others.append(text)
        return others


def invent_question(hops: int, rng: random.Random) -> KnownAnswer:
    """Invent a retrieval question and its passages about a person; with two hops only a house tells
    about whom."""
    name = f"{rng.choice(FIRST_NAMES)} {_invented_name(rng)}"
    town = f"{_invented_name(rng)}ton"
    trade = rng.choice(TRADES)
    thing = rng.choice(NOUNS)
    year = str(rng.randrange(1700, 1950))
    house = f"{_invented_name(rng)} House"
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


def _subject_of_passage(text: str) -> str:
    """Return the person or house that an invented passage of a retrieval question is about."""
    return " ".join(text.split(maxsplit=2)[:2]).rstrip(",")


def _invented_name(rng: random.Random) -> str:
    """Draw an invented name of a person or house in the passages of a retrieval question."""
    return "".join(rng.choices(SYLLABLES, k=3)).capitalize()


HOPS = {"qa_1": 1, "qa_2": 2, "passages": 1}


def _passages_wording(name: str) -> TaskWording:
    """Return the wording of a task over passages: `qa_1`, `qa_2` or `passages`."""
    return TaskWording(name, PassageQuestions(HOPS[name]), ROOM)


TASKS = (
    worded_task(
        _passages_wording("qa_1"),
        "a question that one of many passages answers",
        "made up, or `--passages`",
    ),
    worded_task(
        _passages_wording("qa_2"),
        "a question that two of many passages answer",
        "made up, or `--passages`",
    ),
    worded_task(
        _passages_wording("passages"),
        "several questions over one set of passages",
        "the passages of `qa_1`, read once for all",
        per_haystack=10,
        ruler=False,
    ),
)


def over_passages(task: Task, known: tuple[KnownAnswer, ...]) -> Task:
    """Return the task over the user's passages (--passages); a task without passages stays as it
    is."""
    if task.name not in HOPS:
        return task
    hops = HOPS[task.name]
    questions = task.per_haystack
    texts = set[str]()
    for question in known:
        texts.update(question.passages)
    groups = {question.passages for question in known if question.hops == hops}
    largest = sorted(map(len, groups))[-questions:]
    most = len(texts) - sum(largest)  # minimum of passages around the questions' own
    if len(groups) < questions or most < 1:
        kind = "passages" if hops == 1 else "pairs"
        raise UsageError(
            f"--passages asks about {len(groups)} {kind} of {len(texts)} passages; the task "
            f"{task.name} needs {questions} and more passages"
        )
    return replace(
        task, maker=TaskWording(task.name, PassageQuestions(hops, known), ROOM, most=most)
    )
