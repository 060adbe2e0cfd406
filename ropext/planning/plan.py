"""Define the plan as a value: the changes that `extend` makes, why, and how each engine reads
them."""

from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from ropext import scaling
from ropext.base.errors import RopextError, UnsupportedModel, UsageError, listed
from ropext.base.jsontext import JsonObject, values_json
from ropext.base.narration import join_for_shells
from ropext.base.table import Table
from ropext.families import Model, loaders
from ropext.families.published import Published
from ropext.options.extend import Extend
from ropext.options.fields import flag
from ropext.planning.carrier import DIRECTORY, Carrier, Words
from ropext.planning.methods import (
    LENGTH_ONLY,
    Attempt,
    Attempts,
    MethodRow,
    Recommendation,
    Way,
    form_name,
    loaders_by_options,
    recommend,
    ways_of,
)
from ropext.scaling import self_extend
from ropext.scaling.rope import Edit, RopeSite, Spectrum
from ropext.scaling.self_extend import Fold
from ropext.scaling.tables import Growth

# Times the context with nothing trained: from this factor on, `extend` requires --untrained.
# Nobody publishes an untrained factor above 4 (families/published.json).
ASKED_UNTRAINED = 64


@dataclass(frozen=True)
class InMemory:
    """The changes to a loaded model that its config cannot store."""

    growth: Growth | None = None  # of position tables, or of ALiBi's slopes
    fold: Fold | None = None  # of Self-Extend


CONFIG_ALONE = InMemory()  # the config says all
NO_TABLE = Table("", "", (), ())


