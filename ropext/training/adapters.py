"""Which weights are trained: LoRA on linear layers; norms and embeddings where asked for."""

import difflib
from collections.abc import Iterable
from typing import Any

from ropext.errors import InputError, UsageError
from ropext.options.training import Finetune
from ropext.training.defaults import Settings


def linear_names(model: Any) -> list[str]:
    """Short names of the linear layers inside the model's blocks, in their order.

    A block is what stands in a list of modules; the output head and what projects images or sound
    from outside of the text decoder stay out.
    """
    from torch import nn

    decoder = model.get_decoder()
    head = model.get_output_embeddings()
    names: dict[str, None] = {}
    for name, module in decoder.named_modules():
        inside = any(part.isdigit() for part in name.split("."))
        if inside and module is not head and _is_linear(module, nn.Linear):
            names[name.rpartition(".")[2]] = None
    return list(names)


def _is_linear(module: Any, linear: type) -> bool:
    """nn.Linear and what quantisers make of it, and the transposed Conv1D of GPT-2."""
    return isinstance(module, linear) or type(module).__name__ in ("Conv1D", "Linear4bit")


def target_names(model: Any, wanted: tuple[str, ...]) -> list[str]:
    """The names that get a LoRA; one that is not there is refused with those that are."""
    found = linear_names(model)
    if not found:
        raise InputError("--targets: this model has no linear layer inside its blocks")
    for name in wanted:
        if name not in found:
            near = difflib.get_close_matches(name, found, 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise UsageError(
                f"--targets {name} matches no linear layer{hint}; there are {', '.join(found)}"
            )
    return list(wanted) or found


def precise(model: Any, names: list[str]) -> list[str]:
    """The same, or full names where a short one would also match outside of the text decoder."""
    inside = {id(module) for module in model.get_decoder().modules()}
    wanted = set(names)
    found = [
        (name, id(module) in inside)
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in wanted
    ]
    if all(is_inside for _, is_inside in found):
        return names
    return [name for name, is_inside in found if is_inside]


def norm_names(model: Any) -> list[str]:
    """Full names of the norms: modules with one-dimensional weights that are no linear layer."""
    from torch import nn

    names = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        norm = "norm" in type(module).__name__.lower() and not list(module.children())
        if norm and isinstance(weight, nn.Parameter) and weight.ndim == 1:
            names.append(name)
    return names


def check_rank(model: Any, names: Iterable[str], rank: int) -> None:
    """A rank beyond a layer's smaller side would train more than the layer has."""
    wanted = set(names)
    sides = [
        (min(module.weight.shape), name)
        for name, module in model.get_decoder().named_modules()
        # A quantiser's packed weight does not have the layer's shape.
        if name.rpartition(".")[2] in wanted and type(module).__name__ != "Linear4bit"
    ]
    smallest, name = min(sides, default=(rank, ""))
    if rank > smallest:
        raise UsageError(
            f"--rank {rank} is above {smallest}, the smaller side of {name}; give at most "
            f"{smallest}, or name other layers (--targets)"
        )


def add_adapter(model: Any, options: Finetune, settings: Settings) -> Any:
    """The model in PEFT, with the LoRA (and full copies of norms and embeddings) trainable."""
    import peft

    names = target_names(model, options.targets)
    check_rank(model, names, settings.rank.value)
    names = precise(model, names)
    saved = norm_names(model) if options.train_norms else []
    if options.train_embeddings:
        embedding = model.get_input_embeddings()
        saved.append(next(name for name, module in model.named_modules() if module is embedding))
    tied = bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.rank.value,
        lora_alpha=settings.alpha.value,
        lora_dropout=options.dropout,
        target_modules=names,
        modules_to_save=saved or None,
        # Without it the trained copy of a tied embedding would leave the head behind.
        ensure_weight_tying=tied and options.train_embeddings,
        bias="none",
    )
    return peft.get_peft_model(model, config)
