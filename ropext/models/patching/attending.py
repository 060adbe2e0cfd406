"""Attend with queries that see grouped keys: near keys at their own positions, far keys at the
positions of their groups.

Torch's kernels compute this in blocks of the window; otherwise ropext holds the scores.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

# Devices; "cuda" comes here when benchmarks/gpu_day.py has compared it there.
IN_BLOCKS: tuple[str, ...] = ("cpu",)
CHUNK = 256  # queries at a time if scores are held


@dataclass(frozen=True)
class Heads:
    """The input to the attention of one layer: queries and keys, at their own positions and at the
    positions of their groups, with equally many heads."""

    q: Tensor
    far_q: Tensor
    k: Tensor
    far_k: Tensor
    v: Tensor
    shown: Tensor | None  # which keys a query may see; None: those up to its own
    start: int  # the number of the first query's own key
    window: int
    scale: float

    @property
    def fit_blocks(self) -> bool:
        """Return whether torch's attention kernels that give a log-sum-exp can be used in a patched
        layer.

        They have no gradient and one width of heads, and the kernels for a GPU take neither a mask
        nor every width.
        """
        states = self.q, self.k, self.v
        learns = torch.is_grad_enabled() and any(state.requires_grad for state in states)
        width = self.q.shape[-1]
        if learns or width != self.v.shape[-1] or self.q.device.type not in IN_BLOCKS:
            return False
        if self.q.device.type != "cpu" and (self.shown is not None or width % 8 or width > 256):
            return False
        return self.q.shape[2] >= self.window and self.start >= self.window

    def weighed(self, scores: Tensor, rows: slice) -> Tensor:
        """Return the values of a patched layer's first keys, weighed by the softmax of these
        queries' scores."""
        count = scores.shape[-1]
        if self.shown is None:
            queries = torch.arange(self.start + rows.start, self.start + rows.stop)
            hidden = (queries[:, None] < torch.arange(count)).to(scores.device)
        else:
            hidden = ~self.shown[:, :, rows, :count]
        scores = scores.float() * self.scale
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num()
        return weights.to(self.v.dtype) @ self.v[:, :, :count]


def by_position(heads: Heads, positions: Tensor, key_positions: Tensor) -> Tensor:
    """Attend in a patched layer with all scores of a few queries at a time, for rows with gaps or
    several documents."""
    parts = []
    for at in range(0, heads.q.shape[2], CHUNK):
        rows = slice(at, min(at + CHUNK, heads.q.shape[2]))
        near = heads.q[:, :, rows] @ heads.k.transpose(2, 3)
        far = heads.far_q[:, :, rows] @ heads.far_k.transpose(2, 3)
        distance = positions[:, None, rows, None] - key_positions[:, None, None]
        scores = torch.where(distance < heads.window, near, far)
        parts.append(heads.weighed(scores, rows))
    return torch.cat(parts, 2)


def in_scores(heads: Heads) -> Tensor:
    """Attend in a patched layer with scores held for a few queries at a time."""
    parts = []
    window = heads.window
    for at in range(0, heads.q.shape[2], CHUNK):
        rows = slice(at, min(at + CHUNK, heads.q.shape[2]))
        first = heads.start + at
        end = heads.start + rows.stop  # the keys of these queries themselves
        all_far = max(first + 1 - window, 0)
        any_far = max(end - window, 0)
        near = heads.q[:, :, rows] @ heads.k[:, :, all_far:end].transpose(2, 3)
        far = heads.far_q[:, :, rows] @ heads.far_k[:, :, :any_far].transpose(2, 3)
        both = slice(all_far, any_far)  # far for only some of these queries
        queries = torch.arange(first, end, device=near.device)
        distance = queries[:, None] - torch.arange(all_far, any_far, device=near.device)
        split = any_far - all_far
        mixed = torch.where(distance < window, near[..., :split], far[..., both])
        scores = torch.cat([far[..., :all_far], mixed, near[..., split:]], -1)
        parts.append(heads.weighed(scores, rows))
    return torch.cat(parts, 2)