@dataclass(frozen=True, kw_only=True)
class ExtensionPlan:
    """The changes that `extend` makes for any position scheme: the new config, and why."""

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
    notes: tuple[str, ...] = ()  # remarks on the plan that are no warnings
    obstacles: tuple[str, ...] = ()  # why no extension can help
    task: str = ""  # as the hub names it, if the config states it
    growth: Growth | None = None  # of position tables, or of ALiBi's slopes
    fold: Fold | None = None  # of Self-Extend, which no config says
    uncarried: str = ""  # why no directory can store the plan
    method_source: str | None = None  # source of the user's own method, as it was at planning
    # Carries the spectrum: a config, or the keys and tensors of a GGUF. None if no engine was
    # measured with such a plan.
    carrier: Carrier | None = None
    words: Words = DIRECTORY  # the words for the output in texts
    # For the model card: the beginning of its first sentence, and its sentence about the weights.
    grown: str = "The context of {} was extended"
    weights: str = "The weights are those of the base; only config.json changed."
    # A question for a factor that nobody has reached.
    doubt: str = ""
    # The command that extends the model from the original, if its record says that nothing was
    # trained since it was extended.
    in_one_step: str = ""
    # Tokens that the weights were trained on; None if a training follows, if the spectrum stays or
    # comes from another model (--like), and if the model's authors publish this factor.
    trained: int | None = None
    trained_on: str = ""  # words for these tokens, if a record states them
    training: str = ""  # advice on how to train the model for its length, as an order
    measured: str = ""  # a sentence on the results of its scaling, untrained, on the measured model
    methods_table: Table = NO_TABLE  # compares the methods, if something distinguishes them
    facts_json: JsonObject = field(default_factory=dict)  # of the position scheme, for --json

    def __repr__(self) -> str:
        """Return a line with the model, the context, the target and the method of the plan."""
        far = f"{self.context:,} -> {self.target:,} tokens"
        written = ""
        if self.sites and self.fold is None:
            written = f", written as {self.main.params['rope_type']}"
        return f"<Plan for {self.name}: {far} by {self.method}{written}>"

    @property
    def factor(self) -> float:
        """Return the target of the plan divided by its context."""
        return self.target / self.context

    @property
    def readings(self) -> tuple[loaders.LoaderReading, ...]:
        """Return how each engine reads the planned result."""
        return ()

    @cached_property
    def kv_cache_bytes(self) -> int | None:
        """Return the bytes of the KV cache for one sequence of the planned target, at 2 bytes a
        value. Return None if they are not known."""
        if self.carrier is None:
            return None
        rules = self.carrier.cache
        return self.carrier.model.kv_bytes(self.target, step=rules.step, beside=rules.micro_batch)

    @property
    def main(self) -> RopeSite:
        """Return the planned site that facts and warnings are about: the first scaled one."""
        return next(site for site in self.sites if site.scaled)

    @property
    def in_memory(self) -> InMemory:
        """Return the changes of the plan to a loaded model besides its config."""
        return InMemory(self.growth, self.fold)

    @property
    def command(self) -> str:
        """Return the `ropext extend` command line that writes this plan."""
        line = ["ropext", "extend", self.name]
        if not self.recipe.length_only:
            line += ["--method", self.method]
        for name, info in Extend.model_fields.items():
            value = getattr(self.recipe, name)
            if name in ("method", "short_pair_factors") or value in (None, False, ()):
                if value is False and info.default is None:
                    line.append(f"--no-{flag(name).removeprefix('--')}")
                continue
            line.append(flag(name))
            if name == "pair_factors":
                line.append("FILE")
            elif isinstance(value, tuple):
                line.append(",".join(map(str, value)))
            elif isinstance(value, float):
                line.append(f"{value:.15g}")
            elif value is not True:
                line.append(str(value))
        if self.untrained_factor >= ASKED_UNTRAINED and not self.recipe.untrained:
            line.append("--untrained")
        return join_for_shells(*line, "-o", self.words.name)

    def facts(self, *, briefly: bool = False) -> list[tuple[str, str]]:
        """Return the facts of a planned extension as names and values. If `briefly`, return only
        the reasons for it."""
        return []

    def compare_methods(self) -> Table:
        """Compare the methods that a plan can choose from in a table. It has no rows if nothing
        distinguishes them."""
        return self.methods_table

    def spectra(self) -> dict[str, Spectrum]:
        """Return the RoPE frequencies of every method that needs no input, and of this plan's
        own."""
        return {}

    def remarks(self, *, warnings_first: bool = False) -> list[str]:
        """Return every note and warning of the plan, each with that word before it; the warnings of
        one name are one remark."""
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
    def refusal(self) -> RopextError | None:
        """Return the error that refuses the plan if scaling cannot help or the factor is too large,
        unless the request has --even-so; --length-only also allows a model that scaling cannot
        help. Return an error, too, if ropext extended the model already and its record states no
        training since; else None."""
        if self.obstacles and not (self.recipe.even_so or self.recipe.length_only):
            return UnsupportedModel(
                f"{self.name}: scaling cannot help this model: {'; '.join(self.obstacles)}; "
                "--length-only raises only the stated length, --even-so extends it anyway"
            )
        if self.doubt:
            return UsageError(f"{self.name}: {self.doubt}")
        if self.in_one_step:
            return UsageError(
                f"{self.name}: ropext extended it already, and its record says that nothing was "
                f"trained since. Extend it once from its original RoPE frequencies: "
                f"{self.in_one_step}; --again extends the extension"
            )
        return None

    @property
    def consent(self) -> str:
        """Return the flag with which `extend` writes a refused plan: --again if its only reason is
        an earlier extension, else --even-so."""
        return "--even-so" if self.obstacles or self.doubt else "--again"

    def raise_if_refused(self) -> None:
        """Raise the error with which `extend` refuses this plan, if it does."""
        refusal = self.refusal
        if refusal is not None:
            raise refusal

    @property
    def untrained_factor(self) -> float:
        """Return the plan's target divided by the trained context. Return 1 if the plan needs no
        training."""
        return 1.0 if self.trained is None else self.target / self.trained

    def require_training(self) -> None:
        """Raise UsageError if the extension is so far that it needs --untrained and the request
        lacks it."""
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

    @property
    def log(self) -> str:
        """Return the lines in a program's log that show that the planned scaling is on. Return ""
        if none does."""
        if self.carrier is None or self.recipe.length_only:
            return ""
        return self.carrier.log_of(self)

    def serving(self, directory: str) -> tuple[loaders.Serving, ...]:
        """Return the lines that run the planned result from `directory` in each loader. Return none
        if the plan is refused."""
        if self.carrier is None or self.refusal is not None:  # there will be nothing to serve
            return ()
        return self.carrier.serving(self, directory)

    def overrides(self) -> tuple[loaders.OverrideLine, ...]:
        """Return the lines that run the plan's base itself as planned, in each loader that is known
        to read it. Return none if the plan is refused."""
        if self.carrier is None or self.refusal is not None:
            return ()
        return self.carrier.overrides(self)

    def nearest(self) -> dict[str, str]:
        """Return, for each loader that misreads the plan, the options whose result it reads
        exactly."""
        nearest = dict[str, str]()
        if self.carrier is None or self.refusal is not None:
            return nearest
        for reading in loaders.newest(self.readings):
            options = ""
            if reading.verdict in loaders.WRONG:
                options = self.carrier.nearest(reading.loader, self.main.params, self.target)
            if options:
                nearest[reading.loader] = options
        return nearest

    def nearest_by_options(self) -> dict[str, tuple[str, ...]]:
        """Return the options of `nearest`, each with the loaders that read their result exactly."""
        return loaders_by_options(self.nearest())

    def to_json(self) -> dict[str, Any]:
        """Return the plan of an extension for `ropext plan --json`: its method, edits, warnings and
        config."""
        return {
            "model": self.name,
            **self.facts_json,
            "method": self.method,
            "context": self.context,
            "target": self.target,
            "factor": self.factor,
            "edits": [edit.to_json() for edit in self.edits],
            "warnings": list(self.warnings),
            "config": self.config,
        }


