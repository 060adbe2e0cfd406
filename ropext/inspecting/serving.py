"""How each loader reads a model as it stands, and the commands that run it."""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from ropext import families, loaders
from ropext.checkpoint import Snapshot
from ropext.checkpoint.provenance import Record, record_in, scaled_by_config
from ropext.errors import GateFailed, NotMeasured, RopextError, UsageError, listed
from ropext.families import Model
from ropext.families.config import text_part
from ropext.inspecting.inspection import open_model, positions_of, said_of
from ropext.loaders.lookup import reading_in
from ropext.planning import readings_of
from ropext.planning.plan import WRONG


@dataclass(frozen=True)
class Served:
    """How each loader reads a directory, and the commands that run it."""

    directory: str
    model: Model
    record: Record | None
    readings: tuple[loaders.LoaderReading, ...]
    serving: tuple[loaders.Serving, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "directory": self.directory,
            "method": self.record and self.record.method,
            "context": self.record and self.record.context,
            "target": self.model.context,
            "loaders": [asdict(reading) for reading in self.readings],
            "serving": [asdict(line) for line in self.serving],
        }


def read_again(snapshot: Snapshot) -> Served:
    """What loaders make of a config as it stands, and how to serve it."""
    with said_of(snapshot):
        model, conflicts = families.interpret(snapshot.config)
    record = record_in(snapshot)
    main = model.scaled_sites[0]
    if snapshot.container:
        model = replace(model, container=snapshot.container)
        listed = readings_of(model, main.rope, main.rope.spectrum, main.params, model.context)
        nothing = dict[str, Any]()  # for Ollama's environment: the file is scaled already
        lines = loaders.file_lines(snapshot.name, model.context, listed, nothing)
        return Served(snapshot.name, model, record, listed, lines)
    text = text_part(snapshot.config, model.path)
    read = partial(
        loaders.readings,
        model.text_type,
        main.params,
        model_type=model.model_type,
        length=model.stated_context,
        target=model.context,
    )
    readings = read(v5_only="rope_parameters" in text and "rope_scaling" not in text)
    if conflicts:
        agrees = _older_agrees(snapshot.config, model)
        readings = _of_two_spellings(read(), read(v5_only=True), agrees)
    directory = loaders.ServedDirectory(
        snapshot.name,
        model.text_type,
        model.model_type,
        masked_lm=model.masked_lm,
        on_hub=snapshot.hub_id == snapshot.name,
    )
    context = record.context if record else main.rope.original_context
    serving = loaders.serving_lines(directory, main.params, context=context, target=model.context)
    return Served(snapshot.name, model, record, readings, serving)


def _older_agrees(config: dict[str, Any], model: Model) -> bool:
    """Whether the spellings of transformers 4, alone, say what stock transformers 5 takes."""
    older = copy.deepcopy(config)
    text_part(older, model.path).pop("rope_parameters", None)
    try:
        alone = families.as_read(older)
    except RopextError:
        return False
    return [site.params for site in alone.sites] == [site.params for site in model.sites]


def _of_two_spellings(
    plain: Iterable[loaders.LoaderReading],
    modern: Iterable[loaders.LoaderReading],
    older_agrees: bool,
) -> tuple[loaders.LoaderReading, ...]:
    """Who reads what of two spellings that disagree.

    A loader to which rope_parameters alone (`modern`) says nothing goes by the older spelling; of
    those that know both, only transformers was measured.
    """
    out = []
    for reading, alone in zip(plain, modern, strict=True):
        if reading.verdict == "same" and alone.verdict != "same":
            if not older_agrees:
                why = "takes the older spelling, which disagrees with what transformers 5 takes"
                reading = replace(reading, verdict="different", why=why, flag="")
        elif reading.verdict == "same" and reading.loader != "transformers":
            why = "two spellings disagree; which one it takes was not measured"
            reading = replace(reading, verdict="not measured", why=why, flag="")
        out.append(reading)
    return tuple(out)


def gate(served: Served, names: Sequence[str]) -> None:
    """Raise where one of these loaders reads the model otherwise than its config means, or where
    that was not measured; a version is named as in --for."""
    readings = [reading for name in names for reading in _readings_for(served, name)]
    wrong = [reading for reading in readings if reading.verdict in WRONG]
    unknown = [reading for reading in readings if reading.verdict == "not measured"]
    asked = f"--for {','.join(names)}: {served.directory}"
    if wrong:
        raise GateFailed(f"{asked} is not read as its config means: {_told(wrong)}")
    if unknown:
        raise NotMeasured(f"{asked}: how it is read was not measured: {_told(unknown)}")


def _readings_for(served: Served, name: str) -> list[loaders.LoaderReading]:
    """What a loader of --for makes of the model, in each version that the name means."""
    if served.model.container:
        loader = loaders.loader_of(name)
        readings = [reading for reading in served.readings if reading.loader == loader]
        if not readings:
            known = listed([reading.loader for reading in served.readings])
            raise UsageError(f"--for {name}: it runs no GGUF file that was measured; do: {known}")
        return readings
    model = served.model
    listed_readers = loaders.readers_for(model.text_type, model.model_type)
    meant = list[loaders.LoaderReading]()
    for reader in loaders.select(name):
        if reader in listed_readers:
            meant.append(served.readings[listed_readers.index(reader)])
        else:
            known = reader.known(model.text_type, model.model_type)
            meant.append(reading_in(reader, known, {}, ()))
    return meant


def _told(readings: Sequence[loaders.LoaderReading]) -> str:
    """What these loaders make of it, one after the other."""
    parts = []
    for reading in readings:
        why = f" ({reading.why})" if reading.why else ""
        parts.append(f"{reading.loader} {reading.versions}: {reading.verdict}{why}")
    return "; ".join(parts)


def as_it_stands(model: str, *, revision: str | None = None) -> Served | None:
    """How each loader reads anybody's model; None where it does not rotate."""
    snapshot = open_model(model, revision=revision)
    return None if positions_of(snapshot) is not None else read_again(snapshot)


def serving(model: str, *, revision: str | None = None) -> Served | None:
    """How each loader reads an extended directory; None where it is not one."""
    snapshot = open_model(model, revision=revision)
    if positions_of(snapshot) is not None:
        return None
    served = read_again(snapshot)
    return served if served.record or scaled_by_config(served.model) else None
