"""Write the files of a fine-tuning.

OUT/            merged, in stock format; config.json is the extended base's, byte by byte
OUT/base/       the extended, untuned checkpoint
OUT/adapter/    the LoRA; its adapter_config.json names ../base
OUT/control/    with --control: the control's LoRA, of the model before its extension
                (--slim leaves out base and adapter)
OUT/training/   settings, losses and evaluations, result.json, loss.png, used.log
"""

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ropext.base.atomic import os_errors
from ropext.base.jsontext import JsonObject, dump
from ropext.base.staging import Output, check_space, staged
from ropext.files import inspecting
from ropext.files.checkpoint import Snapshot, card, open_snapshot, provenance
from ropext.files.checkpoint.adapter import WEIGHTS
from ropext.files.checkpoint.snapshot import ADAPTER_CONFIG, INDEX, short_name
from ropext.files.checkpoint.weights import identify_weights
from ropext.files.checkpoint.writing import WriteOptions, copy_file, place
from ropext.models.adapter import add_adapter
from ropext.models.load import Loading, auto_class, load_model, predicts_masked_tokens
from ropext.options.training import Finetune
from ropext.results import BASE, CONTROL
from ropext.results.overlap import HASHES
from ropext.training.new_rows import NewRows
from ropext.training.objective import output_bytes
from ropext.training.origin import Origin
from ropext.training.report import TrainingSummary, write_files
from ropext.training.result import Finetuned
from ropext.verifying import proof

ADAPTER = "adapter"
TRAINING = "training"
MERGED = "LoRA, merged"
ROWS = "new rows of the position table"
WHAT = {"lora": MERGED, "new-rows": ROWS, "both": f"{ROWS}, and a {MERGED}"}  # by --train
ADAPTER_CARD = """\
---
base_model: {where}
library_name: peft
tags:
- ropext
{tag}---

# {what} of an extended model

Trained on `{name}`, which was extended from {context:,} to {target:,} tokens. An adapter stores \
nothing about positions: on the model before its extension it gives wrong results.

{loading}
{note}"""
RELATIVE = """
`base_model_name_or_path` is relative to this folder, while PEFT resolves it from the working \
directory; the lines above load it from anywhere.
"""
LOADING = """\
from peft import PeftModel
from transformers import {kind}

folder = "path/to/this/folder"
base = {kind}.from_pretrained({base}, dtype="auto")
model = PeftModel.from_pretrained(base, folder)
"""


@dataclass(frozen=True)
class TunedWeights:
    """Trainer's checkpoints of the tuned model and its control whose weights count, and the
    extended checkpoint and new rows that were trained."""

    origin: Origin
    new_rows: NewRows | None
    adapter: Path
    control: Path | None


def write_tuned(
    done: Finetuned,
    weights: TunedWeights,
    extras: Mapping[str, bytes],
    story: TrainingSummary,
    manner: WriteOptions,
) -> None:
    """Write OUT of a fine-tuning as a whole or not at all; first verify the model that stock
    transformers builds from it. `extras` are files of OUT/training."""
    origin = weights.origin
    adapter = weights.adapter
    snapshot = origin.snapshot
    output = done.output
    options = done.training.options
    assert isinstance(options, Finetune)
    check_space(output, output_bytes(snapshot, options))
    with staged(Output(output, manner.force, [snapshot.directory])) as stage:
        directory = stage.directory
        compared: JsonObject = {}
        if weights.new_rows is not None and options.train == "new-rows":
            rows = weights.new_rows
            compared = rows.write(snapshot, adapter, directory, manner)
        else:
            _write_merged(snapshot, adapter, directory)
        with os_errors(output):
            beside = [n for n in snapshot.files if n not in (*snapshot.weight_files, INDEX)]
            digests = _copy_base_files(snapshot, beside, directory, manner)
            if not options.slim:
                digests |= _copy_base_checkpoint(snapshot, directory, manner)
                write_adapter(origin, adapter, directory / ADAPTER, story)
            if weights.control is not None:
                base = origin.record.base
                name = str(base.get("hub_id") or base.get("name"))
                copy_adapter(weights.control, directory / CONTROL, name, base.get("commit"), story)
            write_files(directory / TRAINING, extras)
        record = _tuned_record(origin, directory, story, compared)
        with os_errors(output):
            what = WHAT[str(options.train)]
            if not options.slim:
                what += "; `adapter` in the original output has it unmerged"
            _write_card(origin, directory, story, output.name, what)
            provenance.write(record, directory, digests)


def _write_merged(snapshot: Snapshot, adapter: Path, directory: Path) -> None:
    """Write the base and its trained adapter as one checkpoint, in the dtype that the base is
    stored in."""
    # No attention is computed, and the config of a stranger does not choose it.
    model = load_model(
        snapshot, Loading(attention="eager", masked=predicts_masked_tokens(snapshot))
    )
    merged = add_adapter(model, str(adapter)).merge_and_unload()
    largest = max(snapshot.files[name] for name in snapshot.weight_files)
    # Shards as large as the base's: one file stays one file.
    merged.save_pretrained(directory, max_shard_size=largest + (1 << 20))


