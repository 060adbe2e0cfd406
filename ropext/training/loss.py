"""Cross-entropy whose logits are never whole: the head and the loss run in slices of tokens.

The whole logits of one 32k row at a vocabulary of 128k take 39 GiB in a bfloat16 training step.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils import checkpoint

from ropext.training.collating import IGNORED
from ropext.training.probes import why_not_sliced

# Logits and their gradient in flight, in values: 64 MB each in float32. At least MINIMUM tokens,
# below which the matrix products of a slice lose speed.
SLICE_VALUES = 2**24
MINIMUM = 64


def slice_tokens(vocabulary: int) -> int:
    """Tokens whose logits are in memory at once."""
    return max(MINIMUM, SLICE_VALUES // vocabulary)


def sliced_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor
) -> torch.Tensor:
    """The sum of the losses of hidden (n, h) against labels (n); IGNORED ones count nothing.

    torch >= 2.13 has it as one operator, which computes the gradient during the forward pass.
    """
    size = slice_tokens(weight.shape[0])
    options = getattr(nn, "LinearCrossEntropyOptions", None)
    if options is None:
        return _checkpointed(hidden, weight, bias, labels, size)
    return functional.linear_cross_entropy(
        hidden,
        weight,
        labels,
        linear_bias=bias,
        reduction="sum",
        ignore_index=IGNORED,
        options=options(batch_chunk_size=size, chunking_method=None),
    )


def _checkpointed(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    size: int,
) -> torch.Tensor:
    """The same for older torch: each slice's logits are computed again in the backward pass."""

    def part(piece: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        logits = functional.linear(piece, weight, bias).float()
        return functional.cross_entropy(logits, wanted, ignore_index=IGNORED, reduction="sum")

    pairs = zip(hidden.split(size), labels.split(size), strict=True)
    losses = [checkpoint.checkpoint(part, *pair, use_reentrant=False) for pair in pairs]
    return torch.stack(losses).sum()


def shift(labels: torch.Tensor) -> torch.Tensor:
    """Each position's label is the next token; the last has none."""
    return functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


class SlicedForward:
    """Stands in for a causal model's own `forward` in training: same loss, no logits."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(
        self,
        input_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        shift_labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **inputs: Any,
    ) -> Any:
        if shift_labels is None:
            if labels is None:
                return type(self.model).forward(self.model, input_ids=input_ids, **inputs)
            shift_labels = shift(labels)
        from transformers.modeling_outputs import CausalLMOutputWithPast

        inputs.pop("use_cache", None)
        hidden = self.model.base_model(
            input_ids=input_ids, use_cache=False, **inputs
        ).last_hidden_state
        wanted = shift_labels.flatten()
        head = plain_head(self.model)
        total = sliced_cross_entropy(
            hidden.flatten(0, 1).to(head.weight.dtype), head.weight, head.bias, wanted
        )
        if num_items_in_batch is None:
            num_items_in_batch = (wanted != IGNORED).sum().clamp(min=1)
        return CausalLMOutputWithPast(loss=total / num_items_in_batch)


def plain_head(model: Any) -> nn.Linear:
    """The output layer; where PEFT trains a copy of it, that copy."""
    head: Any = model.get_output_embeddings()
    copies = getattr(head, "modules_to_save", None)
    if copies is not None:
        head = copies[head.active_adapters[0]]
    found: nn.Linear = head
    return found


def use_sliced_loss(model: Any) -> str | None:
    """Give a causal model the sliced loss; the reason where it keeps its own."""
    reason = why_not_sliced(model)
    if reason is None:
        model.forward = SlicedForward(model)
    return reason
