"""Many-shot recall: what label a new pair of words has, after as many examples as fit.

The first word of a pair decides its label, the second means nothing; nobody says so. HELMET (Yen et
al. 2024) found that recall from many examples predicts use better than needles. These are made
here, so that no model can know a label but from the examples.
"""

from ropext.tasks.asking import Asked, Order, worded
from ropext.tasks.item import NOUNS

LABELS = 8
ROOM = 8  # tokens of an answer: with more, a model could say every label


def make(order: Order) -> list[Asked]:
    """Several new pairs after the same examples; these are everywhere, so there is no depth."""
    rng = order.rng
    count = len(order.depths)
    firsts = rng.sample(NOUNS, LABELS)
    labels = dict(zip(firsts, rng.sample(range(100, 1000), LABELS), strict=True))
    seconds = rng.sample([noun for noun in NOUNS if noun not in labels], len(NOUNS) - LABELS)
    new = seconds[:count]
    old = seconds[count:]  # the new are in no example
    # Every label is shown as often as any other, to within one.
    drawn = [firsts[k % LABELS] for k in range(order.units)]
    rng.shuffle(drawn)
    text = "".join(f"Item: {name} {rng.choice(old)}\nLabel: {labels[name]}\n\n" for name in drawn)
    return [
        Asked(text, f"Item: {first} {second}", "Label:", (str(labels[first]),))
        for first, second in zip(rng.sample(firsts * count, count), new, strict=True)
    ]


TASK = worded(
    *("shots", "the label of a new item, after many labelled ones", make, ROOM),
    per_haystack=10,
    ruler=False,
    least=2 * LABELS,
)
