"""What can be said of a model from its small files alone: inspect it, plan for it, serve it.

Kept apart from the pipeline so that these commands start at once.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropext import bundled, families, loaders, scaling
from ropext.checkpoint import Snapshot, open_snapshot, provenance
from ropext.checkpoint.provenance import Record, readable_record, record_in, scaled_by_config
from ropext.checkpoint.tokenizer import NO_LIMIT
from ropext.errors import InputError, RopextError, UsageError
from ropext.families import Model, Site
from ropext.families.config import text_part
from ropext.files import read_text
from ropext.options.extend import Extend, parse_extend, resolve_target
from ropext.planning import (
    ExtensionPlan,
    Plan,
    make_plan,
    make_table_plan,
    reached,
    readings_of,
)
from ropext.positions import Positions
from ropext.rope import Spectrum

if TYPE_CHECKING:
    import numpy as np

    from ropext.checkpoint.tables import PositionTable

TELLING_SIZE = 100_000_000  # bytes of a file whose copy is worth a sentence


@dataclass(frozen=True)
class Inspection:
    """What a model has, from its config files alone."""

    name: str
    model: Model
    target: int
    limits: dict[str, Any]
    extended: str = ""  # by what, as ropext.json says

    @property
    def main(self) -> Site:
        """The embedding that an extension would scale."""
        return self.model.scaled_sites[0]

    def __repr__(self) -> str:
        return f"<Inspection of {self.name}: {self.model.context:,} tokens>"

    def spectra(self) -> dict[str, Spectrum]:
        """What three well-known methods would make of it, for the picture."""
        rope, known = self.main.rope, scaling.well_known(self.main.rope, self.target)
        return {name: scaling.compose(rope, own, self.target) for name, own in known.items()}

    def to_json(self) -> dict[str, Any]:
        sites = []
        for site in self.model.sites:
            spectrum = site.rope.spectrum
            pairs = {"inv_freq": spectrum.inv_freq, "wavelengths": spectrum.wavelengths}
            sites.append(asdict(site) | pairs)
        facts = asdict(self.model) | {"sites": sites}
        kv = {"kv_bytes_per_token": self.model.kv_bytes_per_token}
        head = {"model": self.name, "target": self.target, "extended": self.extended or None}
        return head | facts | kv | {"limits": self.limits}


@dataclass(frozen=True)
class Unrotated:
    """What a model without a rotary embedding has, from its small files and weight headers."""

    name: str
    positions: Positions
    limits: dict[str, Any]
    tables: "tuple[PositionTable, ...]"
    directory: Path

    @property
    def advice(self) -> str:
        """What extends it, or why nothing does."""
        return "" if self.positions.carried else families.refusal(self.positions)

    def rows(self) -> "np.ndarray[Any, Any]":
        """The rows of its first table that positions read."""
        from ropext.checkpoint.tables import decoded, read_tensor  # late, as in `inspect`

        if not self.tables:
            raise UsageError(f"--plot draws a table's rows, and {self.name} has none of them here")
        first = self.tables[0]
        data, tensor = read_tensor(self.directory / first.file, first.name)
        values = decoded(data, tensor.dtype).reshape(tensor.shape)
        return values[self.positions.offset :]

    def to_json(self) -> dict[str, Any]:
        facts = {"model": self.name, "positions": asdict(self.positions), "advice": self.advice}
        return facts | {"tables": [asdict(own) for own in self.tables], "limits": self.limits}


def inspect(
    model: str | Path,
    *,
    factor: float | None = None,
    target: int | None = None,
    context: int | None = None,
    original_context: int | None = None,
    revision: str | None = None,
) -> Inspection | Unrotated:
    """What position scheme a model has, and what follows from it."""
    snapshot = open_model(model, revision=revision)
    if (positions := positions_of(snapshot)) is not None:
        from ropext.checkpoint import tables  # late: no rotary model needs it

        here = bool(positions.tensors and snapshot.weight_files)
        found = tables.find_tables(snapshot, positions) if here else ()
        return Unrotated(str(model), positions, _limits(snapshot), found, snapshot.directory)
    with said_of(snapshot):
        read = families.read(snapshot.config, context=context, original=original_context)
    read = replace(read, container=snapshot.container)
    request = Extend(factor=4.0 if factor is None and target is None else factor, target=target)
    record = provenance.readable_record(snapshot)
    done = provenance.history(record) if record else ""
    wanted = resolve_target(request, read.context)
    return Inspection(str(model), read, wanted, _limits(snapshot), done)


def _limits(snapshot: Snapshot) -> dict[str, Any]:
    """What besides the rotary embedding caps a sequence, or decides how it is extended."""
    longest = (snapshot.tokenizer_config or {}).get("model_max_length")
    return {
        "tokenizer": longest if isinstance(longest, int) and longest < NO_LIMIT else None,
        "generation": (snapshot.generation_config or {}).get("max_length"),
        "quantised": snapshot.quantisation,
    }


def positions_of(snapshot: Snapshot) -> Positions | None:
    """The scheme of a model that rotates nothing; None where it rotates."""
    return None if snapshot.container else families.read_positions(snapshot.config)


def plan(model: str | Path, *, revision: str | None = None, **options: Any) -> ExtensionPlan:
    """What `extend` would do; `options` are the fields of ropext.options.Extend."""
    return planned(open_model(model, revision=revision), str(model), options)


def planned(snapshot: Snapshot, name: str, options: Mapping[str, Any]) -> ExtensionPlan:
    """The plan for a model, by the scheme that it has."""
    request = parse_extend(options, read_text)
    if positions_of(snapshot) is not None:
        made, record = make_table_plan(snapshot.config, request, name), readable_record(snapshot)
        again = [f"this extends it again, after {provenance.history(record)}"] if record else []
        return replace(made, warnings=(*made.warnings, *again))
    return plan_of(snapshot, request, name)


def open_model(model: str | Path, *, revision: str | None = None) -> Snapshot:
    """A checkpoint or a GGUF file, whichever the name is of."""
    model = str(model)
    if bundled.find_gguf(model) is not None:
        from ropext.gguf import open_gguf  # late: a directory needs none of it

        return open_gguf(model, revision=revision)
    return open_snapshot(model, revision=revision)


@contextmanager
def said_of(snapshot: Snapshot) -> Iterator[None]:
    """Let errors about a config that was made of a GGUF's metadata speak of that."""
    try:
        yield
    except InputError as error:
        if not snapshot.container:
            raise
        said = str(error).replace("config.json", f"{snapshot.name}, its metadata as a config")
        raise InputError(said) from None


