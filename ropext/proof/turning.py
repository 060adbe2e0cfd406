"""Which layers of a small model of random weights turn what they read, and whether the factor on
cosine and sine reaches the softmax. Loaded by describing.py, by path: it imports nothing of ropext.
"""

from typing import Any

TOKENS = 12
FAR = 3  # what positions are multiplied by, so that distances are others
MOVED = 1e-6  # of an attention's largest output; float32 alone moves less
CANCELLED = 1e-3  # of the largest output; a norm's epsilon leaves some of a doubled factor


def _doubled(module: Any, args: Any, output: Any) -> Any:
    """Double what a rotary module gives, cosine and sine or the complex number of both."""
    if isinstance(output, tuple):
        return tuple(2 * each for each in output)
    return 2 * output


class Listener:
    """Runs a model twice at other positions, each attention on the hidden states of the first pass,
    and notes which layers then compute something else."""

    def __init__(self, model: Any) -> None:
        self.seen: dict[Any, dict[str, Any]] = {}
        self.names: dict[Any, str] = {}
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

    def enter(self, module: Any, args: Any, kwargs: Any) -> Any:
        """Give the second pass what the first one read, but for the positions."""
        seen = self.seen.setdefault(module, {})
        if "args" not in seen:
            seen["args"] = args
            seen["kwargs"] = kwargs
            return None
        if "position_embeddings" in kwargs:
            turned = {"position_embeddings": kwargs["position_embeddings"]}
            return seen["args"], seen["kwargs"] | turned
        if "hidden_states" in seen["kwargs"]:
            return args, kwargs | {"hidden_states": seen["kwargs"]["hidden_states"]}
        return (seen["args"][0], *args[1:]), kwargs

    def leave(self, module: Any, args: Any, output: Any) -> None:
        """Compare an output with that of the first pass."""
        out: Any = output[0] if isinstance(output, tuple) else output
        before: Any = self.seen[module].setdefault("out", out)
        layer = next(int(part) for part in self.names[module].split(".") if part.isdigit())
        far = bool((out - before).abs().max() > MOVED * before.abs().max())
        self.moved[layer] = self.moved.get(layer, False) or far


def small_model(child: Any, forward: Any, model: Any, text: Any) -> tuple[Any, int]:
    """A narrow model of the text part with random weights, and how many layers it has."""
    part = forward.owner(model, text)
    count = text.num_hidden_layers
    stack = forward.layers_of(part, count)
    chosen = forward.first_of_each_kind(forward.kinds(stack, text))
    last: Exception | None = None
    for heads_too in (True, False):
        try:
            config = forward.narrow(text, count, chosen, heads_too)
            small = forward.Small(child, type(part), config)
            if sum(p.numel() for p in small.model.parameters()) > forward.MOST_PARAMETERS:
                raise forward.NotRun("its smallest form is too wide")
            forward.fill(small.model, {})
            small.run(list(range(TOKENS)))
            return small, chosen
        except Exception as error:
            last = last or error
    raise last  # type: ignore[misc]


def turning(child: Any, forward: Any, model: Any, text: Any) -> dict[str, Any]:
    """By layer whether it turns what it reads, and whether a norm cancels the temperature; `unseen`
    says why this type cannot be made small."""
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
