"""What of a checkpoint is trained: a LoRA, new rows of its position table, or both. The objective
asks it; no other part of a training knows which."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from ropext.checkpoint import Snapshot
from ropext.checkpoint.adapter import WEIGHTS
from ropext.checkpoint.writing import place
from ropext.jsontext import JsonObject
from ropext.models.adapter import add_adapter
from ropext.models.load import Loading, is_masked, load_model
from ropext.narration import Show
from ropext.options.fields import Link
from ropext.scaling.tables import Growth

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class NewRowsOf:
    """The rows of one table that are trained."""

    name: str  # of the table's module
    count: int
    fixed: int  # numbers of the other rows, which stay as they are

    def __str__(self) -> str:
        return f"{self.count} new rows of {self.name}"


@dataclass(frozen=True)
class LoraAlone:
    """A LoRA is trained; what the model knows of positions stays."""

    name: ClassVar[str] = "lora"  # as --train says it
    title: ClassVar[str] = "LoRA, merged"
    has_lora: ClassVar[bool] = True

    def modules(self, model: "PreTrainedModel") -> list[str]:
        """Name the modules of a position table, of which PEFT trains a copy."""
        return []

    def prepare(self, joined: nn.Module) -> None:
        """Let new rows alone move in the copies of a table."""

    def new_rows(self, joined: nn.Module) -> list[NewRowsOf]:
        """Count the rows that move, by table."""
        return []

    def write_weights(
        self, snapshot: Snapshot, adapter: Path, directory: Path, link: Link, show: Show
    ) -> JsonObject:
        """Write the tuned weights; what was compared of a table meanwhile."""
        merge(snapshot, adapter, directory)
        return {}


@dataclass(frozen=True)
class NewRows:
    """The rows that a learned table of positions did not have are trained, alone or beside a
    LoRA."""

    table: Growth
    has_lora: bool

    @property
    def name(self) -> str:
        return "both" if self.has_lora else "new-rows"

    @property
    def title(self) -> str:
        rows = "new rows of the position table"
        return f"{rows}, and a {LoraAlone.title}" if self.has_lora else rows

    def modules(self, model: "PreTrainedModel") -> list[str]:
        """Name the modules of a position table, of which PEFT trains a copy."""
        tables = list[str]()
        for name, _ in model.named_parameters():
            if self.table.positions.is_table(name):
                tables.append(name.removesuffix(".weight"))
        return tables

    def prepare(self, joined: nn.Module) -> None:
        """Let new rows alone move in the copies of a table, in float32 as a LoRA is: small steps
        would round."""
        for _, rows in self.tables(joined):
            (module,) = (m for m in joined.modules() if m._parameters.get("weight") is rows)
            kind = rows.dtype
            rows.data = rows.data.float()
            module.register_forward_hook(lambda _, __, read, kind=kind: read.to(kind))
            rows.register_hook(partial(_without_old, self.table))

    def tables(self, joined: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """Find the copies of a position table in which new rows are trained, by the names of the
        modules."""
        for name, weight in joined.named_parameters():
            plain = name.removeprefix("base_model.model.").replace(".modules_to_save.default", "")
            if weight.requires_grad and self.table.positions.is_table(plain):
                yield plain.removesuffix(".weight"), weight

    def new_rows(self, joined: nn.Module) -> list[NewRowsOf]:
        """Count the rows that move, by table."""
        count = self.table.target - len(self.table.old_rows)
        counted = list[NewRowsOf]()
        for name, rows in self.tables(joined):
            fixed = (len(rows) - count) * rows.shape[1]
            counted.append(NewRowsOf(name, count, fixed))
        return counted

    def write_weights(
        self, snapshot: Snapshot, adapter: Path, directory: Path, link: Link, show: Show
    ) -> JsonObject:
        """Write the tuned weights. Without a LoRA these are the trained rows in their table, and
        every other byte as it was; what was compared is returned."""
        if self.has_lora:
            merge(snapshot, adapter, directory)
            return {}
        from safetensors.torch import load_file

        from ropext.schemes import growing  # late: no rotary model needs it

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
        growing.grow_files(snapshot, directory, growth, places, show)
        for name in set(snapshot.weight_files) - {tensor.file for tensor in places}:
            place(snapshot.path(name), directory / name, link, show)
        return growing.compare_tables(snapshot, directory, growth, places)


Trainable = LoraAlone | NewRows
LORA_ALONE = LoraAlone()


def _without_old(table: Growth, gradient: torch.Tensor) -> torch.Tensor:
    """Keep the gradient of the new rows alone: AdamW, its weight decay zero, leaves the others."""
    offset = table.positions.offset
    rows = list(range(offset))
    for row in table.old_rows.values():
        rows.append(offset + row)
    return gradient.index_fill(0, torch.tensor(rows, device=gradient.device), 0.0)


def merge(snapshot: Snapshot, adapter: Path, directory: Path) -> None:
    """Write base and adapter as one checkpoint, in the dtype that the base is stored in."""
    # No attention is computed, and the config of a stranger does not choose it.
    model = load_model(snapshot, Loading(attention="eager", masked=is_masked(snapshot)))
    merged = add_adapter(model, str(adapter)).merge_and_unload()
    largest = max(snapshot.files[name] for name in snapshot.weight_files)
    # Shards as large as the base's: one file stays one file.
    merged.save_pretrained(directory, max_shard_size=largest + (1 << 20))
