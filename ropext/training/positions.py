"""How the checkpoint of a fine-tuning knows positions, by rotary embeddings or by a learned table:
what may be trained of it, what its base is, and how the result is proved."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from ropext import inspecting, proof
from ropext.checkpoint import card, open_snapshot
from ropext.checkpoint.provenance import READ_FROM, Record, scaled_by_config
from ropext.errors import UsageError
from ropext.families import Model
from ropext.jsontext import JsonObject
from ropext.options.fields import flag
from ropext.options.training import Finetune
from ropext.scaling.tables import Growth
from ropext.table import Table
from ropext.training.trainable import LORA_ALONE, NewRows, Trainable

OF_A_LORA = (
    "rank",
    "alpha",
    "dropout",
    "targets",
    "train_norms",
    "train_embeddings",
    "qlora",
)


@dataclass(frozen=True)
class ForLoaders:
    """What a card says of loaders: who reads the checkpoint how, and the commands that run it."""

    readings: Table | None = None
    serving: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class RotaryPositions:
    """Rotary embeddings, scaled in the config."""

    model: Model
    masked: ClassVar[bool] = False  # masked ones are refused
    base_table: ClassVar[Growth | None] = None  # the base has the same tensors
    adapter_title: ClassVar[str] = "LoRA"
    adapter_tag: ClassVar[str] = "- lora\n"

    @property
    def path(self) -> tuple[str, ...]:
        """Where the text part stands inside the config."""
        return self.model.path

    @property
    def two_sets_up_to(self) -> int:
        """Positions up to which a longrope with two sets of factors reads the short one; 0 = no
        such thing."""
        longest = 0
        for site in self.model.scaled_sites:
            if site.rope.short_pair_factors:
                longest = max(longest, site.rope.original_context)
        return longest

    def history(self, record: Record) -> str:
        """How it came to its length."""
        if record.more.get(READ_FROM):
            return scaled_by_config(self.model)
        return _extended(record)

    def trainable(self, options: Finetune, name: str) -> Trainable:
        """What is trained; another kind is refused."""
        if options.train not in (None, "lora"):
            raise UsageError(
                f"--train {options.train} is for a learned table of positions, and "
                f"{name} rotates; leave it out"
            )
        return LORA_ALONE

    def prove(self, directory: Path, record: Record) -> JsonObject:
        """Prove the tuned checkpoint: its spectrum, and a forward pass beside the base."""
        base = dict(record.base["config"])
        forward = proof.Forward(record.context, record.target, base)
        promise = proof.recorded(record)
        return proof.prove(directory, promise, forward=forward, text_path=self.path).to_json()

    def for_loaders(self, directory: Path, title: str) -> ForLoaders:
        """What its card says of loaders, under its title: a command in a card tells nobody where
        the directory lies."""
        served = inspecting.read_again(replace(open_snapshot(str(directory)), name=title))
        return ForLoaders(
            readings=card.loader_table(served.readings),
            serving=card.serving_lines(served.serving),
        )


@dataclass(frozen=True)
class TablePositions:
    """A learned table, which was given new rows."""

    table: Growth
    masked: bool  # the model fills in masked tokens
    two_sets_up_to: ClassVar[int] = 0
    adapter_title: ClassVar[str] = "Adapter"
    adapter_tag: ClassVar[str] = ""

    @property
    def base_table(self) -> Growth | None:
        """How the base's table is made of this one; None where old rows are lost."""
        return self.table.undone()

    @property
    def path(self) -> tuple[str, ...]:
        """Where the text part stands inside the config."""
        return self.table.positions.path

    def history(self, record: Record) -> str:
        """How it came to its length."""
        return _extended(record)

    def trainable(self, options: Finetune, name: str) -> Trainable:
        """What is trained, new rows where nothing is asked; an option that is for another kind is
        refused."""
        if self.masked:
            _check_masked(options)
        kind = options.train or "new-rows"
        if kind == "lora":
            return LORA_ALONE
        if options.control:
            raise UsageError("--control trains the base, which has no new rows; add --train lora")
        if kind == "both":
            return NewRows(self.table, has_lora=True)
        for field in OF_A_LORA:
            if getattr(options, field):
                raise UsageError(
                    f"{flag(field)} goes with a LoRA; add --train both, or --train lora"
                )
        return NewRows(self.table, has_lora=False)

    def prove(self, directory: Path, record: Record) -> JsonObject:
        """Prove the tuned checkpoint: every tensor in its place, read up to the last position."""
        return proof.prove_table(directory, self.table.extended)

    def for_loaders(self, directory: Path, title: str) -> ForLoaders:
        """Nothing is known of loaders."""
        return ForLoaders()


Positions = RotaryPositions | TablePositions


def _extended(record: Record) -> str:
    return f"extended from {record.context} to {record.target} tokens"


def _check_masked(options: Finetune) -> None:
    """Refuse what a masked language model cannot be trained by."""
    unfit = {
        "--strategy pose": options.strategy == "pose",
        "--retrieval-share": options.retrieval_share > 0,
    }
    for name, is_given in unfit.items():
        if is_given:
            raise UsageError(f"{name} is for models that predict the next token; leave it out")
