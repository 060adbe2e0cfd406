"""Apply Self-Extend (arXiv 2401.01325) in a model's attention: no config can describe it.

A query at position p sees the keys nearer than `window` at their distances. It sees a farther key k
as if p were p

group + window - window

group and k were k

group. Without a group (ReRoPE) it sees all of these at distance `window`. The rule depends on the
query: below the trained context a query sees ordinary positions, so the logits there are the
base's. (With `literal` every query sees groups, as in the paper.) Keys arrive rotated, also from a
cache; a far key is rotated on to its group's position, so no other part of the model changes.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, product
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ropext.base.errors import UnsupportedModel, UsageError
from ropext.models.patching import attending
from ropext.models.patching.probing import probe_attention
from ropext.scaling.self_extend import Fold

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

# Parameters: the module that is called, its arguments and its keywords.
Hook = Callable[[nn.Module, tuple[object, ...], dict[str, object]], None]
NAME = "ropext_self_extend"  # in transformers' tables of attention functions
FOLD = "_ropext_fold"  # attribute of an attention module: its Folding and its Rotation
FOLDED = "_ropext_folded"  # attribute of a model: the hooks that a fold added
STOCK = "sdpa"
SHIFT = 7  # positions by which the probe moves its tokens
ROUNDED = 0.02  # share of the largest channel: error of a rotation in bfloat16
FAR = 2**62  # farther than any position
CACHED = "_ropext_positions"  # attribute of a cache: the positions of its keys
ARGUMENTS = {"softcap": "soft caps on its scores", "s_aux": "attention sinks"}


@dataclass(frozen=True)
class Layout:
    """The positions of the tokens of one forward pass, and which of these tokens see grouped
    keys."""

    start: int  # the number of the first query's own key
    positions: Tensor  # the queries' positions, a row for each text
    key_positions: Tensor  # the positions of the keys up to the last query's own
    consecutive: bool  # tokens are as far apart as their numbers
    first: int  # the first query that may see a grouped key, in any row
    full: int  # from this query on every query may, in every row

    @property
    def is_stock(self) -> bool:
        """Return whether no query of a patched model's pass sees a grouped key."""
        return self.first == self.positions.shape[1]


@dataclass
class Folding:
    """The fold of a model, and the forward pass that it computes now."""

    fold: Fold
    positions: Tensor = field(default_factory=lambda: torch.zeros(1, 1, dtype=torch.long))
    cache: "Callable[[], Cache | None]" = lambda: None  # held weakly, like the two tensors below
    layout: Layout | None = None
    layout_of: Sequence[
        Callable[[], Tensor | None]
    ] = ()  # the positions and the mask that the layout was made from

    def begin(self, positions: Tensor) -> None:
        """Begin a forward pass of a patched model over tokens at these positions."""
        self.positions = positions
        self.layout = None

    def layout_of_layer(
        self, positions: Tensor, mask: Tensor | None, queries: Tensor, keys: int
    ) -> Layout:
        """Return the positions of one patched layer's tokens: the first layer computes them, and
        all layers share them."""
        sources = [positions] if mask is None else [positions, mask]
        held = [reference() for reference in self.layout_of]
        if self.layout is not None and list(map(id, held)) == list(map(id, sources)):
            return self.layout
        here = positions.to(queries.device).expand(len(queries), -1)
        self.layout = _layout_of_pass(here, mask, keys, self.fold.begins, self.cache())
        self.layout_of = [weakref.ref(source) for source in sources]
        return self.layout


