"""Read JSON from strangers strictly and within limits, and write JSON as transformers writes it."""

import codecs
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from ropext.base.atomic import write_bytes
from ropext.base.errors import InputError
from ropext.base.inputs import CONFIG_LIMIT, as_text, open_regular, read_bytes

Json = Any  # a value as json.loads gives it
JsonObject = Mapping[str, Json]
T = TypeVar("T")
# A field that may hold not-a-number, which `values_json` writes as null.
_OR_NAN = BeforeValidator(lambda value: math.nan if value is None else value)
Number = Annotated[float, _OR_NAN]
NumberIfAny = Annotated[float | None, _OR_NAN]  # None: it has no number; an absent key
# Metadata of a field that `values_json` treats in another way than the rest.
HIDDEN = {"json": None}  # never written
OR_NULL = {"json": "null"}  # written even if it holds None, its default
IF_ANY = {"json": "any"}  # left out if it is empty

# Objects and arrays in one file. The largest real configs (added tokens, quantiser groups) hold
# some ten thousand; 16 MB of "{}" would be five million Python objects.
CONTAINER_LIMIT = 500_000

# Real configs nest five deep. Anything near Python's recursion limit would fail in later steps.
CONFIG_DEPTH_LIMIT = 64
# ropext.json holds the config and its edits: what ropext writes for an allowed config must be read.
DEPTH_LIMIT = CONFIG_DEPTH_LIMIT + 16

# What transformers spells infinity as, which JSON lacks.
INFINITY = {"__float__": "Infinity"}


# JSON that ropext writes for itself.


def write_json(path: Path, data: Json) -> None:
    """Write a value as an indented JSON file in the order given, with a newline at the end; refuse
    not-a-number."""
    text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    write_bytes(path, text.encode())


def digest(data: Json) -> str:
    """Return the SHA-256 of a value as JSON text, whatever the order of its keys."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def read_json(path: Path) -> Json:
    """Read a JSON file that ropext wrote; raise InputError if it is missing or no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error


