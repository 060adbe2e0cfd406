"""What a value has against a JSON Schema: the part of it that our schemas use, read literally."""

import json
from pathlib import Path

KINDS = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}
UNDERSTOOD = {
    *("$schema", "$defs", "$ref", "title", "description", "default", "anyOf", "type", "enum"),
    *("properties", "required", "additionalProperties", "items", "minimum", "maximum"),
    *("exclusiveMinimum", "exclusiveMaximum"),
}


def complaints(value, schema, whole=None, place="$"):
    """Return one sentence for each thing that is not as the schema says."""
    whole = whole or schema
    assert set(schema) <= UNDERSTOOD, f"{place}: this reader knows no {set(schema) - UNDERSTOOD}"
    if "$ref" in schema:
        return complaints(value, whole["$defs"][schema["$ref"].rpartition("/")[2]], whole, place)
    if "anyOf" in schema:
        each = [complaints(value, part, whole, place) for part in schema["anyOf"]]
        return [] if [] in each else min(each, key=len)
    kinds = schema.get("type", list(KINDS))
    if not any(is_kind(value, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)):
        return [f"{place} is {value!r:.60}, and no {kinds}"]
    if value not in schema.get("enum", [value]):
        return [f"{place} is {value!r:.60}, none of {schema['enum']}"]
    if is_kind(value, "number"):
        is_within = schema.get("minimum", value) <= value <= schema.get("maximum", value)
        above = schema.get("exclusiveMinimum", value - 1) < value
        below = value < schema.get("exclusiveMaximum", value + 1)
        return [] if is_within and above and below else [f"{place} is {value}: out of its range"]
    found = []
    if isinstance(value, dict):
        known = schema.get("properties", {})
        rest = schema.get("additionalProperties", True)
        found += [f"{place} lacks {key}" for key in schema.get("required", ()) if key not in value]
        for key, item in value.items():
            if key not in known and rest is False:
                found.append(f"{place} has {key}, which the schema does not know")
            else:
                own = known.get(key, {} if rest is True else rest)
                found += complaints(item, own, whole, f"{place}.{key}")
    if isinstance(value, list) and "items" in schema:
        for number, item in enumerate(value):
            found += complaints(item, schema["items"], whole, f"{place}[{number}]")
    return found


def is_kind(value, kind):
    return isinstance(value, KINDS[kind]) and (kind == "boolean" or not isinstance(value, bool))


def schema_of(name):
    """One of the schemas of docs/schemas."""
    place = Path(__file__).parents[2] / "docs/schemas" / f"{name}.schema.json"
    return json.loads(place.read_text("utf-8"))


def check(value, name):
    """Hold what a command writes or prints against its schema."""
    against = complaints(json.loads(json.dumps(value)), schema_of(name))
    assert not against, against


def check_file(path):
    """Hold results.json or ropext.json against the schema of its name."""
    check(json.loads(path.read_text("utf-8")), path.stem)
