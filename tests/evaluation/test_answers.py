"""Teacher forcing against generation, and a shared prefix against full forwards."""

import math

import pytest
import torch
from small_models import random_ids, tiny

from ropext.evaluation.forward import Manner, TokenScorer
from ropext.evaluation.reading import score_items
from ropext.tasks import Item

BOS = 1


def scorer_of(model, chunk=None):
    scorer = TokenScorer(model, Manner(chunk, 16))
    scorer.self_check()
    return scorer


def items_over(prefix, count=6, answer=4, shared=True):
    """Questions of different sizes behind one prefix."""
    items = []
    for k in range(count):
        rest, wanted = random_ids(3 + k, seed=k + 1), random_ids(answer, seed=50 + k)
        prompt = (*map(int, prefix), *map(int, rest))
        items.append(
            Item("t", 99, k / 10, 0, 0, prompt, tuple(map(int, wanted)), len(prefix) * shared)
        )
    return items


def greedy(model, prompt, count):
    row = torch.tensor([[BOS, *prompt]])
    made = model.generate(row, do_sample=False, max_new_tokens=count, min_new_tokens=count)
    return tuple(int(token) for token in made[0, row.shape[1] :])


def test_teacher_forced_match_is_greedy_generation():
    model, prefix = tiny(), random_ids(40)
    items = items_over(prefix)
    # Half of the answers are what the model would say, one of them with its last token changed.
    said = [greedy(model, item.prompt, 4) for item in items]
    right = [
        Item(*(item.task, item.length, item.depth, item.index, item.seed, item.prompt), own)
        for item, own in zip(items, said, strict=True)
    ]
    wrong = (*said[2][:3], (said[2][3] + 1) % 128)
    right[2] = Item(*(items[2].task, 99, 0.0, 0, 0, items[2].prompt), wrong)
    scores = score_items(scorer_of(model), [*right, *items], BOS)
    assert [score.exact for score in scores[:6]] == [True, True, False, True, True, True]
    for score, own in zip(scores[:6], said, strict=True):
        assert score.predicted == own
    for score, item in zip(scores[6:], items, strict=True):
        assert score.exact == (greedy(model, item.prompt, 4) == item.answer)


KINDS = {
    "llama": {},
    "mistral": {"sliding_window": 24},  # shorter than the prefix: its cache forgets
    "gemma2": {"final_logit_softcapping": 5.0, "sliding_window": 24, "query_pre_attn_scalar": 8},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [None, 32])
def test_shared_prefix_gives_the_scores_of_full_forwards(kind, chunk):
    model, prefix = tiny(kind, **KINDS[kind]), random_ids(70)
    together = score_items(scorer_of(model, chunk), items_over(prefix), BOS)
    alone = score_items(scorer_of(model), items_over(prefix, shared=False), BOS)
    for one, other in zip(together, alone, strict=True):
        assert one.answer_nll == pytest.approx(other.answer_nll, abs=1e-4)
        assert (one.predicted, one.prompt_hash) == (other.predicted, other.prompt_hash)


def test_the_prefix_is_read_once():
    model, prefix = tiny(), random_ids(70)
    seen = []
    model.model.register_forward_hook(
        lambda module, args, kwargs, output: seen.append(kwargs["input_ids"].shape[1]),
        with_kwargs=True,
    )
    scorer = scorer_of(model)
    seen.clear()
    score_items(scorer, items_over(prefix), BOS)
    assert seen[0] == 71
    assert sum(seen[1:]) == sum(3 + k + 3 for k in range(6))


def test_answer_nll_is_the_mean_of_its_tokens():
    model, prefix = tiny(), random_ids(20)
    (item,) = items_over(prefix, count=1)
    (score,) = score_items(scorer_of(model), [item], None)
    row = torch.tensor([[*item.prompt, *item.answer]])
    logp = torch.log_softmax(model(row).logits[0].double(), -1)
    start = len(item.prompt)
    expected = -sum(logp[start + k - 1, token] for k, token in enumerate(item.answer)) / 4
    assert score.answer_nll == pytest.approx(float(expected), abs=1e-5)
    assert math.isfinite(score.answer_nll)
