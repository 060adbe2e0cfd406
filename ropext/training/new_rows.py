"""Train new rows of a learned position table while the others stay, and write them into their
table."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from ropext.base.jsontext import JsonObject
from ropext.files.checkpoint import Snapshot
from ropext.files.checkpoint.adapter import WEIGHTS
from ropext.files.checkpoint.writing import WriteOptions, place
from ropext.scaling.tables import Growth

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class NewRows:
    """The new rows of a table, which are trained alone or together with a LoRA."""

    table: Growth

    def modules(self, model: "PreTrainedModel") -> list[str]:
        """Return the names of a position table's modules whose new rows are trained; PEFT trains
        copies of these."""
        tables = list[str]()
        for name, _ in model.named_parameters():
            if self.table.positions.is_table(name):
                tables.append(name.removesuffix(".weight"))
        return tables

    def prepare(self, joined: nn.Module) -> None:
        """Let only new rows move in PEFT's copies of a position table, in float32 as a LoRA is:
        small steps would round to nothing."""
        for _, rows in self.tables(joined):
            (module,) = (m for m in joined.modules() if m._parameters.get("weight") is rows)
            kind = rows.dtype
            rows.data = rows.data.float()
            module.register_forward_hook(lambda _, __, read, kind=kind: read.to(kind))
            rows.register_hook(partial(_new_rows_gradient, self.table))

    def tables(self, joined: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the copies of a position table in which new rows are trained, with the names of the
        modules."""
        for name, weight in joined.named_parameters():
            plain = name.removeprefix("base_model.model.").replace(".modules_to_save.default", "")
            if weight.requires_grad and self.table.positions.is_table(plain):
                yield plain.removesuffix(".weight"), weight

    def count_fixed(self, joined: nn.Module) -> dict[str, int]:
        """Return how many numbers of each position table training leaves as they are, by words
        for its new rows (`96 new rows of NAME`)."""
        count = self.table.target - len(self.table.old_rows)
        fixed = dict[str, int]()
        for name, rows in self.tables(joined):
            fixed[f"{count} new rows of {name}"] = (len(rows) - count) * rows.shape[1]
        return fixed

    def write(
        self, snapshot: Snapshot, adapter: Path, directory: Path, manner: WriteOptions
    ) -> JsonObject:
        """Write the trained rows into their position table, with every other byte unchanged;
        return the comparison."""
        from safetensors.torch import load_file

        from ropext.files.schemes import growing  # late: no rotary model needs it

        positions = self.table.positions
        (trained,) = load_file(adapter / WEIGHTS).values()
        new = trained[positions.offset :].double().numpy()
        growth = replace(
            self.table,
            positions=self.table.extended,
            grow=lambda rows, count: new,
            kept={row: row for row in self.table.old_rows.values()},
        )
        places = growing.find_tables(snapshot, growth.positions)
        growing.grow_files(snapshot, directory, growth, places, manner.show)
        for name in set(snapshot.weight_files) - {tensor.file for tensor in places}:
            place(snapshot.path(name), directory / name, manner.link, manner.show)
        return growing.compare_tables(snapshot, directory, growth, places)


def _new_rows_gradient(table: Growth, gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a position table's new rows alone: AdamW, its weight decay zero,
    then leaves the others."""
    offset = table.positions.offset
    rows = list(range(offset))
    for row in table.old_rows.values():
        rows.append(offset + row)
    return gradient.index_fill(0, torch.tensor(rows, device=gradient.device), 0.0)
