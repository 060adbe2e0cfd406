"""Carry a spectrum to the engines that read it: here in the config of a directory.

A GGUF's carrier (gguf_carrier.py) has the same interface for a file. Code that plans, shows or
checks an extension uses the carrier without knowing which of the two it is.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Protocol

from ropext import families
from ropext.base.errors import RopextError
from ropext.base.jsontext import Json, JsonObject
from ropext.families import Model, loaders
from ropext.families.config import text_part
from ropext.families.loaders import LoaderReading, OverrideLine, Serving
from ropext.families.loaders.lookup import reading_in
from ropext.families.loaders.table import Verdict
from ropext.options.extend import Extend
from ropext.scaling import forms
from ropext.scaling.forms import Params
from ropext.scaling.rope import ABSENT, CONFIG, Edit, RopeSite


@dataclass(frozen=True)
class CacheRules:
    """The layout of a model's KV cache in the programs that run it."""

    step: int  # tokens by which it grows
    micro_batch: int  # tokens that a windowed layer keeps in addition to its window
    types: tuple[str, ...]  # of its numbers, by the names of --kv
    by_slots: bool = False  # llama-server starts four slots, unless -np says how many


@dataclass(frozen=True)
class Words:
    """The words for a carrier in texts that people read."""

    edited: str  # the place that an extension changes
    output: str  # the output that it writes ...
    name: str  # ... and a name for that
    training: str  # advice on how to train the model for its planned length, as an order
    first_try: str = ""  # a first use of the output
    # The engine whose command most users need; "" if each program has its own.
    first_engine: str = ""
    without_copy: str = ""  # a way without a copy, besides the lines that run the base itself


DIRECTORY = Words(
    CONFIG,
    "directory",
    "OUT",
    "train (--finetune DATA)",
    first_engine="vllm",
    without_copy="(`extend --link hard` writes a directory that shares the weights)",
)


class PlannedExtension(Protocol):
    """The part of a plan that a carrier needs."""

    @property
    def name(self) -> str:
        """Return the base of the plan, as the user named it."""

    @property
    def main(self) -> RopeSite:
        """Return the rotary embedding that the plan scales."""

    @property
    def context(self) -> int:
        """Return the number of tokens that the base of the plan reads."""

    @property
    def target(self) -> int:
        """Return the number of tokens that the planned result reads."""

    @property
    def config(self) -> dict[str, Json]:
        """Return the config with the edits of the plan."""

    @property
    def edits(self) -> tuple[Edit, ...]:
        """Return the edits of the plan: the config keys that it changes."""

    @property
    def readings(self) -> tuple[LoaderReading, ...]:
        """Return the reading of the planned result by each engine."""

    @property
    def recipe(self) -> Extend:
        """Return the request that the plan is for."""


@dataclass(frozen=True)
class UnextendedModel:
    """A model to run without an extension."""

    name: str  # by which other programs find it
    config: dict[str, Json]
    context: int  # from how many tokens it was extended, as its record or its config says
    on_hub: bool


# How each program reads a model, and the lines that run it.
Programs = tuple[tuple[LoaderReading, ...], tuple[Serving, ...]]


