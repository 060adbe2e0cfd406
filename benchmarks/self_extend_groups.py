"""Self-Extend whose groups double with distance, as a benchmark alone: no option names it.

    python benchmarks/self_extend_groups.py MODEL DATA [--factor 2 4 8] [--documents 24]
    python benchmarks/real_model.py --model SMOLLM2 --dtype bfloat16 --books FOLDER \
        --variants self-extend self-extend-from-2 self-extend-from-4 [--length 32768]

Claim to be tried: groups that double gain 0.01 nats a token over the default's one group on two of
three kinds of text (novels, code, manuals), over the far half of 2, 4 and 8 times the context.

Beyond the window the first band of distances is grouped by a first group (2, or 4); each band after
it holds twice as many tokens in groups twice as large, so that every band takes as many positions.
There are as few bands as keep the target within the positions that the default allows itself:
(context - window) / 1.5 beyond the window.

Models are read by it in one row without padding, without a cache.
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ropext.base.bundled import MODELS
from ropext.models import patching
from ropext.models.patching import attending, self_extend
from ropext.models.patching.attending import Heads, KeySpan
from ropext.results.values import Bootstrap, Value
from ropext.scaling.self_extend import SPARE, Positions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FIRST_GROUPS = (2, 4)
STEPS = 32  # the lengths of bands are multiples of such a part of the context


@dataclass(frozen=True)
class Band:
    """Distances from `begins` on share positions by `group`; the nearest one has `position`."""

    begins: int  # tokens
    group: int
    position: int  # distance that the model sees

    def key_positions(self, positions: Positions) -> Positions:
        """Return k // G."""
        return positions // self.group

    def query_positions(self, positions: Positions) -> Positions:
        """Return p // G, moved so that a key at the band's edge gets its position."""
        return self.key_positions(positions) + (self.position - self.key_positions(self.begins))


