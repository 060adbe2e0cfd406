"""Read documents and questions: windows, passes and answers.

Windows are pure integers: the tokens of one pass, and which of them are scored. Questions are
scored by teacher forcing, and a shared prefix is read once. An answer is right if every one of its
tokens is the model's first choice, given the prompt and the right tokens before it. By induction
that is the answer of greedy decoding, so nothing is generated. If an answer only has to contain
given names (`Item.references`), teacher forcing gives its beginning, and greedy decoding the rest.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from typing import TYPE_CHECKING, Any

import numpy as np
from packaging.version import Version  # accelerate needs it

from ropext.base.lengths import short_windows, strided_windows
from ropext.evaluation.forward import Ids, NanInLogits, TokenNll, TokenScorer, Watch
from ropext.results.retrieval import ItemScore
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
    """Return the scores of a model's answers to the questions of one (task, length, index), over
    their shared prefix if they have one."""
    shared = min(item.shared for item in items)
    if len(items) < 2 or len({item.prompt[:shared] for item in items}) > 1:
        shared = 0
    scores = list[ItemScore]()
    prefix: Prefix | None = None
    for item in items:
        if not shared and not item.references:
            answer = np.asarray(item.answer[:-1], np.int32)
            row = np.concatenate([_prompt_ids(item.prompt, bos), answer])
            scores.append(_score_of_logits(item, scorer.last_logits(row, len(item.answer))))
            continue
        start = shared or len(item.prompt) - 1
        if not shared or prefix is None:
            prefix = Prefix(scorer, _prompt_ids(item.prompt[:start], bos))
        rest = item.prompt[start:]
        logits = prefix.read([*rest, *item.answer[:-1]])
        score = _score_of_logits(item, logits[-len(item.answer) :])
        if item.references:
            score = _score_of_generated_answer(prefix, rest, item, score, decode)
        scores.append(score)
    return scores


class Prefix:
    """Tokens that are read once, and the cache from which each question continues."""

    def __init__(self, scorer: TokenScorer, ids: Ids) -> None:
        """Keep the scorer and the token ids of the prompt that several questions share."""
        self.scorer = scorer
        self.ids = ids
        self._cache: Cache | None = None
        self._added = 0  # tokens that the cache holds after the prefix

    def read(self, ids: Sequence[int]) -> "torch.Tensor":
        """Read a question's tokens right after the shared prompt; return the logits of each."""
        self._go_back()
        return self.read_on(ids)

    def read_on(self, ids: Sequence[int]) -> "torch.Tensor":
        """Read tokens of a question or its answer after the tokens of the last call; return the
        logits of each."""
        assert self._cache is not None, "the prefix is read first"
        self._added += len(ids)
        return self.scorer.extend_cache(self._cache, np.asarray(ids, np.int32))

    def _go_back(self) -> None:
        """Crop the cache to the questions' shared prompt; if the cache cannot go back, read the
        prompt again."""
        if self._cache is None or not _crop_cache(self._cache, self._added, len(self.ids)):
            self._cache = None  # two caches may not fit
            self._cache = _filled_cache(self.scorer, self.ids)
        self._added = 0


def _filled_cache(scorer: TokenScorer, prefix: Ids) -> "Cache":
    """Return a cache of the prompt that several questions share; it can go back to that prompt."""
    cache = scorer.fill_cache(prefix)
    # Layers with a window forget on purpose; newer transformers can let them remember. Before
    # 5.18 a layer that remembers gives a second reading in a row more keys than its mask has.
    remember = getattr(cache, "activate_past_recording", None)
    if remember is not None and Version(metadata.version("transformers")) >= Version("5.18"):
        remember()
    return cache


def _score_of_generated_answer(
    prefix: Prefix, rest: Sequence[int], item: Item, forced: ItemScore, decode: Decode
) -> ItemScore:
    """Return the score of an answer by greedy decoding after the prefix and the `rest` of a
    question's prompt.

    Teacher forcing has read the right answer. Greedy decoding gives the same tokens up to the first
    token that the model does not choose. After it the model reads one token at a time, until the
    item's room or the text ends, or the answer contains all references.
    """
    agreed = common_prefix(forced.predicted, item.answer)
    said = list(forced.predicted[: agreed + 1])[: item.room]
    if len(said) < len(item.answer):
        # Back to the prefix, not to the last token: layers with a window can go back only once.
        prefix.read([*rest, *said[:-1]])
    while len(said) < item.room and said[-1] not in prefix.scorer.ends:
        if match(decode(said), item.references, item.part) == 1:
            break
        said.append(int(prefix.read_on(said[-1:])[-1].argmax()))
    text = decode(said)
    points = match(text, item.references, item.part)
    return replace(forced, predicted=tuple(said), said=text, score=points, exact=points == 1)


