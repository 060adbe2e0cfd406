"""The line search that sets a fit's attention factor at the target's length."""

import numpy as np
import pytest
import torch

from ropext.evaluation.forward import NanInLogits
from ropext.results.values import Bootstrap
from ropext.training import attention
from ropext.training.rows import TrainingDocument

COUNTS, LEVELS = np.full(10, 512.0), np.linspace(500, 2000, 10)


def searched(loss, begin=0.0625):
    """What the search leaves, and what it asked for, of losses by the number."""
    value, asked = torch.nn.Parameter(torch.tensor(begin, dtype=torch.float64)), []

    def read():
        asked.append(float(value.detach()))
        return LEVELS + 512 * loss(asked[-1])

    trials = attention.line_search(value, read, COUNTS, Bootstrap(0))
    assert trials == len(asked)
    return float(value.detach()), asked


@pytest.mark.parametrize("lowest", [-1.2, 0.06, 0.9])
def test_it_ends_nearest_to_the_lowest_point_on_its_grid(lowest):
    found, asked = searched(lambda x: (x - lowest) ** 2)
    grid = 0.0625 + 0.25 * np.arange(-20, 21)
    assert found == grid[np.abs(grid - lowest).argmin()]
    assert len(asked) == len(set(asked))  # nothing is read twice


def test_it_stops_at_the_most_trials():
    found, asked = searched(lambda x: -x)
    assert (found, len(asked)) == (0.0625 + 0.5 * (attention.MOST - 1), attention.MOST)


def test_what_is_not_surely_better_is_not_taken():
    """Half of the windows gain what the other half loses, and a trifle more."""
    found, asked = searched(lambda x: abs(x - 0.0625) * np.array([1.0, -1.01] * 5))
    assert (found, len(asked)) == (0.0625, 5)


def test_logits_that_are_not_numbers_end_a_trial_and_not_the_search():
    def loss(x):
        if x > 0.4:
            raise NanInLogits("nan")
        return (x - 0.6) ** 2

    assert searched(loss)[0] == 0.3125


def test_every_documents_first_window_is_read_before_any_second_one(monkeypatch):
    monkeypatch.setattr(attention, "TOKENS", 500)
    documents = [TrainingDocument(np.arange(size, dtype=np.int32) + 10000 * k) for k, size in
                 enumerate((250, 90, 310, 100))]  # fmt: skip
    windows = attention.windows_of(documents, 100)
    assert [int(ids[0]) for ids, _ in windows] == [0, 20000, 30000, 100, 20100]
    assert {(len(ids), len(scored)) for ids, scored in windows} == {(100, 50)}
