"""Recipe + config dict -> Plan: all that `extend` would do, computed without touching a file.

The plan is the prediction; the proof compares it with what stock transformers builds.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ropext import families, forms, loaders, scaling
from ropext.errors import NotExpressible, UnsupportedModel, UsageError
from ropext.families import Model, Site
from ropext.recipe import Recipe, knobs_for, resolve_target
from ropext.recommending import Recommendation, recommend
from ropext.rope import Explanation, Rope, Spectrum, explain

# Angles are float32 in stock transformers: position * 2^-24 radians of rounding on the fastest
# pair. From here on the error passes 1e-2 (measured: 2.5e-2 at 1M positions).
FLOAT32_MATTERS = 2**18


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


@dataclass(frozen=True)
class Plan:
    """What `extend` does: the new config, why, and who reads it how."""

    name: str  # the model as the user named it
    model: Model
    recipe: Recipe
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
    readings: tuple[loaders.Reading, ...]

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
        newest: dict[str, loaders.Reading] = {}
        for reading in self.readings:
            newest.setdefault(reading.loader, reading)
        for reading in newest.values():
            if reading.verdict in ("different", "ignored", "error"):
                out[reading.loader] = _nearest(
                    self.model, reading.loader, self.main.params, self.target
                )
        return {loader: options for loader, options in out.items() if options}

    def nearest_by_options(self) -> dict[str, tuple[str, ...]]:
        """The same the other way round: options, and the loaders that read their result."""
        return _by_options(self.nearest())

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


def _nearest(model: Model, loader: str, params: forms.Params, target: int) -> str:
    scaled = any(site.rope.is_scaled for site in model.scaled_sites)
    options = loaders.nearest_exact(
        loader, model.text_type, params, scaled=scaled, model_type=model.model_type
    )
    # A factor would count from the original context there, and mean fewer tokens.
    return options.replace("--from-original", f"--from-original --target {target}")


def _by_options(nearest: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
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


def make_plan(config: Mapping[str, Any], recipe: Recipe, name: str = "MODEL") -> Plan:
    """The plan for a config dict; raises where the request cannot be carried exactly."""
    model = families.read(dict(config), context=recipe.context)
    context = _context(model, recipe)
    target = resolve_target(recipe, context)
    method = recipe.method or "yarn"
    knobs = knobs_for(recipe, method)
    sites = tuple(_plan_site(model, site, method, target, knobs, recipe) for site in model.sites)
    written = families.write(
        dict(config), model, {s.label: s.params for s in sites if s.scaled}, target
    )
    rows = tuple(_method_row(model, each, method, target, recipe) for each in scaling.METHODS)
    main = next(site for site in sites if site.scaled)
    return Plan(
        name=name,
        model=model,
        recipe=recipe,
        method=method,
        knobs=asdict(knobs),  # type: ignore[call-overload]
        context=context,
        target=target,
        sites=sites,
        config=written,
        edits=tuple(families.diff(dict(config), written)),
        methods=rows,
        recommendation=recommend(model, recipe, {r.method: r.form for r in rows}),
        warnings=_warnings(model, recipe, sites, context, target),
        readings=loaders.readings(
            model.text_type,
            main.params,
            model_type=model.model_type,
            length=target,
            target=target,
        ),
    )


def require_help(plan: Plan) -> None:
    """Raise where scaling cannot help this model and the user did not ask for it all the same."""
    if plan.model.obstacles and not plan.recipe.even_so:
        raise UnsupportedModel(
            f"{plan.name}: {'; '.join(plan.model.obstacles)}; --even-so extends it all the same"
        )


def _context(model: Model, recipe: Recipe) -> int:
    """The context that the factor counts from."""
    scaled = [site.rope for site in model.sites if site.scaled]
    if not scaled:
        raise UnsupportedModel(
            f"{model.model_type}: none of its rotary embeddings sits in a full-attention layer, so "
            "there is nothing to extend"
        )
    return scaled[0].original_context if recipe.from_original else model.context


def _extended(site: Site, recipe: Recipe) -> Rope:
    return site.rope.original() if recipe.from_original else site.rope


def _plan_site(
    model: Model, site: Site, method: str, target: int, knobs: object, recipe: Recipe
) -> PlannedSite:
    if not site.scaled:
        return PlannedSite(site.label, site.rope, site.rope.spectrum, site.params, False)
    rope = _extended(site, recipe)
    scaled = scaling.scale(rope, method, target, knobs, recipe.attention)
    wanted, native = scaling.compose(rope, scaled, target), scaling.native(rope, scaled)
    try:
        params = _carry(model, rope, wanted, target, native, recipe)
    except NotExpressible:

        def carried(wish: Recipe) -> forms.Params | None:
            try:
                return _carry(model, rope, wanted, target, native, wish)
            except NotExpressible:
                return None

        raise NotExpressible(_why_not(model, method, target, recipe, carried)) from None
    return PlannedSite(site.label, rope, wanted, params, True)


def _exact_in(model: Model, names: tuple[str, ...], params: forms.Params, even_so: bool) -> bool:
    return loaders.exact_in(
        names, model.text_type, params, even_so=even_so, model_type=model.model_type
    )


def _carry(
    model: Model,
    rope: Rope,
    wanted: Spectrum,
    target: int,
    native: forms.Params | None,
    recipe: Recipe,
) -> forms.Params:
    def accept(params: forms.Params) -> bool:
        if params["rope_type"] not in model.forms:
            return False
        return _exact_in(model, recipe.for_loaders, params, recipe.even_so)

    return forms.carry(rope, wanted, target, native, accept)


def _why_not(
    model: Model,
    method: str,
    target: int,
    recipe: Recipe,
    carried: Callable[[Recipe], forms.Params | None],
) -> str:
    """Which part of the request nothing carries, and what would be carried."""
    names = recipe.for_loaders
    trusted = carried(replace(recipe, even_so=True))
    if trusted is not None:
        unsure = [name for name in names if not _exact_in(model, (name,), trusted, False)]
        return (
            f"--for {','.join(unsure)}: how it reads {trusted['rope_type']} scaling in "
            f"{model.model_type} was not measured; --even-so writes it all the same"
        )
    asked = f"--method {method}"
    if recipe.attention is not None:
        asked += f" with an attention factor of {recipe.attention:g}"
    where = f"rope types that {model.text_type} computes ({', '.join(model.forms)})"
    if names:
        where += f" and that --for {','.join(names)} reads exactly"
    able = _able(model, target, recipe)
    hint = f"; these methods can: {', '.join(able)}" if able else ""
    if not able and recipe.attention is not None:
        able = _able(model, target, replace(recipe, attention_factor=None, temperature=None))
        hint = f"; without that factor these methods can: {', '.join(able)}" if able else ""
    free = carried(replace(recipe, for_loaders=()))
    if free is not None and not able:
        near = {name: _nearest(model, name, free, target) for name in names}
        for options, readers in _by_options(near).items():
            if options:
                hint += (
                    f"; {options} is the nearest form that {' and '.join(readers)} reads exactly"
                )
    return f"{asked} cannot be written exactly in the {where}{hint}"


def _able(model: Model, target: int, recipe: Recipe) -> list[str]:
    """The methods that could be written, at their default knobs."""
    rows = (_method_row(model, name, "", target, recipe) for name in scaling.METHODS)
    return [row.method for row in rows if row.form]


def _method_row(model: Model, method: str, chosen: str, target: int, recipe: Recipe) -> MethodRow:
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
        params = _carry(model, rope, wanted, target, scaling.native(rope, scaled), recipe)
    except UsageError as error:
        return MethodRow(method, None, None, str(error))
    except NotExpressible:
        return MethodRow(method, explanation, None, "cannot be written exactly here")
    return MethodRow(method, explanation, params["rope_type"])


def _warnings(
    model: Model, recipe: Recipe, sites: tuple[PlannedSite, ...], context: int, target: int
) -> tuple[str, ...]:
    """What a user must know before relying on the result; each a sentence."""
    main = next(site for site in sites if site.scaled)
    out = [*model.notes, *model.obstacles]
    if recipe.from_original and target <= model.context:
        out.append(
            f"the target of {target} tokens is not above the {model.context} that the model reads "
            "today: from its original context this is a shorter window"
        )
    if main.wanted.attention_factor != main.rope.attention_factor:
        if model.temperature == "rotated channels":
            out.append(
                "the temperature acts on the rotated channels only, not on whole logits as in "
                "YaRN's paper: this family rotates a part of each head"
            )
        if model.temperature == "cancelled":
            out.append(
                "the temperature has no effect: this family normalises queries and keys after "
                "the rotation"
            )
    for keys in (("attn_factor",), ("short_mscale", "long_mscale")):
        if keys[0] in main.params:
            out.append(
                f"transformers will warn of unrecognized keys ({', '.join(keys)}), under which "
                "other loaders read the attention factor"
            )
    if main.rope.softmax_factor != main.wanted.softmax_factor:
        out.append(
            f"the softmax factor goes from {main.rope.softmax_factor:.6g} to "
            f"{main.wanted.softmax_factor:.6g} (mscale_all_dim {main.rope.mscale_all_dim:g})"
        )
    if target > FLOAT32_MATTERS:
        out.append(
            f"at {target} tokens the float32 angles of stock transformers are off by up to "
            f"{target * 2.0**-25:.1e} rad on the fastest pair"
        )
    if main.wanted.short_inv_freq is not None:
        out.append(
            "two sets of factors: a sequence that grows past "
            f"{main.params['original_max_position_embeddings']} tokens while keys are cached mixes "
            "both; only models that refill the cache there (Phi-3) are right"
        )
    return tuple(out)
