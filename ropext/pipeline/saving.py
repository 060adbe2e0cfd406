"""Save a patched model: the weights from memory, every spelling of its config, its record."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ropext.base.atomic import library_errors
from ropext.base.errors import InputError, OutputExists, UnsupportedModel, UsageError, class_name
from ropext.base.inputs import from_home
from ropext.base.jsontext import Json, JsonObject
from ropext.base.staging import Output, Staged
from ropext.files.checkpoint import open_snapshot, provenance
from ropext.files.checkpoint.card import Card, card_of, write_card
from ropext.files.checkpoint.provenance import SAVED, Record, record_of
from ropext.files.checkpoint.tokenizer import (
    TOKENIZER,
    clear_truncation,
    find_truncation,
    length_edits,
)
from ropext.files.checkpoint.weights import WeightFile, identify_weights
from ropext.files.checkpoint.writing import WriteOptions, write, write_texts
from ropext.models.patching import (
    LOADED,
    base_model,
    config_before_patch,
    name_of_loaded,
    plan_of_patched,
)
from ropext.options.door import public
from ropext.options.extend import Writing
from ropext.planning import ExtensionPlan

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TRAINED = "The weights are not the base's: they changed after the extension, as by a training."


@dataclass(frozen=True)
class MemorySource:
    """A patched model in memory, which is written with all spellings of its config dict.

    save_pretrained writes only the spelling of transformers 5, and older readers take that for
    plain RoPE.
    """

    model: object
    config: JsonObject
    prove: Callable[[Path], JsonObject]
    # Called with the record, its proof included, and the title of the card.
    card: Callable[[Record, str], Card]
    tokenizer: "PreTrainedTokenizerBase | None" = None

    left: ClassVar[Mapping[str, str]] = {}

    def check(self, output: Path, manner: WriteOptions) -> Output:
        """Raise an error if `ropext.save` gets no transformers model in memory, or if the output
        exists. It overwrites nothing."""
        from transformers import PreTrainedModel

        if not isinstance(self.model, PreTrainedModel):
            raise UsageError(
                f"save wants a transformers model, not {class_name(self.model)}; "
                "merge an adapter first (merge_and_unload)"
            )
        if output.exists():
            raise OutputExists(f"{output} is there already; save writes to a new directory")
        return Output(output, reads=[name_of_loaded(base_model(self.model))])

    def put(self, stage: Staged, record: Record, output: Path, manner: WriteOptions) -> Record:
        """Do the writing step of the command `ropext.save`: write the weights, the config and the
        tokenizer of its output. Return the record with their identities and edits."""
        with library_errors(output):
            base_model(self.model).save_pretrained(stage.directory)
            weights = dict[str, WeightFile]()
            for file in sorted(stage.directory.glob("*.safetensors")):
                weights[file.name] = identify_weights(file)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(stage.directory)
            snapshot = open_snapshot(stage.directory)
            config = snapshot.config | dict(self.config)
            # The weights have the dtype of the model in memory, under either spelling.
            for key in ("dtype", "torch_dtype"):
                if key in config:
                    config[key] = snapshot.config["dtype"]
            edits, limits = length_edits(snapshot, record.context, record.target)
            stage.notes += limits
            write_texts(snapshot, stage.directory, config, edits)
            if any(edit.file == TOKENIZER for edit in edits):
                _clear_truncation(stage.directory / TOKENIZER)
        return replace(record, weights=weights, edits=record.edits + edits)

    def finish(self, stage: Staged, record: Record, output: Path) -> Record:
        """Write the card and the record in the output of `ropext.save`. Return the record."""
        origin = name_of_loaded(base_model(self.model))
        base = Path(origin) if origin else stage.directory  # which has no card yet
        note = write_card(stage.directory, self.card(record, output.name), base)
        stage.notes += [note] if note else []
        provenance.write(record, stage.directory)
        return record


def _clear_truncation(path: Path) -> None:
    """Do a step of the command `ropext.save`: clear the truncation in its output's tokenizer.json,
    which transformers has just written."""
    span = find_truncation(path)
    assert span is not None, path  # the edit clears it
    capped = path.with_name(f"{path.name}.capped")
    path.rename(capped)
    clear_truncation(capped, path, span)
    capped.unlink()


@public(model=LOADED)
def save(
    model: Any,
    directory: str | os.PathLike[str],
    *,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    no_verify: bool = False,
) -> Path:
    """Write a patched model in memory in stock format, with every spelling that loaders read, and
    its record.

    ropext verifies the output as `extend` does, unless `no_verify` is set. A model in memory has no
    tokenizer: without `tokenizer` none is written, as with save_pretrained. Length limits in the
    tokenizer's files are raised to the target; the tokenizer in memory keeps its own.
    """
    from ropext.models.patching.intact import changed_weight  # late: it loads torch

    Writing(no_verify=no_verify)  # raises an error if it is no flag
    live = base_model(model, "save")
    made = plan_of_patched(live)
    if made is None:
        raise UsageError("save wants a model that ropext.patch extended; call ropext.patch first")
    if made.uncarried:
        raise UnsupportedModel(made.uncarried)
    _check_quantised(live)
    _check_finite(model)

    def prove(folder: Path) -> JsonObject:
        """Do the step of the command `ropext.save` that follows its writing. Compare the model that
        transformers builds from the output with the patched model's plan."""
        from ropext.verifying import proof  # late: reading a model proves nothing

        own_code = type(live).__module__.startswith("transformers_modules.")  # and it runs already
        return proof.prove_plan(folder, made, config_before_patch(live), trust_remote_code=own_code)

    is_changed = bool(changed_weight(live))
    base = _base_of_record(live)
    output = from_home(directory)
    card = partial(_card_of_saved, made, is_changed)
    # A trainer may have changed the weights since the patch, in a way that nobody recorded.
    record = record_of(made, base)
    record = replace(record, more=dict(record.more) | {SAVED: True})
    source = MemorySource(model, made.config, prove, card, tokenizer)
    return write(source, output, record, WriteOptions(no_verify=no_verify)).output


