"""What Trainer trains in a fit: frozen weights, a moving spectrum, a loss that is equal by row."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ropext.errors import Stopped
from ropext.training.loss import head_loss, shift
from ropext.training.sequences import IGNORED
from ropext.training.spectrum import Space


class LeftGuards(Stopped):
    """The spectrum moved out of what is allowed."""


class Learner(nn.Module):
    """Its state is the spectrum's alone, so that a checkpoint holds a few numbers.

    Windows weigh the same, however many of their tokens are scored; questions less (Row.weight).
    """

    accepts_loss_kwargs = False  # Trainer then divides the mean by the accumulation steps

    def __init__(self, model: Any, space: Space, *, sliced: bool) -> None:
        super().__init__()
        self.model, self.space, self.sliced = model, space, sliced

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        row_weights: torch.Tensor | None = None,
        **inputs: Any,
    ) -> dict[str, torch.Tensor]:
        reason = self.space.outside()
        if reason is not None:
            raise LeftGuards(reason)
        wanted = shift(labels)
        rows = torch.stack(self._rows(input_ids, wanted, inputs))
        return {"loss": (rows if row_weights is None else rows * row_weights).mean()}

    def _rows(
        self, ids: torch.Tensor, wanted: torch.Tensor, inputs: dict[str, Any]
    ) -> list[torch.Tensor]:
        """The mean loss of every row; 0 where nothing is scored."""
        if not self.sliced:
            logits = self.model(input_ids=ids, use_cache=False, **inputs).logits
            return [
                functional.cross_entropy(own.float(), labels, ignore_index=IGNORED, reduction="sum")
                / (labels != IGNORED).sum().clamp(min=1)
                for own, labels in zip(logits, wanted, strict=True)
            ]
        hidden = self.model.base_model(input_ids=ids, use_cache=False, **inputs).last_hidden_state
        rows = []
        for own, labels in zip(hidden, wanted, strict=True):
            # Only what is scored goes through the head: half of a window, a few tokens of an item.
            at = (labels != IGNORED).nonzero()[:, 0]
            rows.append(head_loss(self.model, own[at], labels[at]) / max(1, len(at)))
        return rows

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return self.space.state_dict()

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        return self.space.load_state_dict(dict(state_dict))

    def get_input_embeddings(self) -> Any:
        return self.model.get_input_embeddings()

    def activation_checkpointing_enable(self, **options: Any) -> None:
        self.model.activation_checkpointing_enable(**options)

    def gradient_checkpointing_enable(self, **options: Any) -> None:
        self.model.gradient_checkpointing_enable(**options)
