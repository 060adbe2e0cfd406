"""Rows -> tensors for the model."""

from collections.abc import Sequence

import torch

from ropext.training.sequences import Row

IGNORED = -100  # the label that stock losses leave out


class Collator:
    """Stacks rows; shorter ones are padded at their end.

    The attention mask is always given, all ones, also where nothing is padded: without one
    transformers takes positions that jump for the border of a packed document, and lets the second
    chunk of a pose row see nothing of the first.
    """

    def __init__(self, padding: int) -> None:
        self.padding = padding

    def __call__(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        length = max(len(row.ids) for row in rows)
        shape = (len(rows), length)
        ids = torch.full(shape, self.padding)
        labels = torch.full(shape, IGNORED)
        mask = torch.zeros(shape, dtype=torch.long)
        positions = torch.zeros(shape, dtype=torch.long)
        for at, row in enumerate(rows):
            size = len(row.ids)
            read = torch.from_numpy(row.ids.astype("int64"))
            ids[at, :size] = read
            scored = torch.from_numpy(row.scored)
            labels[at, :size] = torch.where(scored, read, IGNORED)
            mask[at, :size] = 1
            positions[at, :size] = torch.from_numpy(row.positions)
        weights = [row.weight for row in rows]
        weighed = {"row_weights": torch.tensor(weights)} if any(w != 1 for w in weights) else {}
        return {
            "input_ids": ids,
            "labels": labels,
            "attention_mask": mask,
            "position_ids": positions,
            **weighed,
        }
