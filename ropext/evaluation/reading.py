"""Read documents and questions: windows, passes and answers.

Windows are pure integers: what is read together, and which part of it is scored. Questions are
scored by teacher forcing, a shared prefix read once: an answer is right when every one of its
tokens is the model's first choice given the prompt and the right tokens before it. By induction
that is what greedy decoding would produce, so nothing is generated. Where an answer need only be
named (`Item.references`), teacher forcing gives the beginning, and greedy decoding what follows it.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from typing import TYPE_CHECKING, Any

import numpy as np
from packaging.version import Version  # accelerate needs it

from ropext.evaluation.forward import Ids, NanInLogits, TokenNll, TokenScorer, Watch
from ropext.results.retrieval import ItemScore
from ropext.results.windows import short_windows, strided_windows
from ropext.tasks import Item
from ropext.tasks.asking import match
from ropext.tasks.item import common_prefix

if TYPE_CHECKING:
    import torch
    from transformers import Cache

Decode = Callable[[Sequence[int]], str]


def score_items(
    scorer: TokenScorer, items: Sequence[Item], bos: int | None, decode: Decode = str
) -> list[ItemScore]:
    """The items of one (task, length, index), over their shared prefix where they have one."""
    shared = min(item.shared for item in items)
    if len(items) < 2 or len({item.prompt[:shared] for item in items}) > 1:
        shared = 0
    scores = list[ItemScore]()
    prefix: Prefix | None = None
    for item in items:
        if not shared and not item.references:
            answer = np.asarray(item.answer[:-1], np.int32)
            row = np.concatenate([_ids(item.prompt, bos), answer])
            scores.append(_judge(item, scorer.last_logits(row, len(item.answer))))
            continue
        start = shared or len(item.prompt) - 1
        if not shared or prefix is None:
            prefix = Prefix(scorer, _ids(item.prompt[:start], bos))
        rest = item.prompt[start:]
        logits = prefix.read([*rest, *item.answer[:-1]])
        score = _judge(item, logits[-len(item.answer) :])
        if item.references:
            score = _generated(prefix, rest, item, score, decode)
        scores.append(score)
    return scores


class Prefix:
    """Tokens that are read once, and the cache from which each question goes on."""

    def __init__(self, scorer: TokenScorer, ids: Ids) -> None:
        self.scorer = scorer
        self.ids = ids
        self._cache: Cache | None = None
        self._added = 0  # tokens that the cache holds after the prefix

    def read(self, ids: Sequence[int]) -> "torch.Tensor":
        """Read tokens right after the prefix; the logits of each."""
        self._go_back()
        return self.read_on(ids)

    def read_on(self, ids: Sequence[int]) -> "torch.Tensor":
        """Read tokens after those that were read last."""
        assert self._cache is not None, "the prefix is read first"
        self._added += len(ids)
        return self.scorer.extend_cache(self._cache, np.asarray(ids, np.int32))

    def _go_back(self) -> None:
        """Leave the prefix alone in the cache; where the cache cannot go back, read it again."""
        if self._cache is None or not _crop(self._cache, self._added, len(self.ids)):
            self._cache = None  # two of them may not fit
            self._cache = _filled(self.scorer, self.ids)
        self._added = 0


def _filled(scorer: TokenScorer, prefix: Ids) -> "Cache":
    """A cache of the prefix that can go back to it."""
    cache = scorer.fill_cache(prefix)
    # Layers with a window forget on purpose; newer transformers can be asked to remember. Before
    # 5.18 a layer that remembers gives a second reading in a row more keys than its mask has.
    remember = getattr(cache, "activate_past_recording", None)
    if remember is not None and Version(metadata.version("transformers")) >= Version("5.18"):
        remember()
    return cache


def _generated(
    prefix: Prefix, rest: Sequence[int], item: Item, forced: ItemScore, decode: Decode
) -> ItemScore:
    """What greedy decoding says after the prefix and the `rest` of the prompt.

    The right answer was read as if it had been said: up to its first token that the model does not
    choose, nothing else is said. From there on one token is read at a time, until the room or the
    text ends, or all is named that was asked for.
    """
    agreed = common_prefix(forced.predicted, item.answer)
    said = list(forced.predicted[: agreed + 1])[: item.room]
    if len(said) < len(item.answer):
        # Back to the prefix, not to what was said: layers with a window can go back but once.
        prefix.read([*rest, *said[:-1]])
    while len(said) < item.room and said[-1] not in prefix.scorer.ends:
        if match(decode(said), item.references, item.part) == 1:
            break
        said.append(int(prefix.read_on(said[-1:])[-1].argmax()))
    text = decode(said)
    points = match(text, item.references, item.part)
    return replace(forced, predicted=tuple(said), said=text, score=points, exact=points == 1)


def _crop(cache: "Cache", count: int, length: int) -> bool:
    """Take the last `count` tokens off; False where this cache cannot."""
    try:
        cache.crop(-count)
    except (RuntimeError, NotImplementedError, ValueError):  # the last before transformers 5.18
        return False
    return int(cache.get_seq_length()) == length


def _ids(prompt: Sequence[int], bos: int | None) -> Ids:
    return np.asarray(([] if bos is None else [bos]) + list(prompt), np.int32)


def _judge(item: Item, logits: "torch.Tensor") -> ItemScore:
    """`logits` (answer tokens, vocabulary) are those from which the answer is read."""
    import torch

    if not bool(torch.isfinite(logits).all()):
        raise NanInLogits(f"the logits are not finite in task {item.task} at length {item.length}")
    answer = torch.as_tensor(item.answer, device=logits.device)
    nll = torch.logsumexp(logits, -1) - logits.gather(1, answer[:, None])[:, 0]
    predicted = tuple(int(token) for token in logits.argmax(-1))
    prompt_hash = hashlib.sha256(np.asarray(item.prompt, "<i4").tobytes()).hexdigest()
    return ItemScore(
        task=item.task,
        length=item.length,
        depth=item.depth,
        index=item.index,
        answer_nll=float(nll.cpu().double().mean()),  # Apple's GPU has no float64
        answer_tokens=len(item.answer),
        exact=predicted == tuple(item.answer),
        prompt_hash=prompt_hash[:32],
        answer=tuple(item.answer),
        predicted=predicted,
        text_hash=item.text_hash,
    )


HF_STRIDE = 512  # of the loop in the transformers documentation


def hf_stride(size: int) -> int:
    """The documentation's stride, or half of a window that is shorter."""
    return min(HF_STRIDE, max(1, size // 2))


def read_short(
    scorer: TokenScorer,
    ids: Ids,
    context: int,
    bos: int | None = None,
    watch: Callable[[int, int], Watch] | None = None,
) -> TokenNll:
    """NLL of every token through the short window, each scored by one window; a length-dependent
    spectrum is that of the window's length.

    `bos` stands in the place of a window's first token, as in front of any text that a program
    truncates. `watch` is told where a window begins and from which token on it scores, and is shown
    its states. What changes here changes SHORT_WINDOW.
    """
    nll = np.full(len(ids), np.nan, np.float32)
    with pinned(scorer.model, context):
        for window in short_windows(len(ids), context):
            row = ids[window.begin : window.end].copy()
            if bos is not None:
                row[0] = bos
            of_window = None if watch is None else watch(window.begin, window.first)
            losses = scorer.token_nll(row, of_window)
            nll[window.first : window.end] = losses[window.first - window.begin :]
    return nll


def read_strided(scorer: TokenScorer, ids: Ids, size: int) -> tuple[float, float]:
    """Weighted sum and weight of the loop in the transformers documentation.

    The loop multiplies a window's mean NLL by one less than its number of scored labels, although
    only the first window loses a label to the shift; it is kept as it is.
    """
    total = weight = 0.0
    with pinned(scorer.model, size):
        for window in strided_windows(len(ids), size, hf_stride(size)):
            nll = scorer.token_nll(ids[window.begin : window.end]).astype(np.float64)
            scored = nll[window.first - window.begin :]
            # The first window's label 0 is among its targets, but has no prediction.
            labels = len(scored) + (1 if window.begin == 0 else 0)
            total += float(scored.mean()) * (labels - 1)
            weight += labels - 1
    return total, weight


def read_pass(scorer: TokenScorer, ids: Ids, length: int, watch: Watch | None = None) -> TokenNll:
    """Read the first `length` tokens in one pass."""
    with pinned(scorer.model, length):
        return scorer.token_nll(ids[:length], watch)


if TYPE_CHECKING:
    import torch

PINNED = "ropext_pinned"  # a rope_type that transformers' update function does not know


def _is_dynamic(rope_type: object) -> bool:
    return isinstance(rope_type, str) and ("dynamic" in rope_type or rope_type == "longrope")


def _rope_types(module: Any) -> dict[str | None, str]:
    """Layer type (None where the module has one rotation) to rope type."""
    kinds = getattr(module, "rope_type", None)
    if isinstance(kinds, dict):
        return dict(kinds)
    return {None: kinds} if isinstance(kinds, str) else {}


@contextmanager
def pinned(model: "torch.nn.Module", length: int) -> Iterator[None]:
    """While this lasts, every rotation is the one of a single forward over `length` tokens.

    transformers recomputes `dynamic` and chooses between the two sets of `longrope` from the
    largest position of every forward call. Read in chunks, the cache would hold keys of several
    rotations, and chunked would differ from whole by tenths of a nat.
    """
    modules: list[Any] = [
        module
        for module in model.modules()
        if any(_is_dynamic(rope_type) for rope_type in _rope_types(module).values())
    ]
    saved = [_state(module) for module in modules]
    try:
        for module in modules:
            _settle(module, length)
        yield
    finally:
        for module, state in zip(modules, saved, strict=True):
            for name, value in state.items():
                put(module, name, value)


def _settle(module: Any, length: int) -> None:
    """Bring a module to the state after one forward of `length` tokens from its first state."""
    import torch

    types = _rope_types(module)
    for layer_type, rope_type in types.items():
        if not _is_dynamic(rope_type):
            continue
        prefix = "" if layer_type is None else f"{layer_type}_"
        first = getattr(module, f"{prefix}original_inv_freq")
        buffer = getattr(module, f"{prefix}inv_freq")
        put(module, f"{prefix}inv_freq", first.to(buffer.device).clone())
        if hasattr(module, "original_max_seq_len"):
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
        position = torch.tensor([[length - 1]], device=buffer.device)
        sample = torch.zeros(1, 1, 1, device=buffer.device)
        if layer_type is None:
            module(sample, position)
        else:
            module(sample, position, layer_type)
    still = {key: PINNED if _is_dynamic(value) else value for key, value in types.items()}
    module.rope_type = still if isinstance(module.rope_type, dict) else PINNED


def _state(module: Any) -> dict[str, Any]:
    names = [
        name
        for name in (*vars(module), *module._buffers)
        if name.endswith(("inv_freq", "max_seq_len_cached", "attention_scaling"))
    ]
    state = {name: getattr(module, name) for name in ("rope_type", *names)}
    return {name: v.clone() if hasattr(v, "clone") else v for name, v in state.items()}


def put(module: Any, name: str, value: Any) -> None:
    """Set a buffer that no checkpoint holds, or an attribute."""
    if name in module._buffers:
        module.register_buffer(name, value, persistent=False)
    else:
        setattr(module, name, value)
