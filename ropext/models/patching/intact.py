"""Check that a model in memory still has the weights of its base and the frequencies of its
config."""

from collections.abc import Container, Iterator
from typing import TYPE_CHECKING

import torch

from ropext.base.errors import UsageError
from ropext.scaling.forms import LENGTH_DEPENDENT

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

Sums = dict[str, tuple[str, int]]  # name of a parameter -> its dtype, and the sum of its bytes

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bytes
# PEFT's names for a layer that an adapter wraps.
WRAPPED = ("base_layer", "original_module")
SUMS = "_ropext_sums"  # attribute of a patched model: its weights at the first patch, as sums
EXACT = "_ropext_exact"  # attribute of a rotary module: its frequencies before any cast
# Between devices float32 frequencies differ by some units in the last place.
TOLERANCE = 4e-6


def sums_of_weights(live: "PreTrainedModel") -> Sums:
    """Return the sum of the bytes of each parameter of a model in memory, read as integers of its
    width, computed on its device.

    Parameters that adapters add and weights that are offloaded to disk are left out.
    """
    sums = Sums()
    for name, parameter in _without_adapters(live):
        if not parameter.is_meta:
            words = parameter.detach().view(WORDS[parameter.element_size()])
            sums[name] = (str(parameter.dtype), int(words.sum(dtype=torch.int64)))
    return sums


def _without_adapters(live: "PreTrainedModel") -> Iterator[tuple[str, "nn.Parameter"]]:
    """Yield the own parameters of a model in memory, by the names that they have without
    adapters."""
    wrappers = list[str]()
    for name, module in live.named_modules():
        if any(hasattr(module, inner) for inner in WRAPPED):
            wrappers.append(f"{name}.")
    for name, parameter in live.named_parameters():
        own = name
        for inner in WRAPPED:
            own = own.replace(f".{inner}.", ".")
        if own != name or not name.startswith(tuple(wrappers)):
            yield own, parameter


def keep_sums(live: "PreTrainedModel", tables: Container[str]) -> None:
    """Keep the sums of the weights of a patched model, except of its tables, for
    `changed_weight`."""
    sums = Sums()
    for name, found in sums_of_weights(live).items():
        if name.removesuffix(".weight") not in tables:
            sums[name] = found
    setattr(live, SUMS, sums)


def changed_weight(live: "PreTrainedModel") -> str:
    """Return a sentence about a weight of a model in memory that changed since its first patch.
    Return "" if none did."""
    now = sums_of_weights(live)
    for name, (dtype, total) in getattr(live, SUMS, Sums()).items():
        if name not in now:
            return f"{name} is gone"
        if now[name][0] != dtype:
            return f"{name} was cast to {now[name][0]}; cast a model before ropext.patch"
        if now[name][1] != total:
            return f"{name} has other values"
    return ""


def check_frequencies(live: "PreTrainedModel", built: "PreTrainedModel") -> None:
    """Raise UsageError if the rotary frequencies of a model in memory differ from a model built
    from the same config by more than a cast to their dtype.

    No result would record such frequencies.
    """
    expected = dict(built.named_modules())
    for place, module in live.named_modules():
        for name, wanted in _frequencies(expected.get(place)):
            held = module._buffers.get(name)
            if held is None or held.is_meta or _follows_length(module, name):
                continue
            if not _are_cast_frequencies(held, wanted):
                raise UsageError(
                    f"{place}.{name} of this model was changed by hand and differs from the "
                    "config; load the model again and let ropext.patch scale it (method= takes a "
                    "function of yours)"
                )


def _frequencies(module: "nn.Module | None") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers of a rotary module in memory that hold frequencies."""
    for name, buffer in ({} if module is None else module._buffers).items():
        if name.endswith("inv_freq") and buffer is not None:
            yield name, buffer


def _follows_length(module: "nn.Module", name: str) -> bool:
    """Return whether a model in memory computes this buffer of its rotary module again for each
    length.

    The constant source of such a buffer is `original_inv_freq`.
    """
    if "original_" in name:
        return False
    kind = getattr(module, "rope_type", None)
    if isinstance(kind, dict):  # one for each type of layers
        kind = kind.get(name.removesuffix("_inv_freq"))
    return kind in LENGTH_DEPENDENT


def _are_cast_frequencies(held: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Return whether a rotary module of a model in memory has the wanted frequencies, cast to its
    dtype."""
    if held.shape != wanted.shape:
        return False
    cast = wanted.to(held.dtype).double()
    kind = torch.finfo(held.dtype)
    smallest = kind.smallest_normal * kind.eps
    here = held.detach().to("cpu", torch.float64)
    return torch.allclose(here, cast, rtol=max(kind.eps, TOLERANCE), atol=smallest)


def keep_exact(live: "PreTrainedModel") -> None:
    """Keep the frequencies of a patched model in memory exact through a cast of the whole model.

    A model that is loaded in that dtype would also have them in float32.
    """
    for module in live.modules():
        exact = {name: buffer.detach().clone() for name, buffer in _frequencies(module)}
        if exact:
            vars(module)[EXACT] = exact
            module.register_forward_pre_hook(_restore_frequencies)


def forget_exact(module: "nn.Module") -> None:
    """Drop the frequencies of a rotary module in memory that `keep_exact` keeps."""
    vars(module).pop(EXACT, None)
    for number, hook in list(module._forward_pre_hooks.items()):
        if hook is _restore_frequencies:
            del module._forward_pre_hooks[number]


def _restore_frequencies(module: "nn.Module", _: object) -> None:
    """Give a rotary module of a cast model in memory its exact frequencies back."""
    for name, exact in vars(module).get(EXACT, {}).items():
        held = module._buffers[name]
        if held is not None and held.dtype != exact.dtype:
            module._buffers[name] = exact.to(held.device)
