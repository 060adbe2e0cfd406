"""ropext.json: the record of the changes to a model, so that anyone can check and repeat them.

The same inputs give the same bytes: no time stamp, no host, no path that the user did not name.
"""

import copy
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from ropext import families, scaling
from ropext.base import guard
from ropext.base.errors import InputError
from ropext.base.inputs import is_plain_name
from ropext.base.jsontext import Json, JsonObject, dump, noun, read_object
from ropext.base.narration import clean_command, scrub
from ropext.base.staging import replace_file
from ropext.families import Model, stock
from ropext.families.config import check_foreign_parts, named, shown
from ropext.files.checkpoint.snapshot import Snapshot
from ropext.files.checkpoint.weights import Count, WeightFile
from ropext.planning import ExtensionPlan
from ropext.scaling.rope import ABSENT, CONFIG, Edit, Site, Spectrum
from ropext.version import __version__

NAME = guard.RECORD
SCHEMA = 1
READ_FROM = "read_from"  # section of a record that ropext made of a config
METHOD_SOURCE = "method_source"  # section of a record whose method is the user's own function
SAVED = "saved_from_memory"  # section of a record whose weights anyone may have trained
# Sections of the record: hashes of the documents used in training, and the trainings.
TRAINED_ON = "trained_on"
TRAININGS = ("fit", "finetune")
READ_AGAIN = (*TRAININGS, "run", TRAINED_ON)  # the sections of later steps that ropext reads
# The keys that a record copies from its base's record.
LINK = ("method", "context", "target", "recipe", "edits", "base")

# Libraries that can change a result. ropext reads their metadata and never imports them.
LIBRARIES = ("transformers", "torch", "safetensors", "huggingface_hub", "peft", "accelerate")


def _plain(name: str) -> str:
    """Return a weight file's name in ropext.json. Raise ValueError if it is not a plain name."""
    if not is_plain_name(name):
        raise ValueError
    return name


Length = Annotated[int, Field(ge=1, lt=1 << 63)]
Name = Annotated[str, AfterValidator(_plain)]


@dataclass(frozen=True, kw_only=True)
class SiteRecord(Site):
    """A site as ropext.json stores it: with the spectrum before the extension, without its own
    config."""

    wanted: Annotated[Spectrum, Field(alias="spectrum")]
    dim: Count
    context: Count
    base: Spectrum


@dataclass(frozen=True, kw_only=True)
class Record:
    """The content of ropext.json, in its order."""

    versions: JsonObject = field(default_factory=dict)
    base: JsonObject  # name, hub_id, revision, commit, its whole config; see base_of
    method: str
    knobs: JsonObject
    context: Length
    target: Length
    sites: tuple[SiteRecord, ...]
    edits: tuple[Edit, ...] = ()
    weights: Mapping[Name, WeightFile] = field(default_factory=dict)
    recipe: JsonObject = field(default_factory=dict)
    command: tuple[str, ...] = ()
    proof: JsonObject | None = None
    more: JsonObject = field(default_factory=dict)  # sections of later steps, by name


@dataclass(frozen=True, kw_only=True)
class KeptBase:
    """The base, as a record describes it."""

    name: str | None = None
    hub_id: str | None = None
    revision: str | None = None
    commit: str | None = None
    config: JsonObject
    extended: "KeptLink | None" = None  # how it was itself extended


@dataclass(frozen=True, kw_only=True)
class KeptLink:
    """One extension, as a later record stores it, and the base of that extension."""

    method: str
    context: Length
    target: Length
    recipe: JsonObject
    edits: tuple[Edit, ...]
    base: KeptBase


def base_of(snapshot: Snapshot) -> dict[str, Json]:
    """Return the base checkpoint as ropext.json stores it: its name, its config, and its own
    recorded extension if any."""
    out: dict[str, Json] = {
        "name": snapshot.name,
        "hub_id": snapshot.hub_id,
        "revision": snapshot.revision,
        "commit": snapshot.commit,
        "quantisation": snapshot.quantisation,
        "config": snapshot.config,
    }
    if (record := record_in(snapshot)) is not None:
        out["extended"] = lineage(record)[0]
    return out


