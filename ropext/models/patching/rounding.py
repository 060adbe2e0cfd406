"""Round keys and values in memory as an engine stores them in a KV cache of few bits.

Keys are rounded after their rotation, as a cache holds them. Every pass attends to the rounded
numbers, with or without a cache. Queries, scores and sums are not rounded; the further errors of an
engine's kernel are not included.

The types q8_0 and q4_0 are ggml's: blocks of 32 channels of one head share a scale of 16 bits.
Before it rounds, llama.cpp multiplies each head by an orthonormal Hadamard matrix if the head's
width is a multiple of 64 (its PR 21038, April 2026). For keys it takes the largest matrix that
divides the width, for values the matrix of size 64. The converter of llama.cpp reorders the
channels of some architectures (`llama` among them) so that the two channels of a rotary pair are
neighbours. Keys of such a model are rounded in that order. The type fp8 is e4m3 with a scale of 1,
as in vLLM if a checkpoint brings no scale.
"""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from ropext import families
from ropext.base.errors import UnsupportedModel, UsageError
from ropext.base.jsontext import Json
from ropext.families import stock
from ropext.families.geometry import CacheLayer
from ropext.families.loaders.gguf import reorders_keys
from ropext.models.patching.probing import probe_attention
from ropext.options.cache import UNROUNDED, StoredCache

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Attended = tuple[Tensor, Tensor | None]  # the output, and the weights if they are kept
Attention = Callable[..., Attended]
NAME = "ropext_rounded_cache"  # in transformers' tables of attention functions
BLOCK = 32  # channels that share a scale
LEAST_TURN = 64  # channels of the smallest Hadamard matrix
LARGEST_FP8 = 448.0  # the largest e4m3; larger numbers are clamped to it
OTHER_NUMBERS = (
    "--kv: the layers of this model attend to other numbers than their cache keeps (a latent "
    "vector, keys shared between layers, or attention of their own)"
)


def rounded_cache(states: Tensor, kind: str, turn: int) -> Tensor:
    """Round keys or values (..., channels of one head) of a model in memory as a cache of this type
    returns them.

    `turn` is the size of the Hadamard matrix that multiplies them first, 0 for none.
    """
    if kind == UNROUNDED:
        return states
    if kind == "fp8":
        limited = states.float().clamp(-LARGEST_FP8, LARGEST_FP8)
        return limited.to(torch.float8_e4m3fn).to(states.dtype)
    turned = _multiplied_by_hadamard(states.float(), turn)
    blocks = turned.unflatten(-1, (-1, BLOCK))
    stored = _q8_0(blocks) if kind == "q8_0" else _q4_0(blocks)
    # The matrix is its own inverse.
    return _multiplied_by_hadamard(stored.flatten(-2), turn).to(states.dtype)


def rounded_keys(keys: Tensor, kind: str, *, pairs_adjacent: bool) -> Tensor:
    """Round the keys of a model in memory as a KV cache of this type returns them.

    With `pairs_adjacent`, as in llama.cpp, the two channels of a rotary pair are neighbours; in
    transformers they are half a head apart.
    """
    turn = hadamard_size_of_keys(kind, keys.shape[-1])
    if not pairs_adjacent:
        return rounded_cache(keys, kind, turn)
    reordered = keys.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    stored = rounded_cache(reordered, kind, turn)
    halves: Tensor = stored.unflatten(-1, (-1, 2)).transpose(-1, -2)
    return halves.flatten(-2)


def _q8_0(blocks: Tensor) -> Tensor:
    """Round keys or values of a model in memory to -127..127 steps of a scale set by the block's
    largest size, halves away from zero."""
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    steps = blocks * _inverse_scale(scale)
    whole: Tensor = steps.sign() * (steps.abs() + 0.5).floor()
    return whole * scale.half().float()


def _q4_0(blocks: Tensor) -> Tensor:
    """Round keys or values of a model in memory to -8..7 steps of a scale by which the entry of the
    largest size, with its sign, is -8."""
    place = blocks.abs().argmax(-1, keepdim=True)
    scale = blocks.gather(-1, place) / -8
    steps = blocks * _inverse_scale(scale)
    whole = (steps + 8.5).floor().clamp(0, 15) - 8
    return whole * scale.half().float()


def _inverse_scale(scale: Tensor) -> Tensor:
    """Return one divided by the scale of a block of a model's rounded keys or values. A block of
    zeros has the scale 0, and its inverse is 0."""
    return torch.where(scale == 0, 0.0, 1 / scale)


