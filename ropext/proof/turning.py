"""Find which layers of a small random model rotate, and whether the factor on cosine and sine
reaches the softmax.

describing.py loads this file by path: it imports nothing of ropext.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor, nn
    from transformers import PreTrainedConfig, PreTrainedModel

    from ropext.proof.answers import Turning
    from ropext.proof.forward import Small

    Arguments = tuple[object, ...]
    Keywords = dict[str, object]

TOKENS = 12
FAR = 3  # multiplies the positions, so that their distances change
MOVED = 1e-6  # relative to an attention's largest output; float32 alone moves less
# relative to the largest output; a norm's epsilon leaves a rest of a doubled factor
CANCELLED = 1e-3


class FirstPass:
    """The input and the output of an attention module in the first pass."""

    def __init__(self, args: Arguments, kwargs: Keywords) -> None:
        self.args = args
        self.kwargs = kwargs
        self.out: Tensor | None = None


def _doubled(
    module: nn.Module, args: Arguments, output: Tensor | tuple[Tensor, ...]
) -> Tensor | tuple[Tensor, ...]:
    """Double a rotary module's output: cosine and sine, or the complex number of both."""
    if isinstance(output, tuple):
        return tuple(2 * each for each in output)
    return 2 * output


class Listener:
    """Hooks on a model's attention modules for two passes at different positions.

    In the second pass each module gets the hidden states of the first. `moved` then holds, by
    layer, whether its output changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self.seen: dict[nn.Module, FirstPass] = {}
        self.names: dict[nn.Module, str] = {}
        self.moved: dict[int, bool] = {}
        attentions = {}
        for name, module in model.named_modules():
            numbered = any(part.isdigit() for part in name.split("."))
            if numbered and type(module).__name__.endswith(("Attention", "MLA")):
                attentions[module] = name
        inner = set()
        for module in attentions:
            inner |= {part for part in module.modules() if part is not module}
        for module, name in attentions.items():
            if module not in inner:
                self.names[module] = name
                module.register_forward_pre_hook(self.enter, with_kwargs=True)
                module.register_forward_hook(self.leave)

    def enter(
        self, module: nn.Module, args: Arguments, kwargs: Keywords
    ) -> tuple[Arguments, Keywords] | None:
        """Give the second pass the input of the first one, except for the positions."""
        first = self.seen.get(module)
        if first is None:
            self.seen[module] = FirstPass(args, kwargs)
            return None
        if "position_embeddings" in kwargs:
            turned = {"position_embeddings": kwargs["position_embeddings"]}
            return first.args, first.kwargs | turned
        if "hidden_states" in first.kwargs:
            return args, kwargs | {"hidden_states": first.kwargs["hidden_states"]}
        return (first.args[0], *args[1:]), kwargs

    def leave(
        self, module: nn.Module, args: Arguments, output: Tensor | tuple[Tensor, ...]
    ) -> None:
        """Compare an output with the first pass's output."""
        out = output
        if isinstance(out, tuple):
            out = out[0]
        first = self.seen[module]
        if first.out is None:
            first.out = out
        before = first.out
        layer = next(int(part) for part in self.names[module].split(".") if part.isdigit())
        far = bool((out - before).abs().max() > MOVED * before.abs().max())
        self.moved[layer] = self.moved.get(layer, False) or far


def small_model(
    child: ModuleType, forward: ModuleType, model: PreTrainedModel, text: PreTrainedConfig
) -> tuple[Small, int]:
    """Build a narrow model of the text part with random weights; return it and its number of
    layers.

    Raise the first error if no narrow form runs.
    """
    part = forward.owner(model, text)
    count = text.num_hidden_layers
    stack = forward.layers_of(part, count)
    chosen = forward.first_of_each_kind(forward.kinds(stack, text))

    def attempt(heads_too: bool) -> Small:
        config = forward.narrow(text, count, chosen, heads_too)
        small: Small = forward.Small(child, type(part), config)
        if sum(p.numel() for p in small.model.parameters()) > forward.MOST_PARAMETERS:
            raise forward.NotRun("its smallest form is too wide")
        forward.fill(small.model, {})
        small.run(list(range(TOKENS)))
        return small

    return forward.first_that_runs(attempt), chosen


def turning(
    child: ModuleType, forward: ModuleType, model: PreTrainedModel, text: PreTrainedConfig
) -> Turning:
    """Return by layer whether it rotates its input, and whether a norm cancels the temperature.

    `unseen` holds the reason if this type cannot be made small.
    """
    try:
        small, layers = small_model(child, forward, model, text)
        listener = Listener(small.model)
        first = small.run(list(range(TOKENS)))
        small.run(list(range(0, FAR * TOKENS, FAR)))
        rotates = [listener.moved.get(layer) for layer in range(layers)]
        fresh, _ = small_model(child, forward, model, text)
        for _, module in fresh.modules:
            if any(name.endswith("inv_freq") for name in module._buffers):
                module.register_forward_hook(_doubled)
        second = fresh.run(list(range(TOKENS)))
    except Exception as error:
        return {"unseen": child.sentence_of(error), "rotates": [], "cancelled": False}
    return {
        "unseen": "",
        "rotates": rotates,
        "cancelled": any(rotates) and forward.apart(first, second) < CANCELLED,
    }
