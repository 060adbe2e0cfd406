"""benchmarks/self_extend_groups.py: groups that double with distance, against positions by hand."""

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.small_models import tiny

from ropext.models import patching
from ropext.models.patching import self_extend
from ropext.models.patching.attending import Heads

CONTEXT = 64
WINDOW = CONTEXT // 2


@pytest.fixture
def groups(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import self_extend_groups

    return self_extend_groups


def seen_distance(bands, query, key):
    """Return the distance that the model sees, by the last band that begins at or before it."""
    distance = query - key
    if distance < WINDOW:
        return distance
    band = [band for band in bands if band.begins <= distance][-1]
    return band.query_positions(query) - band.key_positions(key)


def test_doubling_bands_equal_those_worked_by_hand(groups):
    """128 tokens, window 32, so 96 far ones in at most 32 / 1.5 positions. In one band of groups of
    four they take 24, in two 32 / 4 each."""
    bands = groups.doubling_bands(CONTEXT, 128, 4)
    # 31 tokens beyond the edge are 8 - 1 groups of four on: 63 // 4 rounded up is 16, 32 // 4 is 8.
    assert bands == (groups.Band(32, 4, 32), groups.Band(64, 8, 40))
    assert seen_distance(bands, 100, 68) == 100 // 4 - 68 // 4 + 32 - 8 == 32
    assert seen_distance(bands, 127, 0) == 127 // 8 + 40 - 8 == 47


@pytest.mark.parametrize("first", [2, 4])
@pytest.mark.parametrize("factor", [2, 4, 8])
def test_seen_distances_never_fall_and_stay_within_the_window(groups, first, factor):
    target = factor * CONTEXT
    bands = groups.doubling_bands(CONTEXT, target, first)
    assert bands[0].group == first
    for near, far in pairwise(bands):
        assert far.group == 2 * near.group
    for query in range(CONTEXT, target):
        seen = [seen_distance(bands, query, key) for key in range(query, -1, -1)]
        assert seen[:WINDOW] == list(range(WINDOW))
        assert seen == sorted(seen)
        assert seen[-1] < CONTEXT
    assert seen[-1] <= WINDOW + (CONTEXT - WINDOW) / 1.5 + len(bands)  # as far as the default goes


@pytest.mark.parametrize("tokens", [256, 251])
def test_a_layer_weighs_keys_turned_by_the_distances_that_are_seen(groups, tokens):
    """Each score by its own rotation, from states that were never turned."""
    width = 8
    bands = groups.doubling_bands(CONTEXT, 256, 2)
    rotation = self_extend.Rotation(10000.0 ** (-torch.arange(0, width, 2) / width), False, True)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, tokens, width)
    numbers = torch.arange(tokens)[None]
    start = torch.zeros_like(numbers)
    turned_q = rotation.turn(q, start, numbers)[:, :, CONTEXT:]
    turned_k = rotation.turn(k, start, numbers)
    heads = Heads(turned_q, turned_q, turned_k, turned_k, v, None, CONTEXT, WINDOW, 0.3)
    folded = groups.in_bands(heads, bands, rotation)

    distances = torch.zeros(tokens, tokens)
    for query in range(CONTEXT, tokens):
        for key in range(query + 1):
            distances[query, key] = seen_distance(bands, query, key)
    angles = distances[..., None] * rotation.inv_freq
    first, second = q[..., None, :].chunk(2, -1)
    turned = torch.cat(
        [
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
        ],
        -1,
    )
    scores = 0.3 * (turned * k[:, :, None]).sum(-1)
    scores = scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -math.inf)
    expected = (scores.softmax(-1) @ v)[:, :, CONTEXT:]
    torch.testing.assert_close(folded, expected, rtol=1e-4, atol=1e-5)


def test_one_band_gives_the_logits_of_self_extend(groups):
    """The model has the default's window and group; groups that double give other logits."""
    model = tiny(max_position_embeddings=CONTEXT)
    ids = torch.randint(1, 100, (1, 150), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        base = model(input_ids=ids, use_cache=False).logits
        patching.patch(model, method="self-extend", factor=4)
        expected = model(input_ids=ids, use_cache=False).logits
        group = math.ceil(1.5 * (4 * CONTEXT - WINDOW) / (CONTEXT - WINDOW))
        groups.patch_bands(model, (groups.Band(WINDOW, group, WINDOW),), 4)
        folded = model(input_ids=ids, use_cache=False).logits
        groups.patch_doubling(model, 2, 4)
        doubled = model(input_ids=ids, use_cache=False).logits
        patching.patch(model, method="self-extend", factor=4)
        again = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(folded, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(doubled[:, :CONTEXT], base[:, :CONTEXT])
    assert (doubled - folded)[:, CONTEXT:].abs().max() > 1e-3
    torch.testing.assert_close(again, expected)
