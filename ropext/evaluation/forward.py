"""NLL of every token of one sequence, in memory that does not grow with the vocabulary.

The body runs once over the whole sequence (or in chunks, with a cache), and the head in slices. The
slices go through the model's own forward, its body replaced by the hidden states that are there
already, so that softcapping, logit scaling and the like are the model's own. A self-check proves
this before it is used; a model on which it fails is read whole, in chunks with a cache.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ropext.errors import InputError

if TYPE_CHECKING:
    import torch

# Measured bytes per token and vocabulary entry of a slice: logits, their float32 copy, exponents.
HEAD_BYTES = 9.5
SHORTEST_SLICE, LONGEST_SLICE = 16, 4096
PROBE_TOKENS = 48
# Largest difference of logits, relative to the largest logit, that rounding explains.
TOLERANCE = {"torch.float32": 1e-4, "torch.float64": 1e-8}
HALF_TOLERANCE = 3e-2

TokenNll = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Manner:
    """How sequences are read: body in one piece (`chunk` None) or in chunks; head in slices."""

    chunk: int | None
    slice_tokens: int
    split: bool = True


def slice_for(budget: int, vocabulary: int) -> int:
    """Tokens of one head slice within a memory budget (bytes), a power of two."""
    wanted = max(SHORTEST_SLICE, min(LONGEST_SLICE, int(budget / (HEAD_BYTES * vocabulary))))
    return 1 << (wanted.bit_length() - 1)


class NanInLogits(InputError):
    """The model's logits are not numbers."""