def values_json(data: Any) -> Json:
    """Turn dataclasses, mappings and sequences into values that json.dumps takes. A number that is
    not finite becomes null; a field whose default is None is left out if it holds None, unless its
    metadata say otherwise (HIDDEN, OR_NULL, IF_ANY)."""
    if hasattr(data, "to_json"):
        data = data.to_json()
    elif is_dataclass(data):
        data = fields_of(data)
    if isinstance(data, Mapping):
        return {key: values_json(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [values_json(item) for item in data]
    if isinstance(data, float):
        return float(data) if math.isfinite(data) else None
    if isinstance(data, Path):
        return str(data)
    return data


def fields_of(data: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that its JSON object has."""
    values = dict[str, Any]()
    for field in fields(data):
        value = getattr(data, field.name)
        if _is_written(field, value):
            values[field.name] = value
    return values


def _is_written(field: Field[Any], value: Any) -> bool:
    """Return whether the JSON object of a dataclass has a key for a field that holds this value."""
    how = field.metadata.get("json", "")
    if how == "":
        return value is not None or field.default is not None
    if how == IF_ANY["json"]:
        return bool(value)
    return how is not None


def read_values(kind: type[T], data: Json, place: object, remedy: str = "") -> T:
    """Build a value of this type (a dataclass, or a container of them) from the JSON that
    `values_json` made of it.

    The file may come from anyone: the error names the first key that is missing or has another
    type.
    """
    known: Any = kind
    try:
        read: T = _adapter(known).validate_python(data)
    except ValidationError as error:
        raise InputError(f"{place} is damaged: {_damage(error)}{remedy}") from None
    return read


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Return pydantic's reader of JSON values for a type, made once for each type."""
    return TypeAdapter(kind)


_NOUNS = {
    "dict": "an object",
    "dataclass": "an object",
    "mapping": "an object",
    "tuple": "an array",
    "list": "an array",
    "string": "a text",
    "float": "a number",
    "bool": "true or false",
}


def _damage(error: ValidationError) -> str:
    """Describe the first wrong value in a JSON file by its key."""
    first = error.errors(include_url=False)[0]
    key = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return f"the key {key!r} is missing"
    return f"{key[:200] or 'its content'} is not {noun(first['type'])}"


def noun(error_type: str) -> str:
    """Return what pydantic expected of a JSON value, in words, by the type of its error."""
    if error_type == "string_pattern_mismatch":
        return "well formed"
    return _NOUNS.get(error_type.partition("_")[0], "a whole number in range")


# What strangers wrote.


def read_object(path: Path, levels: int = DEPTH_LIMIT) -> dict[str, Json]:
    """Read the JSON object in a file, perhaps a stranger's, nested at most `levels` deep; raise
    InputError of one sentence for anything else."""
    return parse_object(read_bytes(path, CONFIG_LIMIT), str(path), levels=levels)


def read_redirected(path: Path) -> dict[str, Json]:
    """Read the JSON object in a file that a shell's > may have written in another encoding, such
    as UTF-16."""
    data = read_bytes(path, CONFIG_LIMIT)
    if json.detect_encoding(data) != "utf-8":
        data = as_text(data).encode()
    return parse_object(data, str(path))


def parse_object(
    data: bytes,
    name: str,
    containers: int = CONTAINER_LIMIT,
    levels: int = DEPTH_LIMIT,
) -> dict[str, Json]:
    """Parse a JSON object, perhaps a stranger's. Refuse duplicate keys, NaN, Infinity and depth
    bombs.

    transformers' {"__float__": "Infinity"} is an object like any other and stays one.
    """
    if data.count(b"{") + data.count(b"[") > containers:
        raise InputError(f"{name} holds more than {containers:,} objects and arrays")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8 text (byte {error.start + 1})") from None
    try:
        value = json.loads(
            text, parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_unique
        )
    except json.JSONDecodeError as error:
        raise InputError(_describe(error, text, name)) from None
    except RecursionError:
        raise InputError(f"{name} is nested too deeply to be a config") from None
    except ValueError as error:  # our own refusals, and an integer of more than 4300 digits
        raise InputError(f"{name} is not valid: {error}") from None
    if not isinstance(value, dict):
        kind = {list: "array", type(None): "null"}.get(type(value), type(value).__name__)
        raise InputError(f"{name} holds a JSON {kind}; expected an object")
    level: list[Json] = [value]
    for _ in range(levels):
        below = list[Json]()
        for container in level:
            children = container.values() if isinstance(container, dict) else container
            below += [child for child in children if isinstance(child, dict | list)]
        if not below:
            return value
        level = below
    raise InputError(f"{name} is nested more than {levels} levels deep")


LINE_LIMIT = 64 << 20  # bytes


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Json]]]:
    """Yield the place, for messages, and the JSON object of each line of a JSONL file. Empty lines
    and a byte-order mark are skipped."""
    with open(open_regular(path), "rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(LINE_LIMIT + 1), b""), 1):
            where = f"{path}, line {number}"
            if len(line) > LINE_LIMIT:
                raise InputError(f"{where} has more than {LINE_LIMIT >> 20} MiB")
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield where, parse_object(line, where)


def _no_constant(token: str) -> NoReturn:
    """Refuse NaN and Infinity in JSON text."""
    raise ValueError(f"{token} is not a JSON number")


def _finite(token: str) -> float:
    """Return a number in a JSON text; refuse one that is too large for a float."""
    value = float(token)
    if math.isinf(value):
        raise ValueError(f"{token[:40]} is too large for a number")
    return value


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    """Return the JSON object of the keys and values in a JSON text; refuse a key that occurs
    twice."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise ValueError(f"the key {twice[:80]!r} occurs twice in one object")
    return entries


def _describe(error: json.JSONDecodeError, text: str, name: str) -> str:
    """Return the sentence about JSON text in a file that does not parse: it is empty, cut short, or
    wrong at this line."""
    if not text.strip():
        return f"{name} is empty, where a JSON object is expected"
    where = f"column {error.colno}"
    if "\n" in text.strip():
        where = f"line {error.lineno}, {where}"
    if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated"):
        return f"{name} is cut short: the JSON ends inside a value ({where})"
    return f"{name} is not valid JSON: {error.msg} ({where})"


def dump(value: JsonObject) -> bytes:
    """Return a value as the JSON text that transformers would write, but in the order of the keys:
    indent 2, a final newline."""
    value = tagged(value)
    try:
        return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
    except UnicodeEncodeError:  # a lone surrogate, legal in JSON only as an escape
        return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()


def tagged(value: Json) -> Json:
    """Replace infinity in a JSON value, which JSON lacks, by transformers' spelling. A channel that
    never turns has a longrope factor of infinity."""
    if isinstance(value, Mapping):
        return {key: tagged(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [tagged(item) for item in value]
    if value == math.inf:
        return dict(INFINITY)
    return value


def untagged_float(value: Json) -> Json:
    """Return transformers' JSON spelling of infinity as a float, and every other value
    unchanged."""
    return math.inf if value == INFINITY else value


def untagged(value: Json) -> Json:
    """Copy a JSON value with infinity as a float, as transformers has it in memory."""
    value = untagged_float(value)
    if isinstance(value, Mapping):
        return {key: untagged(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [untagged(item) for item in value]
    return value
