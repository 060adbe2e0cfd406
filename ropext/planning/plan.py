"""The plan as a value: what `extend` does, why, who reads the result how, and which stock rope dict
carries what a method asks for."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import PurePath
from typing import Any

from ropext import families, forms, loaders, scaling
from ropext.errors import NotExpressible, UnsupportedModel, UsageError, listed
from ropext.families import Model, Site
from ropext.narration import pasted
from ropext.options.extend import KNOBS, Extend, knobs_for
from ropext.options.fields import flag
from ropext.rope import Explanation, Rope, Spectrum, explain, turns
from ropext.scaling.self_extend import Fold
from ropext.scaling.tables import Growth


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


@dataclass(frozen=True, kw_only=True)
class ExtensionPlan:
    """What `extend` does, whatever the model's position scheme: the new config, and why."""

    name: str  # the model as the user named it
    recipe: Extend
    method: str
    knobs: dict[str, Any]
    context: int  # the context being extended; `factor` counts from it
    target: int
    sites: tuple[PlannedSite, ...]
    config: dict[str, Any]
    edits: tuple[families.Edit, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...] = ()  # what agrees
    fold: Fold | None = None  # of Self-Extend, which no config says

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
    def container(self) -> str:
        """The architecture of a GGUF file that is extended; "" of a directory."""
        return ""

    @property
    def growth(self) -> Growth | None:
        """What becomes of position tables; None where no tensor changes."""
        return None

    def remarks(self) -> list[str]:
        """Every note and warning, each with that word before it."""
        return [f"note: {note}" for note in self.notes] + [f"warning: {w}" for w in self.warnings]

    def require_help(self) -> None:
        """Raise where an extension cannot help this model, unless asked for all the same."""

    def serving(self, directory: str) -> tuple[loaders.Serving, ...]:
        """How to run the result in each loader, once it lies in `directory`."""
        return ()

    def to_json(self) -> dict[str, Any]:
        """The plan as one JSON document."""
        names = ("method", "knobs", "context", "target", "factor", "config")
        return {"model": self.name, **{name: getattr(self, name) for name in names}}


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan(ExtensionPlan):
    """The plan for rotary embeddings, with who reads the result how."""

    model: Model
    methods: tuple[MethodRow, ...]
    recommendation: Recommendation
    readings: tuple[loaders.LoaderReading, ...]

    @property
    def form(self) -> str:
        return f", written as {self.main.params['rope_type']}"

    @property
    def container(self) -> str:
        return self.model.container

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

    def require_help(self) -> None:
        """Raise where scaling cannot help, or not so far, unless asked for all the same."""
        if self.model.obstacles and not (self.recipe.even_so or self.recipe.length_only):
            raise UnsupportedModel(
                f"{self.name}: {'; '.join(self.model.obstacles)}; --length-only raises "
                "the stated length alone, --even-so extends it all the same"
            )
        if doubt := too_far(self.recipe, self.context, self.target):
            raise UsageError(f"{self.name}: {doubt}")

    def serving(self, directory: str) -> tuple[loaders.Serving, ...]:
        if self.model.container:
            one = directory.lower().endswith(".gguf")
            name = PurePath(self.name).name
            name = name if name.lower().endswith(".gguf") else "model.gguf"
            file = directory if one else f"{directory}/{name}"
            params = {} if self.recipe.length_only else self.main.params  # no scaling to set
            return loaders.file_lines(file, self.target, self.readings, params)
        return loaders.serving_lines(
            directory,
            self.model.text_type,
            self.main.params,
            context=self.context,
            target=self.target,
            model_type=self.model.model_type,
            masked_lm=self.model.masked_lm,
        )

    @property
    def override(self) -> dict[str, Any]:
        """The keys of the text config that say this plan to a loader of the base's weights."""
        text = families.text_part(self.config, self.model.path)
        top = [edit for edit in self.edits if len(edit.path) == 1 + len(self.model.path)]
        lengths = [edit.path[-1] for edit in top if edit.path[-1] in families.LENGTH_KEYS]
        known = [edit.path[-1] for edit in top if edit.before is not families.ABSENT]
        original = [key for key in known if key == "original_max_position_embeddings"]
        return {key: text[key] for key in ("rope_parameters", *lengths, *original) if key in text}

    def overrides(self) -> tuple[loaders.Serving, ...]:
        """How to run the base itself so, in each loader that is known to read it."""
        standing = 0.0 in self.main.wanted.inv_freq  # which a command line cannot say
        if self.model.masked_lm or (standing and not self.model.container):
            return ()
        name = "MODEL" if self.name.startswith("ropext://") else self.name
        named = pasted("MODEL.gguf" if name.startswith("ollama:") else name)
        return loaders.override_lines(
            *(name, self.override, self.readings, self._flags(), self.target, self.model.path),
            file=named if self.model.container else "",
        )

    def _flags(self) -> str:
        """What makes llama-server read a GGUF of the base so; "" where nothing but a copy does."""
        from ropext.loaders import gguf  # late: it reads a table of its own

        main, plain = self.main, not any(site.rope.is_scaled for site in self.model.scaled_sites)
        row = gguf.converted_to(self.model.text_type)
        name = self.model.container or (row.name if row and plain else "")
        rope = gguf.carry(name, main.rope, main.wanted, main.params) if name else None
        if rope is None:
            return ""
        keys = {edit.path[0]: edit.after for edit in self.edits}
        divided = any(isinstance(value, list) for value in keys.values())
        if not self.model.container:  # a file that is not here says the base's theta and no scaling
            known, divided = ("none", 1.0, main.rope.theta), bool(rope.divisors)
            keys = gguf.keys_of(name, rope, self.target)
            keys = {key: value for key, value in keys.items() if value not in known}
        return "" if divided else gguf.flags(name, rope, keys)

    def nearest(self) -> dict[str, str]:
        """For loaders that read it otherwise: the options whose result they read exactly."""
        out: dict[str, str] = {}
        if self.model.container:
            return out
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
            "notes": list(self.notes),
            "warnings": list(self.warnings),
            "kv_cache_bytes": self.kv_cache_bytes,
            "loaders": [asdict(reading) for reading in self.readings],
            "nearest_exact": self.nearest(),
            "serving": [asdict(line) for line in self.serving("OUT")],
            "overrides": [asdict(line) for line in self.overrides()],
            "config": self.config,
        }


