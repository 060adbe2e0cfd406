"""What a training leaves.

A fine-tuning:
OUT/                    merged, in stock format; config.json is the extended base's, byte by byte
OUT/base/               the extended, untuned checkpoint
OUT/adapter/            the LoRA; its adapter_config.json names ../base
OUT/control/            with --control: the control's LoRA, of the model before its extension
                        (--slim leaves out base and adapter)
OUT/training/           settings, losses and evaluations, loss.png, used.log

A fit:
OUT/                    the base's weights, the new config, record and card, as `extend` writes them
OUT/pair-factors.json   what --method longrope --pair-factors reads
OUT/fit/                numbers.json, losses.json, pair-factors.png, positions.png, used.log
"""

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ropext import inspecting, proof
from ropext.atomic import os_errors
from ropext.bundled import MODELS
from ropext.checkpoint import Snapshot, card, open_snapshot, provenance
from ropext.checkpoint.adapter import WEIGHTS
from ropext.checkpoint.card import README, Card, card_of
from ropext.checkpoint.provenance import NAME, Record, record_of
from ropext.checkpoint.snapshot import ADAPTER_CONFIG, INDEX
from ropext.checkpoint.source import WriteManner, write
from ropext.checkpoint.staging import check_space, staged
from ropext.checkpoint.weights import weigh
from ropext.checkpoint.writing import DirectorySource, copy_file, place
from ropext.jsontext import dump
from ropext.models.adapter import add_adapter
from ropext.models.load import Loading, auto_class, load_model
from ropext.models.masked import is_masked
from ropext.narration import Show, unseen
from ropext.options.fields import Link
from ropext.options.training import Finetune
from ropext.results import BASE, CONTROL
from ropext.results.overlap import HASHES
from ropext.training.origin import Origin
from ropext.training.place import room_for
from ropext.training.report import Story
from ropext.training.result import Finetuned, Fitted

ADAPTER = "adapter"
TRAINING = "training"

KINDS = {"lora": "LoRA, merged", "new-rows": "new rows of the position table"}
KINDS["both"] = f"{KINDS['new-rows']}, and a {KINDS['lora']}"

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


def write_fitted(done: Fitted, extras: Mapping[str, bytes], story: Story, show: Show) -> None:
    """Write OUT as a whole or not at all, and prove it; `extras` are files of OUT."""
    objective = done.objective
    plan = done.plan
    output = done.output
    snapshot = objective.snapshot

    def prove(directory: Path) -> dict[str, Any]:
        _write_files(directory, extras)
        return proof.prove_plan(directory, plan, snapshot.config)

    def card_with_numbers(proved: Mapping[str, Any] | None) -> Card:
        plain = card_of(plan, snapshot, output.name, proved)
        return replace(plain, summary=(*plain.summary, *story.summary), numbers=story.numbers)

    finish = None
    if objective.finish is not None:
        finish = partial(objective.finish, output, objective.call)
    record = record_of(plan, provenance.base_of(snapshot), objective.call.command)
    source = DirectorySource(snapshot, plan.config, prove, card_with_numbers, finish)
    manner = WriteManner(link=done.training.options.link, force=objective.call.force, show=show)
    full = replace(record, more=dict(record.more) | story.sections("fit"))
    write(source, output, full, manner)


def write_tuned(
    done: Finetuned,
    origin: Origin,
    adapter: Path,
    control: Path | None,
    extras: Mapping[str, bytes],
    story: Story,
    show: Show,
) -> None:
    """Write OUT as a whole or not at all; what stock transformers builds from it is proved first.

    `adapter` and `control` are the checkpoints whose weights count, `extras` files of OUT/training.
    """
    snapshot = origin.snapshot
    output = done.output
    options = done.training.options
    is_slim = isinstance(options, Finetune) and options.slim
    check_space(output, room_for(snapshot, options))
    with staged(output, force=done.objective.call.force, inputs=[snapshot.directory]) as stage:
        directory = stage.directory
        rows: dict[str, Any] = {}
        if done.training.settings.rank is None:
            rows = _write_rows(origin, adapter, directory, options.link, show)
        else:
            merge(snapshot, adapter, directory)
        with os_errors(output):
            beside = [n for n in snapshot.files if n not in (*snapshot.weight_files, INDEX)]
            digests = _carry(snapshot, beside, directory)
            if not is_slim:
                digests |= _carry_base(snapshot, directory, options.link, show)
                _write_adapter(origin, adapter, directory / ADAPTER, story)
            if control is not None:
                base = origin.record.base
                name = str(base.get("hub_id") or base.get("name"))
                _copy_adapter(control, directory / CONTROL, name, base.get("commit"), story)
            _write_files(directory / TRAINING, extras)
        record = _record(origin, directory, story, rows)
        with os_errors(output):
            what = KINDS[getattr(options, "train", None) or "lora"]
            if not is_slim:
                what += "; where it was made, `adapter` has it alone"
            _write_card(origin, directory, story, output.name, what)
            provenance.write(record, directory, digests)


def _write_files(folder: Path, contents: Mapping[str, bytes]) -> None:
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def merge(snapshot: Snapshot, adapter: Path, directory: Path) -> None:
    """Base and adapter as one checkpoint, in the dtype that the base is stored in."""
    # No attention is computed, and the config of a stranger does not choose it.
    model = load_model(snapshot, Loading(attention="eager", masked=is_masked(snapshot)))
    merged = add_adapter(model, str(adapter)).merge_and_unload()
    largest = max(snapshot.files[name] for name in snapshot.weight_files)
    # Shards as large as the base's: one file stays one file.
    merged.save_pretrained(directory, max_shard_size=largest + (1 << 20))


