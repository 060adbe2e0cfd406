"""One model that is read: which weights, which config, through which windows."""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ropext import families
from ropext.checkpoint import Snapshot
from ropext.errors import UnsupportedModel
from ropext.evaluation.live import record_of_weights
from ropext.forms import LENGTH_DEPENDENT
from ropext.jsontext import Json, JsonObject, read_object
from ropext.options.cache import StoredCache
from ropext.options.fields import FIT
from ropext.planning import CONFIG_ALONE, InMemory
from ropext.results import BASE, EXTENDED, SHORT
from ropext.results.overlap import HASHES, Trained, both, from_json, trained_in, unknown
from ropext.results.perplexity import Frame
from ropext.rope import RopeSite


@dataclass(frozen=True)
class Variant:
    """One model that is read: the base through the short window, and so is the control, which is
    the base trained on the same text."""

    label: str
    kind: str  # "base", "control", "untouched", "extended"
    snapshot: Snapshot
    config: JsonObject | None = None  # applied in memory
    beside: InMemory = CONFIG_ALONE  # and what no config says
    adapter: str | None = None
    cache: StoredCache | None = None  # keys and values are rounded as it stores them
    unrounded: str = ""  # the label of the same variant without that
    target: int | None = None
    info: JsonObject = field(default_factory=dict)

    @property
    def reads_short(self) -> bool:
        """Whether it reads through the short window, and answers no questions."""
        return self.kind in SHORT

    def content(self, model: JsonObject) -> dict[str, Json]:
        """What tells it from other variants: its kind, its model's identity, its spectrum."""
        adapter = None if self.adapter is None else adapter_digest(self.adapter)
        content = {"kind": self.kind, "model": model, "adapter_sha256": adapter, **self.info}
        if self.cache is not None:
            # Until November 2026 all keys were rounded in the order of transformers.
            content["kv_cache"] = asdict(self.cache) | {"order": "gguf"}
        return content

    def passes(self, frame: Frame) -> tuple[int, ...]:
        """Return the pass lengths that serve all lengths of a frame, by the spectra that the config
        names: one for each run of lengths that share a spectrum.

        A static spectrum needs one pass, at the longest; longrope with two different sets needs
        two; dynamic needs one for every length beyond the context. Weights of 8 bits, which the
        tokens of a pass compute with together, need one more for the context. A masked language
        model reads every length, and a base no longer one than its own.
        """
        if not frame.scoring.scores_all:
            reach = frame.context if self.reads_short else frame.longest
            return tuple(length for length in frame.read_lengths if length <= reach)
        if self.reads_short:
            return (frame.longest,)
        config = self.snapshot.config if self.config is None else dict(self.config)
        try:
            sites = families.read(config).sites
        except UnsupportedModel:  # no rotary embeddings, or those of an unknown family
            return frame.read_lengths if _names_length(config) else (frame.longest,)
        spectra = [[_regime(site, length) for site in sites] for length in frame.read_lengths]
        pairs = zip(frame.read_lengths, spectra, [*spectra[1:], None], strict=True)
        lengths = [length for length, here, next_one in pairs if here != next_one]
        if _mixes_tokens(config) and frame.context < min(lengths):
            lengths.insert(0, frame.context)  # the base's first window
        return tuple(lengths)

    def regimes(self, frame: Frame) -> dict[str, int]:
        """Return the pass length of each folder of readings in its store."""
        if self.reads_short and frame.scoring.scores_all:
            return {"short": frame.longest}
        return {f"pass-{length}": length for length in self.passes(frame)}


def follows_length(config: dict[str, Json], longest: int) -> bool:
    """Whether stock rotates a text of the longest length by another spectrum than a short one."""
    try:
        sites = families.read(config).sites
    except UnsupportedModel:
        return _names_length(config)
    return any(_regime(site, 1) != _regime(site, longest) for site in sites)


