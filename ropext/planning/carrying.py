"""Which stock rope dict carries what a method asks for, in this family and these loaders."""

from collections.abc import Callable
from dataclasses import replace

from ropext import forms, loaders, scaling
from ropext.errors import NotExpressible, UsageError
from ropext.families import Model, Site
from ropext.planning.plan import MethodRow, PlannedSite, by_options, nearest_form
from ropext.recipe import Recipe, knobs_for
from ropext.rope import Rope, Spectrum, explain


def _extended(site: Site, recipe: Recipe) -> Rope:
    return site.rope.original() if recipe.from_original else site.rope


def plan_site(
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
        near = {name: nearest_form(model, name, free, target) for name in names}
        for options, readers in by_options(near).items():
            if options:
                hint += (
                    f"; {options} is the nearest form that {' and '.join(readers)} reads exactly"
                )
    return f"{asked} cannot be written exactly in the {where}{hint}"


def _able(model: Model, target: int, recipe: Recipe) -> list[str]:
    """The methods that could be written, at their default knobs."""
    rows = (method_row(model, name, "", target, recipe) for name in scaling.METHODS)
    return [row.method for row in rows if row.form]


def method_row(model: Model, method: str, chosen: str, target: int, recipe: Recipe) -> MethodRow:
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
