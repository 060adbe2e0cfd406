"""Carry a spectrum in a GGUF file: in the keys and tensors that llama.cpp reads."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from ropext.families import loaders
from ropext.families.loaders import LoaderReading, OverrideLine, Serving, gguf
from ropext.families.loaders.gguf import GgufRope
from ropext.planning.carrier import (
    CacheRules,
    Carrier,
    PlannedExtension,
    Programs,
    UnextendedModel,
    Words,
)
from ropext.scaling.forms import Params
from ropext.scaling.rope import RopeSite

FILE = Words(
    "metadata",
    "file",
    "OUT.gguf",
    "train the Hugging Face checkpoint that it was converted from",
    first_try="start llama-server as below and paste a long text at http://127.0.0.1:8080",
)


@dataclass(frozen=True)
class GgufCarrier(Carrier):
    """The metadata keys and tensors of a GGUF of one architecture."""

    words: Words = FILE

    in_transformers = False
    more_forms = ("longrope",)  # divisors are no dict of the family's: a longrope says them
    # llama.cpp makes a cache in steps of 256 tokens. A windowed layer keeps its window and one
    # micro-batch (-ub) of 512.
    cache = CacheRules(256, 512, ("f16", "q8_0", "q4_0"), by_slots=True)

    @property
    def place_for_refusal(self) -> str:
        """Return words for the GGUF keys and tensors that would have to carry a spectrum, for the
        refusal of a plan."""
        return f"keys and tensors that llama.cpp reads of a {self.architecture} GGUF"

    def rope_of(self, site: RopeSite) -> GgufRope | None:
        """Return the GGUF keys and divisors from which llama.cpp computes the planned spectrum of a
        site. Return None if none do."""
        ropes = gguf.candidates(self.architecture, site.rope, site.wanted, site.params)
        return next(ropes, None)

    def offers(self, site: RopeSite, native: Params | None, target: int) -> Iterator[Params]:
        """Yield each rope dict that GGUF keys can carry for the planned spectrum of a site."""
        for params in super().offers(site, native, target):
            if self.rope_of(replace(site, params=params)) is not None:
                yield params

    def read_by(self, name: str, site: RopeSite) -> list[LoaderReading]:
        """Return how the programs that a name of --for means read the planned GGUF keys of a
        site."""
        return self.of_loader(name, self.readings(site, 0))

    def readings(self, site: RopeSite, target: int) -> tuple[LoaderReading, ...]:
        """Return how each program reads the GGUF keys of a site, planned or as it is."""
        return gguf.readings(self.architecture, self.rope_of(site), self.model.text_type)

    def log_of(self, plan: PlannedExtension) -> str:
        """Return the lines by which a plan's user sees in llama-server's log that the planned
        scaling is on. Return "" if none does."""
        rope = self.rope_of(plan.main)
        if rope is None or not loaders.reads_exactly("llama.cpp", plan.readings):
            return ""
        # As llama.cpp's print_info writes them.
        lines = [f"n_ctx_train = {plan.target}"]
        if rope.scaling in ("yarn", "linear"):
            lines += [f"rope scaling = {rope.scaling}", f"freq_scale_train = {1 / rope.factor:g}"]
        elif rope.scaling == "none" and not rope.divisors:
            lines.append(f"freq_base_train = {rope.freq_base:.1f}")
        else:
            return ""  # the log does not show divisors
        return f"with -lv 4 the log of llama-server has {', '.join(lines)}"

    def misread(self, name: str, site: RopeSite) -> str:
        """Return "": measured misreadings of a planned rope dict are of directories, not of a
        GGUF's keys."""
        return ""

    def unmeasured(self, name: str, site: RopeSite) -> str:
        """Return why the planned GGUF keys were not measured in the programs that a name of --for
        means, each with its versions."""
        found = self.read_by(name, site)
        return "; ".join(f"{reading.loader} {reading.versions}: {reading.why}" for reading in found)

    def nearest(self, loader: str, params: Params, target: int) -> str:
        """Return "": the plan for a GGUF offers no other options of `extend`."""
        return ""

    def copy_name(self, name: str) -> str:
        """Return the file name, in a directory, of the planned GGUF of a model of this name."""
        last = PurePath(name).name
        return last if last.lower().endswith(".gguf") else "model.gguf"

    def place_of(self, name: str) -> str:
        """Return the path of the GGUF file that the plan of a model of this name extends."""
        return name

    def serving(self, plan: PlannedExtension, place: str) -> tuple[Serving, ...]:
        """Return the lines that run a planned GGUF file at `place` in each program."""
        file = place
        if not place.lower().endswith(".gguf"):
            file = f"{place}/{self.copy_name(plan.name)}"
        params = plan.main.params
        if plan.recipe.length_only:
            params = {}  # no scaling to set
        return loaders.file_lines(file, plan.target, plan.readings, params)

    def overrides(self, plan: PlannedExtension) -> tuple[OverrideLine, ...]:
        """Return the llama-server line that runs the plan's base file as planned, without a copy.
        Return none if llama.cpp does not read the plan exactly. The line has no command if no flags
        express the plan."""
        if self.model.masked_lm or not loaders.reads_exactly("llama.cpp", plan.readings):
            return ()
        file = self.place_of(plan.name)
        if plan.name.startswith(("ollama:", "ropext://")):
            file = "MODEL.gguf"
        flags = self._flags(plan)
        return (loaders.file_override_line(file, flags, plan.target),)

    def _flags(self, plan: PlannedExtension) -> str:
        """Return the flags by which llama-server reads a GGUF file as planned. Return "" if that
        needs a copy."""
        rope = self.rope_of(plan.main)
        keys = {edit.key: edit.after for edit in plan.edits}
        if rope is None or any(isinstance(value, list) for value in keys.values()):
            return ""
        return gguf.flags(self.architecture, rope, keys)

    def read_unextended(self, unextended: UnextendedModel) -> Programs:
        """Return how each program reads a GGUF without an extension, and how to run it."""
        context = self.model.context
        readings = self.readings(self.model.scaled_sites[0], context)
        nothing: Params = {}  # for Ollama's environment: the file is scaled already
        lines = loaders.file_lines(self.place_of(unextended.name), context, readings, nothing)
        return readings, lines

    def of_loader(self, name: str, readings: Sequence[LoaderReading]) -> list[LoaderReading]:
        """Return the readings by the programs that a name of --for means, from all readings of a
        plan or of a GGUF as it is."""
        programs = [reader.loader for reader in loaders.select_file(name)]
        return [reading for reading in readings if reading.loader in programs]
