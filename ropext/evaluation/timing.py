"""How long work takes on this machine, told by one small step of the same shape and its FLOPs.

The step goes through the model's own shape where that fits into the free memory, else through its
first layer, embeddings and head alone. The weights are made up: the time depends on shapes alone.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ropext.evaluation.costs import USABLE, Costs, Shape, Timed, shape_of
from ropext.evaluation.forward import Manner, TokenScorer
from ropext.evaluation.loading import free_memory
from ropext.evaluation.work import processes

# Rows are doubled from here until one takes this long, or is as long as the work's own.
SHORTEST, ENOUGH = 256, 4.0

Step = Callable[[Any, torch.Tensor], None]  # of a model, on a row of tokens


def timed(
    skeleton: Any,
    device: torch.device,
    dtype: torch.dtype,
    longest: int,
    work: Callable[[Shape], float],
    cost: Callable[[Shape, int], float],
    prepare: Callable[[Any], Step],
    what: str,
) -> Timed:
    """Time a step on a model that is on the meta device: `work` are the FLOPs of everything, by the
    shape of the whole model, `cost` those of a step on so many tokens; `prepare` makes the step."""
    size = torch.empty((), dtype=dtype).element_size()
    whole = own = replace(shape_of(skeleton), dtype_bytes=size, device=device.type)
    through = "the whole model"
    if whole.all_parameters * size > USABLE * free_memory(device):
        _cut(skeleton)
        own, through = shape_of(skeleton), f"one of its {whole.layers} layers"
    model = _filled(skeleton, device, dtype)
    step, vocabulary = prepare(model), own.vocabulary
    tokens = min(SHORTEST, longest)
    _seconds(step, model, tokens, vocabulary)  # the first one also compiles and allocates
    while (took := _seconds(step, model, tokens, vocabulary)) < ENOUGH and tokens < longest:
        tokens = min(2 * tokens, longest)
    seconds = work(whole) / cost(own, tokens) * took / processes()[1]
    return Timed(seconds, f"{what} of {tokens:,} tokens through {through}", took)


def _seconds(step: Step, model: Any, tokens: int, vocabulary: int) -> float:
    device = model.get_input_embeddings().weight.device
    ids = torch.arange(tokens, device=device)[None] % vocabulary
    begun = time.monotonic()
    step(model, ids)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic() - begun


def _cut(model: Any) -> None:
    """Leave the first layer alone."""
    stacks = [own for own in model.get_decoder().modules() if isinstance(own, nn.ModuleList)]
    del max(stacks, key=len)[1:]
    model.config.get_text_config().num_hidden_layers = 1


def _filled(model: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """The same model in memory, with small constants for weights."""
    for module in model.modules():
        for name, own in module.named_parameters(recurse=False):
            kind = dtype if own.is_floating_point() else own.dtype
            full = torch.full(own.shape, 1 / max(own.shape), dtype=kind, device=device)
            setattr(module, name, nn.Parameter(full, requires_grad=False))
    model.tie_weights()
    return model.to(device)


def timed_reading(
    skeleton: Any, device: torch.device, dtype: torch.dtype, costs: Costs, longest: int
) -> Timed:
    """Of an evaluation, by a forward pass as it makes them."""

    def prepare(model: Any) -> Step:
        manner = Manner(costs.chunk, costs.slice_tokens, split=True, columns=costs.columns)
        scorer = TokenScorer(model.eval(), manner)

        def step(_: Any, ids: torch.Tensor) -> None:
            scorer.token_nll(ids[0].cpu().numpy())

        return step

    with torch.inference_mode():
        return timed(
            skeleton, device, dtype, longest, lambda _: costs.flops, Shape.flops, prepare,
            "a forward pass",
        )  # fmt: skip
