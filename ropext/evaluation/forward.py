"""Compute the NLL of every token of one sequence, in memory that does not grow with the vocabulary.

The body runs once over the whole sequence (or in chunks, with a cache), and the head on parts of
it. A head that is a plain matrix is applied in tiles. Any other head runs in slices through the
model's own forward, with the body replaced by its hidden states, so softcapping, logit scaling and
the like are the model's own. A self-check verifies either way before it is used. A model on which
both fail is read whole, in chunks with a cache.

A tile of logits (some tokens by some entries of the vocabulary) is computed in one buffer, which
stays in the processor's cache, and added to a running maximum and sum of exponentials. No row of
logits is ever whole in memory, and float32 logits are not copied.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ropext.base.errors import InputError, UnsupportedModel
from ropext.models.head import logits_after, plain_head, why_head_is_not_separate, why_logits_differ
from ropext.results.perplexity import MASK_STRIDE

if TYPE_CHECKING:
    import torch
    from transformers import Cache

# Fastest of 128 to 8192 on a CPU; a float32 tile then has 4 MiB (benchmarks/eval_speed.py).
TILE_TOKENS = TILE_COLUMNS = 1024
# Bytes of a tile entry: in the dtype of the weights, and in float32 if that is another dtype.
TILE_BYTES = 6
LOG2_E = 1.4426950408889634


def tiled_nll(
    head: Any, hidden: "torch.Tensor", wanted: "torch.Tensor", columns: int
) -> "torch.Tensor":
    """Return a document's losses: the NLL of the token `wanted[i]` after `hidden[i]`, float32; at
    most TILE_TOKENS of them."""
    import torch

    weight = head.weight
    num = len(hidden)
    columns = min(columns, len(weight))
    made = hidden.new_empty(num * columns)
    wide = made if made.dtype == torch.float32 else torch.empty_like(made, dtype=torch.float32)
    peak = wide.new_full((num,), -torch.inf)
    total = torch.zeros_like(peak)
    picked = torch.zeros_like(peak)
    for start in range(0, len(weight), columns):
        part = weight[start : start + columns]
        size = num, len(part)
        product = made[: num * len(part)].view(size)
        if head.bias is None:
            torch.mm(hidden, part.T, out=product)
        else:
            torch.addmm(head.bias[start : start + columns], hidden, part.T, out=product)
        tile = wide[: num * len(part)].view(size)
        if wide is not made:
            tile.copy_(product)
        at = wanted - start
        logit = tile.gather(1, at.clamp(0, len(part) - 1)[:, None])[:, 0]
        picked = torch.where((at >= 0) & (at < len(part)), logit, picked)
        above = torch.maximum(peak, tile.amax(-1))
        # exp2 takes half the time of exp.
        tile.sub_(above[:, None]).mul_(LOG2_E).exp2_()
        total = total * torch.exp(peak - above) + tile.sum(-1)
        peak = above
    return peak + total.log() - picked


@dataclass
class _RunningSum:
    """The log of a sum of exponentials, and the largest exponent, over tiles of a row of logits."""

    peak: "torch.Tensor"
    total: "torch.Tensor"
    first_choice: "torch.Tensor"

    @staticmethod
    def over(rows: "torch.Tensor") -> "_RunningSum":
        """Return the sums before the first tile of logits, one for each row."""
        import torch

        peak = torch.full((len(rows),), -torch.inf, device=rows.device)
        return _RunningSum(peak, torch.zeros_like(peak), torch.zeros_like(peak, dtype=torch.long))

    def add(self, tile: "torch.Tensor", start: int) -> tuple["torch.Tensor", "torch.Tensor"]:
        """Add a tile of logits. Return its exponentials relative to the new peak, and the factor
        for the sums before it."""
        import torch

        largest, place = tile.max(-1)
        self.first_choice = torch.where(largest > self.peak, place + start, self.first_choice)
        peak = torch.maximum(self.peak, largest)
        scale = (self.peak - peak).exp()
        weights = (tile - peak[:, None]).exp()
        self.total = self.total * scale + weights.sum(-1)
        self.peak = peak
        return weights, scale

    @property
    def log(self) -> "torch.Tensor":
        """Return the log of the sum of exponentials of each row of logits, for --kl."""
        return self.peak + self.total.log()


def tiled_divergence(
    base_head: Any, base_rows: "torch.Tensor", head: Any, rows: "torch.Tensor", columns: int
) -> tuple["torch.Tensor", "torch.Tensor"]:
    """Return KL(base || model) in nats of the next token after each row (--kl), and whether both
    have the same first choice.

    No row of logits is ever whole in memory.
    """
    import torch

    base = _RunningSum.over(rows)
    model = _RunningSum.over(rows)
    # Sum of p_base * (logit of the base - logit of the model), times the base's sum of
    # exponentials.
    weighed = torch.zeros_like(base.peak)
    for start in range(0, len(head.weight), columns):
        base_tile = _tile(base_head, base_rows, start, columns)
        tile = _tile(head, rows, start, columns)
        weights, scale = base.add(base_tile, start)
        model.add(tile, start)
        weighed = weighed * scale + (weights * (base_tile - tile)).sum(-1)
    divergence = weighed / base.total - base.log + model.log
    return divergence, base.first_choice == model.first_choice


def _tile(head: Any, rows: "torch.Tensor", start: int, columns: int) -> "torch.Tensor":
    """Return the logits of some columns of the vocabulary, float32, for --kl."""
    import torch

    bias = None if head.bias is None else head.bias[start : start + columns]
    part = head.weight[start : start + columns]
    return torch.nn.functional.linear(rows, part, bias).float()


# Measured bytes per token and vocabulary entry of a slice: logits, float32 copy, exponentials.
HEAD_BYTES = 9.5
SHORTEST_SLICE = 16
LONGEST_SLICE = 4096
# The allocator returns larger blocks to the system after every slice, and clears them when it
# gets them again; below this number of tokens matrix products lose more than that.
KEPT_BYTES = 32 << 20
KEPT_SLICE = 128
PROBE_TOKENS = 48
# Largest difference of logits, relative to the largest logit, that rounding explains.
TOLERANCE = {"torch.float32": 1e-4, "torch.float64": 1e-8}
HALF_TOLERANCE = 3e-2

TokenNll = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int32]
# Receives the position of a token, and the states that predict it and the tokens after it.
Watch = Callable[[int, "torch.Tensor"], None]


@dataclass(frozen=True)
class ReadingMode:
    """The way in which sequences are read.

    The body runs in one piece (`chunk` None) or in chunks; the head in tiles of `columns` columns,
    or (`columns` None) in slices of whole rows.
    """

    chunk: int | None
    slice_tokens: int
    split: bool = True
    columns: int | None = None


def slice_for(budget: int, vocabulary: int) -> int:
    """Return how many tokens of a forward pass go through the head in one slice within a memory
    budget (bytes): a power of two."""
    fast = max(KEPT_SLICE, KEPT_BYTES // (4 * vocabulary))
    wanted = min(LONGEST_SLICE, fast, int(budget / (HEAD_BYTES * vocabulary)))
    return 1 << (max(SHORTEST_SLICE, wanted).bit_length() - 1)


class NanInLogits(InputError):
    """An error: the model's logits are not numbers."""