def _check_quantised(live: "PreTrainedModel") -> None:
    """Raise UnsupportedModel if `ropext.save` gets weights that transformers cannot write as they
    were loaded."""
    quantizer = getattr(live, "hf_quantizer", None)
    if quantizer is None or quantizer.is_serializable():
        return
    kind = quantizer.quantization_config.quant_method
    raise UnsupportedModel(
        f"transformers does not write a model that it loaded from {getattr(kind, 'value', kind)} "
        "weights; extend the file itself (ropext.extend), or load the weights before quantisation"
    )


def _card_of_saved(plan: ExtensionPlan, is_changed: bool, record: Record, title: str) -> Card:
    """Return the card in the output of the command `ropext.save`. It states if the weights changed
    after the extension."""
    card = card_of(plan, record, title)
    if not is_changed:
        return card
    grown, _, verified = card.summary
    return replace(card, summary=(grown, TRAINED, verified))


def _check_finite(model: "PreTrainedModel") -> None:
    """Raise InputError before the command `ropext.save` writes its output, if a weight is not
    finite, as after a training that diverged."""
    import torch  # late: it takes a second

    for name, tensor in model.state_dict().items():
        if tensor.is_meta or not tensor.is_floating_point() or tensor.itemsize == 1:
            continue
        if not bool(torch.isfinite(tensor).all()):
            count = int((~torch.isfinite(tensor)).sum())
            raise InputError(
                f"save wants finite weights, but {count:,} of {tensor.numel():,} numbers of {name} "
                "are not finite (NaN or infinite); load the weights anew, or train with a smaller "
                "learning rate"
            )


def _base_of_record(live: "PreTrainedModel") -> dict[str, Json]:
    """Return the base's entry in the record that `ropext.save` writes of a model in memory."""
    name = name_of_loaded(live)
    is_here = not name or Path(name).is_dir()
    return {
        "name": name or type(live).__name__,
        "hub_id": None if is_here else name,
        "revision": None,
        "commit": None if is_here else getattr(live.config, "_commit_hash", None),
        "quantisation": None,
        "config": config_before_patch(live),
    }
