"""What a run takes, counted before it starts: tokens, FLOPs, peak memory. And what would fit.

FLOPs of one row of n tokens with frozen weights: the layers run forward, forward again (where they
are recomputed) and backward (input gradients only), 2 P n each; the head forward and backward,
2 h V n each; causal attention 2 w n^2 forward, again, and 4 w n^2 backward, with w = layers x heads
x head_dim.
Both numbers are within a factor of two of what three measured shapes take (benchmarks/).
"""

from dataclasses import asdict, dataclass
from typing import Any

from ropext.errors import InputError
from ropext.evaluation.costs import Shape
from ropext.training.defaults import Settings
from ropext.training.loss import slice_tokens

# Bytes of one trained parameter: weight, gradient and AdamW's two moments, all float32.
TRAINED_BYTES = 16
# Share of the free memory that a run may plan to take.
USABLE = 0.9
# Layers are run again in the backward pass unless all activations take less than this share of the
# free memory: then a quarter of the time is saved.
PLENTY = 0.125
# Activations of one layer in the backward pass, in multiples of their single sizes: the inputs of
# the linear layers, the outputs of both LoRA paths and their sum, and the gradients of these
# (measured: benchmarks/finetune_memory.py).
KEPT = 4.0


@dataclass(frozen=True)
class Estimate:
    """Of one device."""

    tokens: int
    flops: float  # of all devices together
    weight_bytes: int
    trained_bytes: int
    activation_bytes: int
    loss_bytes: int
    recompute: bool  # layers are run again in the backward pass

    @property
    def peak_bytes(self) -> int:
        """Activations and loss are not at their largest at the same moment."""
        return self.weight_bytes + self.trained_bytes + max(self.activation_bytes, self.loss_bytes)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"peak_bytes": self.peak_bytes}


def row_flops(shape: Shape, tokens: int, recompute: bool = True) -> float:
    """Of one row, forward and backward."""
    body, square = (6, 8) if recompute else (4, 6)
    dense = tokens * (body * shape.body_parameters + 4 * shape.hidden * shape.vocabulary)
    attention = square * shape.layers * shape.heads * shape.head_dim * tokens**2
    return float(dense + attention)


def activation_bytes(shape: Shape, rows: int, tokens: int, recompute: bool = True) -> int:
    """Each layer's input is kept, and all of one layer in its backward pass; all layers' own
    once where none is run again."""
    at_once = rows * tokens
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    layer = 6 * shape.hidden + 3 * width + 4 * shape.feed_forward
    others = 0 if recompute else shape.layers - 1
    kept = shape.layers * shape.hidden + (KEPT + others) * layer
    return int(at_once * shape.dtype_bytes * kept)


def loss_bytes(shape: Shape, rows: int, tokens: int, sliced: bool) -> int:
    """Logits in flight, beside the layers' inputs and the gradient of the last hidden states."""
    at_once = rows * tokens
    inputs = at_once * shape.dtype_bytes * shape.hidden * (shape.layers + 3)
    if sliced:
        return inputs + 12 * min(slice_tokens(shape.vocabulary), at_once) * shape.vocabulary
    return inputs + 12 * at_once * shape.vocabulary


def estimate(
    shape: Shape,
    settings: Settings,
    trained: int,
    micro: int,
    *,
    free: int = 0,
    sliced: bool = True,
    four_bits: bool = False,
) -> Estimate:
    """Of the whole run; `trained` counts parameters, `micro` rows read at once, `free` bytes."""
    rows = settings.rows.value * settings.steps.value
    tokens = settings.row_tokens.value
    recompute = activation_bytes(shape, micro, tokens, recompute=False) > PLENTY * free
    bytes_each = 0.6 if four_bits else float(shape.dtype_bytes)
    return Estimate(
        tokens=settings.tokens,
        flops=rows * row_flops(shape, tokens, recompute),
        weight_bytes=int(shape.all_parameters * bytes_each),
        trained_bytes=trained * TRAINED_BYTES,
        activation_bytes=activation_bytes(shape, micro, tokens, recompute),
        loss_bytes=loss_bytes(shape, micro, tokens, sliced),
        recompute=recompute,
    )


def check_fits(
    found: Estimate, shape: Shape, free: int, *, sliced: bool = True, lora: bool = True
) -> None:
    """Refuse a run that cannot fit, with the longest row that would; a fit (not `lora`) has fewer
    options that help."""
    budget = int(USABLE * free)
    if found.peak_bytes <= budget:
        return
    fixed = found.weight_bytes + found.trained_bytes
    longest = _longest_row(shape, budget - fixed, sliced)
    need = f"about {found.peak_bytes / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free"
    if longest < 64:
        raise InputError(
            f"this run needs {need}; the weights alone ({found.weight_bytes / 1e9:.1f} GB) leave "
            "no room for a row: --dtype bfloat16 halves them"
            + (
                ", --qlora takes a quarter (on a GPU), accelerate launch with FSDP2 shares them"
                if lora
                else ""
            )
        )
    options = (
        f"--strategy pose --window {longest}, or a checkpoint extended to a smaller target"
        if lora
        else "--dtype bfloat16, or a smaller --factor"
    )
    raise InputError(
        f"this run needs {need}; rows of up to {longest} tokens would fit: --micro-rows 1, "
        f"{options}"
    )


def _longest_row(shape: Shape, budget: int, sliced: bool) -> int:
    """The longest row, read alone, within a budget of activations: a power of two, 0 = none."""
    longest = 0
    size = 16
    while (
        size <= 2**24
        and max(activation_bytes(shape, 1, size), loss_bytes(shape, 1, size, sliced)) <= budget
    ):
        longest, size = size, 2 * size
    return longest
