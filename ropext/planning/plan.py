"""The plan as a value: what `extend` does, why, and who reads the result how."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ropext import families, forms, loaders, scaling
from ropext.families import Model
from ropext.options.extend import Extend
from ropext.rope import Explanation, Rope, Spectrum


@dataclass(frozen=True)
class PlannedSite:
    """One rotary embedding: what it is, what it becomes, and the stock dict that says so."""

    label: str
    rope: Rope  # as extended: the original one with --from-original
    wanted: Spectrum
    params: forms.Params
    scaled: bool


@dataclass(frozen=True)
class MethodRow:
    """A method's two numbers for this model and target; None where it needs an input of its own."""

    method: str
    explanation: Explanation | None
    form: str | None  # the rope type that would carry it, None where nothing can
    note: str = ""
    attention_factor: float = 1.0
    read_by: tuple[str, ...] = ()  # loaders that read it as planned, in their newest version ...
    misread_by: tuple[str, ...] = ()  # ... and those that were seen to read something else


@dataclass(frozen=True)
class Recommendation:
    """The method to take ("none" where none helps), whether from the original spectrum, and why."""

    method: str
    from_original: bool
    reason: str


@dataclass(frozen=True)
class Plan:
    """What `extend` does: the new config, why, and who reads it how."""

    name: str  # the model as the user named it
    model: Model
    recipe: Extend
    method: str
    knobs: dict[str, Any]
    context: int  # the context being extended; `factor` counts from it
    target: int
    sites: tuple[PlannedSite, ...]
    config: dict[str, Any]
    edits: tuple[families.Edit, ...]
    methods: tuple[MethodRow, ...]
    recommendation: Recommendation
    warnings: tuple[str, ...]
    readings: tuple[loaders.LoaderReading, ...]

    @property
    def factor(self) -> float:
        return self.target / self.context

    @property
    def main(self) -> PlannedSite:
        """The embedding that the diagnostics speak of: the first one that is scaled."""
        return next((site for site in self.sites if site.scaled), self.sites[0])

    @property
    def kv_cache_bytes(self) -> int | None:
        """Keys and values of one sequence of `target` tokens at 2 bytes a value."""
        return self.model.kv_bytes(self.target)

    def spectra(self) -> dict[str, Spectrum]:
        """The spectrum of every method that needs no input, this plan's own among them."""
        rope = self.main.rope
        out = {}
        for row in self.methods:
            if row.method == self.method:
                out[row.method] = self.main.wanted
            elif row.explanation is not None:
                knobs = scaling.find(row.method).knobs()
                scaled = scaling.scale(rope, row.method, self.target, knobs, None)
                out[row.method] = scaling.compose(rope, scaled, self.target)
        return out

    def serving(self, directory: str) -> tuple[loaders.Serving, ...]:
        """How to run the result in each loader, once it lies in `directory`."""
        return loaders.serving_lines(
            directory,
            self.model.text_type,
            self.main.params,
            context=self.context,
            target=self.target,
            model_type=self.model.model_type,
            masked_lm=self.model.masked_lm,
        )

    def nearest(self) -> dict[str, str]:
        """For loaders that read it otherwise: the options whose result they read exactly."""
        out: dict[str, str] = {}
        for reading in newest(self.readings):
            if reading.verdict in WRONG:
                out[reading.loader] = nearest_form(
                    self.model, reading.loader, self.main.params, self.target
                )
        return {loader: options for loader, options in out.items() if options}

    def nearest_by_options(self) -> dict[str, tuple[str, ...]]:
        """The same the other way round: options, and the loaders that read their result."""
        return by_options(self.nearest())

    def to_json(self) -> dict[str, Any]:
        """The plan as one JSON document."""
        return {
            "model": self.name,
            "model_type": self.model.model_type,
            "method": self.method,
            "knobs": self.knobs,
            "from_original": self.recipe.from_original,
            "context": self.context,
            "original_context": self.main.rope.original_context,
            "target": self.target,
            "factor": self.factor,
            "sites": [_site_json(site) for site in self.sites],
            "methods": [asdict(row) for row in self.methods],
            "recommendation": asdict(self.recommendation),
            "edits": [edit.to_json() for edit in self.edits],
            "warnings": list(self.warnings),
            "kv_cache_bytes": self.kv_cache_bytes,
            "loaders": [asdict(reading) for reading in self.readings],
            "nearest_exact": self.nearest(),
            "serving": [asdict(line) for line in self.serving("OUT")],
            "config": self.config,
        }


WRONG = ("different", "ignored", "error")


def newest(readings: Iterable[loaders.LoaderReading]) -> tuple[loaders.LoaderReading, ...]:
    """Each loader in its newest version, which comes first."""
    found: dict[str, loaders.LoaderReading] = {}
    for reading in readings:
        found.setdefault(reading.loader, reading)
    return tuple(found.values())


def nearest_form(model: Model, loader: str, params: forms.Params, target: int) -> str:
    scaled = any(site.rope.is_scaled for site in model.scaled_sites)
    options = loaders.nearest_exact(
        loader, model.text_type, params, scaled=scaled, model_type=model.model_type
    )
    # A factor would count from the original context there, and mean fewer tokens.
    return options.replace("--from-original", f"--from-original --target {target}")


def by_options(nearest: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    out: dict[str, tuple[str, ...]] = {}
    for loader, options in nearest.items():
        out[options] = (*out.get(options, ()), loader)
    return out


def _site_json(site: PlannedSite) -> dict[str, Any]:
    return {
        "label": site.label,
        "scaled": site.scaled,
        "dim": site.rope.dim,
        "rope": site.params,
        "inv_freq": list(site.wanted.inv_freq),
        "attention_factor": site.wanted.attention_factor,
        "softmax_factor": site.wanted.softmax_factor,
        "softmax_factor_before": site.rope.softmax_factor,
        "short_inv_freq": site.wanted.short_inv_freq and list(site.wanted.short_inv_freq),
        "spectrum_sha256": site.wanted.digest(),
    }