@dataclass(frozen=True)
class Carrier:
    """A place that holds a spectrum, and the engines that read it there: the config of a directory.

    A rope dict of stock transformers describes its content, also for a GGUF.
    """

    model: Model
    architecture: str = ""  # of a GGUF
    words: Words = DIRECTORY  # for texts that people read

    in_transformers = True  # whether transformers loads the result
    cache = CacheRules(1, 0, ("f16", "q8_0", "q4_0", "fp8"))
    # Rope types of spectra that only this place can hold, as no dict of the family can.
    more_forms: ClassVar[tuple[str, ...]] = ()

    @property
    def three_axes(self) -> bool:
        """Return whether the engines that read the planned result rotate images by three axes
        (mRoPE)."""
        return self.in_transformers and self.model.mrope

    @property
    def place_for_refusal(self) -> str:
        """Return words for the rope types that would have to carry a planned spectrum, for the
        refusal of a plan."""
        model = self.model
        return f"rope types that {model.text_type} computes ({', '.join(model.forms)})"

    def offers(self, site: RopeSite, native: Params | None, target: int) -> Iterator[Params]:
        """Yield each rope dict that `extend` could write for exactly the wanted spectrum of a site,
        in the family's spelling, the most widely read first. The site has the present dict;
        `native` is the method's own."""
        model = self.model
        allowed = model.forms + self.more_forms
        for params in forms.candidates(site.rope, site.wanted, target, native):
            if params["rope_type"] not in allowed:
                continue
            # A length that also scales queries stays, and may be another than this form asks for.
            kept = families.keep_query_scales(site.params, params)
            if forms.same(forms.read(kept, site.rope).spectrum, site.wanted):
                yield families.as_written(model, params, site.rope)

    def read_by(self, name: str, site: RopeSite) -> list[LoaderReading]:
        """Return how the loaders that a name of --for means read the rope dict of a planned
        site."""
        model = self.model
        kinds = loaders.kinds_of(site.params)
        found = list[LoaderReading]()
        for reader in loaders.select(name):
            known = reader.known(model.text_type, model.model_type)
            reading = reading_in(reader, known, site.params, kinds)
            found.append(replace(reading, versions=reader.versions))  # all that the name means
        return found

    def are_exact(self, names: Sequence[str], site: RopeSite, *, even_so: bool = False) -> bool:
        """Return whether these loaders of --for read a planned site exactly as wanted. An
        unmeasured loader counts as exact if `even_so`."""
        right = {"same", "not measured"} if even_so else {"same"}
        for name in names:
            for reading in self.read_by(name, site):
                if reading.verdict not in right:
                    return False
        return True

    def readings(self, site: RopeSite, target: int) -> tuple[LoaderReading, ...]:
        """Return how each loader reads the rope dict of a site, planned or as it is."""
        model = self.model
        return loaders.readings(
            model.text_type,
            site.params,
            model_type=model.model_type,
            length=target,
            target=target,
        )

    def edits(
        self, site: RopeSite, target: int, before: JsonObject, after: JsonObject
    ) -> tuple[Edit, ...]:
        """Return the edits that a planned site and length need; `before` and `after` are the
        configs."""
        return tuple(families.diff(before, after))

    def log_of(self, plan: PlannedExtension) -> str:
        """Return the lines by which a plan's user sees in a program's log that the planned scaling
        is on. Return "" if none does."""
        return ""

    def misread(self, name: str, site: RopeSite) -> str:
        """Return how a loader of --for misreads the rope dict of a planned site, if that was
        measured; else ""."""
        for reading in self.read_by(name, site):
            if reading.verdict in loaders.WRONG:
                return (
                    f"{reading.loader} {reading.versions} reads {site.params['rope_type']} scaling"
                    f" in {self.model.text_type} otherwise ({reading.verdict}: {reading.why})"
                )
        return ""

    def unmeasured(self, name: str, site: RopeSite) -> str:
        """Return which part of a planned site was not measured in a loader, and which part was."""
        model = self.model
        return loaders.unmeasured(name, model.text_type, site.params, model_type=model.model_type)

    def nearest(self, loader: str, params: Params, target: int) -> str:
        """Return the options of `extend` whose result a loader reads exactly. Return "" if there
        are none."""
        model = self.model
        start = ""
        if any(site.rope.is_scaled for site in model.scaled_sites):
            # A factor would count from the original context there, and mean fewer tokens.
            start = f"--from-original --target {target} "
        return loaders.nearest_exact(
            loader, model.text_type, params, start=start, model_type=model.model_type
        )

    def serving(self, plan: PlannedExtension, place: str) -> tuple[Serving, ...]:
        """Return the lines that run a planned result at `place` in each program."""
        directory = loaders.ServedDirectory(place, self.model)
        return loaders.serving_lines(
            directory, plan.readings, plan.main.params, context=plan.context, target=plan.target
        )

    def overrides(self, plan: PlannedExtension) -> tuple[OverrideLine, ...]:
        """Return the lines that run the plan's base itself as planned, in each program that is
        known to read it."""
        if self.model.masked_lm or 0.0 in plan.main.wanted.inv_freq:
            return ()  # a command line cannot set a pair that does not rotate
        name = plan.name
        if name.startswith("ropext://"):
            name = "MODEL"
        nested = override_keys(self.model, plan)
        for part in reversed(self.model.path):
            nested = {part: nested}
        base = loaders.ServedDirectory(name, self.model)
        lines = list(loaders.override_lines(base, nested, plan.target, plan.readings))
        if loaders.reads_exactly("llama.cpp", plan.readings):
            flags = self._file_flags(plan)
            lines.append(loaders.file_override_line("MODEL.gguf", flags, plan.target))
        return tuple(lines)

    def _file_flags(self, plan: PlannedExtension) -> str:
        """Return the flags by which llama-server reads a GGUF of the plan's base as planned. Return
        "" if that needs a copy. The file is not here: it is assumed to state the base's theta and
        no scaling."""
        from ropext.families.loaders import gguf  # late: it reads a table of its own

        main = plan.main
        row = gguf.converted_to(self.model.text_type)
        if row is None or any(site.rope.is_scaled for site in self.model.scaled_sites):
            return ""
        rope = next(gguf.candidates(row.name, main.rope, main.wanted, main.params), None)
        if rope is None or rope.divisors:
            return ""
        known = ("none", 1.0, main.rope.theta)
        keys = dict[str, int | float | str]()
        for key, stated in gguf.keys_of(row.name, rope, plan.target).items():
            if stated not in known:
                keys[key] = stated
        return gguf.flags(row.name, rope, keys)

    def read_unextended(self, unextended: UnextendedModel) -> Programs:
        """Return how each loader reads a model without an extension, and how to run it."""
        model = self.model
        main = model.scaled_sites[0]
        text = text_part(unextended.config, model.path)
        read = partial(
            loaders.readings,
            model.text_type,
            main.params,
            model_type=model.model_type,
            length=model.stated_context,
            target=model.context,
        )
        readings = read(v5_only="rope_parameters" in text and "rope_scaling" not in text)
        if model.conflicts:
            agrees = _old_engines_agree(unextended.config, model)
            readings = _of_two_spellings(read(), read(v5_only=True), agrees)
        directory = loaders.ServedDirectory(unextended.name, model, unextended.on_hub)
        known = self.readings(main, model.context)
        lines = loaders.serving_lines(
            directory, known, main.params, context=unextended.context, target=model.context
        )
        return readings, lines

    def of_loader(self, name: str, readings: Sequence[LoaderReading]) -> list[LoaderReading]:
        """Return the readings by the loaders that a name of --for means, from all readings of a
        plan or of a model as it is."""
        model = self.model
        listed_readers = loaders.readers_for(model.text_type, model.model_type)
        meant = list[LoaderReading]()
        for reader in loaders.select(name):
            if reader in listed_readers:
                meant.append(readings[listed_readers.index(reader)])
            else:
                known = reader.known(model.text_type, model.model_type)
                meant.append(reading_in(reader, known, {}, ()))
        return meant


