"""ropext.json: what was done to which weights, so that it can be checked and repeated.

The same inputs give the same bytes: no time stamp, no host, no path that the user did not name.
"""

import copy
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ropext.checkpoint.snapshot import Snapshot
from ropext.checkpoint.weights import WeightFile, weigh
from ropext.errors import InputError
from ropext.files import dump, is_plain_name, read_object
from ropext.rope import Spectrum
from ropext.version import __version__

NAME = "ropext.json"
SAMPLES, SAMPLE_BYTES = 64, 65536  # blocks of a weight file that are hashed to know it again
SCHEMA = 1
SAVED = "saved_from_memory"  # section of a record whose weights may have been trained by anyone
# Sections of the record: hashes of the documents that were trained on, and the trainings.
TRAINED_ON, TRAININGS = "trained_on", ("fit", "finetune")

# What can change a result. Looked up by their metadata, never imported.
LIBRARIES = ("transformers", "torch", "safetensors", "huggingface_hub", "peft", "accelerate")

# The last word of an option: --hf-token, and not --batch-tokens or --tokenizer.
_SECRET_OPTION = re.compile(r"--?([\w-]*[-_])?(token|secret|password|api[-_]?key)", re.IGNORECASE)
_TOKEN = re.compile(r"\b(hf_|sk-|ghp_|github_pat_)\w{8,}")
_USERINFO = re.compile(r"(\w+://)[^/@\s]+@")
HIDDEN = "***"


@dataclass(frozen=True)
class SiteRecord:
    """One rotary embedding as it was before and is now."""

    label: str  # "" where the model has one
    dim: int
    context: int
    base: Spectrum
    spectrum: Spectrum
    params: Mapping[str, Any]
    scaled: bool = True


@dataclass(frozen=True)
class Record:
    """The content of ropext.json."""

    base: Mapping[str, Any]  # name, hub_id, revision, commit
    method: str
    knobs: Mapping[str, Any]
    context: int
    target: int
    sites: tuple[SiteRecord, ...]
    edits: tuple[Mapping[str, Any], ...] = ()
    weights: Mapping[str, WeightFile] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    proof: Mapping[str, Any] | None = None
    more: Mapping[str, Any] = field(default_factory=dict)  # sections of later steps, by name


def base_of(snapshot: Snapshot) -> dict[str, Any]:
    """How the base is named in the record."""
    return {
        "name": snapshot.name,
        "hub_id": snapshot.hub_id,
        "revision": snapshot.revision,
        "commit": snapshot.commit,
        "quantisation": snapshot.quantisation,
    }


