"""The adapter of a fine-tuning as a folder of its own: PEFT's two files, the documents that it was
trained on, and a card that says how to load it."""

import json
import shutil
from pathlib import Path

from ropext.checkpoint import card
from ropext.checkpoint.adapter import WEIGHTS
from ropext.checkpoint.card import README
from ropext.checkpoint.snapshot import ADAPTER_CONFIG
from ropext.jsontext import dump
from ropext.models.load import auto_class
from ropext.results import BASE
from ropext.results.overlap import HASHES
from ropext.training.origin import Origin
from ropext.training.report import Story

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


def write_adapter(origin: Origin, adapter: Path, directory: Path, story: Story) -> None:
    """PEFT's two files, with a base that is found from anywhere, and how to load them."""
    hub_id = origin.snapshot.hub_id
    copy_adapter(adapter, directory, hub_id or f"../{BASE}", origin.snapshot.commit, story)
    (directory / README).write_text(_adapter_card(origin), encoding="utf-8")


def copy_adapter(
    adapter: Path, directory: Path, base: str, revision: str | None, story: Story
) -> None:
    """Copy a trained adapter into a new folder, under the name of its base."""
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
    hub_id = origin.snapshot.hub_id
    base = f'"{hub_id}"' if hub_id else f'f"{{folder}}/../{BASE}"'
    name = hub_id or f"../{BASE}"
    positions = origin.positions
    loading = LOADING.format(base=base, kind=auto_class(positions.masked).__name__)
    return ADAPTER_CARD.format(
        where=json.dumps(name),
        tag=positions.adapter_tag,
        what=positions.adapter_title,
        name=name,
        context=origin.context,
        target=origin.target,
        loading=card.code_block(loading, "python"),
        note="" if hub_id else RELATIVE,
    )