def override_keys(model: Model, plan: PlannedExtension) -> JsonObject:
    """Return the keys of the text config by which a loader of the base's weights applies a plan
    without a written output."""
    text = families.text_part(plan.config, model.path)
    depth = 1 + len(model.path)
    top = [edit for edit in plan.edits if len(edit.path) == depth]
    lengths = [edit.path[-1] for edit in top if edit.path[-1] in families.LENGTH_KEYS]
    known = [edit.path[-1] for edit in top if edit.before is not ABSENT]
    original_key = "original_max_position_embeddings"
    original = [key for key in known if key == original_key]
    # The size of a head, if the config leaves it to a class without such a key (Mixtral).
    sizes = list[str]()
    for edit in top:
        key = edit.path[-1]
        is_new = edit.before in (ABSENT, None)
        if is_new and type(text.get(key)) is int and key not in (*lengths, original_key):
            sizes.append(key)
    names = ["rope_parameters", *lengths, *original, *sizes]
    return {key: text[key] for key in names if key in text}


def _old_engines_agree(config: dict[str, Json], model: Model) -> bool:
    """Return whether a plan counts engines as exact if they read only the transformers 4 spellings
    of an unextended config. Alone these must give the rope dicts of stock transformers 5."""
    older = copy.deepcopy(config)
    text_part(older, model.path).pop("rope_parameters", None)
    try:
        alone = families.as_read(older)
    except RopextError:
        return False
    return [site.params for site in alone.sites] == [site.params for site in model.sites]


def _in_doubt(reading: LoaderReading, verdict: Verdict, why: str) -> LoaderReading:
    """Return a loader's reading with the carrier's own verdict and reason in place of the loader
    table's."""
    return replace(reading, verdict=verdict, why=why, flag="", has_reason=True)


def _of_two_spellings(
    plain: Iterable[LoaderReading], modern: Iterable[LoaderReading], older_agrees: bool
) -> tuple[LoaderReading, ...]:
    """Return each loader's reading of a carrier that no plan changes, if its two spellings
    disagree.

    A loader that ignores rope_parameters alone (`modern`) uses the older spelling. Among the
    loaders that know both spellings, only transformers was measured.
    """
    out = []
    for reading, alone in zip(plain, modern, strict=True):
        if reading.verdict == "same" and alone.verdict != "same":
            if not older_agrees:
                why = "takes the older spelling, which disagrees with what transformers 5 takes"
                reading = _in_doubt(reading, "different", why)
        elif reading.verdict == "same" and reading.loader != "transformers":
            why = "two spellings disagree; which one it takes was not measured"
            reading = _in_doubt(reading, "not measured", why)
        out.append(reading)
    return tuple(out)
