"""Compute cross-entropy without whole logits: the head and the loss run in slices of tokens.

The whole logits of one 32k row at a vocabulary of 128k take 39 GiB in a bfloat16 training step.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from ropext.models.head import PROBE, probe_token_ids, replaced_forward, why_head_is_not_plain
from ropext.models.processes import ask_first_process
from ropext.training.rows import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.utils.generic import ModelOutput


@contextmanager
def _in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model of a training into evaluation mode inside the `with` block. The block checks
    its training loss or its rows."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@torch.no_grad()
def why_not_sliced(model: "PreTrainedModel") -> str | None:
    """Return None if the training loss may be computed from head and decoder separately, else
    the reason."""
    with _in_evaluation_mode(model):
        return why_head_is_not_plain(model, probe_token_ids(model))


@torch.no_grad()
def chunks_are_joined(model: "PreTrainedModel", jump: int) -> bool:
    """Return whether tokens after a jump in the positions of a training row still see the tokens
    before it, as pose needs.

    Some attention implementations take a jump for the border of a packed document.
    """
    ids = probe_token_ids(model)
    positions = torch.arange(PROBE, device=ids.device)
    positions[PROBE // 2 :] += jump
    changed = ids.clone()
    changed[:, : PROBE // 2] = changed[:, : PROBE // 2].flip(-1)
    inputs = {
        "attention_mask": torch.ones_like(ids),
        "position_ids": positions[None],
        "use_cache": False,
    }
    with _in_evaluation_mode(model):
        one = model(input_ids=ids, **inputs).logits[:, PROBE // 2 :]
        two = model(input_ids=changed, **inputs).logits[:, PROBE // 2 :]
    return not torch.equal(one, two)


# Logits and their gradient in flight, in values: 64 MB each in float32. At least MINIMUM tokens,
# below which the matrix products of a slice lose speed.
SLICE_VALUES = 2**24
MINIMUM = 64


def slice_tokens(vocabulary: int) -> int:
    """Return the number of tokens whose logits are in memory at once in a sliced training loss."""
    return max(MINIMUM, SLICE_VALUES // vocabulary)


def sliced_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
) -> torch.Tensor:
    """Return the sum of the training losses of hidden (n, h) against labels (n), in float32;
    IGNORED labels count nothing."""
    apply: Callable[..., torch.Tensor] = _Sliced.apply
    return apply(hidden, weight, bias, labels, slice_tokens(weight.shape[0]))


class _Sliced(torch.autograd.Function):
    """A loss whose gradients are computed with it, slice by slice, so that no logits are made
    twice.

    torch's own operator (linear_cross_entropy in slices, 2.13) adds up in the dtype of its inputs:
    in bfloat16 a sum over 128k tokens stops growing at a third of its value.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        size: int,
    ) -> torch.Tensor:
        """Return the training loss, and keep its gradients of hidden states, weight and bias for
        the backward pass."""
        total = hidden.new_zeros((), dtype=torch.float32)
        needed = ctx.needs_input_grad
        of_hidden = torch.zeros_like(hidden) if needed[0] else None
        # float32, since one slice's part of the head's gradient is small compared with the sum.
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if needed[1] else None
        of_bias = hidden.new_zeros(len(weight), dtype=torch.float32) if needed[2] else None
        for at in range(0, len(hidden), size):
            piece = hidden[at : at + size]
            label = labels[at : at + size, None]
            counts = label != IGNORED
            label = label.clamp(min=0)
            logits = functional.linear(piece, weight, bias)
            slope = logits.float()
            exponent = slope.logsumexp(1, keepdim=True)
            total += ((exponent - slope.gather(1, label)) * counts).sum()
            # The gradient of the logits, in their own memory: softmax less one at the label.
            slope.sub_(exponent).exp_().scatter_add_(1, label, -torch.ones_like(exponent))
            slope.mul_(counts)
            rounded = slope.to(logits.dtype)
            if of_hidden is not None:
                of_hidden[at : at + size] = rounded @ weight
            if of_weight is not None:
                of_weight += rounded.T @ piece
            if of_bias is not None:
                of_bias += slope.sum(0)
        if of_weight is not None:
            of_weight = of_weight.to(hidden.dtype)
        if of_bias is not None:
            of_bias = of_bias.to(hidden.dtype)
        ctx.save_for_backward(of_hidden, of_weight, of_bias)
        return total

    @staticmethod
    def backward(ctx: Any, *up: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the training loss that `forward` kept, times the gradient of that
        loss."""
        gradients = list[torch.Tensor | None]()
        for gradient in ctx.saved_tensors:
            gradients.append(None if gradient is None else gradient * up[0])
        return (*gradients, None, None)


def next_token_labels(labels: torch.Tensor) -> torch.Tensor:
    """Return the training labels moved to the position before their token; the last position has
    none."""
    return functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


@dataclass(frozen=True)
class SlicedForward:
    """A replacement for a causal model's own `forward` in training: same loss, no logits."""

    model: "PreTrainedModel"

    def __call__(
        self,
        input_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        shift_labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **inputs: torch.Tensor | bool,
    ) -> "ModelOutput":
        """Return the training loss of labels without logits; without labels, call the model's
        own forward."""
        if shift_labels is None:
            if labels is None:
                output: ModelOutput = type(self.model).forward(
                    self.model, input_ids=input_ids, **inputs
                )
                return output
            shift_labels = next_token_labels(labels)
        from transformers.modeling_outputs import CausalLMOutputWithPast

        inputs.pop("use_cache", None)
        hidden = self.model.base_model(
            input_ids=input_ids, use_cache=False, **inputs
        ).last_hidden_state
        wanted = shift_labels.flatten()
        total = head_loss(self.model, hidden.flatten(0, 1), wanted)
        if num_items_in_batch is None:
            num_items_in_batch = (wanted != IGNORED).sum().clamp(min=1)
        return CausalLMOutputWithPast(loss=total / num_items_in_batch)


def head_loss(model: "PreTrainedModel", hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the sum of the training losses, computed inside a call of the output layer. Only
    there does FSDP have the layer's weights, which it shares among processes."""
    head = trained_head(model)

    def forward(states: torch.Tensor) -> torch.Tensor:
        """Return the training loss in the place of the output layer's logits."""
        return sliced_cross_entropy(states.to(head.weight.dtype), head.weight, head.bias, labels)

    with replaced_forward(head, forward):
        total: torch.Tensor = model.get_output_embeddings()(hidden)
    return total


def trained_head(model: "PreTrainedModel") -> nn.Linear:
    """Return the output layer of a model in training, or PEFT's copy if PEFT trains a copy of
    it."""
    head: Any = model.get_output_embeddings()
    copies = getattr(head, "modules_to_save", None)
    if copies is not None:
        head = copies[head.active_adapters[0]]
    linear: nn.Linear = head
    return linear


def use_sliced_loss(model: "PreTrainedModel") -> str | None:
    """Give a causal model the sliced training loss; return the reason if it keeps its own."""
    reason = ask_first_process(lambda: why_not_sliced(model))
    if reason is None:
        model.forward = SlicedForward(model)
    return reason
