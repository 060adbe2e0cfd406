"""Retrieval items scored by teacher forcing; a shared prefix is read once.

An answer is right when every one of its tokens is the model's first choice given the prompt and the
right tokens before it. By induction that is what greedy decoding would produce, so nothing is
generated.
"""

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ropext.evaluation.forward import Ids, NanInLogits, TokenScorer
from ropext.results.retrieval import ItemScore
from ropext.tasks import Item

if TYPE_CHECKING:
    import torch


def score_items(scorer: TokenScorer, items: Sequence[Item], bos: int | None) -> list[ItemScore]:
    """The items of one (task, length, index), over their shared prefix where they have one."""
    shared = min(item.shared for item in items)
    if len(items) < 2 or shared == 0 or len({item.prompt[:shared] for item in items}) > 1:
        return [_judge(item, _whole(scorer, item, bos)) for item in items]
    prefix = _ids(items[0].prompt[:shared], bos)
    cache = scorer.fill_cache(prefix)
    # Layers with a window forget on purpose; newer transformers can be asked to remember.
    remember = getattr(cache, "activate_past_recording", None)
    if remember is not None:
        remember()
    scores, usable = [], True
    for item in items:
        if not usable:
            scores.append(_judge(item, _whole(scorer, item, bos)))
            continue
        rest = np.asarray([*item.prompt[shared:], *item.answer[:-1]], np.int32)
        scores.append(_judge(item, scorer.extend_cache(cache, rest)[-len(item.answer) :]))
        usable = _crop(cache, len(rest), len(prefix))
    return scores


def _crop(cache: Any, count: int, length: int) -> bool:
    """Take the last `count` tokens off; False where this cache cannot."""
    try:
        cache.crop(-count)
    except (RuntimeError, NotImplementedError, ValueError):  # the last before transformers 5.18
        return False
    return int(cache.get_seq_length()) == length


def _ids(prompt: Sequence[int], bos: int | None) -> Ids:
    return np.asarray(([] if bos is None else [bos]) + list(prompt), np.int32)


def _whole(scorer: TokenScorer, item: Item, bos: int | None) -> "torch.Tensor":
    ids = np.concatenate([_ids(item.prompt, bos), np.asarray(item.answer[:-1], np.int32)])
    return scorer.last_logits(ids, len(item.answer))


def _judge(item: Item, logits: "torch.Tensor") -> ItemScore:
    """`logits` (answer tokens, vocabulary) are those from which the answer is read."""
    import torch

    if not bool(torch.isfinite(logits).all()):
        raise NanInLogits(f"the logits are not finite in task {item.task} at length {item.length}")
    answer = torch.as_tensor(item.answer, device=logits.device)
    nll = torch.logsumexp(logits, -1) - logits.gather(1, answer[:, None])[:, 0]
    predicted = tuple(int(token) for token in logits.argmax(-1))
    digest = hashlib.sha256(np.asarray(item.prompt, "<i4").tobytes()).hexdigest()
    return ItemScore(
        task=item.task,
        length=item.length,
        depth=item.depth,
        index=item.index,
        answer_nll=float(nll.double().mean()),
        answer_tokens=len(item.answer),
        exact=predicted == tuple(item.answer),
        prompt_hash=digest[:32],
        answer=tuple(item.answer),
        predicted=predicted,
    )
