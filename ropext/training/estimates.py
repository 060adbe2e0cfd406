"""What a run takes, counted before it starts: tokens, FLOPs, peak memory. And what would fit.

FLOPs of one row of n tokens with frozen weights: the layers run forward, forward again (where they
are recomputed) and backward (input gradients only), 2 P n each; the head forward and backward,
2 h V n each; causal attention 2 w n^2 forward, again, and 4 w n^2 backward, with w = layers x heads
x head_dim. Within a factor of two of what torch's counter says.

Memory is within a fifth of a count of live tensors, for fourteen types of model
(tests/training/test_memory.py); what an allocator loses in its gaps comes on top.
"""

from dataclasses import asdict, dataclass
from typing import Any

from ropext.errors import InputError
from ropext.evaluation.costs import Shape
from ropext.evaluation.layers import Layer
from ropext.training.defaults import Settings
from ropext.training.loss import slice_tokens
from ropext.training.sharing import of_each_row, of_the_weights

# Bytes of one trained parameter: weight, gradient and AdamW's two moments, all float32.
TRAINED_BYTES = 16
# Of the free memory: above the first share a run is warned of, above the second refused.
USABLE, REFUSED = 0.9, 1.15
# Layers are run again in the backward pass unless all activations take less than this share of the
# free memory: then a quarter of the time is saved.
PLENTY = 0.125
SCORE_BYTES = 10  # of one entry of the square of positions, in one layer of eager attention


@dataclass(frozen=True)
class TrainingEstimate:
    """Of one device; under FSDP and context parallelism of its share."""

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


def activation_bytes(
    shape: Shape, rows: int, tokens: int, recompute: bool = True, lora: bool = True
) -> int:
    """Each layer's input is kept, and all of one layer in its backward pass; all layers' own
    where none is run again."""
    size, scores = shape.dtype_bytes, SCORE_BYTES * shape.heads * tokens if shape.eager else 0
    masked = [
        shape.masks and own.window is not None and own.window <= tokens for own in shape.parts
    ]
    kept = [
        scores + kept_bytes(own, size, lora, tokens if mask else 0)
        for own, mask in zip(shape.parts, masked, strict=True)
    ]
    moments = [moment_bytes(own, size, lora) for own in shape.parts]
    if recompute:
        inputs = shape.layers * shape.hidden * size
        widest = (one + other for one, other in zip(kept, moments, strict=True))
        held = inputs + max(widest, default=0)
    else:
        held = sum(kept) + max(moments, default=0)
    # A window narrower than the row needs a mask of all positions by all: as booleans once, and in
    # each layer in the dtype of the weights.
    return int(rows * tokens * (held + tokens * any(masked)))


def kept_bytes(own: Layer, size: int, lora: bool, mask: int = 0) -> int:
    """What one layer keeps of each token for its backward pass, at `size` bytes a number: what its
    operators need again. In bfloat16 (autocast) a LoRA reads a copy of its own of each input.
    `mask` is a row of the mask, where there is one."""
    half = size < 4
    norms = 4 * own.copied + size * own.streams
    inputs = (size * own.inputs if half else size * own.distinct) if lora else 0
    # Where rotation learns (a fit), rotated halves and their other halves.
    attention = 2 * own.queries + own.keys + own.values
    attention += 0 if lora else 2 * own.turned
    if mask:  # keys and values are repeated for all queries
        attention += 2 * own.queries - own.keys - min(own.values, own.keys) + mask
    routed = own.experts.chosen * (3 * own.experts.inner + own.hidden) if own.experts.all else 0
    return norms + inputs + size * (attention + own.factors + routed) + 4 * own.experts.all


def moment_bytes(own: Layer, size: int, lora: bool) -> int:
    """What a layer's MLP holds beside it of each token, at its widest moment."""
    half = size < 4
    # Forward: the residual stream, what the MLP reads, and what its last projection and the LoRA
    # beside it make; the last projection's input, in bfloat16 copied to float32 for the LoRA.
    forward = 5 * size * own.hidden
    if half or not lora:
        forward += (size + 4 if lora else size) * own.inner
    # Backward: that input's gradient, from the projection and from the LoRA, or with the gradients
    # of both factors.
    backward = (2 if lora else 3) * size * own.inner + size * own.hidden
    if own.experts.all:
        # Of each expert's tokens: chosen, weighted, and put back in their order.
        forward = max(forward, 3 * size * own.experts.chosen * own.hidden)
        backward = max(backward, 3 * size * own.experts.chosen * own.experts.inner)
    return max(forward, backward)