def no_matrix(why: str) -> UnsupportedModel:
    """Return the error for a measurement whose forward passes over documents need the model's head
    as a matrix; `why` names the option that needs it."""
    return UnsupportedModel(
        f"{why}: the head of this model is more than a matrix, or its body does not run apart from "
        "it; leave the option out"
    )


class TokenScorer:
    """A loaded model that returns the losses and logits of tokens; use it inside
    `torch.inference_mode()`."""

    def __init__(self, model: Any, manner: ReadingMode) -> None:
        """Keep the loaded model that scores documents and questions, its body, and the tokens that
        end its answers."""
        get_base = getattr(model, "get_base_model", None)
        # LoRA layers of peft are inside the base model, and its forward is split.
        self.model = get_base() if get_base is not None else model
        self.body = self.model.base_model
        self.device = self.model.get_input_embeddings().weight.device
        self.manner = manner
        settings = getattr(self.model, "generation_config", None) or self.model.config
        end = getattr(settings, "eos_token_id", None)
        self.ends = frozenset(end if isinstance(end, list) else [end])  # tokens that end a text

    def self_check(self) -> ReadingMode:
        """Check on random tokens that split reading equals the model's own forward; choose the
        manner by it."""
        import torch

        generator = torch.Generator().manual_seed(0)
        most = getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or -1
        # A position table may have fewer rows, and RoBERTa's has two rows before the first
        # position.
        tokens = min(PROBE_TOKENS, most - 2) if most > 2 else PROBE_TOKENS
        vocabulary = int(self.model.get_input_embeddings().weight.shape[0])
        ids = torch.randint(0, vocabulary, (tokens,), generator=generator)
        truth = self.model(input_ids=self._row(ids.numpy()), use_cache=False).logits[0].float()
        if not torch.isfinite(truth).all():
            raise NanInLogits("the model's logits are not finite on a probe of random tokens")
        bound = TOLERANCE.get(str(self._dtype()), HALF_TOLERANCE) * float(truth.abs().max())
        small = ReadingMode(None if self.manner.chunk is None else 32, 16, split=True)
        for trial, chosen in (
            (small, self.manner),
            (ReadingMode(16, 16, split=False), replace(self.manner, split=False)),
        ):
            if self._difference(ids.numpy(), trial, truth) <= bound:
                tiled = chosen.split and chosen.columns and self._plain(ids.numpy(), truth, bound)
                self.manner = chosen if tiled else replace(chosen, columns=None)
                return self.manner
        raise InputError(
            "this model gives different logits in chunks with a KV cache than in one pass; "
            "evaluation of this architecture is not supported"
        )

    def _difference(self, ids: Ids, manner: ReadingMode, truth: "torch.Tensor") -> float:
        """Return the largest difference between the logits of a manner of reading and of the
        model's own forward; infinite if the model cannot be read in that manner."""
        import torch

        before = self.manner
        self.manner = manner
        try:
            read = torch.cat([logits for _, logits in self.logits(ids)])
        except (TypeError, AttributeError, ValueError, NotImplementedError, RuntimeError):
            return float("inf")  # an architecture that cannot be driven this way
        finally:
            self.manner = before
        if read.shape != truth.shape:
            return float("inf")
        return float((read.float() - truth.to(read.device)).abs().max())

    def _plain(self, ids: Ids, truth: "torch.Tensor", bound: float) -> bool:
        """Return whether the model's head is only a matrix, and its tiles give the right NLL."""
        import torch

        row = self._row(ids)
        try:
            if why_head_is_not_separate(self.model) is not None:
                return False
            output = self.body(input_ids=row, use_cache=False)
            if why_logits_differ(self.model, output) is not None:
                return False
            hidden = output.last_hidden_state[0, :-1]
            wanted = row[0, 1:].to(hidden.device)
            tiled = tiled_nll(plain_head(self.model), hidden, wanted, TILE_COLUMNS)
        except (TypeError, ValueError, NotImplementedError, RuntimeError):
            return False  # weights that are packed, or on another device
        rows = truth[:-1].to(tiled.device)
        expected = torch.nn.functional.cross_entropy(
            rows, row[0, 1:].to(tiled.device), reduction="none"
        )
        return bool((tiled - expected).abs().max() <= bound)

    def _dtype(self) -> Any:
        """Return the dtype of the model's input embedding."""
        return self.model.get_input_embeddings().weight.dtype

    def _row(self, ids: Ids) -> "torch.Tensor":
        """Return the token ids of a document or question as a batch of one on the model's
        device."""
        import torch

        return torch.as_tensor(np.asarray(ids), dtype=torch.long, device=self.device)[None]

    def head_of_tiles(self, why: str) -> Any:
        """Return the model's matrix that makes logits from states, for --kl.

        Raise UnsupportedModel if the head is more than that; `why` names the option that needs it.
        """
        if not self.manner.split or self.manner.columns is None:
            raise no_matrix(why)
        return plain_head(self.model)

    def token_nll(self, ids: Ids, watch: Watch | None = None) -> TokenNll:
        """Return the NLL of every token of a document given all tokens before it, float32; position
        0 is NaN.

        `watch` receives the states, if the head is a plain matrix.
        """
        nll = np.full(len(ids), np.nan, np.float32)
        targets = self._row(ids)[0]
        losses_of = self._sliced(ids, targets)
        if self.manner.split and self.manner.columns is not None:
            losses_of = self._tiled(ids, targets, watch)
        for first, losses in losses_of:
            nll[first : first + len(losses)] = losses.cpu().numpy()
        wrong = np.flatnonzero(~np.isfinite(nll[1:]))
        if len(wrong):
            raise NanInLogits(f"the logits are not finite at token {int(wrong[0]) + 1}")
        return nll

    def _tiled(
        self, ids: Ids, targets: "torch.Tensor", watch: Watch | None
    ) -> Iterator[tuple[int, "torch.Tensor"]]:
        """Yield (position, NLL from there on) of a document, with the head as a plain matrix."""
        head = plain_head(self.model)
        for begin, output in self._bodies(ids):
            hidden = output.last_hidden_state[0]
            for at in range(0, len(hidden), TILE_TOKENS):
                first = begin + at + 1
                wanted = targets[first : begin + min(at + TILE_TOKENS, len(hidden)) + 1]
                if len(wanted):
                    rows = hidden[at : at + len(wanted)]
                    wanted = wanted.to(hidden.device)
                    if watch is not None:
                        watch(first, rows)
                    yield first, tiled_nll(head, rows, wanted, self.manner.columns or TILE_COLUMNS)

    def _sliced(self, ids: Ids, targets: "torch.Tensor") -> Iterator[tuple[int, "torch.Tensor"]]:
        """Yield (position, NLL from there on) of a document, with the head in slices of whole
        rows."""
        import torch

        for begin, logits in self.logits(ids):
            wanted = targets[begin + 1 : begin + 1 + len(logits)].to(logits.device)
            if len(wanted):
                rows = logits[: len(wanted)].float()
                yield (
                    begin + 1,
                    torch.nn.functional.cross_entropy(rows, wanted, reduction="none"),
                )

    def masked_nll(self, ids: Ids, places: range, mask: int) -> TokenNll:
        """Return the NLL of a document's tokens at `places`, each masked in one of MASK_STRIDE
        passes, float32."""
        import torch

        nll = np.empty(len(places), np.float32)
        for first in range(min(MASK_STRIDE, len(places))):
            chosen = places[first::MASK_STRIDE]
            read = np.where(np.isin(np.arange(len(ids)), chosen), mask, ids)
            logits = self.last_logits(read, len(ids) - chosen[0])[::MASK_STRIDE][: len(chosen)]
            wanted = self._row(ids[chosen])[0].to(logits.device)
            losses = torch.nn.functional.cross_entropy(logits, wanted, reduction="none")
            nll[first::MASK_STRIDE] = losses.cpu().numpy()
        if not np.isfinite(nll).all():
            raise NanInLogits("the logits are not finite at masked tokens")
        return nll

    def last_logits(self, ids: Ids, count: int) -> "torch.Tensor":
        """Return the logits at the last `count` positions of a document or question, float32,
        (count, vocabulary)."""
        import torch

        pieces = [logits.float() for _, logits in self.logits(ids, first=len(ids) - count)]
        return torch.cat(pieces)[-count:]

    def logits(
        self, ids: Ids, first: int = 0, cache: "Cache | None" = None
    ) -> Iterator[tuple[int, "torch.Tensor"]]:
        """Yield (begin, logits) of a document or question slice by slice; slices wholly before
        `first` may be left out.

        The tokens are read after those in `cache`, which then holds them, too.
        """
        if not self.manner.split:
            yield from self._whole_chunks(ids, first, cache)
            return
        for begin, output in self._bodies(ids, cache):
            hidden = output.last_hidden_state
            for at in range(max(0, first - begin), hidden.shape[1], self.manner.slice_tokens):
                part = hidden[:, at : at + self.manner.slice_tokens]
                yield begin + at, logits_after(self.model, output, part)

    def _bodies(self, ids: Ids, cache: "Cache | None" = None) -> Iterator[tuple[int, Any]]:
        """Yield the first position and the body's output of each chunk of a document or
        question."""
        chunk = self.manner.chunk or len(ids)
        if cache is None and chunk >= len(ids):
            yield 0, self.body(input_ids=self._row(ids), use_cache=False)
            return
        if cache is None:
            cache = self.new_cache()
        for begin in range(0, len(ids), chunk):
            row = self._row(ids[begin : begin + chunk])
            yield begin, self.body(input_ids=row, past_key_values=cache, use_cache=True)

    def _whole_chunks(
        self, ids: Ids, first: int, cache: "Cache | None"
    ) -> Iterator[tuple[int, "torch.Tensor"]]:
        """Yield (begin, logits) of each chunk that the whole model reads with a cache, except
        chunks wholly before `first`."""
        if cache is None:
            cache = self.new_cache()
        size = self.manner.slice_tokens
        for begin in range(0, len(ids), size):
            row = self._row(ids[begin : begin + size])
            output = self.model(input_ids=row, past_key_values=cache, use_cache=True)
            if begin + row.shape[1] > first:
                yield begin, output.logits[0]

    def new_cache(self) -> "Cache":
        """Return an empty cache of the kind that this model's layers need."""
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def extend_cache(self, cache: "Cache", ids: Ids) -> "torch.Tensor":
        """Read tokens of a question or its answer after the cached ones; return the logits at each
        of them, float32."""
        output = self.model(input_ids=self._row(ids), past_key_values=cache, use_cache=True)
        logits: torch.Tensor = output.logits[0].float()
        return logits

    def fill_cache(self, ids: Ids) -> "Cache":
        """Return a cache that holds the beginning of a question's prompt; no logits are kept."""
        cache = self.new_cache()
        size = self.manner.chunk or len(ids)
        read = self.body if self.manner.split else self.model
        for begin in range(0, len(ids), size):
            row = self._row(ids[begin : begin + size])
            read(input_ids=row, past_key_values=cache, use_cache=True)
        return cache