def _multiplied_by_hadamard(states: Tensor, size: int) -> Tensor:
    """Multiply each run of `size` channels of a model's keys or values by the Hadamard matrix of
    that size."""
    if not size:
        return states
    runs = states.unflatten(-1, (-1, size))
    turned: Tensor = runs @ _hadamard(size, states.device)
    return turned.flatten(-2)


@cache
def _hadamard(size: int, device: torch.device) -> Tensor:
    """Build Sylvester's orthonormal matrix, H(2n) = [[H, H], [H, -H]], which multiplies a model's
    keys or values."""
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < size:
        above = torch.cat([matrix, matrix], 1)
        below = torch.cat([matrix, -matrix], 1)
        matrix = torch.cat([above, below], 0)
    return matrix / math.sqrt(size)


def hadamard_size_of_keys(kind: str, width: int) -> int:
    """Return the size of the matrix by which a patched model multiplies its keys of this width
    before it rounds them, as llama.cpp does. Return 0 for none."""
    if not hadamard_size_of_values(kind, width):
        return 0
    return width & -width  # the largest power of two that divides it


def hadamard_size_of_values(kind: str, width: int) -> int:
    """Return the size of the matrix by which a patched model multiplies its values of this width
    before it rounds them, as llama.cpp does. Return 0 for none."""
    if kind in (UNROUNDED, "fp8") or width % LEAST_TURN:
        return 0
    return LEAST_TURN


@contextmanager
def cache_rounded(live: "PreTrainedModel", stored: StoredCache) -> Iterator[None]:
    """Make a model in memory attend to a cache stored in these types, inside the `with` block."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = live.config._attn_implementation
    if before == NAME:
        raise UsageError("the cache of this model is rounded already")
    seen = dict[nn.Module, tuple[Tensor, Tensor]]()
    pairs_adjacent = reorders_keys(live.config.get_text_config().model_type)

    def inner(module: nn.Module) -> Attention:
        """Return the attention function that the layer in memory would call."""
        if before == "eager":  # each family's own
            family = sys.modules[type(module).__module__]
            return cast(Attention, vars(family)["eager_attention_forward"])
        return cast(Attention, ALL_ATTENTION_FUNCTIONS[before])

    def attend_and_keep(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **rest: object
    ) -> Attended:
        """Attend for a layer of the patched model as its own attention would, and keep its keys and
        values."""
        seen[module] = (k, v)
        return inner(module)(module, q, k, v, mask, **rest)

    def attend(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **rest: object
    ) -> Attended:
        """Attend to the rounded keys and values of a layer in memory."""
        keys = rounded_keys(k, stored.keys, pairs_adjacent=pairs_adjacent)
        values = rounded_cache(
            v, stored.values, hadamard_size_of_values(stored.values, v.shape[-1])
        )
        return inner(module)(module, q, keys, values, mask, **rest)

    AttentionInterface.register(NAME, attend_and_keep)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS[before])
    live.set_attn_implementation(NAME)
    try:
        probe_attention(live)
        _check_layers(live.config, list(seen.values()), stored)
        AttentionInterface.register(NAME, attend)
        yield
    finally:
        live.set_attn_implementation(before)


def kept_layers(config: dict[str, Json]) -> tuple[CacheLayer, ...]:
    """Return the numbers that the layers of a model in memory keep in a KV cache.

    Raise UnsupportedModel if no config gives them, or if the layers attend to other numbers.
    """
    stock.describe_unknown_types(config)
    layers = families.as_read(config).kv_layers
    if layers is None:
        raise UnsupportedModel("--kv: what the layers of this model keep in a cache is not known")
    if any(layer.is_latent for layer in layers):
        raise UnsupportedModel(OTHER_NUMBERS)
    return layers


def _check_layers(
    config: "PreTrainedConfig", seen: list[tuple[Tensor, Tensor]], stored: StoredCache
) -> None:
    """Raise UnsupportedModel if the layers of a model in memory attend to other numbers than their
    cache keeps, or if heads are not whole blocks."""
    kept = sorted(layer.values for layer in kept_layers(config.to_dict()))
    attended = sorted(_numbers_of_token(keys) + _numbers_of_token(values) for keys, values in seen)
    if kept != attended:
        raise UnsupportedModel(OTHER_NUMBERS)
    for keys, values in seen:
        for kind, width in ((stored.keys, keys.shape[-1]), (stored.values, values.shape[-1])):
            if kind in ("q8_0", "q4_0") and width % BLOCK:
                raise UnsupportedModel(
                    f"--kv {kind}: heads of {width} channels are no whole blocks of {BLOCK}; "
                    "engines refuse that too"
                )


def _numbers_of_token(states: Tensor) -> int:
    """Return how many numbers one token adds to the keys or values of a layer in memory."""
    return states.shape[1] * states.shape[-1]
