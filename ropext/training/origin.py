"""The checkpoint that is trained: extended by ropext and saved, with its record."""

from dataclasses import dataclass
from typing import Any

from ropext import families
from ropext.checkpoint import Snapshot, open_snapshot
from ropext.checkpoint.provenance import Record, base_config
from ropext.checkpoint.records import read_record
from ropext.errors import InputError, UnsupportedModel
from ropext.families import Model
from ropext.families.typed import named


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

    def base_config(self) -> dict[str, Any]:
        """The config before the extension: the recorded edits taken back."""
        return base_config(self.snapshot.config, self.record)


def open_origin(model: str) -> Origin:
    """Read the extended checkpoint; one that was never extended is refused."""
    snapshot = open_snapshot(model, weights=True)
    record = read_record(snapshot.directory)
    if record is None:
        raise InputError(
            f"{model} was not extended by ropext (it has no ropext.json), and training it would "
            f"not make it so; run: ropext extend {model} --factor 4 -o EXTENDED, then finetune "
            "EXTENDED"
        )
    found = families.read(snapshot.config)
    if found.masked_lm:
        raise UnsupportedModel(
            f"{model} is a masked language model ({found.model_type}); finetune trains causal ones"
        )
    if snapshot.is_quantised:
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