def versions() -> dict[str, str]:
    """Return the versions of ropext, Python and installed libraries for a checkpoint's
    ropext.json."""
    known = {"ropext": __version__, "python": ".".join(map(str, sys.version_info[:3]))}
    return known | installed(LIBRARIES)


def installed(libraries: Iterable[str]) -> dict[str, str]:
    """Return the versions of libraries as a checkpoint's ropext.json and other records store them.
    Leave out a missing library."""
    import importlib.metadata  # late: `plan` reads records and needs no versions

    known = {}
    for library in libraries:
        with suppress(importlib.metadata.PackageNotFoundError):
            known[library] = importlib.metadata.version(library)
    return known


def to_json(record: Record) -> dict[str, Json]:
    """Return the record as one JSON object, in the order of ropext.json. `write` adds the list of
    files."""
    weights = {name: asdict(record.weights[name]) for name in sorted(record.weights)}
    out: dict[str, Json] = {"schema": SCHEMA} | vars(record)
    out |= {
        "sites": [_site_to_json(site) for site in record.sites],
        "edits": _edits_to_json(record.edits),
        "weights": {n: {k: v for k, v in w.items() if v is not None} for n, w in weights.items()},
        "command": list(record.command),
    }
    more: JsonObject = out.pop("more")
    return {**out, **more}


def _site_to_json(site: SiteRecord) -> dict[str, Json]:
    """Return a rotary site as ropext.json stores it, with its spectra before and after."""
    return {
        "label": site.label,
        "dim": site.dim,
        "context": site.context,
        "scaled": site.scaled,
        "params": site.params,
        "base": _spectrum_to_json(site.base),
        "spectrum": _spectrum_to_json(site.wanted),
    }


def _edits_to_json(edits: Iterable[Edit]) -> list[dict[str, Json]]:
    """Return the edits of a checkpoint's files as ropext.json lists them."""
    return [{"file": edit.file} | edit.to_json() for edit in edits]


def _spectrum_to_json(spectrum: Spectrum) -> dict[str, Json]:
    """Return a spectrum as ropext.json stores it: its digest, its factors and its frequencies."""
    out: dict[str, Json] = {
        "digest": spectrum.digest(),
        "attention_factor": spectrum.attention_factor,
        "softmax_factor": spectrum.softmax_factor,
        "inv_freq": list(spectrum.inv_freq),
    }
    if spectrum.short_inv_freq is not None:
        out["short_inv_freq"] = list(spectrum.short_inv_freq)
        out["short_context"] = spectrum.short_context
    return out


def write(record: Record, directory: Path, known: Mapping[str, str] = {}) -> None:
    """Write ropext.json as the last file of a directory, with a list of its other files. `known`
    has the SHA-256 of files that are hashed already."""
    files = {guard.FILES: guard.states(directory, known)}
    (directory / NAME).write_bytes(dump(to_json(record) | files))


def replace_section(directory: Path, name: str, section: Json) -> None:
    """Replace one section of the ropext.json in a written directory. All others stay."""
    content = read_object(directory / NAME) | {name: section}
    replace_file(directory / NAME, dump(content))


def relist(directory: Path, name: str) -> None:
    """Update the entry in ropext.json of a file that ropext wrote after the record."""
    files = read_object(directory / NAME)[guard.FILES]
    replace_section(directory, guard.FILES, files | {name: guard.state(directory / name)})


def replace_listed(directory: Path, name: str, content: bytes) -> None:
    """Replace the content of an output's file in one step. If the file was as ropext.json lists it,
    update that entry. A file that the user edited stays the user's."""
    listed = (guard.files_in(directory) or {}).get(name)
    is_ours = guard.is_in_state(directory / name, listed)
    replace_file(directory / name, content)
    if is_ours:
        relist(directory, name)


