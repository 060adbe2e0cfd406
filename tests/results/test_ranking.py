"""Ranking: the first, the models that tie with it, and the choice among them."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ropext.results.measurement import MeasuredModel, Measurement
from ropext.results.perplexity import LossStatistics, Reading
from ropext.results.rules import rank_methods, sure_lead
from ropext.results.values import Bootstrap

FRAME = LossStatistics(context=8, lengths=(32,), tail=2, bootstrap=Bootstrap(0))


def reading(label, tails):
    """Return a reading with one document per number: the NLL of both tail tokens; all other tokens
    cost 1."""
    arrays = []
    for nll in tails:
        array = np.ones(32, np.float32)
        array[0], array[30:] = np.nan, nll
        arrays.append(array)
    return Reading(label, {32: arrays})


def ranked(preference=(), base=None, **tails):
    models = {label: MeasuredModel(reading=reading(label, own)) for label, own in tails.items()}
    if base is not None:
        models["base"] = MeasuredModel("base", reading("base", base))
    return rank_methods(Measurement(FRAME, models), preference)


def test_a_ranking_takes_a_clear_winner_over_the_preferred_method():
    levels = np.linspace(2, 5, 10)  # documents differ far more than the contenders do
    found = ranked(("worse", "better"), worse=levels + 0.2, better=levels)
    assert [*found.standing.behind] == ["better", "worse"]
    assert (found.taken, found.standing.is_sure, found.standing.tied) == (
        "better",
        True,
        ("better",),
    )
    assert found.standing.behind["worse"].value == pytest.approx(0.2, abs=1e-6)
    assert found.standing.behind["worse"].ci95 == pytest.approx((0.2, 0.2), abs=1e-6)
    assert found.tail("better").value == pytest.approx(math.exp(3.5), rel=1e-6)


def test_a_ranking_names_a_tie_and_takes_the_preferred_method():
    levels, sway = np.linspace(2, 5, 10), np.array([0.3, -0.3] * 5)
    contenders = {"odd": levels, "plain": levels + sway + 0.01, "far": levels + 1}
    found = ranked(("plain", "far", "odd"), **contenders)
    assert found.best == "odd"
    assert found.standing.tied == ("odd", "plain")
    assert not found.standing.is_sure
    assert found.taken == "plain"
    # "far" is preferred to "odd", but surely worse: it is no part of the tie.
    assert ranked(("far", "odd", "plain"), **contenders).taken == "odd"


def test_the_lowest_of_many_equals_is_seldom_called_surely_the_lowest():
    """Twelve contenders that differ by chance alone: one of them is always the lowest."""
    rng, sure, naive = np.random.default_rng(0), 0, 0
    frame = replace(FRAME, bootstrap=Bootstrap(0, 500))
    for _ in range(30):
        losses = rng.normal(3, 0.5, (12, 40))
        models = {f"c{k}": MeasuredModel(reading=reading("", own)) for k, own in enumerate(losses)}
        found = rank_methods(Measurement(frame, models))
        sure += found.standing.is_sure
        # Each comparison by itself leaves fewer and fewer in the tie.
        naive += any(behind.sign != 0 for behind in found.standing.behind.values())
    assert naive > 20
    assert sure <= 1


@pytest.mark.parametrize("spread", ["normal", "real"])
def test_of_two_equal_models_one_is_surely_lower_in_a_twentieth_of_the_draws(spread):
    """Documents that differ far more than the models do, 2,000 draws of 8, 12, 16 and 32."""
    rng, sure = np.random.default_rng(0), 0
    kept = json.loads(Path(__file__).with_name("tail_losses.json").read_text(encoding="utf-8"))
    base, gap = np.array(kept["base"]), np.array(kept["yarn-4x"]) - np.array(kept["base"])
    frame = LossStatistics(1, (2,), 1, Bootstrap(0))
    for n in [8, 12, 16, 32] * 2000:
        picked = rng.integers(len(base), size=n)
        moved = rng.normal(0, 0.1, n) if spread == "normal" else (gap - gap.mean())[picked]
        losses = {"a": base[picked], "b": base[picked] + moved}
        both = {
            label: Reading(label, {2: np.stack([np.zeros(n), own], 1)})
            for label, own in losses.items()
        }
        lowest, other = sorted(both, key=lambda label: losses[label].sum())
        sure += sure_lead(frame, both[lowest], both[other], (1, 2), 1) > 0
    assert 0.04 <= sure / 8000 <= 0.06


def test_a_lead_that_one_comparison_makes_sure_may_not_be_sure_among_many():
    levels, sway = np.linspace(2, 5, 16), np.array([0.3, -0.3] * 8)
    losses = {"low": levels, "next": levels + sway + 0.18}
    assert ranked(**losses).standing.is_sure
    crowd = {f"far{number}": levels + 1 for number in range(8)}
    among = ranked(**losses, **crowd)
    assert not among.standing.is_sure
    assert (among.standing.tied, among.taken) == (
        ("low",),
        "low",
    )  # a choice, no claim
    assert among.standing.leads["next"] < 0 < among.standing.behind["next"].ci95[0]


def test_below_eight_documents_nothing_is_sure_and_the_lowest_is_taken():
    levels = np.linspace(2, 5, 7)
    found = ranked(("worse", "better"), worse=levels + 2, better=levels)
    assert found.taken == "better"
    assert not found.standing.is_sure
    assert found.standing.behind["worse"].ci95 is None


def test_a_ranking_of_equal_methods_takes_the_preferred_one():
    levels = np.linspace(2, 5, 10)
    assert ranked(("second", "first"), first=levels, second=levels).taken == "second"


def test_gain_is_against_the_base_on_the_same_tokens():
    levels = np.linspace(2, 5, 10)
    found = ranked(base=levels, helped=levels - 0.25, hurt=levels + 0.5)
    assert found.in_window.value == pytest.approx(math.exp(3.5), rel=1e-6)
    assert found.gain("helped").value == pytest.approx(0.25, abs=1e-6)
    assert found.gain("hurt").value == pytest.approx(-0.5, abs=1e-6)
    assert found.short_tax("helped").value == 0