class TokenScorer:
    """A loaded model, as evaluation needs it. Use inside `torch.inference_mode()`."""

    def __init__(self, model: Any, manner: Manner) -> None:
        get_base = getattr(model, "get_base_model", None)
        # LoRA layers of peft live inside the base model, whose forward is the one to split.
        self.model = get_base() if get_base is not None else model
        self.body = self.model.base_model
        self.device = self.model.get_input_embeddings().weight.device
        self.manner = manner

    @property
    def vocabulary(self) -> int:
        """Rows of the input embedding."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    def self_check(self) -> Manner:
        """Prove that split reading equals the model's own forward; settle the manner by it."""
        import torch

        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self.vocabulary, (PROBE_TOKENS,), generator=generator)
        truth = self.model(input_ids=self._row(ids.numpy()), use_cache=False).logits[0].float()
        if not torch.isfinite(truth).all():
            raise NanInLogits("the model's logits are not finite on a probe of random tokens")
        bound = TOLERANCE.get(str(self._dtype()), HALF_TOLERANCE) * float(truth.abs().max())
        small = Manner(None if self.manner.chunk is None else 32, 16, split=True)
        for trial, chosen in (
            (small, self.manner),
            (Manner(16, 16, split=False), replace(self.manner, split=False)),
        ):
            if self._difference(ids.numpy(), trial, truth) <= bound:
                self.manner = chosen
                return chosen
        raise InputError(
            "the model gives other logits read in chunks with a cache than read whole; "
            "evaluation of this architecture is not supported"
        )

    def _difference(self, ids: Ids, manner: Manner, truth: "torch.Tensor") -> float:
        import torch

        kept, self.manner = self.manner, manner
        try:
            read = torch.cat([logits for _, logits in self._logits(ids)])
        except (TypeError, AttributeError, ValueError, NotImplementedError, RuntimeError):
            return float("inf")  # an architecture that cannot be driven this way
        finally:
            self.manner = kept
        if read.shape != truth.shape:
            return float("inf")
        return float((read.float() - truth.to(read.device)).abs().max())

    def _dtype(self) -> Any:
        return self.model.get_input_embeddings().weight.dtype

    def _row(self, ids: Ids) -> "torch.Tensor":
        import torch

        return torch.as_tensor(np.asarray(ids), dtype=torch.long, device=self.device)[None]

    def token_nll(self, ids: Ids) -> TokenNll:
        """NLL of every token given all before it, float32; position 0 is not-a-number."""
        import torch

        nll = np.full(len(ids), np.nan, np.float32)
        targets = self._row(ids)[0]
        for begin, logits in self._logits(ids):
            end = min(begin + len(logits), len(ids) - 1)
            if end > begin:
                own = logits[: end - begin].float()
                wanted = targets[begin + 1 : end + 1].to(own.device)
                found = torch.logsumexp(own, -1) - own.gather(1, wanted[:, None])[:, 0]
                nll[begin + 1 : end + 1] = found.cpu().numpy()
        wrong = np.flatnonzero(~np.isfinite(nll[1:]))
        if len(wrong):
            raise NanInLogits(f"the logits are not finite at token {int(wrong[0]) + 1}")
        return nll

    def last_logits(self, ids: Ids, count: int) -> "torch.Tensor":
        """Logits at the last `count` positions, float32, (count, vocabulary)."""
        import torch

        kept = [
            logits[max(0, len(ids) - count - begin) :].float()
            for begin, logits in self._logits(ids, first=len(ids) - count)
        ]
        return torch.cat(kept)

    def _logits(self, ids: Ids, first: int = 0) -> Iterator[tuple[int, "torch.Tensor"]]:
        """(begin, logits) slice by slice, from the one that holds position `first` on."""
        if not self.manner.split:
            yield from self._whole_chunks(ids, first)
            return
        for begin, output in self._bodies(ids):
            hidden = output.last_hidden_state
            for at in range(0, hidden.shape[1], self.manner.slice_tokens):
                part = hidden[:, at : at + self.manner.slice_tokens]
                if begin + at + part.shape[1] > first:
                    yield begin + at, self._head(output, part)

    def _bodies(self, ids: Ids) -> Iterator[tuple[int, Any]]:
        chunk = self.manner.chunk
        if chunk is None or chunk >= len(ids):
            yield 0, self.body(input_ids=self._row(ids), use_cache=False)
            return
        cache = self.new_cache()
        for begin in range(0, len(ids), chunk):
            row = self._row(ids[begin : begin + chunk])
            yield begin, self.body(input_ids=row, past_key_values=cache, use_cache=True)

    def _whole_chunks(self, ids: Ids, first: int) -> Iterator[tuple[int, "torch.Tensor"]]:
        cache, size = self.new_cache(), self.manner.slice_tokens
        for begin in range(0, len(ids), size):
            row = self._row(ids[begin : begin + size])
            output = self.model(input_ids=row, past_key_values=cache, use_cache=True)
            if begin + row.shape[1] > first:
                yield begin, output.logits[0]

    def _head(self, output: Any, hidden: "torch.Tensor") -> "torch.Tensor":
        """The model's own forward with its body's output given."""
        given = replace(output, last_hidden_state=hidden)
        ids = self._row(np.zeros(hidden.shape[1], np.int32))
        with _replaced_forward(self.body, given):
            logits: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits[0]
        return logits

    def new_cache(self) -> Any:
        """An empty cache of the kind that this model's layers need."""
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def extend_cache(self, cache: Any, ids: Ids) -> "torch.Tensor":
        """Read tokens after those in the cache; logits at each of them, float32."""
        output = self.model(input_ids=self._row(ids), past_key_values=cache, use_cache=True)
        logits: torch.Tensor = output.logits[0].float()
        return logits

    def fill_cache(self, ids: Ids) -> Any:
        """A cache that holds the tokens; no logits are kept."""
        cache, size = self.new_cache(), self.manner.chunk or len(ids)
        for begin in range(0, len(ids), size):
            row = self._row(ids[begin : begin + size])
            if self.manner.split:
                self.body(input_ids=row, past_key_values=cache, use_cache=True)
            else:
                self.model(input_ids=row, past_key_values=cache, use_cache=True)
        return cache


@contextmanager
def _replaced_forward(module: Any, output: Any) -> Iterator[None]:
    """For a moment, calling `module` gives `output`."""
    own = module.__dict__.get("forward")
    module.forward = lambda *args, **kwargs: output
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
