"""Make the plan for rotary embeddings."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from ropext import families, scaling
from ropext.base.errors import InputError, NotExpressible, UnsupportedModel, UsageError
from ropext.families import Model
from ropext.options.extend import KNOBS, Extend, knobs_for, resolve_target
from ropext.options.fields import flag
from ropext.planning.carrier import Carrier
from ropext.planning.methods import (
    LENGTH_ONLY,
    Attempts,
    attempt_of,
    default_method,
    needs_no_scaling,
    plan_site,
    require_lasting,
    require_motion,
)
from ropext.planning.plan import ExtensionPlan, Plan, why_unfolded
from ropext.planning.warnings import warnings_of
from ropext.scaling import self_extend
from ropext.scaling.forms import longrope_attention, same
from ropext.scaling.rope import Spectrum
from ropext.scaling.self_extend import FoldOptions

# LongRoPE took LLaMA2 from 4k to 2,048k (Ding et al. 2024, table 4): nobody went further.
FARTHEST = 512
# What speaks of a spectrum, which Self-Extend leaves alone.
OF_SPECTRA = (
    "attention_factor",
    "temperature",
    "like",
    "original_context",
    "from_original",
    "for_loaders",
)


def make_plan(
    config: Mapping[str, Any],
    recipe: Extend,
    name: str = "MODEL",
    carries: Callable[[Model], Carrier] = Carrier,
    read: Callable[[int | None, int | None], Model] | None = None,
) -> Plan:
    """Return the plan for a config dict; raise if the request cannot be carried exactly.

    `carries` makes the carrier of a model. `read` returns the model for a context and an original
    length, if it is not to be read from this config.
    """
    if read is None:
        read = partial(families.read, dict(config))
    model = read(recipe.context, recipe.original_context)
    carrier = carries(model)
    context = _context(model, recipe)
    target = resolve_target(recipe, context)
    if _leaves_the_spectrum(model, recipe, target):
        recipe = recipe.changed(length_only=True)
    attempts = Attempts(carrier, target)
    method = LENGTH_ONLY
    knobs = None
    if recipe.length_only:
        require_lasting(model, target)
    else:
        method = recipe.method or default_method(attempts, recipe)
        knobs = knobs_for(recipe, method)
        require_motion(attempts, attempt_of(recipe, method, knobs), recipe)
    attempt = attempt_of(recipe, method, knobs)
    sites = tuple(plan_site(attempts, site, attempt, recipe) for site in model.sites)
    params = {site.label: site.params for site in sites if site.scaled}
    written = families.write(dict(config), model, params, target)
    _read_again(written, method, {site.label: site.wanted for site in sites})
    main = next(site for site in sites if site.scaled)
    task = ""  # as the hub names it: a composite does more than text
    if model.masked_lm:
        task = "fill-mask"
    elif model.text_type == model.model_type:
        task = "text-generation"
    authors = families.recipe_of(model)
    # A length alone says nothing against authors who state it themselves.
    if authors is not None and recipe.length_only and target <= (authors.card or target):
        authors = None
    plan = Plan(
        name=name,
        carrier=carrier,
        model=model,
        authors=authors,
        words=carrier.words,
        attempts=attempts,
        attempt=attempt,
        recipe=recipe,
        method=method,
        knobs=asdict(knobs) if knobs else {},  # type: ignore[call-overload]
        context=context,
        target=target,
        sites=sites,
        config=written,
        edits=carrier.edits(main, target, config, written),
        warnings=(),
        obstacles=model.obstacles,
        task=task,
        method_source=scaling.source_of(method),
        doubt=_too_far(recipe, context, target),
        training="" if model.masked_lm and carrier.in_transformers else carrier.words.training,
    )
    notes = tuple[str, ...]()
    is_trained = bool(recipe.finetune or recipe.like or recipe.length_only)
    if authors is not None and authors.agrees(plan):
        notes = (authors.against(plan),)
        is_trained = True
    if not is_trained:
        plan = replace(plan, trained=max(context, model.context))
    notes += tuple(filter(None, [_no_attention_factor(plan)]))
    return replace(plan, warnings=warnings_of(plan), notes=notes)


def _too_far(recipe: Extend, context: int, target: int) -> str:
    """Return a question for a planned factor that nobody has reached. Return "" for any other
    factor."""
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


def _no_attention_factor(plan: Plan) -> str:
    """Return the note of a plan on the attention factor that LongRoPE's code would take, if neither
    the file of pair factors nor an option gives one."""
    rope = plan.main.rope
    if plan.method != "longrope" or plan.recipe.attention is not None or rope.is_scaled:
        return ""
    theirs = longrope_attention(plan.target / rope.context, rope.context)
    return (
        "the file of pair factors has no attention factor, so ropext takes 1; LongRoPE's code "
        f"takes √(1 + ln {plan.factor:g} / ln {rope.context}): --attention-factor {theirs:.6g}"
    )


def _leaves_the_spectrum(model: Model, recipe: Extend, target: int) -> bool:
    """Return whether a request to `extend` has no method and needs none: no pair needs scaling, or
    the authors' card reaches the target already."""
    authors = families.recipe_of(model)
    understated = authors is not None and authors.understates(model.context, target)
    if not (understated or needs_no_scaling(model)) or model.obstacles:
        return False
    given = [recipe.method, recipe.attention, *(getattr(recipe, name) for name in KNOBS)]
    return not recipe.from_original and all(value is None for value in given)