@dataclass(frozen=True)
class Rotation:
    """How one attention module rotates its channels, found by moving tokens."""

    inv_freq: Tensor  # float32, radians a token
    interleaved: bool  # pairs of neighbours, or of two halves
    first: bool  # the leading channels rotate, or the last ones

    def turn(self, states: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """Rotate the states of an attention module in memory (batch, heads, tokens, channels) from
        one position to another.

        Both angles are rounded as stock rounds them, and their difference is exact.
        """
        rates = self.inv_freq.to(states.device)
        old, new = (positions[:, None, :, None].float() * rates for positions in (before, after))
        place = "cpu" if states.device.type == "mps" else states.device  # it has no float64
        angle = new.to(place).double() - old.to(place).double()
        cos = angle.cos().to(states)
        sin = angle.sin().to(states)
        size = 2 * len(rates)
        channels = states.shape[-1]
        start = 0 if self.first else channels - size
        left, turned, right = states.split([start, size, channels - size - start], -1)
        if self.interleaved:
            a = turned[..., ::2]
            b = turned[..., 1::2]
            turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        else:
            a, b = turned.chunk(2, -1)
            turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        return torch.cat([left, turned, right], -1)


def _layout_of_pass(
    positions: Tensor, mask: Tensor | None, keys: int, begins: int, cache: "Cache | None"
) -> Layout:
    """Return the positions of the queries and keys of a patched model's pass, and keep them with
    its cache for later passes."""
    rows, count = positions.shape
    shown = None if mask is None else _shown_keys(mask[:, 0])  # all heads have the same
    start = _first_key(shown, count, keys)
    key_positions = positions
    if start > 0:
        key_positions = torch.cat(
            [_cached_positions(cache, rows, start).to(positions), positions], 1
        )
    if cache is not None:
        vars(cache)[CACHED] = key_positions
    numbers = torch.arange(start + count, device=positions.device)
    offsets = key_positions - numbers
    least = offsets.amin(1)
    most = offsets.amax(1)
    if shown is not None:  # no query sees padding, so its positions do not matter
        seen = shown.any(1)[:, : start + count].expand(rows, -1)
        least = offsets.masked_fill(~seen, FAR).amin(1)
        most = torch.where(seen.any(1), offsets.masked_fill(~seen, -FAR).amax(1), least)
    consecutive = bool((least == most).all())
    if consecutive:
        key_positions = numbers + least[:, None]  # also for the padding
        positions = key_positions[:, start:]
    beyond = positions >= begins
    first = int((~beyond.any(0)).cumprod(0).sum())
    full = count - int(beyond.all(0).flip(0).cumprod(0).sum())
    return Layout(start, positions, key_positions, consecutive, first, full)


def _first_key(shown: Tensor | None, count: int, keys: int) -> int:
    """Return the number of the first query's own key in a patched layer: a static cache holds more
    keys than tokens."""
    if shown is None:
        return keys - 1 if count == 1 else 0
    if count == keys:
        return 0
    numbers = torch.arange(keys, device=shown.device)
    last_seen = torch.where(shown, numbers, -1).amax(2)  # each query's own key, except in padding
    starts = last_seen - torch.arange(count, device=shown.device)
    return int(starts.max().clamp(0, keys - count))


def _cached_positions(cache: "Cache | None", rows: int, count: int) -> Tensor:
    """Return the positions that the first keys in a patched model's cache had when it was
    filled."""
    held: Tensor | None = None if cache is None else vars(cache).get(CACHED)
    if held is None or held.shape[1] < count or rows % len(held):
        raise UnsupportedModel(
            "self-extend: the positions of the keys in this cache are unknown; "
            "fill it with the patched model itself"
        )
    return held[:, :count].repeat_interleave(rows // len(held), 0)


def _shown_keys(mask: Tensor) -> Tensor:
    """Return which keys each query of a patched layer sees, by a mask of booleans or of numbers
    that are added to scores."""
    return mask if mask.dtype == torch.bool else mask == 0


def _folded_attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **rest: Any
) -> tuple[Tensor, None]:
    """Compute the attention of a module in memory: as stock below the context, with grouped keys
    beyond it."""
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    reading: Folding | None
    reading, rotation = vars(module).get(FOLD, (None, None))
    if reading is None or rotation is None:
        return sdpa_attention_forward(module, q, k, v, mask, **rest)
    fold = reading.fold
    positions = rest.get("position_ids")
    if positions is None:
        positions = reading.positions
    layout = reading.layout_of_layer(positions, mask, q, k.shape[2])
    if layout.is_stock:
        return sdpa_attention_forward(module, q, k, v, mask, **rest)
    first = layout.first
    full = layout.full
    end = layout.start + q.shape[2]
    near = torch.empty(len(q), 0, q.shape[1], v.shape[-1], dtype=v.dtype, device=v.device)
    if full:
        stop = layout.start + full
        seen = None if mask is None else mask[:, :, :full, :stop]
        near, _ = sdpa_attention_forward(
            module, q[:, :, :full], k[:, :, :stop], v[:, :, :stop], seen, **rest
        )
    q = q[:, :, first:]
    positions = layout.positions[:, first:]
    k = k[:, :, :end]
    v = v[:, :, :end]
    far_k = rotation.turn(k, layout.key_positions, fold.key_positions(layout.key_positions))
    far_q = rotation.turn(q, positions, fold.query_positions(positions))
    k, far_k, v = (repeat_kv(heads, q.shape[1] // heads.shape[1]) for heads in (k, far_k, v))
    seen = None if mask is None else _shown_keys(mask[:, :, first:, :end])
    scale = rest.get("scaling") or q.shape[-1] ** -0.5
    heads = attending.Heads(q, far_q, k, far_k, v, seen, layout.start + first, fold.window, scale)
    if not layout.consecutive:
        folded = attending.by_position(heads, positions, layout.key_positions)
    elif heads.fit_blocks:
        folded = attending.in_blocks(heads)
    else:
        folded = attending.in_scores(heads)
    folded = folded.transpose(1, 2)
    beyond = (positions >= fold.begins)[:, : full - first, None, None]
    mixed = torch.where(beyond, folded[:, : full - first], near[:, first:])
    return torch.cat([near[:, :first], mixed, folded[:, full - first :]], 1), None


# its branches depend on the values of mask and positions
UNCOMPILED = torch.compiler.disable(_folded_attention)


def apply_fold(live: "PreTrainedModel", how: Fold) -> None:
    """Make a model in memory attend by Self-Extend."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    remove_fold(live)
    loaded = live.config._attn_implementation
    if loaded != STOCK:
        raise UsageError(
            f"self-extend needs a model loaded with attn_implementation={STOCK!r}, was {loaded!r} "
            "(a model that needs it for soft caps or attention sinks cannot use self-extend)"
        )
    AttentionInterface.register(NAME, UNCOMPILED)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    live.set_attn_implementation(NAME)
    hooks = list[RemovableHandle]()
    setattr(live, FOLDED, hooks)
    try:
        rotations = {
            module: _rotation_of_module(seen, how.spectra)
            for module, seen in _probed_queries_and_keys(live).items()
        }
        if not any(rotations.values()):
            raise UnsupportedModel("self-extend: no layer of this model rotates and sees all text")
        reading = Folding(how)
        for module, rotation in rotations.items():
            vars(module)[FOLD] = (reading, rotation)
        folded = next(module for module, rotation in rotations.items() if rotation)
        hooks.append(folded.register_forward_pre_hook(_cache_hook(reading), with_kwargs=True))
        for module in live.get_decoder().modules():  # not the rotary modules of a vision tower
            if any(name.endswith("inv_freq") for name in module._buffers):
                hooks.append(
                    module.register_forward_pre_hook(_position_hook(reading), with_kwargs=True)
                )
    except BaseException:
        remove_fold(live)
        raise


def remove_fold(live: "PreTrainedModel") -> None:
    """Remove Self-Extend from a model in memory."""
    if FOLDED not in vars(live):
        return
    for hook in vars(live).pop(FOLDED):
        hook.remove()
    for module in live.modules():
        vars(module).pop(FOLD, None)
    live.set_attn_implementation(STOCK)


def _position_hook(reading: Folding) -> Hook:
    """Build a hook for a rotary module in memory that keeps the positions it receives."""

    def note_positions(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Keep the positions that a rotary module in memory receives; refuse positions of several
        axes."""
        for value in chain(args, kwargs.values()):
            if isinstance(value, Tensor) and not value.is_floating_point():
                if value.dim() != 2:
                    raise UnsupportedModel("self-extend: positions of several axes (mRoPE)")
                reading.begin(value)

    return note_positions


def _cache_hook(reading: Folding) -> Hook:
    """Build a hook for an attention module in memory that keeps the cache it receives."""

    def note_cache(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Keep the cache that an attention module in memory receives."""
        reading.cache = lambda: None
        for value in chain(args, kwargs.values()):
            if hasattr(value, "get_seq_length"):
                reading.cache = weakref.ref(cast("Cache", value))
                return

    return note_cache


def _probed_queries_and_keys(live: "PreTrainedModel") -> dict[nn.Module, list[tuple[Tensor, ...]]]:
    """Return the queries and keys of each attention module in memory that sees the whole text.

    They are of three tokens, at the first positions and `SHIFT` positions later.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    seen = dict[nn.Module, list[tuple[Tensor, ...]]]()
    kinds = getattr(live.config.get_text_config(), "layer_types", None) or ()
    windowed = {index for index, kind in enumerate(kinds) if kind != "full_attention"}

    def attend_and_keep(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **rest: Any
    ) -> tuple[Tensor, None]:
        """Attend as stock in a model in memory that a patch probes; if a module sees the whole
        text, keep its queries and keys, to find out how it rotates."""
        for name, what in ARGUMENTS.items():
            if rest.get(name) is not None:
                raise UnsupportedModel(f"self-extend: {type(module).__name__} has {what}")
        if rest.get("sliding_window") is None and module.layer_idx not in windowed:
            seen.setdefault(module, []).append((q, k))
        return sdpa_attention_forward(module, q, k, v, mask, **rest)

    AttentionInterface.register(NAME, attend_and_keep)
    try:
        probe_attention(live, (0, SHIFT))
    finally:
        AttentionInterface.register(NAME, UNCOMPILED)
    return seen


def _rotation_of_module(
    seen: Sequence[tuple[Tensor, ...]], spectra: Sequence[Sequence[float]]
) -> Rotation | None:
    """Return how an attention module of the model to patch rotates, found on the same tokens moved
    by `SHIFT`. Return None if it does not rotate them."""
    here, there = ([state.float() for state in states] for states in seen)
    at = torch.arange(here[0].shape[2], device=here[0].device)[None].expand(len(here[0]), -1)

    def turned(rotation: Rotation | None) -> bool:
        """Return whether a rotation, or none, turns the first queries and keys of a module in
        memory into the moved ones."""
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
