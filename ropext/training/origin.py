"""Where a fine-tuning begins: a checkpoint that was extended, with its record."""

from dataclasses import dataclass

from ropext import bundled, families
from ropext.checkpoint import Snapshot, open_snapshot
from ropext.checkpoint.provenance import (
    READ_FROM,
    Record,
    read_record,
    record_of_config,
)
from ropext.errors import InputError, UnsupportedModel, UsageError
from ropext.families.config import named
from ropext.jsontext import Json
from ropext.models.load import is_masked
from ropext.results import BASE
from ropext.schemes import read_positions
from ropext.schemes.plan import growth_of
from ropext.training.positions import Positions, RotaryPositions, TablePositions


@dataclass(frozen=True)
class Origin:
    """The checkpoint that is trained: extended by ropext and saved, with its record."""

    snapshot: Snapshot
    record: Record
    positions: Positions

    @property
    def context(self) -> int:
        return self.record.context

    @property
    def target(self) -> int:
        return self.record.target

    @property
    def is_read_from_config(self) -> bool:
        """Whether it has no record but the scaling that its config names."""
        return bool(self.record.more.get(READ_FROM))

    @property
    def history(self) -> str:
        """How it came to its length."""
        return self.positions.history(self.record)

    def base_config(self) -> dict[str, Json]:
        """The config before the extension, as recorded."""
        return dict(self.record.base["config"])


def _never_extended(snapshot: Snapshot) -> str:
    """Why a directory without a record is not trained; a scaled one is not to be extended twice."""
    rotates = read_positions(snapshot.config) is None
    if rotates and any(
        site.rope.is_scaled for site in families.as_read(snapshot.config).scaled_sites
    ):
        return (
            f"{snapshot.name} has no ropext.json, and its config is scaled without stating the "
            "original length; fine-tune what `ropext extend` or ropext.save wrote"
        )
    return (
        f"{snapshot.name} was not extended by ropext (no ropext.json, no scaling in its config), "
        f"and training does not extend it; run: ropext extend {snapshot.name} "
        "--factor 4 -o EXTENDED, then finetune EXTENDED"
    )


def _trained_already(snapshot: Snapshot, record: Record) -> str:
    """Say what to train in place of a checkpoint that was fine-tuned; --slim left its base out."""
    said = f"{snapshot.name} is the result of a fine-tuning already"
    untuned = snapshot.directory / BASE
    if (untuned / "config.json").is_file():
        return f"{said}; its extended, untuned base lies in {untuned}: fine-tune that"
    source = record.base.get("hub_id") or record.base.get("name")
    return (
        f"{said}, and its extended, untuned base does not lie in it (finetune --slim leaves it "
        f"out); fine-tune the checkpoint that it was trained from, or extend {source} again"
    )


def open_origin(model: str) -> Origin:
    """Read the extended checkpoint; one that was never extended is refused."""
    if bundled.find_gguf(model) is not None:
        raise UsageError(
            f"finetune {model}: a GGUF file takes no gradients and holds no adapter; "
            "fine-tune the Hugging Face checkpoint, convert OUT, then run `ropext extend OUT.gguf "
            "--like OUT`"
        )
    snapshot = open_snapshot(model, weights=True)
    scheme = read_positions(snapshot.config)
    rotary = families.read(snapshot.config) if scheme is None or not scheme.tensors else None
    record = read_record(snapshot.directory)
    if record is None and rotary is not None:
        record = record_of_config(snapshot)
    if record is None:
        raise InputError(_never_extended(snapshot))
    read = rotary or scheme
    assert read is not None
    masked = is_masked(snapshot)  # without a head it is refused
    if rotary is not None and rotary.masked_lm:
        raise UnsupportedModel(
            f"{model} is a masked language model with rotary embeddings ({read.model_type}); of "
            "masked ones finetune trains those with a learned table"
        )
    if snapshot.quantisation:
        raise InputError(
            f"{model} is quantised ({named(snapshot.quantisation)}), and a LoRA cannot be merged "
            "into quantised weights; extend the unquantised model (--qlora holds it in 4 bits "
            "during training)"
        )
    if record.more.get("finetune"):
        raise InputError(_trained_already(snapshot, record))
    if read.context != record.target:
        raise InputError(
            f"{model}: ropext.json says that it was extended to {record.target} tokens, but its "
            f"config reads {read.context}; see ropext verify {model}"
        )
    if rotary is not None:
        return Origin(snapshot, record, RotaryPositions(rotary))
    table = growth_of(snapshot, record)
    if table.undone() is None:
        raise InputError(
            f"{model}: its table keeps {len(table.old_rows)} of {record.context} old rows, so its "
            f"base cannot be rebuilt; extend the base to a multiple of {record.context}"
        )
    return Origin(snapshot, record, TablePositions(table, masked))