WRONG = ("different", "ignored", "error")
# LongRoPE took LLaMA2 from 4k to 2,048k (Ding et al. 2024, table 4): nobody went further.
FARTHEST = 512


def too_far(recipe: Extend, context: int, target: int) -> str:
    """The question that a factor nobody has reached gets; "" for any other."""
    factor = target / context
    if factor <= FARTHEST or recipe.even_so:
        return ""
    meant = f"is --target {recipe.factor:g} meant" if recipe.factor else "is that meant"
    return (
        f"{target:,} tokens are {factor:g} times the {context:,} of the model, and no model was "
        f"ever extended more than {FARTHEST} times: {meant}? (--even-so goes on)"
    )


def readings_of(
    model: Model, rope: Rope, wanted: Spectrum, params: forms.Params, target: int
) -> tuple[loaders.LoaderReading, ...]:
    """Who reads a rope dict how: as a config, or as the keys of a GGUF file."""
    if model.container:
        from ropext.loaders import gguf  # late: no directory needs it

        carried = gguf.carry(model.container, rope, wanted, params)
        return gguf.readings(model.container, carried, model.text_type)
    kind, length = model.model_type, target
    return loaders.readings(model.text_type, params, model_type=kind, length=length, target=target)


def newest(readings: Iterable[loaders.LoaderReading]) -> tuple[loaders.LoaderReading, ...]:
    """Each loader in its newest version, which comes first."""
    latest: dict[str, loaders.LoaderReading] = {}
    for reading in readings:
        latest.setdefault(reading.loader, reading)
    return tuple(latest.values())


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


def _extended(site: Site, recipe: Extend) -> Rope:
    return site.rope.original() if recipe.from_original else site.rope


