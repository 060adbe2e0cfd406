"""The output layer of a model: whether its logits are the hidden states times one matrix, and
nothing else. Only then may they be made in tiles, and the loss in slices.

The class and the config of a model foretell it (`foretold_bend`), for a forecast; what is computed
rests on the proof by running the model (`why_not_plain`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from ropext.errors import class_of

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel
    from transformers.modeling_outputs import BaseModelOutput

# Config keys that scale or cap logits, in so far as a config tells.
BENDING = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "output_multiplier_scale",
)
# Largest relative difference of two ways to multiply the same numbers.
SAME_PRODUCT = {"torch.float32": 1e-5, "torch.float64": 1e-12}
SAME_HALF_PRODUCT = 2**-7
# A cap or any other bend that logits of usual size hide shows when they are so many times larger,
# and at least so large.
STRETCH = 16
LARGE_LOGIT = 100.0


def plain_head(model: "PreTrainedModel") -> "torch.nn.Linear | None":
    """The output embeddings if they are one matrix that nobody wraps, moves or adapts."""
    import torch

    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear or "forward" in vars(head):
        return None
    if head._forward_hooks or head._forward_pre_hooks:
        return None
    return head


def foretold_bend(model: "PreTrainedModel") -> str | None:
    """Why logits will not be those of a plain matrix, as far as class and config tell."""
    if plain_head(model) is None:
        return _why_wrapped(model)
    config = model.config.get_text_config()
    for key in BENDING:
        value = getattr(config, key, None)
        if value not in (None, 0, 1, 1.0):
            return f"it scales or caps its logits ({key} {value:g})"
    return None


def why_not_plain(model: "PreTrainedModel", ids: "torch.Tensor") -> str | None:
    """None where logits are the decoder's states times one matrix; else the reason.

    Families scale or cap their logits under many names, some in code of their own: a pass over a
    few `ids` (1, tokens) finds them all. Asked of a model before PEFT wraps it, without gradients.
    """
    reason = why_not_apart(model)
    if reason is not None:
        return reason
    return why_bent(model, model.base_model(input_ids=ids, use_cache=False))


def why_not_apart(model: "PreTrainedModel") -> str | None:
    """None where a decoder and one plain matrix can be told apart; else the reason."""
    if plain_head(model) is None:
        return _why_wrapped(model)
    if model.base_model is model:
        return "its decoder cannot be told from its output layer"
    return None


def why_bent(model: "PreTrainedModel", output: "BaseModelOutput") -> str | None:
    """None where the logits are the states of `output`, what the decoder gave, times the matrix;
    else the reason."""
    head = plain_head(model)
    assert head is not None  # they were told apart
    hidden = output.last_hidden_state
    assert hidden is not None
    largest = float(head(hidden[0]).float().abs().max())
    factor = max(STRETCH, LARGE_LOGIT / max(largest, 1e-6))
    for states in (hidden, hidden * factor):
        whole = logits_after(model, output, states)
        if not same_logits(whole.float(), head(states[0]).float(), head.weight.dtype):
            return "it scales or caps its logits"
    return None


def _why_wrapped(model: "PreTrainedModel") -> str:
    """Why the output layer is no plain head."""
    import torch

    head = model.get_output_embeddings()
    if type(head) is torch.nn.Linear:
        return "its output layer is wrapped: a hook, or another forward, stands around it"
    return f"its output layer is {class_of(head)}, not a plain linear one"


def same_logits(one: "torch.Tensor", other: "torch.Tensor", dtype: "torch.dtype") -> bool:
    """Whether two (tokens, vocabulary) logits are the same products, each rounded its own way."""
    if one.shape != other.shape:
        return False
    bound = SAME_PRODUCT.get(str(dtype), SAME_HALF_PRODUCT) * float(other.abs().max())
    return bool((one - other).abs().max() <= bound)


def logits_after(
    model: "PreTrainedModel", output: "BaseModelOutput", hidden: "torch.Tensor"
) -> "torch.Tensor":
    """Logits (tokens, vocabulary) of the model's own forward where its body has given `hidden` in
    the place of the last states of `output`."""
    import torch

    given = replace(output, last_hidden_state=hidden)
    embedding = model.get_input_embeddings().weight
    assert isinstance(embedding, torch.Tensor)
    ids = hidden.new_zeros(hidden.shape[:2]).long().to(embedding.device)
    with replaced_forward(model.base_model, lambda *args, **kwargs: given):
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return logits


@contextmanager
def replaced_forward(module: "torch.nn.Module", forward: Callable[..., object]) -> Iterator[None]:
    """For a moment, a call of `module` computes `forward`, inside of what hooks do around it."""
    replaced = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if replaced is None:
            del module.forward
        else:
            module.forward = replaced