def in_blocks(heads: Heads) -> Tensor:
    """Attend in a patched layer in blocks of Self-Extend's window.

    A kernel gives each part of the keys with the log-sum-exp of its scores, and these sums join the
    parts. Memory grows with the length, not with its square.
    """
    parts = []
    for at in range(0, heads.q.shape[2], heads.window):
        count = min(heads.window, heads.q.shape[2] - at)
        pieces = [attend_span(heads, at, count, span) for span in _spans(heads, at, count)]
        parts.append(join_spans(pieces).to(heads.v.dtype))
    return torch.cat(parts, 2)


@dataclass(frozen=True)
class KeySpan:
    """A part of the keys that each query of a block sees whole, or as a triangle as wide as
    high."""

    keys: slice
    far: bool  # at the positions of their groups
    triangle: Literal["", "up to its own", "beyond its own"] = ""


def _spans(heads: Heads, at: int, count: int) -> list[KeySpan]:
    """Divide the keys that `count` queries of a patched layer see into parts.

    They see their own block. In the block before it, query r sees key c near if c > r, and
    otherwise far. Every key before that block is far.
    """
    here = heads.start + at
    before = here - heads.window
    spans = [
        KeySpan(slice(here, here + count), far=False, triangle="up to its own"),
        KeySpan(slice(before, before + count), far=False, triangle="beyond its own"),
        KeySpan(slice(before + count, here), far=False),  # if the last block is not whole
        KeySpan(slice(before, before + count), far=True, triangle="up to its own"),
        KeySpan(slice(0, before), far=True),
    ]
    return [span for span in spans if span.keys.stop > span.keys.start]


def attend_span(heads: Heads, at: int, count: int, span: KeySpan) -> tuple[Tensor, Tensor]:
    """Return the attention of a patched layer over a part of the keys, for each query of a block,
    and the log-sum-exp of its scores."""
    rows = slice(at, at + count)
    queries = (heads.far_q if span.far else heads.q)[:, :, rows]
    keys = (heads.far_k if span.far else heads.k)[:, :, span.keys]
    values = heads.v[:, :, span.keys]
    if heads.shown is not None:
        seen = heads.shown[:, :, rows, span.keys]
        index = torch.arange(count, device=queries.device)
        if span.triangle == "up to its own":
            seen = seen & (index <= index[:, None])
        elif span.triangle:
            seen = seen & (index > index[:, None])
        return _kernel_with_mask(queries, keys, values, seen, heads.scale)
    if span.triangle != "beyond its own":
        return _kernel(queries, keys, values, bool(span.triangle), heads.scale)
    # Backwards, c > r is c' <= r', for all but the last query, which sees none, and the first key.
    out = torch.zeros_like(queries)
    total = queries.new_full(queries.shape[:3], -torch.inf, dtype=torch.float32)
    if count > 1:
        seen_backwards, sums = _kernel(
            queries[:, :, :-1].flip(2),
            keys[:, :, 1:].flip(2),
            values[:, :, 1:].flip(2),
            True,
            heads.scale,
        )
        out[:, :, :-1] = seen_backwards.flip(2)
        total[:, :, :-1] = sums.flip(2)
    return out, total


def _kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attend in a patched layer by torch's kernel for this device and dtype. Return the output and
    the log-sum-exp of the scores."""
    aten = torch.ops.aten
    if q.device.type == "cpu":
        out, total = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=scale
        )
    elif q.dtype == torch.float32:
        answer = aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, causal, scale=scale
        )
        out = answer[0]
        total = answer[1][..., : q.shape[2]]  # whole groups of 32 queries
    else:
        answer = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        out = answer[0]
        total = answer[1]
    return out, total


def _kernel_with_mask(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend in a patched layer by torch's kernel on a CPU to the keys that each query may see;
    some queries see none of these keys."""
    bias = torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, -torch.inf)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, total = attend(q, k, v, 0.0, False, attn_mask=bias, scale=scale)
    return out.nan_to_num(), total.masked_fill(~seen.any(-1), -torch.inf)


def join_spans(pieces: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Weigh the attention outputs of a patched layer over the parts of the keys by each part's
    share of all scores."""
    total = torch.logsumexp(torch.stack([sums for _, sums in pieces]), 0)
    shares = ((sums - total).exp().nan_to_num()[..., None] for _, sums in pieces)
    weighed = [out.float() * share for (out, _), share in zip(pieces, shares, strict=True)]
    return torch.stack(weighed).sum(0)