def plan_of(snapshot: Snapshot, request: Extend, name: str) -> Plan:
    """The plan; what a config of ropext's own leaves open of its lengths stands in its record."""
    if request.like is not None:
        if not snapshot.container:
            raise UsageError(f"--like {request.like} is for a GGUF file, and {name} is none")
        from ropext.gguf import request_like

        request = request_like(snapshot, request)
    with said_of(snapshot):
        record = readable_record(snapshot)
        if record is not None and request.from_original:
            made = _from_record(snapshot, record, request, name)
        else:
            silent = request.context is None and request.original_context is None
            if silent and record and families.as_read(snapshot.config).asks_original:
                request = request.changed(context=record.target)
            made = make_plan(snapshot.config, request, name, snapshot.container)
            again = _again(record, made.model, request)
            made = replace(made, warnings=(*made.warnings, *again))
    if not snapshot.container:
        return made
    from ropext.gguf import GgufFile, key_edits

    # A file's weights as a directory (for a fit) have its keys no more.
    if not isinstance(snapshot, GgufFile):
        return made
    vision = [
        f"{path.name} beside it is a part for images or sound, which an extension leaves as it is; "
        "give it to the runner as before (llama-server --mmproj)"
        for path in sorted(snapshot.directory.parent.glob("mmproj*.gguf"))[:1]
    ]
    if (size := sum(part.end for part in snapshot.parts)) > TELLING_SIZE:
        gigabytes = f"{size / 1e9:.1f} GB"
        vision.append(f"the copy has {gigabytes}; `ollama create` makes a second one as large")
    return replace(made, edits=key_edits(snapshot, made), warnings=(*made.warnings, *vision))


def _from_record(snapshot: Snapshot, record: Record, request: Extend, name: str) -> Plan:
    """The plan from the base before every recorded extension."""
    links = provenance.lineage(record)
    first, before = links[-1], snapshot.config
    for link in links:
        before = provenance.undone(before, link["edits"])
    if request.context is None and request.original_context is None:
        key = "original_context" if first["recipe"].get("from_original") else "context"
        known = families.as_read(first["base"]["config"])
        if key == "context" or known.asks_original:
            request = request.changed(**{key: first["context"]})
    made = make_plan(before, request, name, snapshot.container, first["base"]["config"])
    said = f"ropext.json: the original is {first['base']['name']}, {made.context:,} tokens"
    warnings = [f"{said} with theta {made.main.rope.theta:,g}", *made.warnings]
    if made.target <= record.target:
        warnings.append(reached(made.target, record.target))
    edits = families.diff(snapshot.config, made.config)
    return replace(made, edits=tuple(edits), warnings=tuple(warnings))


def _again(record: Record | None, model: Model, request: Extend) -> Iterator[str]:
    """That a model was scaled before, or may have been."""
    rope, kind = model.scaled_sites[0].rope, model.scaled_sites[0].params["rope_type"]
    first = f"{kind} (its config)" if rope.is_scaled else ""
    first = provenance.history(record) if record else first
    if first and not request.from_original:
        yield f"this scales the model again, after {first}; --from-original starts before that"
    elif request.from_original and not first and kind == "default":
        yield (
            f"--from-original: the config declares no scaling and there is no ropext.json; theta "
            f"{rope.theta:,g} may have been raised already, and its original is not known"
        )


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
        found = readings_of(model, main.rope, main.rope.spectrum, main.params, model.context)
        lines = loaders.file_lines(snapshot.name, model.context, found, main.params)
        return Served(snapshot.name, model, record, found, lines)
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
    serving = loaders.serving_lines(
        snapshot.name,
        model.text_type,
        main.params,
        context=record.context if record else main.rope.original_context,
        target=model.context,
        model_type=model.model_type,
        masked_lm=model.masked_lm,
        on_hub=snapshot.hub_id == snapshot.name,
    )
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


def serving(model: str, *, revision: str | None = None) -> Served | None:
    """How each loader reads an extended directory; None where it is not one."""
    snapshot = open_model(model, revision=revision)
    if positions_of(snapshot) is not None:
        return None
    served = read_again(snapshot)
    return served if served.record or scaled_by_config(served.model) else None