def loss_bytes(shape: Shape, rows: int, tokens: int, sliced: bool) -> int:
    """Logits in flight, beside the layers' inputs and the gradient of the last hidden states."""
    at_once = rows * tokens
    inputs = at_once * shape.dtype_bytes * shape.hidden * (shape.layers + 3)
    if sliced:  # the logits, as float32 where they are not, and their exponentials
        each = 8 if shape.dtype_bytes == 4 else 8 + shape.dtype_bytes
        return inputs + each * min(slice_tokens(shape.vocabulary), at_once) * shape.vocabulary
    return inputs + 12 * at_once * shape.vocabulary


def gathered_bytes(shape: Shape) -> int:
    """What FSDP has whole at once: the layer in hand and the next, the embeddings and the head."""
    if of_the_weights() == 1:
        return 0
    tables = 2 * shape.hidden * shape.vocabulary
    layers = max(0, shape.all_parameters - tables) // shape.layers
    return int(shape.dtype_bytes * (2 * layers + tables))


def estimate(
    shape: Shape,
    settings: Settings,
    trained: int,
    micro: int,
    *,
    free: int = 0,
    sliced: bool = True,
    four_bits: bool = False,
    lora: bool = True,
) -> TrainingEstimate:
    """Of the whole run; `trained` counts parameters, `micro` rows read at once, `free` bytes. What
    the processes of a launch share is divided by their number."""
    # Of each row, what one process reads.
    tokens, holders = settings.longest // of_each_row(), of_the_weights()
    recompute = activation_bytes(shape, micro, tokens, False, lora) > PLENTY * free
    bytes_each = 0.6 if four_bits else float(shape.dtype_bytes)
    return TrainingEstimate(
        tokens=settings.tokens,
        flops=(settings.steps.value + settings.lost_steps)
        * (
            settings.rows.value * row_flops(shape, settings.row_tokens.value, recompute)
            + settings.keep_short * row_flops(shape, settings.context, recompute)
        ),
        weight_bytes=int(shape.all_parameters * bytes_each / holders) + gathered_bytes(shape),
        trained_bytes=trained * TRAINED_BYTES // holders,
        activation_bytes=activation_bytes(shape, micro, tokens, recompute, lora),
        loss_bytes=loss_bytes(shape, micro, tokens, sliced),
        recompute=recompute,
    )


def check_fits(
    found: TrainingEstimate,
    shape: Shape,
    free: int,
    *,
    sliced: bool = True,
    lora: bool = True,
    ignored: bool = False,
) -> str | None:
    """Refuse a run that cannot fit, with the longest row that would, unless that is `ignored`; the
    warning where it may not fit. A fit (not `lora`) has fewer options that help."""
    if found.peak_bytes <= USABLE * free:
        return None
    need = f"about {found.peak_bytes / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free"
    ways = _ways(found, shape, int(USABLE * free), sliced, lora)
    if ignored or found.peak_bytes <= REFUSED * free:
        return f"this run needs {need}, which may not be enough; {ways}"
    raise InputError(
        f"this run needs {need}; {ways} (--ignore-memory goes on whatever the estimate says)"
    )


def _ways(found: TrainingEstimate, shape: Shape, budget: int, sliced: bool, lora: bool) -> str:
    """What takes less."""
    longest = _longest_row(shape, budget - found.weight_bytes - found.trained_bytes, sliced, lora)
    longest *= of_each_row()
    if longest < 64:
        others = ""
        if of_the_weights() > 1:
            others = ", more GPUs share them further"
        elif lora:
            others = (
                ", --qlora takes a quarter (on a GPU), accelerate launch with FSDP2 shares them "
                "(both were not run on GPUs yet)"
            )
        return (
            f"the weights alone ({found.weight_bytes / 1e9:.1f} GB) leave no room for a row: "
            f"--dtype bfloat16 halves them{others}"
        )
    options = (
        f"--strategy pose --window {longest}, or a checkpoint extended to a smaller target"
        if lora
        else "--dtype bfloat16, or a smaller --factor"
    )
    return f"rows of up to {longest} tokens would fit: --micro-rows 1, {options}"


def _longest_row(shape: Shape, budget: int, sliced: bool, lora: bool) -> int:
    """The longest row, read alone, within a budget of activations: a power of two, 0 = none."""

    def needed(size: int) -> int:
        activations = activation_bytes(shape, 1, size, lora=lora)
        return max(activations, loss_bytes(shape, 1, size, sliced))

    longest, size = 0, 16
    while size <= 2**24 and needed(size) <= budget:
        longest, size = size, 2 * size
    return longest
