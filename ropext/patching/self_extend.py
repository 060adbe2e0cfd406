"""Self-Extend (arXiv 2401.01325) in memory: what no config can say, said in a model's attention.

A query at position p sees the keys nearer than `window` at their distances and the others at
p // group + window - window // group against k // group; without a group (ReRoPE) all at `window`.
The rule goes by the query: below the trained context a query sees ordinary positions, so the logits
there are the base's. Keys come rotated, out of a cache too; a far one is turned on to where its
group stands, so nothing else of the model is touched.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ropext.errors import UnsupportedModel, UsageError
from ropext.scaling.self_extend import Fold

NAME = "ropext_self_extend"  # in transformers' tables of attention functions
FOLD = "_ropext_fold"  # attribute of an attention module: what is read, how it rotates
FOLDED = "_ropext_folded"  # attribute of a model: how to take its folds back
STOCK = "sdpa"
SHIFT = 7  # positions by which the probe moves its tokens
ROUNDED = 0.02  # of the largest channel: what bfloat16 makes of a turn
CHUNK = 256  # queries at a time where scores are held
ARGUMENTS = {"softcap": "soft caps on its scores", "s_aux": "attention sinks"}


@dataclass
class Folding:
    """How a model is folded, and the positions of the tokens that it reads just now."""

    fold: Fold
    positions: Tensor = field(default_factory=lambda: torch.zeros(1, 1, dtype=torch.long))


@dataclass(frozen=True)
class Rotation:
    """How one attention module turns its channels, found by moving tokens."""

    inv_freq: Tensor  # float32, radians a token
    interleaved: bool  # pairs of neighbours, or of two halves
    first: bool  # the leading channels turn, or the last ones

    def turn(self, states: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """Turn states (batch, heads, tokens, channels) on from one position to another.

        Angles are rounded at each of the two as stock rounds them, and their difference is exact.
        """
        rates = self.inv_freq.to(states.device)
        old, new = (positions[:, None, :, None].float() * rates for positions in (before, after))
        place = "cpu" if states.device.type == "mps" else states.device  # it has no float64
        angle = new.to(place).double() - old.to(place).double()
        cos, sin = angle.cos().to(states), angle.sin().to(states)
        size, channels = 2 * len(rates), states.shape[-1]
        start = 0 if self.first else channels - size
        left, turned, right = states.split([start, size, channels - size - start], -1)
        if self.interleaved:
            a, b = turned[..., ::2], turned[..., 1::2]
            turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        else:
            a, b = turned.chunk(2, -1)
            turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        return torch.cat([left, turned, right], -1)


def _attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **rest: Any
) -> tuple[Tensor, None]:
    """Stand for stock's attention: as stock below the context, folded beyond it."""
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    reading: Folding | None
    reading, rotation = vars(module).get(FOLD, (None, None))
    count, last = q.shape[2], k.shape[2] - 1  # `last`: the key of the last query itself
    if mask is not None:  # a static cache holds more keys than tokens
        last -= int(mask[:, 0, -1].flip(-1).int().argmax(-1).min())
    if reading is None or rotation is None or last < reading.fold.context:
        return sdpa_attention_forward(module, q, k, v, mask, **rest)
    fold, positions = reading.fold, reading.positions
    positions = positions.to(q.device).expand(len(q), -1)
    beyond = positions >= fold.context
    full, first = count - int(beyond.all(0).sum()), count - int(beyond.any(0).sum())
    start = last + 1 - count
    near = torch.empty(len(q), 0, q.shape[1], v.shape[-1], dtype=v.dtype, device=v.device)
    if full:
        seen = None if mask is None else mask[:, :, :full, : start + full]
        k_seen, v_seen = k[:, :, : start + full], v[:, :, : start + full]
        near, _ = sdpa_attention_forward(module, q[:, :, :full], k_seen, v_seen, seen, **rest)
    if first == count:
        return near, None
    ends = positions[:, -1:]
    key_positions = ends + torch.arange(-last, 1, device=q.device)
    q, positions = q[:, :, first:], positions[:, first:]
    k, v = k[:, :, : last + 1], v[:, :, : last + 1]
    far_k = rotation.turn(k, key_positions, fold.key_positions(key_positions))
    far_q = rotation.turn(q, positions, fold.query_positions(positions))
    k, far_k, v = (repeat_kv(heads, q.shape[1] // heads.shape[1]) for heads in (k, far_k, v))
    seen = None if mask is None else mask[:, :, first:, : last + 1]
    scale = rest.get("scaling") or q.shape[-1] ** -0.5
    learns = torch.is_grad_enabled() and any(state.requires_grad for state in (q, k, v))
    blocks = q.device.type == "cpu" and q.shape[2] >= fold.window and not learns
    way = _in_blocks if blocks and q.shape[-1] == v.shape[-1] else _in_scores
    folded = way(q, far_q, k, far_k, v, seen, start + first, fold.window, scale).transpose(1, 2)
    rows = beyond[:, first:full, None, None]
    mixed = torch.where(rows, folded[:, : full - first], near[:, first:])
    return torch.cat([near[:, :first], mixed, folded[:, full - first :]], 1), None


def _in_scores(
    q: Tensor, far_q: Tensor, k: Tensor, far_k: Tensor, v: Tensor, mask: Tensor | None,
    start: int, window: int, scale: float,
) -> Tensor:  # fmt: skip
    """Attend with scores held for a few queries at a time; the first query's key is at `start`."""
    parts = []
    for at in range(0, q.shape[2], CHUNK):
        rows = slice(at, min(at + CHUNK, q.shape[2]))
        first, end = start + at, start + rows.stop  # the keys of these queries themselves
        all_far, any_far = max(first + 1 - window, 0), max(end - window, 0)
        near = q[:, :, rows] @ k[:, :, all_far:end].transpose(2, 3)
        far = far_q[:, :, rows] @ far_k[:, :, :any_far].transpose(2, 3)
        keys = torch.arange(end, device=q.device)
        distance = torch.arange(first, end, device=q.device)[:, None] - keys
        both = slice(all_far, any_far)  # far for some of these queries alone
        split = any_far - all_far
        mixed = torch.where(distance[:, both] < window, near[..., :split], far[..., both])
        scores = torch.cat([far[..., :all_far], mixed, near[..., split:]], -1).float() * scale
        hidden = distance < 0 if mask is None else ~_allowed(mask[:, :, rows, :end])
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num()
        parts.append(weights.to(v.dtype) @ v[:, :, :end])
    return torch.cat(parts, 2)


def _allowed(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask == 0


def _in_blocks(
    q: Tensor, far_q: Tensor, k: Tensor, far_k: Tensor, v: Tensor, mask: Tensor | None,
    start: int, window: int, scale: float,
) -> Tensor:  # fmt: skip
    """Attend in blocks of the window, by torch's flash attention for CPUs: the block itself, what
    of the block before it is near, what of it is far, and all before that; joined by their
    log-sum-exp. Memory grows with the length, not with its square."""
    parts = []
    index = torch.arange(window)
    near = index[:, None] < index  # query r of a block and key c of the one before: r + window - c
    for at in range(0, q.shape[2], window):
        rows = slice(at, min(at + window, q.shape[2]))
        count = rows.stop - at
        here, before = start + at, start + at - window
        spans: list[tuple[Tensor, Tensor, slice, Tensor | None]] = [
            (q, k, slice(here, here + count), None),
            (q, k, slice(before, here), near[:count]),
            (far_q, far_k, slice(before, here), ~near[:count]),
            (far_q, far_k, slice(0, before), None),
        ]
        pieces = []
        for number, (queries, keys, span, band) in enumerate(spans):
            causal = number == 0 and mask is None
            if mask is not None:
                shown = _allowed(mask[:, :, rows, span])
                band = shown if band is None else shown & band
            pieces.append(
                _flash(queries[:, :, rows], keys[:, :, span], v[:, :, span], band, causal, scale)
            )
        parts.append(_joined(pieces).to(v.dtype))
    return torch.cat(parts, 2)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, band: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return what each query sees of these keys, and the log-sum-exp of its scores."""
    bias = None
    if band is not None:
        bias = torch.zeros(band.shape, dtype=q.dtype).masked_fill(~band, -torch.inf)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, total = attend(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    if band is not None:  # a query that sees none of them
        total = total.masked_fill(~band.any(-1), -torch.inf)
    return out.nan_to_num(), total


def _joined(pieces: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Weigh what was seen of each part of the keys by that part's share of all scores."""
    total = torch.logsumexp(torch.stack([sums for _, sums in pieces]), 0)
    shares = ((sums - total).exp().nan_to_num()[..., None] for _, sums in pieces)
    weighed = [out.float() * share for (out, _), share in zip(pieces, shares, strict=True)]
    return torch.stack(weighed).sum(0)


def apply_fold(live: Any, how: Fold) -> None:
    """Let a loaded transformers model read by Self-Extend."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    remove_fold(live)
    loaded = live.config._attn_implementation
    if loaded != STOCK:
        raise UsageError(
            f"self-extend needs a model loaded with attn_implementation={STOCK!r}, was {loaded!r} "
            "(a model that needs it for soft caps or attention sinks cannot use self-extend)"
        )
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    live.set_attn_implementation(NAME)
    setattr(live, FOLDED, hooks := list[Any]())
    try:
        rotations = {module: _rotation(seen, how.spectra) for module, seen in _moved(live).items()}
        if not any(rotations.values()):
            raise UnsupportedModel("self-extend: no layer of this model rotates and sees all text")
        reading = Folding(how)
        for module, rotation in rotations.items():
            vars(module)[FOLD] = (reading, rotation)
        for module in live.get_decoder().modules():  # not what turns in a vision tower
            if any(name.endswith("inv_freq") for name in module._buffers):
                hooks.append(module.register_forward_pre_hook(_note(reading), with_kwargs=True))
    except BaseException:
        remove_fold(live)
        raise


def remove_fold(live: Any) -> None:
    """Take Self-Extend back."""
    if FOLDED not in vars(live):
        return
    for hook in vars(live).pop(FOLDED):
        hook.remove()
    for module in live.modules():
        vars(module).pop(FOLD, None)
    live.set_attn_implementation(STOCK)


def _note(reading: Folding) -> Any:
    """Make a hook of a rotary embedding that keeps the positions it is handed."""

    def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and not value.is_floating_point():
                if value.dim() != 2:
                    raise UnsupportedModel("self-extend: positions of several axes (mRoPE)")
                reading.positions = value

    return note


def _moved(live: Any) -> dict[Any, list[tuple[Tensor, ...]]]:
    """What each attention module that sees the whole text is handed: queries and keys of three
    tokens, at the first positions and `SHIFT` further on."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    seen: dict[Any, list[tuple[Tensor, ...]]] = {}
    kinds = getattr(live.config.get_text_config(), "layer_types", None) or ()
    windowed = {index for index, kind in enumerate(kinds) if kind != "full_attention"}

    def look(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **rest: Any) -> Any:
        for name, what in ARGUMENTS.items():
            if rest.get(name) is not None:
                raise UnsupportedModel(f"self-extend: {type(module).__name__} has {what}")
        if rest.get("sliding_window") is None and module.layer_idx not in windowed:
            seen.setdefault(module, []).append((q, k))
        return sdpa_attention_forward(module, q, k, v, mask, **rest)

    AttentionInterface.register(NAME, look)
    trains = live.training
    try:
        live.eval()
        tokens = torch.arange(3, device=live.device)[None]
        with torch.no_grad():
            for first in (0, SHIFT):
                live(input_ids=tokens, position_ids=tokens + first, use_cache=False)
    finally:
        live.train(trains)
        AttentionInterface.register(NAME, _attention)
    return seen


def _rotation(
    seen: Sequence[tuple[Tensor, ...]], spectra: Sequence[Sequence[float]]
) -> Rotation | None:
    """Find how the same tokens were turned on; None where they stayed."""
    here, there = ([state.float() for state in states] for states in seen)
    at = torch.arange(here[0].shape[2], device=here[0].device)[None].expand(len(here[0]), -1)

    def turned(rotation: Rotation | None) -> bool:
        return all(
            (old - new if rotation is None else rotation.turn(old, at, at + SHIFT) - new)
            .abs()
            .max()
            < ROUNDED * old.abs().max()
            for old, new in zip(here, there, strict=True)
        )

    if turned(None):
        return None
    for rates, interleaved, first in product(spectra, (False, True), (True, False)):
        if 2 * len(rates) <= min(state.shape[-1] for state in here):
            rotation = Rotation(torch.tensor(rates, dtype=torch.float32), interleaved, first)
            if turned(rotation):
                return rotation
    raise UnsupportedModel("self-extend: how its attention rotates queries and keys is unknown")
