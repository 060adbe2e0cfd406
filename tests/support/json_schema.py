"""Compare a value with a JSON Schema by the library `jsonschema`."""

import json
from functools import cache
from pathlib import Path

from jsonschema import Draft202012Validator
from referencing import Registry, Resource

SCHEMAS = Path(__file__).parents[2] / "docs/schemas"


def schema_of(name):
    """Return one of the schemas of docs/schemas."""
    return json.loads((SCHEMAS / f"{name}.schema.json").read_text("utf-8"))


@cache
def registry():
    """Return all schemas by the names of their files, by which one refers to another."""
    files = ((file.name, json.loads(file.read_text("utf-8"))) for file in SCHEMAS.iterdir())
    return Registry().with_resources([(name, Resource.from_contents(own)) for name, own in files])


def complaints(value, schema, whole=None):
    """Return one sentence for each place of a value that differs from a schema, or from a part of
    the `whole` schema."""
    judge = Draft202012Validator(whole or schema, registry=registry()).evolve(schema=schema)
    return [f"{error.json_path}: {error.message:.200}" for error in judge.iter_errors(value)]


def check(value, name):
    """Compare a command's output with its schema."""
    against = complaints(json.loads(json.dumps(value)), schema_of(name))
    assert not against, against


def check_file(path):
    """Compare results.json, ropext.json or outcome.json with the schema of its name."""
    check(json.loads(path.read_text("utf-8")), path.stem)