def versions() -> dict[str, str]:
    """ropext's, Python's and the libraries' versions; a library that is missing is left out."""
    import importlib.metadata  # late: `plan` reads records and asks for no versions

    found = {"ropext": __version__, "python": ".".join(map(str, sys.version_info[:3]))}
    for library in LIBRARIES:
        try:
            found[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def scrub(text: str) -> str:
    """The text without tokens: those of the environment, of a known shape, or inside a URL."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN"):
        token = os.environ.get(name)
        if token:
            text = text.replace(token, HIDDEN)
    return _USERINFO.sub(rf"\1{HIDDEN}@", _TOKEN.sub(HIDDEN, text))


def clean_command(argv: Sequence[str]) -> tuple[str, ...]:
    """The command line to record: the program by its name alone, no secret in any word."""
    words = ["ropext"]
    hide = False
    for word in argv[1:]:
        option, equals, _ = word.partition("=")
        secret = bool(_SECRET_OPTION.fullmatch(option))
        if hide:
            words.append(HIDDEN)
        elif secret and equals:
            words.append(f"{option}={HIDDEN}")
        else:
            words.append(scrub(word))
        hide = secret and not equals
    return tuple(words)


def digest(data: Any) -> str:
    """SHA-256 of a value as JSON, whatever the order of its keys."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def identity(snapshot: Snapshot) -> dict[str, Any]:
    """What tells a checkpoint from another without reading all of its weights."""
    return {
        "hub_id": snapshot.hub_id,
        "commit": snapshot.commit,
        "config_sha256": digest(snapshot.config),
        "weights_sha256": weights_digest(snapshot),
        "weights": f"sizes, headers, and {SAMPLES} blocks of {SAMPLE_BYTES} bytes of each file",
    }


def weights_digest(snapshot: Snapshot) -> str:
    """Of sizes, headers and samples of the weight files."""
    return digest(
        {
            name: [asdict(weigh(snapshot.path(name))), sample(snapshot.path(name))]
            for name in snapshot.weight_files
        }
    )


def sample(path: Path) -> str:
    """SHA-256 of blocks spread over a file: weights that were trained again have other bytes
    nearly everywhere, while the whole of a large model takes minutes."""
    found, size = hashlib.sha256(), path.stat().st_size
    with path.open("rb") as stream:
        for number in range(SAMPLES):
            stream.seek(max(0, size - SAMPLE_BYTES) * number // (SAMPLES - 1))
            found.update(stream.read(SAMPLE_BYTES))
    return found.hexdigest()


def to_json(record: Record) -> dict[str, Any]:
    """The record as one JSON object, in a fixed order."""
    return {
        "schema": SCHEMA,
        "versions": dict(record.versions),
        "base": dict(record.base),
        "method": record.method,
        "knobs": dict(record.knobs),
        "context": record.context,
        "target": record.target,
        "sites": [_site_to_json(site) for site in record.sites],
        "edits": [dict(edit) for edit in record.edits],
        "weights": {name: _weight_to_json(record.weights[name]) for name in sorted(record.weights)},
        "recipe": dict(record.recipe),
        "command": list(record.command),
        "proof": dict(record.proof) if record.proof is not None else None,
        **record.more,
    }


def _weight_to_json(weight: WeightFile) -> dict[str, Any]:
    out: dict[str, Any] = {"size": weight.size, "header_sha256": weight.header_sha256}
    return out | ({"sha256": weight.sha256} if weight.sha256 else {})


def _site_to_json(site: SiteRecord) -> dict[str, Any]:
    return {
        "label": site.label,
        "dim": site.dim,
        "context": site.context,
        "scaled": site.scaled,
        "params": dict(site.params),
        "base": _spectrum_to_json(site.base),
        "spectrum": _spectrum_to_json(site.spectrum),
    }


def _spectrum_to_json(spectrum: Spectrum) -> dict[str, Any]:
    out: dict[str, Any] = {
        "digest": spectrum.digest(),
        "attention_factor": spectrum.attention_factor,
        "softmax_factor": spectrum.softmax_factor,
        "inv_freq": list(spectrum.inv_freq),
    }
    if spectrum.short_inv_freq is not None:
        out["short_inv_freq"] = list(spectrum.short_inv_freq)
        out["short_context"] = spectrum.short_context
    return out


def write(record: Record, directory: Path) -> None:
    (directory / NAME).write_bytes(dump(to_json(record)))


def base_config(config: Mapping[str, Any], record: Record) -> dict[str, Any]:
    """The config before the extension: the recorded edits taken back."""
    out = copy.deepcopy(dict(config))
    for edit in record.edits:
        if edit.get("file") != "config.json":
            continue
        *parents, key = str(edit["key"]).split(".")
        holder = out
        for parent in parents:
            if not isinstance(holder.get(parent), dict):
                holder[parent] = {}
            holder = holder[parent]
        if "before" in edit:
            holder[key] = edit["before"]
        else:  # it was new, and null would be read otherwise than absent
            holder.pop(key, None)
    return out


def with_training(record: Record) -> dict[str, Any]:
    """The sections of a record, and among them what was trained on; of a training before there were
    hashes, that it is not known."""
    more = dict(record.more)
    if TRAINED_ON not in more and (done := [name for name in TRAININGS if more.get(name)]):
        more[TRAINED_ON] = {"not_recorded": done}
    return more


def edits_to_json(edits: Iterable[Any]) -> tuple[dict[str, Any], ...]:
    """Length edits (file, key, before, after) as the record holds them."""
    return tuple(
        {"file": edit.file, "key": edit.key, "before": edit.before, "after": edit.after}
        for edit in edits
    )


def read_record(directory: Path) -> Record | None:
    """The record in a directory, or None where there is none. Each spectrum in it must have the
    digest that stands beside it."""
    path = directory / NAME
    if not os.path.lexists(path):
        return None
    content = read_object(path)
    schema = content.get("schema")
    if schema != SCHEMA:
        raise InputError(
            f"{path} has schema {str(schema)[:20]}, this ropext reads {SCHEMA}; use the version "
            "that wrote it"
        )
    reader = _Reader(path)
    known = {key: content.pop(key, None) for key in _KNOWN}
    return Record(
        base=reader.object("base", known["base"]),
        method=reader.text("method", known["method"]),
        knobs=reader.object("knobs", known["knobs"]),
        context=reader.count("context", known["context"], least=1),
        target=reader.count("target", known["target"], least=1),
        sites=tuple(map(reader.site, reader.array("sites", known["sites"]))),
        edits=tuple(reader.object("edits", edit) for edit in reader.array("edits", known["edits"])),
        weights=reader.weights(known["weights"]),
        recipe=reader.object("recipe", known["recipe"]),
        command=tuple(reader.text("command", w) for w in reader.array("command", known["command"])),
        versions=reader.object("versions", known["versions"]),
        proof=None if known["proof"] is None else reader.object("proof", known["proof"]),
        more=content,
    )


def inherited_training(directory: Path) -> dict[str, Any]:
    """The section of what was trained on, for the record of a checkpoint that is made of this
    one."""
    try:
        record = read_record(directory)
    except InputError:
        return {TRAINED_ON: {"not_recorded": ["its base's record cannot be read"]}}
    known = with_training(record).get(TRAINED_ON) if record else None
    return {TRAINED_ON: known} if known else {}


_KNOWN = (
    "schema", "versions", "base", "method", "knobs", "context", "target", "sites", "edits",
    "weights", "recipe", "command", "proof",
)  # fmt: skip


class _Reader:
    """Checked values out of a ropext.json, each wrong one named in the error."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def wrong(self, key: str, wanted: str) -> InputError:
        return InputError(f"{self.path} is damaged: {key} is not {wanted}")

    def object(self, key: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return value

    def array(self, key: str, value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise self.wrong(key, "an array")
        return value

    def text(self, key: str, value: Any) -> str:
        if not isinstance(value, str):
            raise self.wrong(key, "a text")
        return value

    def count(self, key: str, value: Any, least: int = 0) -> int:
        if type(value) is not int or not least <= value < 1 << 63:
            raise self.wrong(key, f"a whole number of at least {least}")
        return value

    def number(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, "a number")
        try:
            return float(value)
        except OverflowError:
            raise self.wrong(key, "a number that a float holds") from None

    def numbers(self, key: str, value: Any) -> tuple[float, ...]:
        return tuple(self.number(key, item) for item in self.array(key, value))

    def hash(self, key: str, value: Any) -> str:
        if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{64}", value):
            raise self.wrong(key, "a SHA-256 in hexadecimal")
        return value

    def weights(self, value: Any) -> dict[str, WeightFile]:
        found = {}
        for name, entry in self.object("weights", value).items():
            if not is_plain_name(name):
                raise self.wrong(f"weights: {name[:80]!r}", "a plain file name")
            entry = self.object("weights", entry)
            sha256 = entry.get("sha256")
            found[name] = WeightFile(
                self.count("size", entry.get("size")),
                self.hash("header_sha256", entry.get("header_sha256")),
                None if sha256 is None else self.hash("sha256", sha256),
            )
        return found

    def site(self, value: Any) -> SiteRecord:
        entry = self.object("sites", value)
        return SiteRecord(
            label=self.text("label", entry.get("label")),
            dim=self.count("dim", entry.get("dim")),
            context=self.count("context", entry.get("context")),
            base=self.spectrum(entry.get("base")),
            spectrum=self.spectrum(entry.get("spectrum")),
            params=self.object("params", entry.get("params")),
            scaled=entry.get("scaled") is not False,
        )

    def spectrum(self, value: Any) -> Spectrum:
        entry = self.object("spectrum", value)
        short = entry.get("short_inv_freq")
        found = Spectrum(
            self.numbers("inv_freq", entry.get("inv_freq")),
            self.number("attention_factor", entry.get("attention_factor")),
            self.number("softmax_factor", entry.get("softmax_factor")),
            None if short is None else self.numbers("short_inv_freq", short),
            0 if short is None else self.count("short_context", entry.get("short_context")),
        )
        if found.digest() != entry.get("digest"):
            raise InputError(f"{self.path} is damaged: a spectrum does not have its digest")
        return found
