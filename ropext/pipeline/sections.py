"""What a recipe may say: one table for the file, for `key=value`, for `extend`'s flags and for the
schema. It is made of the option classes of the rooms, so that no option exists in only one of them.
"""

from dataclasses import MISSING, Field, dataclass, field, fields
from types import NoneType
from typing import Any, get_args, get_origin

from ropext.evaluation.options import Options as EvaluationOptions
from ropext.recipe import Recipe
from ropext.recipefile import Key
from ropext.training.fit_options import FitOptions
from ropext.training.options import Options as TrainingOptions

EXTEND, FIT, FINETUNE, EVALUATE = "extend", "fit", "finetune", "evaluate"


def _field(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True)
class Top:
    """What stands above the sections."""

    model: str | None = _field(None, "a directory, a hub id, or ropext://demo")
    revision: str | None = _field(None, "branch, tag or commit of a hub model")
    trust_remote_code: bool = _field(False, "run Python code that comes with the model")
    seed: int | None = _field(None, "seed of every section that names none of its own [0]")
    output: str | None = _field(None, "directory to write; -o on the command line wins")


@dataclass(frozen=True)
class Writing:
    """How `extend` writes, beside what it writes."""

    link: str = _field("copy", "how the base's weights get to the output: copy, hard, symlink")
    no_verify: bool = _field(False, "skip the proof by stock transformers")
    hash: bool = _field(False, "record a SHA-256 of every weight file")


@dataclass(frozen=True)
class Data:
    """What a training section needs beside its options."""

    data: str | None = _field(None, "documents: txt, jsonl, parquet, a folder, or a datasets id")


@dataclass(frozen=True)
class Judging:
    """What an evaluation's result is held against."""

    fail_if: tuple[str, ...] = _field((), 'gates such as "short_tax > 0.02" (exit code 3)')


# Options that name a file, a folder, a model or a dataset.
LOCAL_PLACES = ("output", "pair_factors")
PLACES = ("model", "data", "evaluate", *LOCAL_PLACES)
# Spelled like the flag where the field has another name.
SPELLED = {"for_loaders": "for"}
# Of an option class, but not of its section: who says it in a recipe.
NOT_HERE = {
    EXTEND: {
        "short_pair_factors": "comes in the file of extend.pair_factors",
        "finetune": "finetune.data",
    },
    FIT: {
        name: f"extend.{name}"
        for name in (
            *("factor", "target", "context", "original_context"),
            *("from_original", "even_so", "for_loaders"),
        )
    },
    FINETUNE: {},
    EVALUATE: {
        "method": "extend.method",
        "factor": "extend.factor",
        "context": "extend.context",
        "base": "model",
        "adapter": "finetune makes it",
    },
}


def _kind(declared: Any) -> Any:
    """A field's type without its None."""
    if get_origin(declared) is tuple:
        return declared
    return next((kind for kind in get_args(declared) if kind is not NoneType), declared)


def _key(wish: "Field[Any]", spelled: dict[str, str], matrix: bool = False) -> Key:
    kind = _kind(wish.type)
    if wish.name == "lengths":
        kind = tuple[str, ...]  # 4k and 4096 alike
    return Key(
        name=spelled.get(wish.name, wish.name),
        field=wish.name,
        kind=kind,
        help=wish.metadata["help"],
        default=None if wish.default is MISSING else wish.default,
        place=wish.name in PLACES,
        local=wish.name in LOCAL_PLACES,
        matrix=matrix,
    )


def _keys(section: str, *classes: Any) -> tuple[Key, ...]:
    spelled = SPELLED | ({"evaluate": "eval"} if section == FINETUNE else {})
    left = NOT_HERE.get(section, {})
    grid = ("method", "factor") if section == EXTEND else ()
    return tuple(
        _key(wish, spelled, wish.name in grid)
        for kind in classes
        for wish in fields(kind)
        if wish.name not in left
    )


CLASSES: dict[str, tuple[Any, ...]] = {
    "": (Top,),
    EXTEND: (Recipe, Writing),
    FIT: (Data, FitOptions),
    FINETUNE: (Data, TrainingOptions),
    EVALUATE: (EvaluationOptions, Judging),
}
TABLE: dict[str, tuple[Key, ...]] = {name: _keys(name, *own) for name, own in CLASSES.items()}

TITLES = {
    EXTEND: "how far and how, and how it is written",
    FIT: "a search for the pair factors, after the extension",
    FINETUNE: "a short LoRA, after the extension",
    EVALUATE: "base, untouched, and every checkpoint of the run, on the same tokens",
}


def schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a recipe, for editors."""
    top = {key.name: _schema_of(key) for key in TABLE[""]}
    for name, keys in TABLE.items():
        if name:
            top[name] = {
                "type": ["object", "null"],
                "description": TITLES[name],
                "additionalProperties": False,
                "properties": {key.name: _schema_of(key) for key in keys},
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
    single: list[str] = [_TYPES[key.item]]
    if key.field == "lengths":
        single = ["integer", "string"]  # 4096 or 4k
    out: dict[str, Any] = {"description": key.help}
    if key.takes_list:
        # A list in one text, as on the command line; a grid is written out.
        texts = [] if key.matrix else ["string"]
        out["type"] = ["array", *dict.fromkeys([*single, *texts]), "null"]
        out["items"] = {"type": single if len(single) > 1 else single[0]}
    else:
        out["type"] = [*single, "null"]
    if key.default not in (None, (), False, ""):
        out["default"] = list(key.default) if isinstance(key.default, tuple) else key.default
    return out