def _write_rows(
    origin: Origin, adapter: Path, directory: Path, link: Link, show: Show
) -> dict[str, Any]:
    """The weights with the trained rows in their table, every other byte as it was; what was
    compared."""
    from safetensors.torch import load_file

    from ropext.schemes import growing  # late: no rotary model needs it

    snapshot = origin.snapshot
    table = origin.table
    assert table is not None
    scheme = replace(table.positions, context=table.target)
    offset = table.positions.offset
    (trained,) = load_file(adapter / WEIGHTS).values()
    new = trained[offset:].double().numpy()
    growth = replace(
        table,
        positions=scheme,
        grow=lambda rows, count: new,
        kept={row: row for row in table.old_rows.values()},
    )
    places = growing.find_tables(snapshot, scheme)
    growing.grow_files(snapshot, directory, growth, places, show)
    for name in set(snapshot.weight_files) - {tensor.file for tensor in places}:
        place(snapshot.path(name), directory / name, link, show)
    return growing.compare_tables(snapshot, directory, growth, places)


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
    ours = [name for name in (NAME, README) if snapshot.path(name).is_file()]
    digests = dict[str, str]()
    carried = _carry(snapshot, [*snapshot.files, *ours], directory / BASE, link, show)
    for name, digest in carried.items():
        digests[f"{BASE}/{name}"] = digest
    return digests


def _write_adapter(origin: Origin, adapter: Path, directory: Path, story: Story) -> None:
    """PEFT's two files, with a base that is found from anywhere, and how to load them."""
    hub_id = origin.snapshot.hub_id
    _copy_adapter(adapter, directory, hub_id or f"../{BASE}", origin.snapshot.commit, story)
    (directory / README).write_text(_adapter_card(hub_id, origin), encoding="utf-8")


def _copy_adapter(
    adapter: Path, directory: Path, base: str, revision: str | None, story: Story
) -> None:
    directory.mkdir()
    (directory / HASHES).write_bytes(dump(story.trained_on))
    shutil.copyfile(adapter / WEIGHTS, directory / WEIGHTS)
    config = json.loads((adapter / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = base
    config["revision"] = revision
    if isinstance(config.get("target_modules"), list):
        config["target_modules"].sort()  # PEFT writes a set, in another order every time
    (directory / ADAPTER_CONFIG).write_bytes(dump(config))


def _adapter_card(hub_id: str | None, origin: Origin) -> str:
    base = f'"{hub_id}"' if hub_id else f'f"{{folder}}/../{BASE}"'
    name = hub_id or f"../{BASE}"
    is_lora = origin.table is None
    loading = LOADING.format(base=base, kind=auto_class(origin.is_masked).__name__)
    return ADAPTER_CARD.format(
        where=json.dumps(name),
        tag="- lora\n" if is_lora else "",
        what="LoRA" if is_lora else "Adapter",
        name=name,
        context=origin.context,
        target=origin.target,
        loading=card.code_block(loading, "python"),
        note="" if hub_id else RELATIVE,
    )


def _record(origin: Origin, directory: Path, story: Story, rows: Mapping[str, Any]) -> Record:
    """The base's record with the new weights, the run, and a proof of the merged checkpoint, beside
    what was compared of `rows`."""
    record = origin.record
    path = origin.path
    if origin.table is not None:
        proved = dict(rows) | proof.prove_table(directory, origin.table.extended)
    else:
        forward = proof.Forward(record.context, record.target, origin.base_config())
        promise = proof.recorded(record)
        proved = proof.prove(directory, promise, forward=forward, text_path=path).to_json()
    names = sorted(path.name for path in directory.glob("*.safetensors"))
    return replace(
        record,
        weights={name: weigh(directory / name) for name in names},
        versions=provenance.versions(),
        proof=proved,
        more=dict(record.more) | story.sections("finetune"),
    )


def _write_card(origin: Origin, directory: Path, story: Story, title: str, what: str) -> None:
    record = origin.record
    # Under its title: a command in a card tells nobody where the directory lies.
    readings = None
    serving = tuple[tuple[str, str], ...]()
    if origin.table is None:
        served = inspecting.read_again(replace(open_snapshot(str(directory)), name=title))
        readings = card.loader_table(served.readings)
        serving = card.serving_lines(served.serving)
    name = str(record.base.get("name", ""))
    base = str(record.base.get("hub_id") or (name if name in MODELS else Path(name).name))
    text = Card(
        title=title,
        base=base,
        base_is_hub_id=bool(record.base.get("hub_id")),
        summary=(
            f"The context of {base} was extended from {record.context:,} to {record.target:,} "
            f"tokens by {record.method} (factor {record.target / record.context:g}).",
            *story.summary,
        ),
        facts=card.facts(
            [
                ("method", record.method),
                ("context", record.context),
                ("target", record.target),
                ("trained", what),
            ]
        ),
        numbers=story.numbers,
        readings=readings,
        serving=serving,
    )
    readme, _ = card.read_readme(origin.snapshot.path(README))
    (directory / README).write_bytes(card.render(text, readme).encode(errors="replace"))