def plan_site(
    model: Model, site: Site, method: str, target: int, knobs: object, recipe: Extend
) -> PlannedSite:
    if not site.scaled:
        return PlannedSite(site.label, site.rope, site.rope.spectrum, site.params, False)
    rope = _extended(site, recipe)
    wanted: Spectrum = rope.spectrum
    native: forms.Params | None = site.params
    if not recipe.length_only:
        scaled = scaling.scale(rope, method, target, knobs, recipe.attention)
        wanted, native = scaling.compose(rope, scaled, target), scaling.native(rope, scaled)
    try:
        params = _carry(model, site, rope, wanted, target, native, recipe)
    except NotExpressible:

        def carried(request: Extend) -> forms.Params | None:
            try:
                return _carry(model, site, rope, wanted, target, native, request)
            except NotExpressible:
                return None

        exact = partial(_exact_in, model, rope, wanted)
        raise NotExpressible(_why_not(model, method, target, recipe, carried, exact)) from None
    return PlannedSite(site.label, rope, wanted, params, True)


def _moves(rope: Rope, wanted: Spectrum) -> bool:
    return wanted.inv_freq != rope.spectrum.inv_freq


def require_motion(model: Model, method: str, target: int, knobs: object, recipe: Extend) -> None:
    """Refuse a method that leaves every pair as it is, unless a temperature was asked for too."""
    ropes = [_extended(site, recipe) for site in model.scaled_sites]
    made = [scaling.scale(rope, method, target, knobs, recipe.attention) for rope in ropes]
    pairs = zip(ropes, made, strict=True)
    moved = any(_moves(rope, scaling.compose(rope, spectrum, target)) for rope, spectrum in pairs)
    if moved or recipe.attention is not None or recipe.even_so:
        return
    turning = [turn for rope in ropes for turn in turns(rope.spectrum, rope.context) if turn]
    if not turning:
        raise NotExpressible(f"--method {method}: every pair of this model stands still already")
    fewest = min(turning)
    able = _able(model, target, recipe)
    hint = f"; these methods move some: {', '.join(able)}" if able else ""
    raise NotExpressible(
        f"--method {method} moves no pair of this model, since each turns at least {fewest:.4g}"
        f" times in its {ropes[0].context} tokens; only the stated length would grow{hint}"
        " (--even-so extends it anyway)"
    )


def _exact_in(
    model: Model,
    rope: Rope,
    wanted: Spectrum,
    names: tuple[str, ...],
    params: forms.Params,
    even_so: bool,
) -> bool:
    """Whether these loaders read a dict of this spectrum exactly, as a config or as GGUF keys."""
    if model.container:
        from ropext.loaders import gguf

        form = gguf.carry(model.container, rope, wanted, params)
        text = model.text_type
        return form is not None and gguf.exact_in(names, model.container, form, text, even_so)
    return loaders.exact_in(
        names, model.text_type, params, even_so=even_so, model_type=model.model_type
    )


def _carry(
    model: Model,
    site: Site,
    rope: Rope,
    wanted: Spectrum,
    target: int,
    native: forms.Params | None,
    recipe: Extend,
) -> forms.Params:
    def accept(params: forms.Params) -> bool:
        if params["rope_type"] not in model.forms:
            return False
        # A length that also scales queries stays, and may be another than this form asks for.
        scaled = families.keep_query_scales(site.params, params)
        if not forms.same(forms.read(scaled, rope, target), wanted):
            return False
        if model.container:
            params = scaled
        else:
            params = families.as_written(model.text_type, params, rope)
        return _exact_in(model, rope, wanted, recipe.for_loaders, params, recipe.even_so)

    carried = forms.carry(rope, wanted, target, native, accept)
    return families.as_written(model.text_type, carried, rope)


