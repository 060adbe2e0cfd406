"""What a fine-tuning leaves.

OUT/                    merged, in stock format; config.json is the extended base's, byte by byte
OUT/base/               the extended, untuned checkpoint
OUT/adapter/            the LoRA; its adapter_config.json names ../base
OUT/control/            with --control: the control's LoRA, of the model before its extension
                        (--slim leaves out base and adapter)
OUT/training/           settings, losses and evaluations, result.json, loss.png, used.log
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ropext.atomic import os_errors
from ropext.bundled import MODELS
from ropext.checkpoint import Snapshot, card, provenance
from ropext.checkpoint.card import README, Card
from ropext.checkpoint.provenance import NAME, Record
from ropext.checkpoint.snapshot import INDEX
from ropext.checkpoint.staging import Output, check_space, staged
from ropext.checkpoint.weights import weigh
from ropext.checkpoint.writing import copy_file, place
from ropext.jsontext import JsonObject
from ropext.narration import Show, unseen
from ropext.options.fields import Link
from ropext.options.training import Finetune
from ropext.results import BASE, CONTROL
from ropext.training.adapter_writing import copy_adapter, write_adapter
from ropext.training.origin import Origin
from ropext.training.place import room_for, write_files
from ropext.training.report import Story
from ropext.training.result import Finetuned
from ropext.training.trainable import Trainable

ADAPTER = "adapter"
TRAINING = "training"


@dataclass(frozen=True)
class TunedWeights:
    """The checkpoints whose weights count, and what was trained of which model."""

    origin: Origin
    trainable: Trainable
    adapter: Path
    control: Path | None


def write_tuned(
    done: Finetuned,
    weights: TunedWeights,
    extras: Mapping[str, bytes],
    story: Story,
    show: Show,
) -> None:
    """Write OUT as a whole or not at all; what stock transformers builds from it is proved first.
    `extras` are files of OUT/training."""
    origin = weights.origin
    trainable = weights.trainable
    adapter = weights.adapter
    snapshot = origin.snapshot
    output = done.output
    options = done.training.options
    is_slim = isinstance(options, Finetune) and options.slim
    check_space(output, room_for(snapshot, options))
    force = done.objective.call.force
    with staged(Output(output, force, [snapshot.directory])) as stage:
        directory = stage.directory
        compared = trainable.write_weights(snapshot, adapter, directory, options.link, show)
        with os_errors(output):
            beside = [n for n in snapshot.files if n not in (*snapshot.weight_files, INDEX)]
            digests = _carry(snapshot, beside, directory)
            if not is_slim:
                digests |= _carry_base(snapshot, directory, options.link, show)
                write_adapter(origin, adapter, directory / ADAPTER, story)
            if weights.control is not None:
                base = origin.record.base
                name = str(base.get("hub_id") or base.get("name"))
                copy_adapter(weights.control, directory / CONTROL, name, base.get("commit"), story)
            write_files(directory / TRAINING, extras)
        record = _record(origin, directory, story, compared)
        with os_errors(output):
            what = trainable.title
            if not is_slim:
                what += "; `adapter` in the original output has it unmerged"
            _write_card(origin, directory, story, output.name, what)
            provenance.write(record, directory, digests)


def _carry(
    snapshot: Snapshot,
    names: Iterable[str],
    directory: Path,
    link: Link = "copy",
    show: Show = unseen,
) -> dict[str, str]:
    """The base's files as they are, and the SHA-256 of those where it is known; save_pretrained's
    own config.json, which lacks the legacy spellings, gives way to the base's."""
    digests = dict[str, str]()
    for name in names:
        source = snapshot.path(name)
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        if name in snapshot.weight_files:
            digest = place(source, target, link, show).sha256
            digests |= {} if digest is None else {name: digest}
        else:
            digests[name] = copy_file(source, target)
    return digests


def _carry_base(snapshot: Snapshot, directory: Path, link: Link, show: Show) -> dict[str, str]:
    """Put the untuned checkpoint into the output; the SHA-256 of its files where it is known."""
    names = list(snapshot.files)
    for name in (NAME, README):
        if snapshot.path(name).is_file():
            names.append(name)
    digests = dict[str, str]()
    for name, digest in _carry(snapshot, names, directory / BASE, link, show).items():
        digests[f"{BASE}/{name}"] = digest
    return digests


def _record(origin: Origin, directory: Path, story: Story, compared: JsonObject) -> Record:
    """The base's record with the new weights, the run, and a proof of the tuned checkpoint, beside
    what was `compared` of a table."""
    record = origin.record
    proved = dict(compared) | dict(origin.positions.prove(directory, record))
    names = sorted(path.name for path in directory.glob("*.safetensors"))
    return replace(
        record,
        weights={name: weigh(directory / name) for name in names},
        versions=provenance.versions(),
        proof=proved,
        more=dict(record.more) | story.sections("finetune"),
    )


def _write_card(origin: Origin, directory: Path, story: Story, title: str, what: str) -> None:
    """Write the model card; `what` was trained."""
    record = origin.record
    loaders = origin.positions.for_loaders(directory, title)
    name = str(record.base.get("name", ""))
    base = str(record.base.get("hub_id") or (name if name in MODELS else Path(name).name))
    extended = (
        f"The context of {base} was extended from {record.context:,} to {record.target:,} "
        f"tokens by {record.method} (factor {record.target / record.context:g})."
    )
    text = Card(
        title=title,
        base=base,
        base_is_hub_id=bool(record.base.get("hub_id")),
        summary=(extended, *story.summary),
        facts=card.facts(
            [
                ("method", record.method),
                ("context", record.context),
                ("target", record.target),
                ("trained", what),
            ]
        ),
        numbers=story.numbers,
        readings=loaders.readings,
        serving=loaders.serving,
    )
    readme, _ = card.read_readme(origin.snapshot.path(README))
    (directory / README).write_bytes(card.render(text, readme).encode(errors="replace"))