def make_folded_plan(
    config: Mapping[str, Any], recipe: Extend, name: str, options: FoldOptions
) -> ExtensionPlan:
    """Return the plan of Self-Extend, a window and a group, for a config that rotates."""
    given = [key for key in OF_SPECTRA if getattr(recipe, key) not in (None, False, ())]
    if given:
        raise UsageError(
            f"{flag(given[0])} is not for {self_extend.NAME}, which keeps the spectrum"
        )
    model = families.read(dict(config), context=recipe.context)
    spectra = tuple(site.rope.spectrum.inv_freq for site in model.scaled_sites)
    if why := why_unfolded(Carrier(model)):
        raise UnsupportedModel(f"{self_extend.NAME}: {name} has {why}")
    target = resolve_target(recipe, model.context)
    how = self_extend.fold(model.context, target, options, spectra)
    return ExtensionPlan(
        name=name,
        recipe=recipe,
        method=self_extend.NAME,
        knobs=how.knobs,
        context=model.context,
        target=target,
        sites=model.sites,
        config=dict(config),
        edits=(),
        warnings=(),
        fold=how,
        uncarried=self_extend.UNCARRIED,
        facts_json={"knobs": how.knobs},
    )


def _read_again(written: dict[str, Any], method: str, wanted: Mapping[str, Spectrum]) -> None:
    """Raise NotExpressible if ropext cannot read the planned config, or reads another spectrum from
    it."""
    try:
        read = families.as_read(written)
        for site in read.sites:
            if site.label in wanted and not same(site.rope.spectrum, wanted[site.label]):
                raise NotExpressible(
                    f"--method {method}: no spelling of {read.text_type} keeps this spectrum: its "
                    "config would be read as another"
                )
    except InputError as error:
        raise NotExpressible(
            f"--method {method}: the result leaves the range of numbers that a config may hold: "
            f"{error}"
        ) from None


def _context(model: Model, recipe: Extend) -> int:
    """Return the context from which the factor of a plan counts; raise UsageError if the request
    needs a length and has none."""
    asks = model.asks_original if recipe.from_original else model.asks_context
    if asks:
        raise UsageError(asks)
    scaled = [site.rope for site in model.sites if site.scaled]
    if not scaled:
        raise UnsupportedModel(
            f"{model.model_type}: none of its rotary embeddings sits in a full-attention layer, so "
            "there is nothing to extend"
        )
    original = model.scaled_sites[0].rope.original_context
    if recipe.factor is None and recipe.target is None and original < model.context:
        raise UsageError(  # a scaled model is not simply to be scaled again
            f"give a length: the config states {model.context} tokens, "
            f"{model.context / original:g}× its original {original}; --target N --from-original "
            "scales once from the original, --target N or --factor N scales on from now"
        )
    return scaled[0].original_context if recipe.from_original else model.context
