"""Open the checkpoint from which a fine-tuning begins: extended, with its record, and with the
parts that may be trained."""

from dataclasses import dataclass
from typing import Literal

from ropext import families
from ropext.base import bundled
from ropext.base.errors import InputError, UnsupportedModel, UsageError
from ropext.families.config import named
from ropext.families.schemes import read_positions
from ropext.files.checkpoint import Snapshot, open_snapshot
from ropext.files.checkpoint.provenance import (
    READ_FROM,
    Record,
    read_record,
    record_of_config,
    scaling_in_words,
)
from ropext.files.schemes.plan import growth_of
from ropext.models.load import predicts_masked_tokens
from ropext.options.fields import flag
from ropext.options.training import Finetune
from ropext.results import BASE
from ropext.scaling.tables import Growth

Train = Literal["lora", "new-rows", "both"]
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
class Origin:
    """The checkpoint that is trained: extended and saved, with its record. It knows positions by
    rotary embeddings that its config scales, or by a learned table."""

    snapshot: Snapshot
    record: Record
    history: str  # how it came to its length
    path: tuple[str, ...]  # to the text part, inside the config
    table: Growth | None = None  # that was given new rows; None if it rotates
    masked: bool = False  # it fills in masked tokens
    # Positions up to which a longrope with two sets of factors reads the short one; 0 = it has one.
    two_sets_up_to: int = 0

    def trained(self, options: Finetune) -> Train:
        """Return which parts a fine-tuning trains (--train), with the default filled in; refuse
        options for another kind."""
        if self.table is None:
            if options.train not in (None, "lora"):
                raise UsageError(
                    f"--train {options.train} is for a learned table of positions, and "
                    f"{self.snapshot.name} rotates; leave it out"
                )
            return "lora"
        unfit = {
            "--strategy pose": options.strategy == "pose",
            "--retrieval-share": options.retrieval_share > 0,
        }
        for name, is_given in unfit.items():
            if is_given and self.masked:
                raise UsageError(f"{name} is for models that predict the next token; leave it out")
        wanted = options.train or "new-rows"
        if wanted != "lora" and options.control:
            raise UsageError("--control trains the base, which has no new rows; add --train lora")
        for field in OF_A_LORA:
            if wanted == "new-rows" and getattr(options, field):
                raise UsageError(
                    f"{flag(field)} goes with a LoRA; add --train both, or --train lora"
                )
        return wanted


def _never_extended_text(snapshot: Snapshot) -> str:
    """Return why a directory without a record is not fine-tuned; a scaled one must not be
    extended twice."""
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


def _trained_already_text(snapshot: Snapshot, record: Record) -> str:
    """Return why a fine-tuned checkpoint is not trained again, and the checkpoint to train
    instead; --slim left its base out."""
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
    """Open the extended checkpoint that a fine-tuning begins from; refuse a checkpoint that was
    never extended."""
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
        raise InputError(_never_extended_text(snapshot))
    read = rotary or scheme
    assert read is not None
    masked = predicts_masked_tokens(snapshot)  # without a head it is refused
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
        raise InputError(_trained_already_text(snapshot, record))
    if read.context != record.target:
        raise InputError(
            f"{model}: ropext.json says that it was extended to {record.target} tokens, but its "
            f"config reads {read.context}; see ropext verify {model}"
        )
    extended = f"extended from {record.context} to {record.target} tokens"
    if rotary is not None:
        history = scaling_in_words(rotary) if record.more.get(READ_FROM) else extended
        two_sets_up_to = 0
        for site in rotary.scaled_sites:
            if site.rope.short_pair_factors:
                two_sets_up_to = max(two_sets_up_to, site.rope.original_context)
        path = rotary.path
        return Origin(snapshot, record, history, path, two_sets_up_to=two_sets_up_to)
    table = growth_of(snapshot, record)
    if table.undone() is None:
        raise InputError(
            f"{model}: its table keeps {len(table.old_rows)} of {record.context} old rows, so its "
            f"base cannot be rebuilt; extend the base to a multiple of {record.context}"
        )
    return Origin(snapshot, record, extended, table.positions.path, table, masked)
