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

    from ropext.verifying.proof.answers import Turning
    from ropext.verifying.proof.forward import SmallModel

    Arguments = tuple[object, ...]
    Keywords = dict[str, object]

TOKENS = 12
FAR = 3  # multiplies the positions, so that their distances change
MOVED = 1e-6  # relative to an attention's largest output; float32 alone moves less
# relative to the largest output; a norm's epsilon leaves a rest of a doubled factor
CANCELLED = 1e-3


def _double_rotation(
    module: nn.Module, args: Arguments, output: Tensor | tuple[Tensor, ...]
) -> Tensor | tuple[Tensor, ...]:
    """Double the output of a small model's rotary module: cosine and sine, or the complex number of
    both."""
    if isinstance(output, tuple):
        return tuple(2 * each for each in output)
    return 2 * output


class AttentionListener:
    """Hooks on a model's attention modules for two passes at different positions.

    In the second pass each module gets the hidden states of the first. `moved` then holds, by
    layer, whether its output changed.
    """

    def __init__(self, model: nn.Module) -> None:
        """Register hooks on the outermost attention modules of a small model."""
        self.inputs: dict[nn.Module, tuple[Arguments, Keywords]] = {}  # in the first pass
        self.outputs: dict[nn.Module, Tensor] = {}
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
                module.register_forward_pre_hook(self.give_first_input, with_kwargs=True)
                module.register_forward_hook(self.compare_outputs)

    def give_first_input(
        self, module: nn.Module, args: Arguments, kwargs: Keywords
    ) -> tuple[Arguments, Keywords] | None:
        """Give a small model's attention module in the second pass its input of the first one,
        except for the positions."""
        if module not in self.inputs:
            self.inputs[module] = args, kwargs
            return None
        first_args, first_kwargs = self.inputs[module]
        if "position_embeddings" in kwargs:
            turned = {"position_embeddings": kwargs["position_embeddings"]}
            return first_args, first_kwargs | turned
        if "hidden_states" in first_kwargs:
            return args, kwargs | {"hidden_states": first_kwargs["hidden_states"]}
        return (first_args[0], *args[1:]), kwargs

    def compare_outputs(
        self, module: nn.Module, args: Arguments, output: Tensor | tuple[Tensor, ...]
    ) -> None:
        """Compare the output of a small model's attention module with its output in the first
        pass."""
        out = output
        if isinstance(out, tuple):
            out = out[0]
        before = self.outputs.setdefault(module, out)
        layer = next(int(part) for part in self.names[module].split(".") if part.isdigit())
        far = bool((out - before).abs().max() > MOVED * before.abs().max())
        self.moved[layer] = self.moved.get(layer, False) or far


def narrow_model(
    child: ModuleType, forward: ModuleType, model: PreTrainedModel, text: PreTrainedConfig
) -> tuple[SmallModel, int]:
    """Return a narrow model of the text part with random weights, and its number of layers.

    Raise the first error if no narrow form runs.
    """
    part = forward.text_model_of(model, text)
    count = text.num_hidden_layers
    stack = forward.stack_of_layers(part, count)
    chosen = forward.count_to_include_each_kind(forward.kinds_of_layers(stack, text))

    def attempt(heads_too: bool) -> SmallModel:
        """Run a small model with few heads, or with all of them."""
        config = forward.narrow_config(text, count, chosen, heads_too)
        small: SmallModel = forward.SmallModel(child, type(part), config)
        if sum(p.numel() for p in small.model.parameters()) > forward.MOST_PARAMETERS:
            raise forward.NotRun("its smallest form is too wide")
        forward.fill_parameters(small.model, {})
        small.outputs_at(list(range(TOKENS)))
        return small

    return forward.first_that_runs(attempt), chosen


def rotating_layers(
    child: ModuleType, forward: ModuleType, model: PreTrainedModel, text: PreTrainedConfig
) -> Turning:
    """Return which layers of a small model rotate their input, and whether a norm cancels the
    temperature.

    `unseen` holds the reason if this type cannot be made small.
    """
    try:
        small, layers = narrow_model(child, forward, model, text)
        listener = AttentionListener(small.model)
        first = small.outputs_at(list(range(TOKENS)))
        small.outputs_at(list(range(0, FAR * TOKENS, FAR)))
        rotates = [listener.moved.get(layer) for layer in range(layers)]
        fresh, _ = narrow_model(child, forward, model, text)
        for _, module in fresh.modules:
            if any(name.endswith("inv_freq") for name in module._buffers):
                module.register_forward_hook(_double_rotation)
        second = fresh.outputs_at(list(range(TOKENS)))
    except Exception as error:
        return {"unseen": child.sentence_of_error(error), "rotates": [], "cancelled": False}
    return {
        "unseen": "",
        "rotates": rotates,
        "cancelled": any(rotates) and forward.output_difference(first, second) < CANCELLED,
    }
