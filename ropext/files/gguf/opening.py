"""Open a GGUF model: one file, or the parts of a split one."""

import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

from ropext.base import bundled
from ropext.base.errors import UnsupportedModel, UsageError
from ropext.base.jsontext import parse_object
from ropext.families.loaders.gguf import architecture
from ropext.files.gguf.file import RECORD, GgufFile
from ropext.files.gguf.geometry import read_config
from ropext.files.gguf.header import GgufHeader, read_gguf
from ropext.files.gguf.keys import FileCarrier
from ropext.planning.carrier import DIRECTORY
from ropext.planning.gguf_carrier import FILE

SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
MOST_PARTS = 1000


def open_gguf(model: str, *, revision: str | None = None) -> GgufFile:
    """Read the header of a GGUF file, and the headers of its other parts if it is split."""
    if revision is not None:
        raise UsageError(f"--revision {revision} is for hub ids, but {model} is a local file")
    path = bundled.find_gguf(model) or Path(os.path.expanduser(model))
    parts = _parts(path)
    head = parts[0]
    name = head.text("general.architecture")
    if not name:
        raise head.wrong("general.architecture is missing, so the model is not known")
    if head.text("general.type") not in (None, "model"):
        raise UnsupportedModel(f"{path} is not a model but of the type {head.text('general.type')}")
    config, dim = read_config(parts, architecture(name))
    stored = head.text(RECORD)
    record = None
    if stored is not None:
        record = parse_object(stored.encode(), f"{RECORD} in {path}")
    file = GgufFile(
        name=model,
        directory=path,
        config=config,
        files={part.path.name: part.size for part in parts},
        config_name=f"{model}, its metadata as a config",
        kept_record=record,
        architecture=name,
        parts=parts,
        dim=dim,
    )
    words = FILE
    if len(parts) > 1:  # the output is a directory of all parts
        words = replace(FILE, output=DIRECTORY.output, name=DIRECTORY.name)
    carries = partial(FileCarrier, architecture=name, words=words, file=file)
    return replace(file, carries=carries)


def _parts(path: Path) -> tuple[GgufHeader, ...]:
    """Return the headers of a GGUF's files in their order: one, or all parts of a split GGUF."""
    head = read_gguf(path)
    count = head.whole("split.count", 0, MOST_PARTS) or 1
    if count == 1:
        return (head,)
    place = SPLIT.fullmatch(path.name)
    if place is None or int(place["count"]) != count:
        raise head.wrong(
            f"it is one of {count} parts, but not named as such (-00001-of-{count:05})"
        )
    if head.whole("split.no", 0, MOST_PARTS) or int(place["number"]) != 1:
        raise UsageError(f"{path} is a later part of {count}; name the first one")
    others = [
        read_gguf(path.with_name(f"{place['stem']}-{number:05}-of-{count:05}.gguf"))
        for number in range(2, count + 1)
    ]
    for number, part in enumerate(others, 1):
        if part.whole("split.no", 0) != number or part.whole("split.count") != count:
            raise part.wrong(
                f"its split.no and split.count do not say part {number + 1} of {count}"
            )
    total = len(head.tensors) + sum(len(part.tensors) for part in others)
    stated = head.whole("split.tensors.count")
    if stated not in (None, total):
        raise head.wrong(f"split.tensors.count is {stated}, but the parts hold {total} tensors")
    return (head, *others)