def _why_not(
    model: Model,
    method: str,
    target: int,
    recipe: Extend,
    carried: Callable[[Extend], forms.Params | None],
    exact: Callable[[tuple[str, ...], forms.Params, bool], bool],
) -> str:
    """Which part of the request nothing carries, and what would be carried."""
    names = recipe.for_loaders
    trusted = carried(recipe.changed(even_so=True))
    if trusted is not None:
        unsure = [name for name in names if not exact((name,), trusted, False)]
        return (
            f"--for {','.join(unsure)}: how {_they(unsure, 'reads')} {trusted['rope_type']} scaling"
            f" in {model.model_type} was not measured; --even-so writes it anyway"
        )
    given = {flag(key): getattr(recipe, key) for key in KNOBS}
    knobs = [f"{name} {value:g}" for name, value in given.items() if isinstance(value, float | int)]
    wish = " ".join([f"--method {method}", *knobs])
    if recipe.attention is not None:
        wish += f" with an attention factor of {recipe.attention:g}"
    wish += " cannot"
    where = f"rope types that {model.text_type} computes ({', '.join(model.forms)})"
    if model.container:
        where = f"keys and tensors that llama.cpp reads of a {model.container} GGUF"
    if names:
        where += f" and that {_they(names, 'reads')} exactly (--for {','.join(names)})"
    able = _able(model, target, recipe)
    alone = ", without such options" if knobs else ""
    hint = f"; these methods can{alone}: {', '.join(able)}" if able else ""
    if not able and recipe.attention is not None:
        able = _able(model, target, recipe.changed(attention_factor=None, temperature=None))
        hint = f"; without that factor these methods can: {', '.join(able)}" if able else ""
    if not able:
        hint = _from_original(model, method, target, recipe)
    free = carried(recipe.changed(for_loaders=()))
    if free is not None and not able and not hint and not model.container:
        near = {name: nearest_form(model, name, free, target) for name in names}
        for options, readers in by_options(near).items():
            if options:
                hint += f"; {options} is the nearest form that {_they(readers, 'reads')} exactly"
    if recipe.method is None and recipe.attention is None and not knobs and not able:
        wish = "no method can"  # nobody asked for this one
    return f"{wish} be written exactly in the {where}{hint}"


def _they(names: Sequence[str], verb: str) -> str:
    return f"{listed(names)} {verb.removesuffix('s') if len(names) > 1 else verb}"


def _from_original(model: Model, method: str, target: int, recipe: Extend) -> str:
    """What a model that is scaled already can be written as from before that scaling."""
    scaled = any(site.rope.is_scaled for site in model.scaled_sites)
    if not scaled or recipe.from_original or model.asks_original:
        return ""
    able = _able(model, target, recipe.changed(from_original=True))
    if not able:
        return ""
    first = method if method in able else able[-1]
    others = [each for each in able if each != first]
    # A factor would count from the original context there, and mean fewer tokens.
    options = f"--from-original --target {target} --method {first}"
    return f"; {options}{f' (or {listed(others)})' if others else ''} can"


def _able(model: Model, target: int, recipe: Extend) -> list[str]:
    """The methods that could be written, at their default knobs."""
    rows = (method_row(model, name, "", target, recipe) for name in scaling.METHODS)
    return [row.method for row in rows if row.form]


def method_row(model: Model, method: str, chosen: str, target: int, recipe: Extend) -> MethodRow:
    """The two numbers of one method, and the form that would carry it; knobs for the chosen one."""
    if method in ("abf", "longrope") and method != chosen:
        needs = "--theta" if method == "abf" else "--pair-factors"
        return MethodRow(method, None, None, f"needs {needs}")
    site = next(site for site in model.sites if site.scaled)
    rope = _extended(site, recipe)
    knobs = knobs_for(recipe, method) if method == chosen else scaling.find(method).knobs()
    try:
        scaled = scaling.scale(rope, method, target, knobs, recipe.attention)
        wanted = scaling.compose(rope, scaled, target)
        explanation = explain(site.rope, wanted, target)
        if not _moves(rope, wanted) and recipe.attention is None and not recipe.even_so:
            return MethodRow(method, explanation, None, "moves no pair here")
        native = scaling.native(rope, scaled)
        params = _carry(model, site, rope, wanted, target, native, recipe)
    except UsageError as error:
        return MethodRow(method, None, None, str(error))
    except NotExpressible:
        where = f"for {listed(recipe.for_loaders)}" if recipe.for_loaders else "here"
        return MethodRow(method, explanation, None, f"cannot be written exactly {where}")
    readings = newest(readings_of(model, rope, wanted, params, target))
    return MethodRow(
        method,
        explanation,
        params["rope_type"],
        attention_factor=wanted.attention_factor,
        read_by=tuple(r.loader for r in readings if r.verdict == "same"),
        misread_by=tuple(r.loader for r in readings if r.verdict in WRONG),
    )
