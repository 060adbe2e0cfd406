"""The last layer as the plain matrix that it is in most models: NLL from tiles of it.

A tile of logits (so many tokens by so many entries of the vocabulary) is made in one buffer, which
stays in the processor's cache, and taken into a running maximum and sum of exponents. No row of
logits ever stands whole: memory does not grow with the vocabulary, and nothing is copied that is
float32 already.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Fastest of 128 to 8192 on a CPU, where a float32 tile then has 4 MiB (benchmarks/eval_speed.py).
TILE_TOKENS = TILE_COLUMNS = 1024
# Bytes of a tile entry: in the dtype of the weights, and in float32 where that is another one.
TILE_BYTES = 6
# Largest relative difference of two ways to multiply the same numbers.
SAME_PRODUCT = {"torch.float32": 1e-5, "torch.float64": 1e-12}
SAME_HALF_PRODUCT = 2**-7
# A cap or any other bend that logits of usual size hide shows when they are so much larger.
STRETCH = 16
LOG2_E = 1.4426950408889634
# Config keys that scale or cap logits, in so far as a config tells.
BENDING = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "output_multiplier_scale",
)


def plain_head(model: Any) -> Any | None:
    """The output embeddings if they are one matrix that nobody wraps, moves or adapts."""
    import torch

    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear or "forward" in vars(head):
        return None
    return None if head._forward_hooks or head._forward_pre_hooks else head


def bends_logits(config: Any) -> bool:
    """Whether a config says that logits are scaled or capped."""
    return any(getattr(config, key, None) not in (None, 0, 1, 1.0) for key in BENDING)


def same_logits(own: "torch.Tensor", other: "torch.Tensor", dtype: "torch.dtype") -> bool:
    """Whether two (tokens, vocabulary) logits are the same products, each rounded its own way."""
    if own.shape != other.shape:
        return False
    bound = SAME_PRODUCT.get(str(dtype), SAME_HALF_PRODUCT) * float(other.abs().max())
    return bool((own - other).abs().max() <= bound)


def columns_for(budget: int, device: str) -> int:
    """Width of a tile: what the cache holds on a CPU, what the budget (bytes) allows elsewhere."""
    if device == "cpu":
        return TILE_COLUMNS
    return max(TILE_COLUMNS, budget // (TILE_BYTES * TILE_TOKENS))


def tiled_nll(
    head: Any, hidden: "torch.Tensor", wanted: "torch.Tensor", columns: int
) -> "torch.Tensor":
    """NLL of the token `wanted[i]` after `hidden[i]`, float32; at most TILE_TOKENS of them."""
    import torch

    weight, num = head.weight, len(hidden)
    columns = min(columns, len(weight))
    made = hidden.new_empty(num * columns)
    wide = made if made.dtype == torch.float32 else torch.empty_like(made, dtype=torch.float32)
    peak = wide.new_full((num,), -torch.inf)
    total, picked = torch.zeros_like(peak), torch.zeros_like(peak)
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
        own = tile.gather(1, at.clamp(0, len(part) - 1)[:, None])[:, 0]
        picked = torch.where((at >= 0) & (at < len(part)), own, picked)
        above = torch.maximum(peak, tile.amax(-1))
        # exp2 takes half the time of exp.
        tile.sub_(above[:, None]).mul_(LOG2_E).exp2_()
        total = total * torch.exp(peak - above) + tile.sum(-1)
        peak = above
    return peak + total.log() - picked
