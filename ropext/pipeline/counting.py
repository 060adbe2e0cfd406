"""What a demo costs, counted while it runs: tokens that pass a model's embedding.

A forward token counts 1 and a trained token 3 (forward, and a backward pass of twice its work). A
token counts as trained where gradients are recorded. Layers that are run again in the backward
pass do not read the embedding again, so recomputing is not counted.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

TRAINED = 3  # forward tokens that a trained one is worth


@dataclass
class Spent:
    """Tokens read without and with gradients."""

    forward: int = 0
    trained: int = 0

    @property
    def equivalents(self) -> int:
        """In forward tokens."""
        return self.forward + TRAINED * self.trained

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(self.forward + other.forward, self.trained + other.trained)

    def to_json(self) -> dict[str, int]:
        return {
            "forward": self.forward,
            "trained": self.trained,
            "equivalents": self.equivalents,
        }


@contextmanager
def counted(spent: Spent, seen: Callable[[], None] = lambda: None) -> Iterator[None]:
    """While this lasts, every token that any embedding reads is added to `spent`; `seen` is called
    after each addition."""
    import torch
    from torch.nn.modules.module import register_module_forward_pre_hook

    def on_forward(module: Any, inputs: tuple[Any, ...]) -> None:
        if not isinstance(module, torch.nn.Embedding) or inputs[0].is_meta:
            return
        if torch.is_grad_enabled():
            spent.trained += inputs[0].numel()
        else:
            spent.forward += inputs[0].numel()
        seen()

    handle = register_module_forward_pre_hook(on_forward)
    try:
        yield
    finally:
        handle.remove()
