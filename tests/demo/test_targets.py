"""Each target is judged by the numbers that it names, and says them."""

import pytest

from ropext import demo
from ropext.demo import FITTED, TUNED
from ropext.results.values import Value


def everything(**changes):
    """A demo that reaches every target just so."""
    found = {"base": 2.4, "control": 2.4, "fitted": 1.01 * 2.4, "tuned": 2.4, "keys": 0.95}
    found |= changes

    def model(**values):
        return {name.replace("_at_", "@"): Value(v, None, None, 32) for name, v in values.items()}

    return {
        "base": model(tail_nll_at_1024=found["base"]),
        "control": model(tail_nll_at_1024=found["control"]),
        "untouched": model(keys_at_256=1.0),
        FITTED: model(tail_nll_at_1024=found["fitted"]),
        TUNED: model(tail_nll_at_1024=found["tuned"], keys_at_1024=found["keys"]),
    }


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, []),
        ({"fitted": 2.4241}, [0]),
        ({"base": 2.3999, "fitted": 2.0}, [1]),
        ({"control": 2.3999}, [2]),
        ({"keys": 0.94}, [3]),
        ({"tuned": 2.45}, [1, 2]),
    ],
)
def test_a_miss_is_said_with_its_number(changes, missed):
    judged = demo.judge(everything(**changes))
    assert [at for at, target in enumerate(judged) if not target.reached] == missed
    for at, target in enumerate(judged):
        assert target.sentence.startswith("MISSED: " if at in missed else "Reached: ")
        assert f": {target.found:.4f} against" in target.sentence


def test_models_that_were_left_out_have_no_target():
    untuned = {k: v for k, v in everything().items() if k not in (TUNED, "control")}
    assert [target.what for target in demo.judge(untuned)] == [demo.BOUNDS[0].what]