def _copy_base_files(
    snapshot: Snapshot,
    names: Iterable[str],
    directory: Path,
    manner: WriteOptions,
) -> dict[str, str]:
    """Complete a fine-tuning's OUT with the base's files, copied or linked unchanged, and return
    their known SHA-256 values. The base's config.json replaces save_pretrained's own, which lacks
    the legacy spellings."""
    digests = dict[str, str]()
    for name in names:
        source = snapshot.path(name)
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        if name in snapshot.weight_files:
            digest = place(source, target, manner.link, manner.show).sha256
            digests |= {} if digest is None else {name: digest}
        else:
            digests[name] = copy_file(source, target)
    return digests


def _copy_base_checkpoint(
    snapshot: Snapshot, directory: Path, manner: WriteOptions
) -> dict[str, str]:
    """Put the untuned checkpoint into OUT/base of a fine-tuning; return the known SHA-256 values
    of its files."""
    names = list(snapshot.files)
    for name in (provenance.NAME, card.README):
        if snapshot.path(name).is_file():
            names.append(name)
    digests = dict[str, str]()
    for name, digest in _copy_base_files(snapshot, names, directory / BASE, manner).items():
        digests[f"{BASE}/{name}"] = digest
    return digests


def _tuned_record(
    origin: Origin, directory: Path, story: TrainingSummary, compared: JsonObject
) -> provenance.Record:
    """Return the base's record with the weights of a fine-tuning, its run, a proof of the tuned
    checkpoint, and the table's comparison `compared`."""
    record = origin.record
    if origin.table is not None:
        proved = proof.prove_table(directory, origin.table.extended).to_json()
    else:
        promise = proof.ExpectedRotary(record.sites, record.target / record.context)
        base = record.base["config"]
        context = record.context
        proved = proof.prove(
            proof.BuildRequest(directory, origin.path, base, promise, context, record.target)
        ).to_json()
    names = sorted(path.name for path in directory.glob("*.safetensors"))
    return replace(
        record,
        weights={name: identify_weights(directory / name) for name in names},
        versions=provenance.versions(),
        proof=dict(compared) | dict(proved),
        more=dict(record.more) | story.sections("finetune"),
    )


def _write_card(
    origin: Origin, directory: Path, story: TrainingSummary, title: str, what: str
) -> None:
    """Write the model card of a fine-tuned checkpoint; `what` names the trained parts."""
    record = origin.record
    # A command in a card must not reveal the directory's path.
    served = inspecting.read_unchanged(replace(open_snapshot(str(directory)), name=title))
    hub_id = record.base.get("hub_id")
    base = short_name(str(record.base.get("name", "")), hub_id)
    extended = (
        f"The context of {base} was extended from {record.context:,} to {record.target:,} "
        f"tokens by {record.method} (factor {record.target / record.context:g})."
    )
    text = card.Card(
        title=title,
        base=base,
        base_is_hub_id=bool(hub_id),
        summary=(extended, *story.summary),
        facts=[
            ("method", record.method),
            ("context", record.context),
            ("target", record.target),
            ("trained", what),
        ],
        numbers=story.numbers,
        readings=served.readings if served else (),
        serving=served.serving if served else (),
    )
    card.write_card(directory, text, origin.snapshot.directory)


def write_adapter(origin: Origin, adapter: Path, directory: Path, story: TrainingSummary) -> None:
    """Write PEFT's two files of the trained adapter, and a card whose lines load them from
    anywhere."""
    hub_id = origin.snapshot.hub_id
    copy_adapter(adapter, directory, hub_id or f"../{BASE}", origin.snapshot.commit, story)
    (directory / card.README).write_text(_adapter_card(origin), encoding="utf-8")


def copy_adapter(
    adapter: Path, directory: Path, base: str, revision: str | None, story: TrainingSummary
) -> None:
    """Copy the PEFT adapter that a fine-tuning or its control trained into a new folder of OUT,
    under the name of its base."""
    directory.mkdir()
    (directory / HASHES).write_bytes(dump(story.trained_on))
    shutil.copyfile(adapter / WEIGHTS, directory / WEIGHTS)
    config = json.loads((adapter / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = base
    config["revision"] = revision
    if isinstance(config.get("target_modules"), list):
        config["target_modules"].sort()  # PEFT writes a set, in another order every time
    (directory / ADAPTER_CONFIG).write_bytes(dump(config))


def _adapter_card(origin: Origin) -> str:
    """Return the model card of OUT/adapter, with the lines that load the adapter."""
    hub_id = origin.snapshot.hub_id
    base = f'"{hub_id}"' if hub_id else f'f"{{folder}}/../{BASE}"'
    name = hub_id or f"../{BASE}"
    loading = LOADING.format(base=base, kind=auto_class(origin.masked).__name__)
    rotates = origin.table is None
    return ADAPTER_CARD.format(
        where=json.dumps(name),
        tag="- lora\n" if rotates else "",
        what="LoRA" if rotates else "Adapter",
        name=name,
        context=origin.record.context,
        target=origin.record.target,
        loading=card.code_block(loading, "python"),
        note="" if hub_id else RELATIVE,
    )
