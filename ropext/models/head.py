"""Check whether a model's logits are its hidden states times one matrix, and nothing else.

Only then may ropext compute them in tiles, and the loss in slices. The class and the config of a
model predict it (`predicted_head_problem`), for a forecast. Before it computes, ropext checks it
by running the model (`why_head_is_not_plain`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from ropext.base.errors import class_name

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel
    from transformers.modeling_outputs import BaseModelOutput

# Config keys that scale or cap logits, as far as a config names them.
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
# Logits of usual size can hide a cap or another bend: it shows if they are this many times larger,
# and at least this large.
STRETCH = 16
LARGE_LOGIT = 100.0
PROBE = 32  # tokens


def probe_token_ids(model: "PreTrainedModel") -> "torch.Tensor":
    """Return random tokens that probe how a model in memory computes."""
    import torch

    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, weight.shape[0], (1, PROBE), generator=generator).to(weight.device)


def plain_head(model: "PreTrainedModel") -> "torch.nn.Linear | None":
    """Return the output layer of a model in memory if it is one matrix without a wrapper, hook or
    adapter; else None."""
    import torch

    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear or "forward" in vars(head):
        return None
    if head._forward_hooks or head._forward_pre_hooks:
        return None
    return head


def predicted_head_problem(model: "PreTrainedModel") -> str | None:
    """Return why the logits of a model in memory will not be the product with a plain matrix, as
    far as class and config show."""
    if plain_head(model) is None:
        return _why_wrapped(model)
    config = model.config.get_text_config()
    for key in BENDING:
        value = getattr(config, key, None)
        if value not in (None, 0, 1, 1.0):
            return f"it scales or caps its logits ({key} {value:g})"
    return None


def why_head_is_not_plain(model: "PreTrainedModel", ids: "torch.Tensor") -> str | None:
    """Return why the logits of a model in memory are not its decoder's states times one matrix.
    Return None if they are.

    Families scale or cap their logits under many names, some in their own code: a pass over a few
    `ids` (1, tokens) finds them all. Call it before PEFT wraps the model, without gradients.
    """
    reason = why_head_is_not_separate(model)
    if reason is not None:
        return reason
    return why_logits_differ(model, model.base_model(input_ids=ids, use_cache=False))


def why_head_is_not_separate(model: "PreTrainedModel") -> str | None:
    """Return why a model in memory has no separate decoder with one plain matrix. Return None if it
    has."""
    if plain_head(model) is None:
        return _why_wrapped(model)
    if model.base_model is model:
        return "its decoder cannot be told from its output layer"
    return None


def why_logits_differ(model: "PreTrainedModel", output: "BaseModelOutput") -> str | None:
    """Return why the logits of a model in memory are not its decoder's states, in `output`, times
    the matrix. Return None if they are."""
    head = plain_head(model)
    assert head is not None  # why_head_is_not_separate has checked this
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
    """Return why the output layer of a model in memory is no plain head."""
    import torch

    head = model.get_output_embeddings()
    if type(head) is torch.nn.Linear:
        return "its output layer is wrapped: a hook, or another forward, stands around it"
    return f"its output layer is {class_name(head)}, not a plain linear one"


def same_logits(one: "torch.Tensor", other: "torch.Tensor", dtype: "torch.dtype") -> bool:
    """Return whether two (tokens, vocabulary) logits of a model in memory are the same products,
    with separate rounding."""
    if one.shape != other.shape:
        return False
    bound = SAME_PRODUCT.get(str(dtype), SAME_HALF_PRODUCT) * float(other.abs().max())
    return bool((one - other).abs().max() <= bound)


def logits_after(
    model: "PreTrainedModel", output: "BaseModelOutput", hidden: "torch.Tensor"
) -> "torch.Tensor":
    """Return the logits (tokens, vocabulary) of the forward of a model in memory, with `hidden` as
    the last states of `output`."""
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
    """Replace the forward of a module of a model in memory inside the `with` block; hooks still run
    around it."""
    replaced = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if replaced is None:
            del module.forward
        else:
            module.forward = replaced
