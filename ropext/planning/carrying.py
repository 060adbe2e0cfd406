"""Which stock rope dict carries what a method asks for, in this family and these loaders."""

from collections.abc import Callable, Sequence

from ropext import families, forms, loaders, scaling
from ropext.errors import NotExpressible, UsageError, listed
from ropext.families import Model, Site
from ropext.options.extend import Extend, knobs_for
from ropext.planning.plan import (
    WRONG,
    MethodRow,
    PlannedSite,
    by_options,
    nearest_form,
    newest,
)
from ropext.rope import Rope, Spectrum, explain, turns


def _extended(site: Site, recipe: Extend) -> Rope:
    return site.rope.original() if recipe.from_original else site.rope


def plan_site(
    model: Model, site: Site, method: str, target: int, knobs: object, recipe: Extend
) -> PlannedSite:
    if not site.scaled:
        return PlannedSite(site.label, site.rope, site.rope.spectrum, site.params, False)
    rope = _extended(site, recipe)
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

        raise NotExpressible(_why_not(model, method, target, recipe, carried)) from None
    return PlannedSite(site.label, rope, wanted, params, True)


def _moves(rope: Rope, wanted: Spectrum) -> bool:
    return wanted.inv_freq != rope.spectrum.inv_freq


def require_motion(model: Model, method: str, target: int, knobs: object, recipe: Extend) -> None:
    """Refuse a method that leaves every pair as it is, unless a temperature was asked for too."""
    ropes = [_extended(site, recipe) for site in model.scaled_sites]
    made = [scaling.scale(rope, method, target, knobs, recipe.attention) for rope in ropes]
    pairs = zip(ropes, made, strict=True)
    moved = any(_moves(rope, scaling.compose(rope, own, target)) for rope, own in pairs)
    if moved or recipe.attention is not None or recipe.even_so:
        return
    fewest = min(turn for rope in ropes for turn in turns(rope.spectrum, rope.context) if turn)
    able = _able(model, target, recipe)
    hint = f"; these methods move some: {', '.join(able)}" if able else ""
    raise NotExpressible(
        f"--method {method} moves no pair of this model, each of which turns at least {fewest:.4g}"
        f" times in its {ropes[0].context} tokens, so that only the stated length would grow{hint}"
        " (--even-so goes on all the same)"
    )


def _exact_in(model: Model, names: tuple[str, ...], params: forms.Params, even_so: bool) -> bool:
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
        kept = families.keep_query_scales(site.params, params)
        if not forms.same(forms.read(kept, rope, target), wanted):
            return False
        params = families.as_written(model.text_type, params, rope)
        return _exact_in(model, recipe.for_loaders, params, recipe.even_so)

    found = forms.carry(rope, wanted, target, native, accept)
    return families.as_written(model.text_type, found, rope)


def _why_not(
    model: Model,
    method: str,
    target: int,
    recipe: Extend,
    carried: Callable[[Extend], forms.Params | None],
) -> str:
    """Which part of the request nothing carries, and what would be carried."""
    names = recipe.for_loaders
    trusted = carried(recipe.changed(even_so=True))
    if trusted is not None:
        unsure = [name for name in names if not _exact_in(model, (name,), trusted, False)]
        return (
            f"--for {','.join(unsure)}: how {_they(unsure, 'reads')} {trusted['rope_type']} scaling"
            f" in {model.model_type} was not measured; --even-so writes it all the same"
        )
    asked = f"--method {method}"
    if recipe.attention is not None:
        asked += f" with an attention factor of {recipe.attention:g}"
    where = f"rope types that {model.text_type} computes ({', '.join(model.forms)})"
    if names:
        where += f" and that {_they(names, 'reads')} exactly (--for {','.join(names)})"
    able = _able(model, target, recipe)
    hint = f"; these methods can: {', '.join(able)}" if able else ""
    if not able and recipe.attention is not None:
        able = _able(model, target, recipe.changed(attention_factor=None, temperature=None))
        hint = f"; without that factor these methods can: {', '.join(able)}" if able else ""
    if not able:
        hint = _from_original(model, method, target, recipe)
    free = carried(recipe.changed(for_loaders=()))
    if free is not None and not able and not hint:
        near = {name: nearest_form(model, name, free, target) for name in names}
        for options, readers in by_options(near).items():
            if options:
                hint += f"; {options} is the nearest form that {_they(readers, 'reads')} exactly"
    return f"{asked} cannot be written exactly in the {where}{hint}"


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
    found = newest(
        loaders.readings(
            model.text_type, params, model_type=model.model_type, length=target, target=target
        )
    )
    return MethodRow(
        method,
        explanation,
        params["rope_type"],
        attention_factor=wanted.attention_factor,
        read_by=tuple(r.loader for r in found if r.verdict == "same"),
        misread_by=tuple(r.loader for r in found if r.verdict in WRONG),
    )
