"""The checkpoint that is trained: extended by ropext and saved, with its record."""

from dataclasses import dataclass
from typing import Any

from ropext import families
from ropext.checkpoint import Snapshot, open_snapshot
from ropext.checkpoint.provenance import Record, base_config, read_record
from ropext.errors import InputError, UnsupportedModel
from ropext.families import Model
from ropext.families.config import named
from ropext.inspecting import READ_FROM, record_of_config, scaled_by_config


@dataclass(frozen=True)
class Origin:
    """What a run starts from."""

    snapshot: Snapshot
    record: Record
    model: Model  # its position scheme

    @property
    def context(self) -> int:
        return self.record.context

    @property
    def target(self) -> int:
        return self.record.target

    @property
    def two_sets_up_to(self) -> int:
        """Positions up to which a longrope with two sets of factors reads the short one; 0 = no
        such thing."""
        ropes = [site.rope for site in self.model.scaled_sites]
        return max((r.original_context for r in ropes if r.short_pair_factors), default=0)

    @property
    def told(self) -> str:
        """How it came to its length."""
        if self.record.more.get(READ_FROM):
            return scaled_by_config(self.model)
        return f"extended from {self.context} to {self.target} tokens"

    def base_config(self) -> dict[str, Any]:
        """The config before the extension: the recorded edits taken back."""
        return base_config(self.snapshot.config, self.record)


def _never_extended(snapshot: Snapshot) -> str:
    """Why a directory without a record is not trained; a scaled one is not to be extended twice."""
    if any(site.rope.is_scaled for site in families.as_read(snapshot.config).scaled_sites):
        return (
            f"{snapshot.name} is scaled by its config, which leaves open from how many tokens, and "
            "has no record (ropext.json) of it; finetune what `ropext extend` or ropext.save wrote"
        )
    return (
        f"{snapshot.name} was not extended by ropext (it has no ropext.json, and its config names "
        f"no scaling), and training it would not make it so; run: ropext extend {snapshot.name} "
        "--factor 4 -o EXTENDED, then finetune EXTENDED"
    )


def open_origin(model: str) -> Origin:
    """Read the extended checkpoint; one that was never extended is refused."""
    snapshot = open_snapshot(model, weights=True)
    record = read_record(snapshot.directory) or record_of_config(snapshot)
    if record is None:
        raise InputError(_never_extended(snapshot))
    found = families.read(snapshot.config)
    if found.masked_lm:
        raise UnsupportedModel(
            f"{model} is a masked language model ({found.model_type}); finetune trains causal ones"
        )
    if snapshot.quantisation:
        how = named(snapshot.quantisation or "")
        raise InputError(
            f"{model} is quantised ({how}), and a LoRA is merged into weights that are not; extend "
            "the unquantised model (--qlora holds it in 4 bits in training)"
        )
    if record.more.get("finetune"):
        raise InputError(
            f"{model} is the result of a fine-tuning already; its extended, untuned base lies in "
            f"{snapshot.directory / 'base'}: fine-tune that"
        )
    if found.context != record.target:
        raise InputError(
            f"{model}: ropext.json says that it was extended to {record.target} tokens, but its "
            f"config reads {found.context}; see ropext verify {model}"
        )
    return Origin(snapshot, record, found)