def why_unfolded(carrier: Carrier) -> str:
    """Return the reason why Self-Extend cannot extend a model, for a plan or its refusal. Return ""
    if it can."""
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


def serves_folded(carrier: Carrier) -> bool:
    """Return whether a plan may advise `ropext serve` with Self-Extend, which needs a causal
    model."""
    return not carrier.model.masked_lm and not why_unfolded(carrier)


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan(ExtensionPlan):
    """The plan for rotary embeddings, with the reading of the result by each engine."""

    carrier: Carrier
    attempt: Attempt  # that this plan makes
    model: Model  # as its config was read
    authors: Published | None  # the authors' published recipe for this model
    attempts: Attempts = field(compare=False)  # at this model and target, by any method
    advised: Recommendation | None = None  # replaces the recommendation of the methods' rows

    @cached_property
    def methods(self) -> tuple[MethodRow, ...]:
        """Return the row of every method in the plan's table, with the user's own method if the
        plan has that."""
        rows = list[MethodRow]()
        for method in scaling.beside(self.method):
            rows.append(self.attempts.row(self.recipe, method, self.method))
        return tuple(rows)

    @cached_property
    def ways(self) -> tuple[Way, ...]:
        """Return both ways of the plan to extend a model whose config is scaled already."""
        return ways_of(self.attempts, self.recipe, self.method)

    @cached_property
    def recommendation(self) -> Recommendation:
        """Return the method that the plan recommends, and why."""
        others = self.recipe.changed(length_only=False)  # the methods' rows are about a scaling
        return self.advised or recommend(self.attempts, others, self.method)

    @cached_property
    def readings(self) -> tuple[loaders.LoaderReading, ...]:
        """Return how each engine reads the rope dict that the plan writes."""
        return self.attempts.readings(self.model.scaled_sites[0], self.attempt)

    def facts(self, *, briefly: bool = False) -> list[tuple[str, str]]:
        """Return the facts that `ropext plan` prints: factor, rope type, attention factor,
        recommendation, measured results, other ways to extend, and Self-Extend. If `briefly`, leave
        out the rope type, the attention factor and Self-Extend."""
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
        if self.measured:
            facts.append(("measured", self.measured))
        for place, way in enumerate(self.ways):
            facts.append(("or" if place else "scaled again", way.sentence()))
        if briefly or self.recipe.length_only or not serves_folded(self.carrier):
            return facts
        target = str(self.target)
        line = join_for_shells(
            "ropext", "serve", self.name, "--method", self_extend.NAME, "--target", target
        )
        facts.append(("in memory", f"Self-Extend, which no file can store: {line}"))
        facts.append(("", f"({self_extend.EXCEPTION})"))
        return facts

    def _written(self) -> list[tuple[str, str]]:
        """Return the rope type that carries the plan, and its attention factor."""
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

    def compare_methods(self) -> Table:
        """Compare the methods that a plan can choose from, without measurements. The table has
        pairs extrapolated, compression and rope type."""
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
        """Return the RoPE frequencies of the plan's methods that can run without input, and of its
        own method."""
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

    def to_json(self) -> dict[str, Any]:
        """Return the plan of an extension for `ropext plan --json`: its methods, edits, warnings,
        memory, loaders and serving lines."""
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


def _site_json(site: RopeSite) -> dict[str, Any]:
    """Return one planned rotary embedding as the JSON of a plan lists it."""
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