def lineage(record: Record) -> list[JsonObject]:
    """Return the extensions that ropext.json records for a checkpoint, each with the keys of LINK,
    the newest first."""
    newest: dict[str, Json] = {name: getattr(record, name) for name in LINK}
    newest["edits"] = _edits_to_json(record.edits)
    links: list[JsonObject] = [newest]
    while older := links[-1]["base"].get("extended"):
        links.append(older)
    return links


def history(record: Record) -> str:
    """Return in words the extensions that ropext.json records, the oldest first."""
    steps = list[str]()
    for link in reversed(lineage(record)):
        method = named(link["method"])  # a record is untrusted and may hold any text
        steps.append(f"{method}, {link['context']:,} to {link['target']:,} tokens")
    return f"{'; then '.join(steps)} (ropext.json)"


def edits_of(link: JsonObject) -> tuple[Edit, ...]:
    """Parse the list `edits` of a checkpoint's ropext.json, with its edits of config.json and other
    files. A link of its lineage and the JSON of a plan have the same list."""
    return tuple(Edit.from_json(entry) for entry in link["edits"])


def undone(config: JsonObject, edits: Iterable[Edit]) -> dict[str, Json]:
    """Return the config.json of an extended checkpoint as it was before the edits that its
    ropext.json records."""
    out = copy.deepcopy(dict(config))
    for edit in edits:
        if edit.file != CONFIG:
            continue
        *parents, key = edit.path
        holder = out
        for parent in parents:
            if not isinstance(holder.get(parent), dict):
                holder[parent] = {}
            holder = holder[parent]
        if edit.before is not ABSENT:
            holder[key] = edit.before
        else:  # the key was new, and null does not mean the same as absent
            holder.pop(key, None)
    check_foreign_parts(out, "the config before its recorded edits")
    return out


def with_training(record: Record) -> dict[str, Json]:
    """Return the sections of later steps in a checkpoint's ropext.json, with one about the training
    documents. If their hashes are missing, that section lists the trainings without hashes."""
    more = dict(record.more)
    if TRAINED_ON not in more and (done := [name for name in TRAININGS if more.get(name)]):
        more[TRAINED_ON] = {"not_recorded": done}
    return more


def read_record(directory: Path) -> Record | None:
    """Return the content of ropext.json in a directory, or None if it has none. Raise if a spectrum
    does not have the digest stored with it."""
    path = directory / NAME
    return _record(read_object(path), str(path)) if os.path.lexists(path) else None


def record_in(snapshot: Snapshot) -> Record | None:
    """Return the record of a checkpoint, from ropext.json next to its config or from inside a GGUF
    file. Return None if it has none."""
    if snapshot.kept_record is not None:
        return _record(dict(snapshot.kept_record), f"the record in {snapshot.name}")
    return read_record(snapshot.directory)


def _record(content: dict[str, Json], path: str) -> Record:
    """Return the record in the parsed JSON of a ropext.json. Raise InputError if it is damaged or
    has another schema."""
    schema = content.pop("schema", None)
    if schema != SCHEMA:
        raise InputError(
            f"{path} has schema {shown(schema)}, this ropext reads {SCHEMA}; use the version "
            "that wrote it"
        )
    keys = [entry.name for entry in fields(Record) if entry.name != "more"]
    for key in keys:
        if key not in content:
            raise InputError(f"{path} is damaged: it has no {key}")
    # The validator refuses lone surrogates, which names of files can hold.
    text = json.dumps(content, ensure_ascii=False).encode(errors="replace")
    try:
        record = TypeAdapter(Record).validate_json(text, strict=True)
        link = TypeAdapter(KeptLink).validate_json(text, strict=True)
    except ValidationError as error:
        raise InputError(f"{path} is damaged: {_damage(error)}") from None
    for name in READ_AGAIN:
        if not isinstance(content.get(name), dict | None):
            raise InputError(f"{path} is damaged: {name} is not an object")
    for site, entry in zip(record.sites, content["sites"], strict=True):
        for key, spectrum in (("base", site.base), ("spectrum", site.wanted)):
            if spectrum.digest() != entry[key].get("digest"):
                raise InputError(f"{path} is damaged: a spectrum does not have its digest")
    older: KeptLink | None = link
    while older is not None:  # ropext may build a model from each of these configs
        check_foreign_parts(older.base.config, f"{path}, its base's config")
        stock.describe_unknown_types(older.base.config)
        older = older.base.extended
    as_given = {key: content[key] for key in ("base", "knobs", "recipe", "proof")}
    edits = edits_of(content)
    command = tuple(content["command"])
    more = {key: value for key, value in content.items() if key not in (*keys, guard.FILES)}
    return replace(record, **as_given, edits=edits, command=command, more=more)


