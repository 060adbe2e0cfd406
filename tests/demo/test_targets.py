"""Each target is judged by the numbers that it names, and says them."""

import math

import pytest

from ropext import demo
from ropext.demo import DemoModel as Model
from ropext.results.comparison import Contender
from ropext.results.perplexity import Frame
from ropext.results.retrieval import ItemScore
from ropext.results.values import Bootstrap, Value

UNTOUCHED, CONTROL, FITTED, TUNED, TUNED_WIDER = (
    *("untouched", "control", "fitted-4x", "tuned-4x", "tuned-8x"),
)
MOST, MOST_UNTUNED = 5_600_000, 2_100_000


def judge(read, spent, finetune=True, far=True):
    return demo.judge(demo.read_recipe(finetune, far).gates, read, spent)


def number(value):
    return Value(value, None, None, 32)


def asked(right, count, length, task="passkey"):
    return [
        ItemScore(task, length, 0.5, at, 0.0, 5, at < right, f"{at}", (1,), (1,))
        for at in range(count)
    ]


def model(items=(), **metrics):
    frame = Frame(256, (256, 512, 1024), 64, Bootstrap())
    values = {name.replace("_at_", "@"): number(value) for name, value in metrics.items()}
    return Model(values, Contender("it", frame, None, None, tuple(items)))


def everything(**changes):
    """A demo that reaches every target just so."""
    found = {
        "tuned": 2.40,
        "base": 2.40,
        "control": 2.40,
        "fitted": 1.01 * 2.40,
        "found": 95,
        "wider": math.exp(2.3) * 1.0499,
        "found_wider": 90,
    } | changes
    return {
        UNTOUCHED: model(asked(100, 100, 256)),
        FITTED: model(tail_nll_at_1024=found["fitted"], in_window_nll_at_1024=2.40),
        CONTROL: Model({"tail_nll@1024": number(found["control"])}),
        TUNED: model(
            [*asked(found["found"], 100, 1024), *asked(0, 50, 512)],
            tail_nll_at_1024=found["tuned"],
            in_window_nll_at_1024=found["base"],
        ),
        TUNED_WIDER: model(
            asked(found["found_wider"], 100, 2048),
            tail_at_2048=found["wider"],
            in_window_at_2048=math.exp(2.3),
        ),
    }


def test_all_are_reached_at_their_bounds():
    judged = judge(everything(), MOST)
    assert [target.reached for target in judged] == [True] * 7
    assert all(target.sentence.startswith("Reached: ") for target in judged)


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({"fitted": 2.4241}, [0]),
        ({"base": 2.3999}, [1]),
        ({"control": 2.3999}, [2]),
        ({"found": 94}, [3]),
        ({"wider": math.exp(2.3) * 1.0501}, [4]),
        ({"found_wider": 89}, [5]),
        ({"tuned": 2.45}, [1, 2]),
    ],
)
def test_a_miss_is_said_with_its_number(changes, missed):
    judged = judge(everything(**changes), MOST)
    assert [at for at, target in enumerate(judged) if not target.reached] == missed
    for at in missed:
        assert judged[at].sentence.startswith("MISSED: ")
        assert f"{judged[at].found:.3f}" in judged[at].sentence


def test_the_part_at_eight_times_is_judged_where_it_was_done():
    judged = judge(everything(), MOST, far=False)
    assert len(judged) == 5
    assert not [target for target in judged if "2048" in target.what]


def test_the_budget_is_a_third_without_fine_tuning():
    whole = everything()
    untuned = {label: whole[label] for label in (UNTOUCHED, FITTED)}
    for read, finetune, most in ((whole, True, MOST), (untuned, False, MOST_UNTUNED)):
        assert judge(read, most, finetune, False)[-1].reached
        assert not judge(read, most + 1, finetune, False)[-1].reached
    assert len(judge(untuned, 0, False, False)) == 2


def test_retrieval_takes_the_questions_of_all_tasks_together():
    own = model([*asked(8, 10, 1024), *asked(3, 30, 1024, "mkey"), *asked(5, 5, 256)])
    found = own.values["keys@1024"]
    assert (found.value, found.n) == (11 / 40, 40)
    assert "keys@512" not in own.values
    assert Model({}).values == {}
