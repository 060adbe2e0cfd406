"""What a recipe may say: sections, each with the keys of its option classes."""

from typing import Any

from ropext.options.evaluate import Measuring
from ropext.options.extend import Choosing, Extend
from ropext.options.fields import (
    EVALUATE,
    EXTEND,
    FINETUNE,
    FIT,
    Key,
    Link,
    Options,
    Place,
    Seed,
    Words,
    keys,
    wanted,
)
from ropext.options.training import Finetune, FitSettings


class Top(Options):
    """What stands above the sections."""

    model: Place | None = wanted(None, "a directory, a hub id, or ropext://demo")
    revision: str | None = wanted(None, "branch, tag or commit of a hub model")
    seed: Seed | None = wanted(None, "seed of every section that names none of its own [0]")
    output: Place | None = wanted(None, "directory to write; -o on the command line wins")


class Writing(Options):
    """How `extend` writes, beside what it writes."""

    link: Link = wanted("copy", "how the base's weights get to the output")
    no_verify: bool = wanted(False, "skip the proof by stock transformers")
    hash: bool = wanted(False, "record a SHA-256 of every weight file")


class Data(Options):
    """What a training section needs beside its options."""

    data: Place | None = wanted(None, "documents: txt, jsonl, parquet, a folder, or a datasets id")


class Judging(Options):
    """What an evaluation's result is held against."""

    fail_if: Words = wanted((), 'gates such as "short_tax > 0.02" (exit code 3)')


SECTIONS: dict[str, tuple[type[Options], ...]] = {
    "": (Top,),
    EXTEND: (Extend, Choosing, Writing),
    FIT: (Data, FitSettings),
    FINETUNE: (Data, Finetune),
    EVALUATE: (Measuring, Judging),
}


TABLE: dict[str, tuple[Key, ...]] = {
    name: keys(*own, section=name) for name, own in SECTIONS.items()
}

TITLES = {
    EXTEND: "how far and how, and how it is written",
    FIT: "a search for the pair factors, after the extension",
    FINETUNE: "a short LoRA, after the extension",
    EVALUATE: "base, untouched, and every checkpoint of the run, on the same tokens",
}


def schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a recipe, for editors."""
    top = {key.name: _schema_of(key) for key in TABLE[""]}
    for name, own in TABLE.items():
        if name:
            top[name] = {
                "type": ["object", "null"],
                "description": TITLES[name],
                "additionalProperties": False,
                "properties": {key.name: _schema_of(key) for key in own},
            }
    for name in (FIT, FINETUNE):
        top[name]["required"] = ["data"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ropext recipe",
        "type": "object",
        "additionalProperties": False,
        "required": ["model", EXTEND],
        "properties": top,
    }


_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}


def _schema_of(key: Key) -> dict[str, Any]:
    single = [_TYPES[key.item], *(["string"] if key.length else [])]  # 4096 or 4k
    out: dict[str, Any] = {"description": key.help}
    if key.takes_list:
        # A list in one text, as on the command line; a grid is written out.
        texts = [] if key.matrix else ["string"]
        out["type"] = ["array", *dict.fromkeys([*single, *texts]), "null"]
        out["items"] = {"type": single if len(single) > 1 else single[0]}
    else:
        out["type"] = [*single, "null"]
    if key.choices:
        out["enum"] = [*key.choices, None]
    if key.default not in (None, (), False, ""):
        out["default"] = list(key.default) if isinstance(key.default, tuple) else key.default
    return out
