"""Many-shot recall: what label a new pair of words has, after as many examples as fit.

The first word of a pair decides its label, the second means nothing; nobody says so. HELMET (Yen et
al. 2024) found that recall from many examples predicts use better than needles. These are made
here, so that no model can know a label but from the examples.
"""

from ropext.tasks.asking import TaskWording, TextQuestion, TextRequest, worded_task
from ropext.tasks.item import NOUNS

LABELS = 8
ROOM = 8  # tokens of an answer: with more, a model could say every label


def shots_questions(request: TextRequest) -> list[TextQuestion]:
    """Ask for the labels of several new pairs after the same examples (task `shots`); those are
    everywhere, so there is no depth."""
    rng = request.rng
    count = len(request.depths)
    firsts = rng.sample(NOUNS, LABELS)
    labels = dict(zip(firsts, rng.sample(range(100, 1000), LABELS), strict=True))
    seconds = [noun for noun in NOUNS if noun not in labels]
    shuffled = rng.sample(seconds, len(seconds))
    asked_seconds = shuffled[:count]
    shown_seconds = shuffled[count:]  # no example holds a pair of a question
    # Every label occurs as often as any other, to within one.
    shown_firsts = [firsts[k % LABELS] for k in range(request.units)]
    rng.shuffle(shown_firsts)
    text = ""
    for first in shown_firsts:
        text += f"Item: {first} {rng.choice(shown_seconds)}\nLabel: {labels[first]}\n\n"
    asked_firsts = rng.sample(firsts * count, count)
    questions = list[TextQuestion]()
    for first, second in zip(asked_firsts, asked_seconds, strict=True):
        questions.append(
            TextQuestion(text, f"Item: {first} {second}", "Label:", (str(labels[first]),))
        )
    return questions


TASK = worded_task(
    TaskWording("shots", shots_questions, ROOM, least=2 * LABELS),
    "the label of a new item, after many labelled ones",
    "as many as fit; after HELMET, Yen et al. 2024",
    per_haystack=10,
    ruler=False,
)
