"""Finished pieces of another run directory, where the same model read the same tokens.

A grid reads its base once, and a run that was trained again does not read the base again.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ropext import workdir
from ropext.files import write_bytes


def borrow(path: Path, decides: Mapping[str, Any], other: Path) -> None:
    """Link every unit of `other` whose variant, tokens, settings and versions are the same."""
    found = workdir.read(other)
    if found is None or found["command"] != "eval":
        return  # not begun, or of another kind
    theirs = found["decides"]
    mine = json.loads(json.dumps(decides))  # tuples as the file has them
    if _without_variants(theirs) != _without_variants(mine):
        return
    for label, variant in mine["variants"].items():
        if theirs["variants"].get(label) == variant:
            _link_all(other / "variants" / label, path / "variants" / label)


def _without_variants(run: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in run.items() if key != "variants"}


def _link_all(source: Path, target: Path) -> None:
    for file in sorted(source.glob("*/*")):
        place = target / file.parent.name / file.name
        if file.name.startswith(".") or place.exists():
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(file, place)
        except OSError:  # another device, or a file system without hard links
            write_bytes(place, file.read_bytes())
