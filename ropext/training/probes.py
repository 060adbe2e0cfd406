"""Questions asked of the very model that is to be trained, before it is."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

PROBE = 32  # tokens


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _random_ids(model: Any) -> torch.Tensor:
    weight = model.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, weight.shape[0], (1, PROBE), generator=generator).to(weight.device)


@contextmanager
def _amplified(head: nn.Module) -> Iterator[None]:
    """Multiply the head's output, so that a cap on logits shows also where they are small."""

    def widen(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output * (100.0 / output.abs().amax().clamp(min=1e-6))

    handle = head.register_forward_hook(widen)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def why_not_sliced(model: Any) -> str | None:
    """None where head(decoder(ids)) is what the model itself computes; else the reason.

    Asked of the model before PEFT wraps it. Families scale or cap their logits under many names;
    a probe of 32 tokens finds them all.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return f"its output layer is a {type(head).__name__}, not a plain linear one"
    if getattr(model, "base_model", model) is model:
        return "its decoder cannot be told from its output layer"
    ids = _random_ids(model)
    with _evaluating(model), _amplified(head):
        own = model(input_ids=ids, use_cache=False).logits.float()
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        split = head(hidden).float()
    difference = float((own - split).abs().max())
    # 100 is the largest logit; bfloat16 keeps 8 bits of it.
    if not difference <= (0.01 if head.weight.dtype == torch.float32 else 1.0):
        return "it scales or caps its logits"
    return None


@torch.no_grad()
def chunks_are_joined(model: Any, jump: int) -> bool:
    """Whether tokens after a jump in the positions still see those before it, as pose needs.

    Some attention implementations take a jump for the border of a packed document.
    """
    ids = _random_ids(model)
    positions = torch.arange(PROBE, device=ids.device)
    positions[PROBE // 2 :] += jump
    changed = ids.clone()
    changed[:, : PROBE // 2] = changed[:, : PROBE // 2].flip(-1)
    inputs = {
        "attention_mask": torch.ones_like(ids),
        "position_ids": positions[None],
        "use_cache": False,
    }
    with _evaluating(model):
        one = model(input_ids=ids, **inputs).logits[:, PROBE // 2 :]
        two = model(input_ids=changed, **inputs).logits[:, PROBE // 2 :]
    return not torch.equal(one, two)
