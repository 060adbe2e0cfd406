"""The attention factor of a fit in short rows, set at the target's length: a line search.

Pattern search (Hooke and Jeeves 1961) on one number, by forward passes over documents that are
fitted on: it moves by a step in either direction, and goes on while each move is better by more
than its interval, paired over windows; where neither direction is, the step is halved.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from ropext.evaluation.forward import Ids, NanInLogits, TokenScorer
from ropext.evaluation.reading import read_pass
from ropext.narration import Show
from ropext.results.values import Bootstrap, Floats
from ropext.training.rows import Flags, TrainingDocument

STEPS = (0.5, 0.25)  # of an offset: at first 13 % of the factor, at last 6 %
TOKENS = 8192  # read by one trial
USUAL = 6
MOST = 12  # trials

Window = tuple[Ids, Flags]  # and what is scored of its far half


def windows_of(documents: Sequence[TrainingDocument], target: int) -> list[Window]:
    """Cut the first window of the target's length of every document, then their second ones, and so
    on: as few as tell one attention factor from another."""
    begins = sorted(
        (begin, number)
        for number, document in enumerate(documents)
        for begin in range(0, len(document.ids) - target + 1, target)
    )[: max(2, TOKENS // target)]
    cut = [(documents[number], slice(begin, begin + target)) for begin, number in begins]
    return [(document.ids[at], document.mask()[at][target // 2 :]) for document, at in cut]


def far_losses(scorer: TokenScorer, windows: Sequence[Window], pause: Show) -> Floats:
    """Sum the loss over the far half of every window."""
    sums = list[float]()
    tokens = sum(len(ids) for ids, _ in windows)
    for ids, scored in windows:
        pause(len(ids) * len(sums), tokens, "a trial of the attention factor")
        with torch.no_grad():  # not inference_mode: a fit in short rows may go on after it
            nll = read_pass(scorer, ids, len(ids))
        sums.append(float(nll[-len(scored) :][scored].astype(np.float64).sum()))
    return np.array(sums)


def line_search(
    value: torch.nn.Parameter, read: Callable[[], Floats], counts: Floats, bootstrap: Bootstrap
) -> int:
    """Leave a number where `read` (sums of losses over so many tokens each) is lowest; the trials
    that it took. Logits that are not numbers end a trial."""
    best = float(value.detach())
    lowest = read()
    tried = {best}

    def lower(trial: float) -> bool:
        nonlocal best, lowest
        if trial in tried or len(tried) >= MOST:
            return False
        tried.add(trial)
        value.data.fill_(trial)
        try:
            losses = read()
        except NanInLogits:
            return False
        change = bootstrap.ratio(losses - lowest, counts)
        if change.value >= 0 or (change.ci95 is not None and change.ci95[1] >= 0):
            return False
        best = trial
        lowest = losses
        return True

    def moves(way: float) -> bool:
        begun = best
        while lower(best + way):
            pass
        return best != begun

    for step in STEPS:
        while moves(step) or moves(-step):
            pass
    value.data.fill_(best)
    return len(tried)