def _damage(error: ValidationError) -> str:
    """Return the sentence about the first invalid value of a ropext.json, with its key."""
    first = error.errors(include_url=False)[0]
    keys = [str(part) for part in first["loc"] if type(part) is str and part != "[key]"]
    key = ".".join(keys) if keys[0] == "base" else keys[-1]
    if first["type"] == "string_pattern_mismatch":
        return f"{key} is not a SHA-256 in hexadecimal"
    if first["type"] == "value_error":
        return f"weights: {key[:80]!r} is not a plain file name"
    if first["type"] == "missing":
        return f"{key} is not there"
    return f"{key} is not {noun(first['type'])}"


def record_of(plan: ExtensionPlan, base: JsonObject, command: Sequence[str] = ()) -> Record:
    """Build the record that ropext.json of a written checkpoint stores of its plan. `write` adds
    the weights and the proof later."""
    recipe = dict(plan.recipe)
    for switch in ("length_only", "untrained", "again"):
        if not recipe.get(switch):
            recipe.pop(switch, None)  # a switch that is off does not belong to the method
    more = dict[str, Json]()
    if scaling.is_function(plan.method):  # the user's own function
        more[METHOD_SOURCE] = plan.method_source and scrub(plan.method_source)
    return Record(
        base=base,
        method=plan.method,
        knobs=plan.knobs,
        context=plan.context,
        target=plan.target,
        sites=tuple(
            SiteRecord(
                label=site.label,
                dim=site.rope.dim,
                context=site.rope.context,
                base=site.rope.spectrum,
                wanted=site.wanted,
                params=site.params,
                scaled=site.scaled,
            )
            for site in plan.sites
        ),
        edits=plan.edits,
        recipe={key: value for key, value in recipe.items() if value not in (None, ())},
        command=clean_command(command),
        versions=versions(),
        more=more,
    )


def scaling_in_words(model: Model) -> str:
    """Return by how much the config.json of a checkpoint without ropext.json scales it, in words.
    Return "" if it does not, or if the config omits the original length."""
    original = model.scaled_sites[0].rope.original_context
    if model.asks_original or original >= model.context:
        return ""
    return f"scaled {model.context / original:g}x from {original:,} by its config; no record"


def record_of_config(snapshot: Snapshot) -> Record | None:
    """Build the record of ropext.json from the scaling that a config.json states, for a directory
    of another program. Return None if `scaling_in_words` returns ""."""
    config = snapshot.config
    model = families.read(config)
    if not scaling_in_words(model):
        return None
    context = model.scaled_sites[0].rope.original_context
    plain = {
        s.label: {"rope_type": "default", "rope_theta": s.rope.theta} for s in model.scaled_sites
    }
    sites = tuple(
        SiteRecord(
            label=site.label,
            dim=site.rope.dim,
            context=site.rope.original_context,
            base=site.rope.original().spectrum if site.scaled else site.rope.spectrum,
            wanted=site.rope.spectrum,
            params=site.params,
            scaled=site.scaled,
        )
        for site in model.sites
    )
    before = families.write(config, model, plain, context)
    return Record(
        base=base_of(snapshot) | {"config": before},
        method=model.scaled_sites[0].params["rope_type"],
        knobs={},
        context=context,
        target=model.context,
        sites=sites,
        edits=tuple(families.diff(before, config)),
        more={READ_FROM: "config.json"},
    )
