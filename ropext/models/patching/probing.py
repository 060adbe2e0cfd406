"""Run a model in memory on a few tokens, so that each of its attention layers is called."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS = 3


def probe_attention(live: "PreTrainedModel", first_positions: Iterable[int] = (0,)) -> None:
    """Run a model in memory on a few tokens that begin at each of these positions.

    Each pass is without gradients, without a cache and in evaluation mode.
    """
    trains = live.training
    try:
        live.eval()
        tokens = torch.arange(TOKENS, device=live.device)[None]
        with torch.no_grad():
            for first in first_positions:
                moved = {"position_ids": tokens + first} if first else {}  # 0 is every default
                live(input_ids=tokens, use_cache=False, **moved)
    finally:
        live.train(trains)