def _crop_cache(cache: "Cache", count: int, length: int) -> bool:
    """Remove a question's last `count` tokens from the cache, back to the prompt that questions
    share; return False if this cache cannot do that."""
    try:
        cache.crop(-count)
    except (RuntimeError, NotImplementedError, ValueError):  # ValueError: before transformers 5.18
        return False
    return int(cache.get_seq_length()) == length


def _prompt_ids(prompt: Sequence[int], bos: int | None) -> Ids:
    """Return the token ids of a question's prompt, after the BOS if there is one."""
    return np.asarray(([] if bos is None else [bos]) + list(prompt), np.int32)


def _score_of_logits(item: Item, logits: "torch.Tensor") -> ItemScore:
    """Return the score of a question; the `logits` (answer tokens, vocabulary) predict its
    answer."""
    import torch

    if not bool(torch.isfinite(logits).all()):
        raise NanInLogits(f"the logits are not finite in task {item.task} at length {item.length}")
    answer = torch.as_tensor(item.answer, device=logits.device)
    nll = torch.logsumexp(logits, -1) - logits.gather(1, answer[:, None])[:, 0]
    predicted = tuple(int(token) for token in logits.argmax(-1))
    return ItemScore(
        task=item.task,
        length=item.length,
        depth=item.depth,
        index=item.index,
        answer_nll=float(nll.cpu().double().mean()),  # Apple's GPU has no float64
        answer_tokens=len(item.answer),
        exact=predicted == tuple(item.answer),
        prompt_hash=item.prompt_hash,
        answer=tuple(item.answer),
        predicted=predicted,
        text_hash=item.text_hash,
    )


HF_STRIDE = 512  # in the loop of the transformers documentation


def hf_stride(size: int) -> int:
    """Return the stride of the transformers documentation's perplexity loop, or half of a window
    that is shorter."""
    return min(HF_STRIDE, max(1, size // 2))


def read_short(
    scorer: TokenScorer,
    ids: Ids,
    context: int,
    bos: int | None = None,
    watch: Callable[[int, int], Watch] | None = None,
) -> TokenNll:
    """Return the NLL of every token of a document through the short window, each scored by one
    window.

    A length-dependent spectrum is the spectrum of the window's length. `bos` replaces a window's
    first token, as in front of any text that a program truncates. `watch` receives a window's
    beginning and its first scored token, and returns a function that receives its states. A change
    here must change SHORT_WINDOW.
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
    """Return the weighted sum of a document's losses and their weight, by the loop in the
    transformers documentation.

    The loop multiplies a window's mean NLL by one less than its number of scored labels, although
    only the first window loses a label to the shift. ropext keeps that rule.
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
    """Return the NLL of the first `length` tokens of a document, read in one pass."""
    with pinned(scorer.model, length):
        return scorer.token_nll(ids[:length], watch)


if TYPE_CHECKING:
    import torch

PINNED = "ropext_pinned"  # a rope_type that transformers' update function does not know


def _is_dynamic(rope_type: object) -> bool:
    """Return whether a rotation needs pinning for forward passes over a document's chunks, because
    transformers chooses its rope type's frequencies by the length."""
    return isinstance(rope_type, str) and ("dynamic" in rope_type or rope_type == "longrope")


def _rope_types(module: Any) -> dict[str | None, str]:
    """Return the rope types of a rotary module that forward passes over documents may pin, by layer
    type (None if it has one rotation)."""
    kinds = getattr(module, "rope_type", None)
    if isinstance(kinds, dict):
        return dict(kinds)
    return {None: kinds} if isinstance(kinds, str) else {}


@contextmanager
def pinned(model: "torch.nn.Module", length: int) -> Iterator[None]:
    """Keep every rotation as in a single forward pass over `length` tokens, while documents or
    questions are read inside the `with` block.

    transformers recomputes `dynamic` and chooses between the two sets of `longrope` from the
    largest position of every forward call. Read in chunks, the cache would hold keys of several
    rotations, and chunked reading would differ from whole reading by tenths of a nat.
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
    """Pin a rotary module for forward passes over a document's chunks: bring it to its state after
    one forward of `length` tokens from its first state."""
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
    """Return the rope type, frequencies, cached length and attention scaling of a rotary module, to
    restore them after the forward passes over a document."""
    names = [
        name
        for name in (*vars(module), *module._buffers)
        if name.endswith(("inv_freq", "max_seq_len_cached", "attention_scaling"))
    ]
    state = {name: getattr(module, name) for name in ("rope_type", *names)}
    return {name: v.clone() if hasattr(v, "clone") else v for name, v in state.items()}


def put(module: Any, name: str, value: Any) -> None:
    """Set a buffer of a rotary module, which no checkpoint holds, or an attribute, to pin or
    restore it around the forward passes over a document."""
    if name in module._buffers:
        module.register_buffer(name, value, persistent=False)
    else:
        setattr(module, name, value)
