"""The order in which a plan is made."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ropext import families, loaders, scaling
from ropext.errors import InputError, NotExpressible, UnsupportedModel, UsageError
from ropext.families import Model
from ropext.options.extend import Extend, knobs_for, resolve_target
from ropext.planning.carrying import method_row, plan_site, require_motion
from ropext.planning.plan import MethodRow, Plan
from ropext.planning.recommending import recommend
from ropext.planning.warnings import composed, warnings_of


def make_plan(config: Mapping[str, Any], recipe: Extend, name: str = "MODEL") -> Plan:
    """The plan for a config dict; raises where the request cannot be carried exactly."""
    model = families.read(dict(config), context=recipe.context, original=recipe.original_context)
    context = _context(model, recipe)
    _require_length(model, recipe)
    target = resolve_target(recipe, context)
    method = recipe.method or "yarn"
    knobs = knobs_for(recipe, method)
    require_motion(model, method, target, knobs, recipe)
    sites = tuple(plan_site(model, site, method, target, knobs, recipe) for site in model.sites)
    written = families.write(
        dict(config), model, {s.label: s.params for s in sites if s.scaled}, target
    )
    _read_again(written, method)

    def rows(wish: Extend, chosen: str = "") -> tuple[MethodRow, ...]:
        return tuple(method_row(model, each, chosen, target, wish) for each in scaling.METHODS)

    table = rows(recipe, method)
    main = next(site for site in sites if site.scaled)
    readings = loaders.readings(
        model.text_type, main.params, model_type=model.model_type, length=target, target=target
    )
    warnings = warnings_of(model, recipe, sites, context, target)
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
        methods=table,
        recommendation=recommend(
            model, recipe, table, lambda: rows(recipe.changed(from_original=True))
        ),
        warnings=(*warnings, *composed(model, recipe, main, method, target, readings)),
        readings=readings,
    )


def _require_length(model: Model, recipe: Extend) -> None:
    """Where nothing says how far, a scaled model is not simply to be scaled again."""
    original = model.scaled_sites[0].rope.original_context
    if recipe.factor is None and recipe.target is None and original < model.context:
        raise UsageError(
            f"say how far: the model reads {model.context} tokens by its config, "
            f"{model.context / original:g}x its original {original}; --target N --from-original "
            "gets there in one step, --target N or --factor N goes on from what it reads"
        )


def _read_again(written: dict[str, Any], method: str) -> None:
    """The new config stays within the ranges that ropext itself reads."""
    try:
        families.as_read(written)
    except InputError as error:
        raise NotExpressible(
            f"--method {method}: the result leaves the range of numbers that a config may hold: "
            f"{error}"
        ) from None


def require_help(plan: Plan) -> None:
    """Raise where scaling cannot help this model and the user did not ask for it all the same."""
    if plan.model.obstacles and not plan.recipe.even_so:
        raise UnsupportedModel(
            f"{plan.name}: {'; '.join(plan.model.obstacles)}; --even-so extends it all the same"
        )


def _context(model: Model, recipe: Extend) -> int:
    """The context that the factor counts from; a length that nothing says is asked for."""
    asks = model.asks_original if recipe.from_original else model.asks_context
    if asks:
        raise UsageError(asks)
    scaled = [site.rope for site in model.sites if site.scaled]
    if not scaled:
        raise UnsupportedModel(
            f"{model.model_type}: none of its rotary embeddings sits in a full-attention layer, so "
            "there is nothing to extend"
        )
    return scaled[0].original_context if recipe.from_original else model.context
