"""The plan as a value: what `extend` does, why, and who reads the result how."""

from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from ropext import scaling
from ropext.base.errors import RopextError, UnsupportedModel, UsageError, listed
from ropext.base.jsontext import values_json
from ropext.base.narration import join_for_shells
from ropext.base.table import Table
from ropext.families import Model, loaders
from ropext.families.published import Published
from ropext.options.extend import Extend
from ropext.planning.carrier import DIRECTORY, Carrier, Words
from ropext.planning.methods import (
    LENGTH_ONLY,
    Attempt,
    Attempts,
    MethodRow,
    Recommendation,
    Way,
    by_options,
    form_name,
    recommend,
    rows_of,
    ways_of,
)
from ropext.scaling import self_extend
from ropext.scaling.rope import Edit, RopeSite, Spectrum
from ropext.scaling.self_extend import Fold
from ropext.scaling.tables import Growth

# Times the context with nothing trained: from here on --untrained is asked for. Nobody publishes an
# untrained scaling by more than 4 times (families/published.json).
ASKED_UNTRAINED = 64


@dataclass(frozen=True)
class InMemory:
    """What becomes of a loaded model that its config does not say."""

    growth: Growth | None = None  # of position tables, or of ALiBi's slopes
    fold: Fold | None = None  # of Self-Extend


CONFIG_ALONE = InMemory()  # the config says all


@dataclass(frozen=True, kw_only=True)
class ExtensionPlan:
    """What `extend` does, whatever the model's position scheme: the new config, and why."""

    name: str  # the model as the user named it
    recipe: Extend
    method: str
    knobs: dict[str, Any]
    context: int  # the context being extended; `factor` counts from it
    target: int
    sites: tuple[RopeSite, ...]
    config: dict[str, Any]
    edits: tuple[Edit, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...] = ()  # what agrees
    obstacles: tuple[str, ...] = ()  # why no extension can help
    task: str = ""  # as the hub names it, where the config says so
    fold: Fold | None = None  # of Self-Extend, which no config says
    method_source: str | None = None  # of a function of the user's, as it was when this was planned
    words: Words = DIRECTORY  # what people read of what is written

    def __repr__(self) -> str:
        far = f"{self.context:,} -> {self.target:,} tokens"
        return f"<Plan for {self.name}: {far} by {self.method}{self.form}>"

    @property
    def form(self) -> str:
        """How the config carries it, as a clause."""
        return ""

    @property
    def factor(self) -> float:
        return self.target / self.context

    @property
    def readings(self) -> tuple[loaders.LoaderReading, ...]:
        """How each engine reads the result."""
        return ()

    @property
    def kv_cache_bytes(self) -> int | None:
        """The bytes of one sequence of `target` tokens, at 2 bytes a value."""
        return None

    @property
    def main(self) -> RopeSite:
        """The embedding that the diagnostics speak of: the first one that is scaled."""
        return next(site for site in self.sites if site.scaled)

    @property
    def growth(self) -> Growth | None:
        """What becomes of position tables; None where no tensor changes."""
        return None

    @property
    def in_memory(self) -> InMemory:
        """What becomes of a loaded model beside its config."""
        return InMemory(self.growth, self.fold)

    @property
    def weights(self) -> str:
        """What becomes of the weights, as a card says it."""
        return "The weights are those of the base; only config.json changed."

    def what_grows(self, base: str) -> str:
        """What of the base was extended, as the beginning of a sentence."""
        return f"The context of {base} was extended"

    def facts(self, *, briefly: bool = False) -> list[tuple[str, str]]:
        """Return what is planned, as names and values; `briefly`, only why it is planned so."""
        return []

    def compared(self) -> Table:
        """The methods for this model side by side; no rows where nothing tells them apart."""
        return Table("", "", (), ())

    def spectra(self) -> dict[str, Spectrum]:
        """The spectrum of every method that needs no input, this plan's own among them."""
        return {}

    def remarks(self, *, warnings_first: bool = False) -> list[str]:
        """Return every note and warning, each with that word before it; the warnings of one name
        are one remark."""
        notes = [f"note: {note}" for note in self.notes]
        kinds = dict[str, str]()
        for warning in self.warnings:
            kind, bracket, rest = warning.partition("] ")
            if bracket and kind in kinds:
                kinds[kind] += f"; {rest}"
            else:
                kinds[kind] = warning
        warnings = [f"warning: {warning}" for warning in kinds.values()]
        return warnings + notes if warnings_first else notes + warnings

    @property
    def uncarried(self) -> str:
        """Why no directory can say it; "" where one can."""
        return "" if self.fold is None else self_extend.UNCARRIED

    @property
    def refusal(self) -> RopextError | None:
        """Why `extend` does not write this plan; None where it does."""
        return None

    def raise_if_refused(self) -> None:
        """Raise what `extend` refuses this plan with."""
        refusal = self.refusal
        if refusal is not None:
            raise refusal

    @property
    def untrained_factor(self) -> float:
        """How many times the model's own context it is to read with nothing trained for it; 1
        where a training follows, where the spectrum stays or is that of another model (--like), and
        where its authors publish it so."""
        return 1.0

    @property
    def trained_on(self) -> str:
        """How many tokens a record says that the weights were trained on, where these are fewer
        than it reads; "" where it says nothing of the kind."""
        return ""

    @property
    def training(self) -> str:
        """What trains it for its length, as an order; "" where ropext trains no such model."""
        return ""

    def require_training(self) -> None:
        """Refuse an extension so far that it is only written untrained where that was asked for."""
        if self.untrained_factor < ASKED_UNTRAINED or self.recipe.untrained:
            return
        ways = "take a smaller factor, or write it anyway with --untrained"
        if self.training:
            ways = f"{self.training}, {ways}"
        trained = self.trained_on or "its context"
        raise UsageError(
            f"{self.name}: {self.target:,} tokens are {self.untrained_factor:g}× {trained}, and"
            f" nothing is trained for them: {ways}"
        )

    def serving(self, directory: str) -> tuple[loaders.Serving, ...]:
        """How to run the result in each loader, once it lies in `directory`."""
        return ()

    def overrides(self) -> tuple[loaders.OverrideLine, ...]:
        """How to run the base itself so, in each loader that is known to read it."""
        return ()

    def nearest(self) -> dict[str, str]:
        """For loaders that read it otherwise: the options whose result they read exactly."""
        return {}

    def nearest_by_options(self) -> dict[str, tuple[str, ...]]:
        """The same the other way round: options, and the loaders that read their result."""
        return by_options(self.nearest())

    def to_json(self) -> dict[str, Any]:
        """The plan as one JSON document."""
        names = ("method", "knobs", "context", "target", "factor", "config")
        return {"model": self.name, **{name: getattr(self, name) for name in names}}


