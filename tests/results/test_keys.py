"""Key tokens, planted: what is found, what a run makes of them, and where the measure is blind."""

from dataclasses import replace

import numpy as np
import pytest

from ropext.errors import UsageError
from ropext.report.evaluation import compare
from ropext.results.comparison import Contender
from ropext.results.keys import key_tokens
from ropext.results.perplexity import Documents, Frame, Reading
from ropext.results.values import Bootstrap

LONG, CONTEXT, NUM = 512, 128, 10
FRAME = Frame(CONTEXT, (256, LONG), 32, Bootstrap())
OWN = Documents(
    tuple(f"d{k}" for k in range(NUM)),
    tuple({256: f"a{k}", LONG: f"b{k}"} for k in range(NUM)),
    (np.ones(LONG, np.int64),) * NUM,
)


def contender(label, nll):
    arrays = [row.astype(np.float32) for row in nll]
    return Contender(label, FRAME, OWN, Reading(label, {LONG: arrays}))


@pytest.fixture
def planted():
    """Tokens 200, 300 and 400 of ten documents need far text; the reference finds two of them."""
    short = np.full((NUM, LONG), 3.0)
    short[:, 0] = np.nan
    reference, other = short.copy(), short.copy()
    reference[:, [50, 200, 300]] = 0.5  # 50 lies inside the trained context
    other[:, [300, 400]] = 0.25
    return {
        own.label: own
        for own in (
            contender("base", short),
            contender("reference", reference),
            contender("other", other),
        )
    }


def test_planted_keys_are_found_and_no_others(planted):
    found = key_tokens(planted, "reference")
    assert (found.keys, found.mirrored, found.tokens) == (2 * NUM, 0, NUM * (LONG - CONTEXT))
    assert found.span == (CONTEXT, LONG)
    losses = {label: own["keys"].value for label, own in found.losses.items()}
    assert losses == pytest.approx({"base": 3.0, "reference": 0.5, "other": (3 + 0.25) / 2})
    whole = found.losses["reference"]["whole"].value
    assert whole == pytest.approx(3 - 2 * 2.5 / (LONG - CONTEXT))
    assert found.losses["other"]["keys"].ci95 is not None


def test_blind_to_what_the_reference_does_not_find(planted):
    """The other run finds token 400, and gets credit only where it chooses the keys itself."""
    by_reference = key_tokens(planted, "reference").losses["other"]["keys"].value
    by_itself = key_tokens(planted, "other").losses["other"]["keys"].value
    assert by_itself == pytest.approx(0.25) != by_reference


def test_blind_to_chance_but_for_the_mirrored_count():
    """Two readings that differ by noise alone: keys are found all the same, as many as mirrored,
    and the run that chose them looks far better on them than another of its kind."""
    rng = np.random.default_rng(1)
    short, one, other = (3 + rng.normal(0, 1, (NUM, LONG)) for _ in range(3))
    found = key_tokens(
        {own.label: own for own in (contender("base", short), contender("one", one))}
        | {"other": contender("other", other)},
        "one",
    )
    assert found.keys == pytest.approx(found.mirrored, rel=0.2)
    assert found.keys > 200
    assert found.losses["one"]["keys"].value < 2 < 2.9 < found.losses["other"]["keys"].value


def test_the_table_and_the_json(planted):
    compared = compare(planted, "reference")
    assert compared.to_json()["keys"]["keys"] == 2 * NUM
    table = next(own for own in compared.tables if own.title.startswith("Key tokens"))
    assert [row[0] for row in table.rows] == ["base", "reference*", "other"]
    assert "keys" not in compare(planted).to_json()


def test_without_a_base_or_far_tokens_it_is_refused(planted):
    with pytest.raises(UsageError, match="one of what is compared"):
        key_tokens(planted, "nobody")
    with pytest.raises(UsageError, match="one of what is compared"):
        key_tokens(planted, "base")
    with pytest.raises(UsageError, match="the base's short window"):
        key_tokens({k: own for k, own in planted.items() if k != "base"}, "reference")
    near = {k: replace(own, frame=replace(FRAME, context=LONG)) for k, own in planted.items()}
    with pytest.raises(UsageError, match="beyond the trained context"):
        key_tokens(near, "reference")