def _mixes_tokens(config: JsonObject) -> bool:
    """Whether the loss of a token depends on those after it: LLM.int8 (Dettmers et al. 2022) keeps
    a column of activations in 16 bits if any token of the pass has an outlier there."""
    quantised = config.get("quantization_config")
    if not isinstance(quantised, dict) or not quantised.get("load_in_8bit"):
        return False
    return bool(quantised.get("llm_int8_threshold", 6.0))


def _names_length(config: dict[str, Json]) -> bool:
    """Whether the config of an unknown family names a spectrum that follows the length."""
    named = set(_texts(config.get("rope_scaling")))
    named |= set(_texts(config.get("rope_parameters")))
    return not named.isdisjoint(LENGTH_DEPENDENT)


def _texts(value: Json) -> Iterator[str]:
    """Every text in a piece of JSON, keys left out."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _texts(part)
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)


def _regime(site: RopeSite, length: int) -> Any:
    """What tells the spectrum that stock uses at a length from that at another one."""
    spectrum = site.rope.spectrum
    if site.params["rope_type"] == "dynamic":
        return max(length, site.rope.original_context)
    has_two = spectrum.short_inv_freq not in (None, spectrum.inv_freq)
    return has_two and length > spectrum.short_context


def adapter_digest(adapter: str) -> str:
    """Hash the files of an adapter, each by its name."""
    digest = hashlib.sha256()
    for name in sorted(os.listdir(adapter)) if os.path.isdir(adapter) else ():
        if name.endswith((".safetensors", ".json")):
            digest.update(name.encode())
            digest.update(Path(adapter, name).read_bytes())
    return digest.hexdigest()


def trained_on(variant: Variant) -> Trained | None:
    """What is known of the documents that a variant was trained or fitted on."""
    record = record_of_weights(variant.snapshot)
    before_it = variant.config is not None and variant.kind != EXTENDED
    if before_it and record is not None and record.more.get(FIT):
        record = None  # the spectrum of before the fit
    before = trained_in(record)
    if before is not None and variant.kind != EXTENDED:  # nobody chose the base
        before = replace(before, chose=None) if before.count or before.not_recorded else None
    if variant.adapter is None:
        return before
    hashes = Path(variant.adapter, HASHES)
    if not hashes.is_file():
        return both(before, unknown("the adapter"))
    return both(before, from_json(read_object(hashes)))


def base_variant(
    snapshot: Snapshot,
    config: JsonObject | None = None,
    beside: InMemory = CONFIG_ALONE,
    info: JsonObject | None = None,
) -> Variant:
    """The base: a model through the short window, with its frequencies, for the pictures."""
    known = dict(info or {}) | _turning(snapshot.config if config is None else dict(config))
    return Variant(BASE, BASE, snapshot, config, beside, info=known)


def _turning(config: dict[str, Json]) -> dict[str, Json]:
    """The frequencies of the first scaled rotary embedding; nothing where none rotates."""
    try:
        sites = families.read(config).sites
    except UnsupportedModel:
        return {}  # no rotary embeddings
    first = next(site for site in sites if site.scaled)
    return {"inv_freq": list(first.rope.spectrum.inv_freq)}


# While it lasts, the model that it yields computes as the variant says.
Computing = Callable[[Variant], AbstractContextManager[Any]]


@contextmanager
def applied(model: Any, variant: Variant) -> Iterator[Any]:
    """While this lasts, a loaded model computes as the variant says."""
    from ropext.patching import apply_config, unpatch
    from ropext.patching.rounding import cache_rounded

    with ExitStack() as stack:
        if variant.adapter is None and hasattr(model, "disable_adapter"):
            stack.enter_context(model.disable_adapter())
        if variant.config is not None:
            apply_config(model, variant.config, variant.beside)
            stack.callback(unpatch, model)
        if variant.cache is not None:
            base = model.get_base_model() if hasattr(model, "get_base_model") else model
            stack.enter_context(cache_rounded(base, variant.cache))
        yield model