def why_unfolded(carrier: Carrier) -> str:
    """Return why Self-Extend cannot read a model; "" if it can."""
    model = carrier.model
    if not carrier.in_transformers:
        return "no class in transformers"
    if model.mrope:
        return "positions of several axes (mRoPE)"
    if model.obstacles:
        return "obstacles: " + "; ".join(model.obstacles)
    kinds = {str(site.params["rope_type"]) for site in model.scaled_sites}
    changing = sorted(kinds & {"dynamic", "longrope"})
    return f"a spectrum that follows the length ({listed(changing)})" if changing else ""


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan(ExtensionPlan):
    """The plan for rotary embeddings, with who reads the result how."""

    carrier: Carrier  # of the spectrum: a config, or the keys and tensors of a GGUF
    model: Model  # as its config was read
    authors: Published | None  # what the model's authors publish about such a plan
    attempts: Attempts = field(compare=False)  # at this model and target, by any method
    attempt: Attempt  # that this plan makes
    advised: Recommendation | None = None  # replaces what the methods' rows recommend
    # Tokens that the weights were trained on, where a record tells that it reads further untrained.
    trained: int | None = None
    is_quantised: bool = False  # its weights are packed

    @cached_property
    def methods(self) -> tuple[MethodRow, ...]:
        """The row of every method."""
        return rows_of(self.attempts, self.recipe, self.method)

    @cached_property
    def ways(self) -> tuple[Way, ...]:
        """Both ways to extend a model that is scaled already."""
        return ways_of(self.attempts, self.recipe, self.method)

    @cached_property
    def recommendation(self) -> Recommendation:
        """The method to take, and why."""
        others = self.recipe.changed(length_only=False)  # what the methods would do
        return self.advised or recommend(self.attempts, others, self.method)

    @cached_property
    def readings(self) -> tuple[loaders.LoaderReading, ...]:
        return self.attempts.readings(self.model.scaled_sites[0], self.attempt)

    @cached_property
    def kv_cache_bytes(self) -> int | None:
        rules = self.carrier.cache
        return self.model.kv_bytes(self.target, step=rules.step, beside=rules.micro_batch)

    @property
    def form(self) -> str:
        return f", written as {self.main.params['rope_type']}"

    @property
    def untrained_factor(self) -> float:
        recipe = self.recipe
        if recipe.finetune or recipe.like or recipe.length_only:
            return 1.0
        authors = self.authors
        if authors is not None and authors.agrees(self):
            return 1.0
        trained = self.trained or max(self.context, self.model.context)
        return self.target / trained

    @property
    def trained_on(self) -> str:
        if self.trained is None:
            return ""
        return f"the {self.trained:,} tokens that its base was trained on (ropext.json)"

    @property
    def training(self) -> str:
        if not self.carrier.in_transformers:
            return "train the Hugging Face checkpoint that it was converted from"
        if self.is_quantised:
            return "train the checkpoint that it was quantised from"
        if self.model.masked_lm:
            return ""
        return "train (--finetune DATA)"

    def facts(self, *, briefly: bool = False) -> list[tuple[str, str]]:
        facts = list[tuple[str, str]]()
        now = self.model.scaled_sites[0].rope
        if now.original_context != now.context:  # from which of them a factor counts
            both = f"{self.target / now.context:g}× its current context of {now.context:,}, "
            both += f"{self.target / now.original_context:g}× its original context of "
            facts.append(("factor", f"{both}{now.original_context:,}"))
        if not briefly:
            facts += self._written()
        chosen = self.recommendation
        origin = f" --from-original --target {self.target}" if chosen.from_original else ""
        advice = f"--method {chosen.method}{origin}"
        if chosen.method == "none":
            advice = "none"
        elif chosen.method == LENGTH_ONLY:
            advice = "--length-only"
        facts.append(("recommended", f"{advice}: {chosen.reason}"))
        for place, way in enumerate(self.ways):
            facts.append(("or" if place else "scaled again", way.sentence()))
        if briefly or self.recipe.length_only or why_unfolded(self.carrier):
            return facts
        target = str(self.target)
        line = join_for_shells(
            "ropext", "serve", self.name, "--method", self_extend.NAME, "--target", target
        )
        facts.append(("in memory", f"Self-Extend, which no file can store: {line}"))
        facts.append(("", f"({self_extend.EXCEPTION})"))
        return facts

    def _written(self) -> list[tuple[str, str]]:
        """Return which rope type carries it, and its attention factor."""
        written = (
            f"{site.label + ': ' if site.label else ''}{form_name(site.params['rope_type'])}"
            for site in self.sites
            if site.scaled
        )
        attention = f"factor {self.main.wanted.attention_factor:.6g} on cos and sin"
        if self.method == "longrope":  # pair factors bring none of their own
            given = self.recipe.attention is not None
            attention += " (from the file or a flag)" * given
            attention += " (the file of pair factors sets none)" * (not given)
        return [("written as", ", ".join(written)), ("attention", attention)]

    def compared(self) -> Table:
        rows = []
        for row in self.methods:
            cells = ["-", "-", "-"]
            if (seen := row.explanation) is not None:
                cells = [str(seen.pairs_extrapolated), f"{seen.worst_extrapolation:.3g}"]
                cells += [f"{seen.mean_compression:.3g}"]
            mark = "*" if row.method == self.method else ""
            rows.append((row.method + mark, *cells, form_name(row.form), row.note))
        header = ("method", "pairs extrapolated", "worst", "mean compression", "written as", "")
        return Table("", LEGEND, header, tuple(rows))

    def spectra(self) -> dict[str, Spectrum]:
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

    @property
    def refusal(self) -> RopextError | None:
        """Where scaling cannot help, or not so far, unless asked for all the same."""
        if self.obstacles and not (self.recipe.even_so or self.recipe.length_only):
            return UnsupportedModel(
                f"{self.name}: scaling cannot help this model: {'; '.join(self.obstacles)}; "
                "--length-only raises only the stated length, --even-so extends it anyway"
            )
        if doubt := too_far(self.recipe, self.context, self.target):
            return UsageError(f"{self.name}: {doubt}")
        return None

    def serving(self, directory: str) -> tuple[loaders.Serving, ...]:
        if self.refusal is not None:  # there will be nothing to serve
            return ()
        return self.carrier.serving(self, directory)

    def overrides(self) -> tuple[loaders.OverrideLine, ...]:
        if self.refusal is not None:
            return ()
        return self.carrier.overrides(self)

    def nearest(self) -> dict[str, str]:
        nearest = dict[str, str]()
        if self.refusal is not None:
            return nearest
        for reading in loaders.newest(self.readings):
            options = ""
            if reading.verdict in loaders.WRONG:
                options = self.carrier.nearest(reading.loader, self.main.params, self.target)
            if options:
                nearest[reading.loader] = options
        return nearest

    def to_json(self) -> dict[str, Any]:
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
            "ways": [asdict(way) for way in self.ways],
            "refused": None if self.refusal is None else str(self.refusal),
            "edits": [edit.to_json() for edit in self.edits],
            "notes": list(self.notes),
            "warnings": list(self.warnings),
            "kv_cache_bytes": self.kv_cache_bytes,
            "loaders": [values_json(reading) for reading in self.readings],
            "nearest_exact": self.nearest(),
            "serving": [asdict(line) for line in self.serving("OUT")],
            "overrides": [asdict(line) for line in self.overrides()],
            "config": self.config,
        }


LEGEND = """\
* this plan. Pairs extrapolated: rotary pairs that reach angles beyond those of training; worst: the
  largest ratio. Mean compression: how many times slower the pairs rotate, on average."""


# LongRoPE took LLaMA2 from 4k to 2,048k (Ding et al. 2024, table 4): nobody went further.
FARTHEST = 512


def too_far(recipe: Extend, context: int, target: int) -> str:
    """The question that a factor nobody has reached gets; "" for any other."""
    factor = target / context
    if factor <= FARTHEST or recipe.even_so:
        return ""
    meant = "Is that meant"
    if recipe.factor and recipe.factor > context:
        meant = f"Is --target {recipe.factor:g} meant"
    return (
        f"{target:,} tokens are {factor:g}× the model's {context:,}, and no model was ever "
        f"extended beyond {FARTHEST}×. {meant}? (--even-so extends it anyway)"
    )


def _site_json(site: RopeSite) -> dict[str, Any]:
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
