"""A loaded model and documents that it reads again and again, each time as another model.

What choosing stands on: ranking the closed forms, judging the steps of a training. The readings
are those of `ropext eval`, and nothing is written.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ropext.evaluation import costs, loading
from ropext.evaluation.estimating import MIB
from ropext.evaluation.forward import Ids, NanInLogits, TokenScorer
from ropext.evaluation.pinning import pass_lengths
from ropext.evaluation.reading import read_pass, read_short
from ropext.evaluation.session import SILENT, Hooks
from ropext.evaluation.windows import short_windows
from ropext.evaluation.work import NothingKept
from ropext.lengths import tail_tokens
from ropext.results.perplexity import Frame
from ropext.results.readings import Reading, TokenNll
from ropext.results.values import Bootstrap


def frame_of(context: int, target: int, seed: int = 0) -> Frame:
    """One length, the target, with the tail that `ropext eval` takes."""
    return Frame(context, (target,), tail_tokens(context), Bootstrap(seed))


def base_tokens(frame: Frame) -> int:
    """Forward tokens of one document read through the short window."""
    return sum(own.end - own.begin for own in short_windows(frame.longest, frame.context))


@dataclass
class Bench:
    """`documents` are token ids, each at least `frame.longest` long; what follows is not read."""

    model: Any
    scorer: TokenScorer
    frame: Frame
    documents: Sequence[Ids]
    hooks: Hooks = field(default_factory=Hooks)
    total: int = 0  # forward tokens expected, for the progress shown
    tokens: int = 0  # forward tokens spent

    def whole(self, label: str, config: Mapping[str, Any] | None) -> Reading:
        """Every document in one pass, the model computing as `config` says (None: as it is)."""
        with _computing(self.model, config):
            longest, inside = self.frame.longest, self.frame.context
            wanted = [longest, *([inside] if inside < longest else [])]
            # A spectrum that depends on the length has another one inside the context.
            lengths = pass_lengths(self.model, wanted)
            self._begin(sum(lengths), label)
            passes = {
                length: [
                    self._read(ids, length, label, self._pass(length)) for ids in self.documents
                ]
                for length in lengths
            }
        return Reading(label, passes)

    def short_window(self, label: str = "base") -> Reading:
        """Every document through the short window by the model as it is."""
        longest, cost = self.frame.longest, base_tokens(self.frame)

        def compute(ids: Ids) -> TokenNll:
            return read_short(self.scorer, self.model, ids[:longest], self.frame.context)

        self._begin(cost, label)
        return Reading(
            label, {longest: [self._read(ids, cost, label, compute) for ids in self.documents]}
        )

    def _begin(self, cost: int, label: str) -> None:
        """Of each document so many forward tokens come."""
        self.total = max(self.total, self.tokens + cost * len(self.documents))
        self.hooks.show(self.tokens, self.total, f"documents read by {label}")

    def _pass(self, length: int) -> Callable[[Ids], TokenNll]:
        return lambda ids: read_pass(self.scorer, self.model, ids, length)

    def _read(
        self, ids: Ids, cost: int, label: str, compute: Callable[[Ids], TokenNll]
    ) -> TokenNll:
        import torch

        if self.hooks.stop():
            raise NothingKept("interrupted; a measurement keeps nothing")
        # Not inference_mode: buffers made in it could not be trained through afterwards.
        with torch.no_grad():
            try:
                nll = compute(ids)
            except NanInLogits as error:
                raise NanInLogits(f"{label}: {error}") from error
        self.tokens += cost
        self.hooks.show(self.tokens, self.total, f"documents read by {label}")
        return nll


@contextmanager
def _computing(model: Any, config: Mapping[str, Any] | None) -> Iterator[None]:
    from ropext.patching import apply_config, unpatch

    if config is None:
        yield
        return
    apply_config(model, config)
    try:
        yield
    finally:
        unpatch(model)


def set_up(
    model: Any,
    documents: Sequence[Ids],
    frame: Frame,
    *,
    chunk: int | None = None,
    slice_memory: int = 256,
    hooks: Hooks = SILENT,
) -> Bench:
    """A bench for a loaded model (in PEFT or not): how it is read is settled as `ropext eval`
    settles it."""
    import torch

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    manner = costs.choose_manner(
        costs.shape_of(base),
        frame.longest,
        loading.free_memory(base.get_input_embeddings().weight.device),
        chunk,
        slice_memory * MIB,
    )
    scorer = TokenScorer(model, manner)
    with torch.no_grad():
        scorer.self_check()
    return Bench(base, scorer, frame, [np.asarray(ids, np.int32) for ids in documents], hooks)
