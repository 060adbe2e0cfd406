"""What can be said of a model from its small files alone: inspect, plan, how to serve it.

Kept apart from the pipeline so that these commands start at once.
"""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ropext import families, loaders, scaling
from ropext.checkpoint import Snapshot, open_snapshot
from ropext.checkpoint.provenance import Record, read_record
from ropext.describing import scaled_by_config
from ropext.errors import InputError, RopextError, UsageError
from ropext.families import Model, Site
from ropext.files import read_bytes
from ropext.options.extend import Extend, parse_extend, resolve_target
from ropext.planning import Plan, make_plan
from ropext.rope import Spectrum

PAIR_FACTORS_LIMIT = 16 << 20  # bytes
# transformers writes int(1e30) where a tokenizer has no limit.
NO_LIMIT = 10**9


@dataclass(frozen=True)
class Inspection:
    """What a model has, from its config files alone."""

    name: str
    model: Model
    target: int
    limits: dict[str, Any]

    @property
    def main(self) -> Site:
        """The embedding that an extension would scale."""
        return next(iter(self.model.scaled_sites), self.model.sites[0])

    def spectra(self) -> dict[str, Spectrum]:
        """What three well-known methods would make of it, for the picture."""
        rope, out = self.main.rope, {}
        for method in ("pi", "ntk", "yarn"):
            try:
                knobs = scaling.find(method).knobs()
                scaled = scaling.scale(rope, method, self.target, knobs, None)
                out[method] = scaling.compose(rope, scaled, self.target)
            except UsageError:
                continue  # a single pair has no NTK
        return out

    def to_json(self) -> dict[str, Any]:
        sites = []
        for site in self.model.sites:
            spectrum = site.rope.spectrum
            sites.append(
                asdict(site)
                | {
                    "inv_freq": spectrum.inv_freq,
                    "wavelengths": spectrum.wavelengths,
                }
            )
        facts = asdict(self.model) | {"sites": sites}
        kv = {"kv_bytes_per_token": self.model.kv_bytes_per_token}
        return {"model": self.name, "target": self.target} | facts | kv | {"limits": self.limits}


def inspect(
    model: str,
    *,
    factor: float | None = None,
    target: int | None = None,
    context: int | None = None,
    original_context: int | None = None,
    revision: str | None = None,
) -> Inspection:
    """What position scheme a model has, and what follows from it."""
    snapshot = open_snapshot(model, revision=revision)
    read = families.read(snapshot.config, context=context, original=original_context)
    wish = Extend(factor=factor, target=target)
    if factor is None and target is None:
        wish = Extend(factor=4.0)
    return Inspection(model, read, resolve_target(wish, read.context), _limits(snapshot))


def _limits(snapshot: Snapshot) -> dict[str, Any]:
    """What besides the rotary embedding caps a sequence, or decides how it is extended."""
    tokenizer = (snapshot.tokenizer_config or {}).get("model_max_length")
    generation = (snapshot.generation_config or {}).get("max_length")
    return {
        "tokenizer": tokenizer if isinstance(tokenizer, int) and tokenizer < NO_LIMIT else None,
        "generation": generation,
        "quantised": snapshot.quantisation,
    }


def plan(model: str, *, revision: str | None = None, **options: Any) -> Plan:
    """What `extend` would do; `options` are the fields of ropext.options.Extend."""
    snapshot = open_snapshot(model, revision=revision)
    return plan_of(snapshot, parse_extend(options, read_text), model)


def plan_of(snapshot: Snapshot, wish: Extend, name: str) -> Plan:
    """The plan; what a config of ropext's own leaves open of its lengths stands in its record."""
    if wish.context is None and wish.original_context is None:
        asks = families.as_read(snapshot.config).asks_original
        record = read_record(snapshot.directory) if asks else None
        wish = wish.changed(context=record.target) if record else wish
    return make_plan(snapshot.config, wish, name)


def read_text(path: str) -> str:
    """A small text file that an option names."""
    return read_bytes(Path(path), PAIR_FACTORS_LIMIT).decode("utf-8", errors="replace")


@dataclass(frozen=True)
class Served:
    """How each loader reads a directory, and the commands that run it."""

    directory: str
    model: Model
    record: Record | None
    readings: tuple[loaders.Reading, ...]
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
    model = families.as_read(snapshot.config)
    record = read_record(snapshot.directory)
    main = next(iter(model.scaled_sites), model.sites[0])
    text = _text(snapshot.config, model)
    told = partial(
        loaders.readings,
        model.text_type,
        main.params,
        model_type=model.model_type,
        length=model.stated_context,
        target=model.context,
    )
    readings = told(v5_only="rope_parameters" in text and "rope_scaling" not in text)
    if _contradicts_itself(snapshot.config):
        agrees = _older_agrees(snapshot.config, model)
        readings = _of_two_spellings(told(), told(v5_only=True), agrees)
    serving = loaders.serving_lines(
        snapshot.name,
        model.text_type,
        main.params,
        context=record.context if record else main.rope.original_context,
        target=model.context,
        model_type=model.model_type,
        masked_lm=model.masked_lm,
    )
    return Served(snapshot.name, model, record, readings, serving)


def _contradicts_itself(config: dict[str, Any]) -> bool:
    try:
        families.read(config)
    except InputError:
        return True
    return False


def _older_agrees(config: dict[str, Any], model: Model) -> bool:
    """Whether the spellings of transformers 4, alone, say what stock transformers 5 takes."""
    older = copy.deepcopy(config)
    text: Any = _text(older, model)
    text.pop("rope_parameters", None)
    try:
        alone = families.as_read(older)
    except RopextError:
        return False
    return [site.params for site in alone.sites] == [site.params for site in model.sites]


def _of_two_spellings(
    plain: Iterable[loaders.Reading], modern: Iterable[loaders.Reading], older_agrees: bool
) -> tuple[loaders.Reading, ...]:
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


def _text(config: Mapping[str, Any], model: Model) -> Mapping[str, Any]:
    for key in model.path:
        config = config[key]
    return config


def serving(model: str, *, revision: str | None = None) -> Served | None:
    """How each loader reads an extended directory; None where it is not one."""
    served = read_again(open_snapshot(model, revision=revision))
    return served if served.record or scaled_by_config(served.model) else None