def doubling_bands(context: int, target: int, first: int) -> tuple[Band, ...]:
    """Divide the distances beyond half of the context into bands, the first in groups of `first`.

    From a band to the next the seen distance never falls. A band's last key is at most ceil((end -
    1) / G) - begins // G beyond its first, and the next band begins there.
    """
    window = context // 2
    room = (context - window) / SPARE
    step = context // STEPS
    count = 1
    tokens = _first_band(target - window, count, step)
    while count * tokens / first > room:
        count += 1
        tokens = _first_band(target - window, count, step)
    bands = []
    begins = window
    position = window
    for number in range(count):
        group = first << number
        end = begins + (tokens << number)
        bands.append(Band(begins, group, position))
        position += -(-(end - 1) // group) - begins // group
        begins = end
    return tuple(bands)


def _first_band(far: int, count: int, step: int) -> int:
    """Return the tokens of the first of `count` bands that double and hold `far` tokens."""
    return step * math.ceil(far / ((1 << count) - 1) / step)


def in_bands(heads: Heads, bands: tuple[Band, ...], rotation: self_extend.Rotation) -> Tensor:
    """Attend in blocks: near keys at their positions, the keys of each band at its positions."""
    device = heads.q.device
    block = math.gcd(heads.start, heads.window, *(band.begins for band in bands))
    positions = torch.arange(heads.start, heads.start + heads.q.shape[2], device=device)[None]
    key_positions = torch.arange(heads.k.shape[2], device=device)[None]
    banded = []
    for band in bands:
        far_q = rotation.turn(heads.q, positions, band.query_positions(positions))
        far_k = rotation.turn(heads.k, key_positions, band.key_positions(key_positions))
        banded.append(replace(heads, far_q=far_q, far_k=far_k))
    last = block * math.ceil(heads.k.shape[2] / block)
    ends = [*(band.begins for band in bands[1:]), last]
    parts = []
    for at in range(0, heads.q.shape[2], block):
        count = min(block, heads.q.shape[2] - at)
        here = heads.start + at
        pieces = []
        for span in _spans(here, count, 0, heads.window, far=False):
            pieces.append(attending.attend_span(heads, at, count, span))
        for band, states, end in zip(bands, banded, ends, strict=True):
            for span in _spans(here, count, band.begins, end, far=True):
                pieces.append(attending.attend_span(states, at, count, span))
        parts.append(attending.join_spans(pieces).to(heads.v.dtype))
    return torch.cat(parts, 2)


def _spans(here: int, count: int, begins: int, end: int, far: bool) -> Iterator[KeySpan]:
    """Divide the keys that are `begins` to `end` - 1 tokens before each of `count` queries.

    All are multiples of a block, so that a triangle is wholly before the first key or beyond it.
    """
    nearest = here - begins
    furthest = here - end
    if nearest >= 0:
        yield KeySpan(slice(nearest, nearest + count), far, "up to its own")
    if furthest >= 0:
        yield KeySpan(slice(furthest, furthest + count), far, "beyond its own")
    between = slice(max(furthest + count, 0), nearest)
    if between.stop > between.start:
        yield KeySpan(between, far)


def _attention(
    bands: tuple[Band, ...],
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Stand for Self-Extend's attention: as stock below the context, in bands beyond it."""
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    reading, rotation = vars(module)[self_extend.FOLD]
    if mask is not None or q.shape[2] != k.shape[2]:
        raise NotImplementedError("groups that double are read in one row without padding or cache")
    context = reading.fold.context
    near, _ = sdpa_attention_forward(
        module, q[:, :, :context], k[:, :, :context], v[:, :, :context], None, **rest
    )
    if q.shape[2] <= context:
        return near, None
    queries = q[:, :, context:]
    keys = repeat_kv(k, q.shape[1] // k.shape[1])
    values = repeat_kv(v, q.shape[1] // v.shape[1])
    scale = rest.get("scaling") or q.shape[-1] ** -0.5
    window = reading.fold.window
    heads = Heads(queries, queries, keys, keys, values, None, context, window, scale)
    folded = in_bands(heads, bands, rotation)
    return torch.cat([near, folded.transpose(1, 2)], 1), None


def patch_bands(model: "PreTrainedModel", bands: tuple[Band, ...], factor: float) -> None:
    """Let a model read by Self-Extend with these bands, until `patching.unpatch` or a patch."""
    from transformers import AttentionInterface

    patching.patch(model, method="self-extend", factor=factor)
    AttentionInterface.register(self_extend.NAME, partial(_attention, bands))


def patch_doubling(model: "PreTrainedModel", first: int, factor: float) -> None:
    """Let a model read by Self-Extend with groups that double with distance, from `first` on."""
    context = int(model.config.max_position_embeddings)
    patch_bands(model, doubling_bands(context, int(context * factor), first), factor)


def gained(default: list[np.ndarray], doubling: list[np.ndarray], span: slice) -> Value:
    """Nats a token that groups that double gain over the default, paired by document."""
    gaps = []
    counts = []
    for one, other in zip(default, doubling, strict=True):
        gaps.append(float((one[span] - other[span]).sum()))
        counts.append(len(one[span]))
    return Bootstrap(0).ratio(gaps, counts)


def main() -> None:
    import transformers
    from real_model import told
    from self_extend import documents, losses

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("data", help="documents, a line of JSON each")
    parser.add_argument("--factor", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--documents", type=int, default=24)
    given = parser.parse_args()
    place = str(MODELS.get(given.model, given.model))
    model = transformers.AutoModelForCausalLM.from_pretrained(place).eval()
    context = int(model.config.max_position_embeddings)
    print("Gain over the default, nats a token (95 % interval over documents; above 0 is better)\n")
    print("| tokens | documents | groups | far half | last eighth |\n|---|---|---|---|---|")
    for factor in given.factor:
        target = factor * context
        texts = documents(place, given.data, target, given.documents)
        patching.patch(model, method="self-extend", factor=factor)
        default = [losses(model, ids) for ids in texts]
        spans = (slice(target // 2 - 1, None), slice(-target // 8, None))
        for first in FIRST_GROUPS:
            patch_doubling(model, first, factor)
            doubling = [losses(model, ids) for ids in texts]
            bands = doubling_bands(context, target, first)
            named = ", ".join(f"{band.group} from {band.begins:,}" for band in bands)
            cells = " | ".join(told(gained(default, doubling, span)) for span in spans)
            print(f"| {target:,} | {len(texts)} | {named} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
