"""Teacher forcing against generation, and a shared prefix against full forwards."""

import math
from dataclasses import replace

import pytest
import torch
from small_models import random_ids, tiny

from ropext.evaluation import reading
from ropext.evaluation.forward import ReadingMode, TokenScorer
from ropext.evaluation.reading import score_items
from ropext.tasks import Item
from ropext.tasks.asking import match

BOS = 1


def scorer_of(model, chunk=None):
    scorer = TokenScorer(model, ReadingMode(chunk, 16))
    scorer.self_check()
    return scorer


def items_over(prefix, count=6, answer=4, shared=True):
    """Make questions of different sizes after one prefix."""
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
    # Half of the answers are the model's own, one of them with its last token changed.
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


def words(ids):
    """Decode so that every token is a word of its own."""
    return " ".join(f"<{token}>" for token in ids)


def named(items, model, room=9):
    """Return questions answered in words: the model's answers match from none to all of their
    tokens."""
    found = []
    for k, item in enumerate(items):
        said = greedy(model, item.prompt, room)
        # All right, right for so many tokens, wrong from the first on.
        answer = (*said[:k], *((token + 1) % 128 for token in said[k:]))[:5]
        wanted = (said[1], said[7], 127) if k % 2 else (said[7],)
        references = tuple(f"<{token}>" for token in wanted)
        found.append(replace(item, answer=answer, references=references, room=room))
    return found


def margins(model, item, said):
    """Return by how much the best logit leads the second, at each generated token."""
    logits = model(torch.tensor([[BOS, *item.prompt, *said]])).logits[0, -len(said) - 1 : -1]
    best = logits.topk(2).values
    return best[:, 0] - best[:, 1]


def same_unless_tied(model, item, one, other):
    """Return whether the answers are equal up to the first token whose two best logits are within
    1e-4."""
    for k, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return float(margins(model, item, other)[k]) < 1e-4
    return len(one) == len(other)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [None, 32])
@pytest.mark.parametrize("backs", [True, False], ids=["crop", "no crop"])
def test_the_answer_equals_greedy_decoding(kind, chunk, backs, monkeypatch):
    """Over a shared prefix, as separate prompts, and by transformers: the same tokens."""
    if not backs:  # as a recurrent model's cache
        monkeypatch.setattr(reading, "_crop_cache", lambda *args: False)
    model, prefix = tiny(kind, eos_token_id=None, **KINDS[kind]), random_ids(70)
    items = named(items_over(prefix), model)
    together = score_items(scorer_of(model, chunk), items, BOS, words)
    alone = score_items(scorer_of(model), [replace(item, shared=0) for item in items], BOS, words)
    for item, one, other in zip(items, together, alone, strict=True):
        assert same_unless_tied(model, item, one.predicted, other.predicted)
        said = greedy(model, item.prompt, item.room)[: len(one.predicted)]
        assert same_unless_tied(model, item, one.predicted, said)
        assert one.answer_nll == pytest.approx(other.answer_nll, abs=1e-4)
        # It stops when all names are found, or at the end of the room.
        assert one.score == match(words(said), item.references, False)
        assert one.exact == (one.score == 1)
        assert len(said) == item.room or (one.exact and said[-1] == int(item.references[0][1:-1]))
        assert one.said == words(one.predicted)
    assert {round(one.score, 2) for one in together} == {1.0, 0.67}


def test_generation_ends_with_the_text():
    model, prefix = tiny(), random_ids(40)
    (item,) = items_over(prefix, count=1)
    first = greedy(model, item.prompt, 6)
    model.generation_config.eos_token_id = [2, first[3]]
    asked = replace(item, answer=first[:2], references=("<200>",), room=6)
    (score,) = score_items(scorer_of(model), [asked], BOS, words)
    assert score.predicted == first[: first.index(first[3]) + 1]
    assert (score.score, score.exact) == (0.0, False)


def test_the_right_answer_is_read_at_once_and_the_rest_token_by_token():
    model, prefix = tiny(eos_token_id=None), random_ids(70)
    items = named(items_over(prefix), model)
    seen = []
    model.model.register_forward_hook(
        lambda module, args, kwargs, output: seen.append(kwargs["input_ids"].shape[1]),
        with_kwargs=True,
    )
    scorer = scorer_of(model)
    seen.clear()
    scores = score_items(scorer, items, BOS, words)
    assert seen[0] == 71
    assert sum(seen[1:]) <= sum(item.most_read - item.shared for item in items)
    asked = [size for size in seen[1:] if size > 1]
    # With the right answer; and if the model misses more than its last token, with the beginning of
    # its own answer.
    assert asked[:8:2] == [3 + k + 4 for k in range(4)]
    assert asked[1:8:2] == [3 + k + k for k in range(4)]
    assert asked[8:] == [3 + 4 + 4, 3 + 5 + 4]
    steps = sum(len(own.predicted) - min(5, k + 1) for k, own in enumerate(scores))
    assert len(seen) - 1 - len(asked) == steps
