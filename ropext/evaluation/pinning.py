"""Rotary embeddings that depend on the length, held still while they are measured.

transformers recomputes `dynamic` and chooses between the two sets of `longrope` from the largest
position of every forward call. Read in chunks, the cache then holds keys of several rotations, and
chunked differs from whole by tenths of a nat. A pinned module keeps what one forward over the whole
sequence would use.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

LENGTH_DEPENDENT = ("dynamic", "longrope", "su")  # rope types; the last is longrope's old name
PINNED = "ropext_pinned"  # a rope_type that transformers' update function does not know


def _is_dynamic(rope_type: object) -> bool:
    return isinstance(rope_type, str) and ("dynamic" in rope_type or rope_type == "longrope")


def _rope_types(module: Any) -> dict[str | None, str]:
    """Layer type (None where the module has one rotation) to rope type."""
    kinds = getattr(module, "rope_type", None)
    if isinstance(kinds, dict):
        return dict(kinds)
    return {None: kinds} if isinstance(kinds, str) else {}


@contextmanager
def pinned(model: "torch.nn.Module", length: int) -> Iterator[None]:
    """While this lasts, every rotation is the one of a single forward over `length` tokens."""
    modules: list[Any] = [
        module
        for module in model.modules()
        if any(_is_dynamic(rope_type) for rope_type in _rope_types(module).values())
    ]
    saved = [_state(module) for module in modules]
    try:
        for module in modules:
            _settle(module, length)
        yield
    finally:
        for module, state in zip(modules, saved, strict=True):
            for name, value in state.items():
                put(module, name, value)


def _settle(module: Any, length: int) -> None:
    """Bring a module to the state after one forward of `length` tokens from its first state."""
    import torch

    types = _rope_types(module)
    for layer_type, rope_type in types.items():
        if not _is_dynamic(rope_type):
            continue
        prefix = "" if layer_type is None else f"{layer_type}_"
        first = getattr(module, f"{prefix}original_inv_freq")
        buffer = getattr(module, f"{prefix}inv_freq")
        put(module, f"{prefix}inv_freq", first.to(buffer.device).clone())
        if hasattr(module, "original_max_seq_len"):
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
        position = torch.tensor([[length - 1]], device=buffer.device)
        sample = torch.zeros(1, 1, 1, device=buffer.device)
        if layer_type is None:
            module(sample, position)
        else:
            module(sample, position, layer_type)
    still = {key: PINNED if _is_dynamic(value) else value for key, value in types.items()}
    module.rope_type = still if isinstance(module.rope_type, dict) else PINNED


def _state(module: Any) -> dict[str, Any]:
    names = [
        name
        for name in (*vars(module), *module._buffers)
        if name.endswith(("inv_freq", "max_seq_len_cached", "attention_scaling"))
    ]
    state = {name: getattr(module, name) for name in ("rope_type", *names)}
    return {name: v.clone() if hasattr(v, "clone") else v for name, v in state.items()}


def put(module: Any, name: str, value: Any) -> None:
    """Set a buffer that no checkpoint holds, or an attribute."""
    if name in module._buffers:
        module.register_buffer(name, value, persistent=False)
    else:
        setattr(module, name, value)
