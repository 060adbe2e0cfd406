"""The plan for rotary embeddings, in the order in which it is made."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ropext import families
from ropext.carriers import Carrier, ConfigCarrier
from ropext.errors import InputError, NotExpressible, UnsupportedModel, UsageError
from ropext.families import Model
from ropext.forms import same
from ropext.loaders import LoaderReading
from ropext.options.extend import KNOBS, Extend, knobs_for, resolve_target
from ropext.options.fields import flag
from ropext.planning.attempts import Attempts, attempt_of
from ropext.planning.memory import cache_bytes
from ropext.planning.methods import (
    default_method,
    needs_no_scaling,
    plan_site,
    recommend,
    require_lasting,
    require_motion,
    rows_of,
    ways_of,
)
from ropext.planning.plan import (
    LENGTH_ONLY,
    WRONG,
    ExtensionPlan,
    Plan,
    Way,
    newest,
    too_far,
    why_unfolded,
)
from ropext.rope import RopeSite, Spectrum
from ropext.scaling import self_extend
from ropext.scaling.self_extend import FoldOptions

# Angles are float32 in stock transformers: position * 2^-24 radians of rounding on the fastest
# pair. From here on the error passes 1e-2 (measured: 2.5e-2 at 1M positions).
FLOAT32_MATTERS = 2**18
# What speaks of a spectrum, which Self-Extend leaves alone.
OF_SPECTRA = (
    *("attention_factor", "temperature", "like", "original_context"),
    *("from_original", "for_loaders"),
)
EVEN_SO = (
    "; extend and its like ask for --even-so, or for --length-only, which raises the length alone"
)


def composed(
    recipe: Extend, main: RopeSite, readings: Iterable[LoaderReading], ways: Sequence[Way]
) -> Iterator[str]:
    """That two scalings together become a longrope, who does not read that, and the one-step way.

    A temperature alone, or a plain embedding, is composed with nothing.
    """
    others = [f"{r.loader} ({r.verdict})" for r in newest(readings) if r.verdict in WRONG]
    composes = main.params["rope_type"] == "longrope" and not main.rope.is_geometric
    if recipe.from_original or recipe.length_only or not composes or not others:
        return
    sentence = (
        "[composed] the model is scaled already, and both scalings together are written as a "
        f"longrope, which not every loader reads as planned: {', '.join(others)}"
    )
    if len(ways) == 2 and ways[1].form not in (None, "longrope"):
        sentence += f"; in one step, {ways[1].condition}: {ways[1].options}"
    yield sentence


def _what_moves(recipe: Extend, main: RopeSite, context: int, target: int) -> Iterator[str]:
    """Say which pairs do not move, or stop."""
    if recipe.length_only:
        yield (
            "[length-only] the spectrum is untouched: only the stated length goes from "
            f"{context:,} to {target:,}, for a model that reads further than it states, or for a "
            "scaling that is set at run time"
        )
    elif main.wanted.inv_freq == main.rope.spectrum.inv_freq:
        yield "[still] no pair moves: only the stated length grows"
    pairs = zip(main.wanted.inv_freq, main.rope.spectrum.inv_freq, strict=True)
    still = [i for i, (turn, before) in enumerate(pairs) if not turn and before]
    if still and len(still) < main.rope.dim // 2:
        named = ", ".join(map(str, still))
        yield f"[still] pairs {named} stand still from now on: no position reaches them"
    elif still:
        yield (
            "[still] all pairs stand still from now on: the model reads without positions, as "
            "DroPE does after training without them"
        )


def warnings_of(
    carrier: Carrier, recipe: Extend, sites: tuple[RopeSite, ...], context: int, target: int
) -> tuple[str, ...]:
    """What a user must know before relying on the result; each a sentence."""
    model = carrier.model
    main = next(site for site in sites if site.scaled)
    needed = "" if recipe.even_so or recipe.length_only else EVEN_SO
    out = [*model.notes, *(obstacle + needed for obstacle in model.obstacles)]
    out += _what_moves(recipe, main, context, target)
    if doubt := too_far(recipe, context, target):
        out.append(f"[too-far] {doubt}")
    if recipe.from_original and target <= model.context:
        out.append(reached(target, model.context))
    if main.wanted.attention_factor != main.rope.attention_factor:
        if model.temperature == "rotated channels":
            out.append(
                "[temperature] the attention factor acts on the rotated channels only, not on "
                "whole logits as in YaRN's paper: this family rotates a part of each head"
            )
        if model.temperature == "cancelled":
            out.append(
                "[temperature] the attention factor has no effect: this family normalises queries "
                "and keys after the rotation"
            )
    for keys in (("attn_factor",), ("short_mscale", "long_mscale")):
        if keys[0] in main.params and carrier.in_transformers:
            out.append(
                f"[unknown-keys] transformers will warn of unrecognized keys ({', '.join(keys)}), "
                "under which other loaders read the attention factor"
            )
    if carrier.three_axes:
        out += mrope_warnings(model, main, target > context)
    softmax = model.site(main.label).rope.softmax_factor
    if softmax != main.wanted.softmax_factor:
        out.append(
            f"[softmax] the softmax factor goes from {softmax:.6g} to "
            f"{main.wanted.softmax_factor:.6g} (mscale_all_dim {main.rope.mscale_all_dim:g})"
        )
    if target > FLOAT32_MATTERS:
        out.append(
            f"[float32] at {target} tokens the float32 angles of stock transformers are off by up "
            f"to {target * 2.0**-25:.1e} rad on the fastest pair"
        )
    if main.wanted.short_inv_freq is not None:
        out.append(
            "[two-sets] two sets of factors: a sequence that grows past "
            f"{main.params['original_max_position_embeddings']} tokens while keys are cached mixes "
            "both; only models that refill the cache there (Phi-3) are right"
        )
    return tuple(out)


# vLLM 0.32 and 0.33 build these with a table of one position a token; of every other mRoPE they
# take four times the original length for the table, and so for the ramp of a yarn (0.11 to 0.33:
# its rotary code was run; 0.32 built the models, 0.33 was read).
VLLM_ONE_POSITION = ("qwen3_vl", "qwen3_5")


def mrope_warnings(model: Model, main: RopeSite, longer: bool) -> Iterator[str]:
    """What three axes of positions mean for the form and for the factor."""
    form = main.params["rope_type"]
    if form not in ("default", "yarn"):
        yield (
            f"[mrope] vLLM and SGLang read mrope_section with a theta or a yarn alone: as {form} "
            "they turn images as if they were text"
        )
    if form == "yarn":
        one = model.text_type.startswith(VLLM_ONE_POSITION)
        yield (
            "[mrope] vLLM up to 0.30 counts the ramp of a yarn from 4 times the original length in "
            "mRoPE, from 0.32 on as stock; it reads attn_factor up to 0.21, attention_factor from "
            "0.30 on"
            if one
            else "[mrope] vLLM (0.11 to 0.33) counts the ramp of a yarn from 4 times the original "
            "length in this mRoPE, and no spelling makes it the authors'; --method ntk is read "
            "exactly"
        )
    if longer:
        yield (
            "[mrope] an image takes fewer positions than tokens in mRoPE, and a factor counts "
            "positions: with images a smaller one reaches the same length (Qwen3-VL's authors "
            "take 3 for 262,144 -> 1,000,000 tokens)"
        )


def reached(target: int, context: int) -> str:
    """That a target from the original context is not beyond what the model reads today."""
    if target == context:
        return (
            f"[not-longer] the target is the {target} tokens that the model reads today: this "
            "keeps its length and replaces its scaling"
        )
    return (
        f"[not-longer] the target of {target} tokens is below the {context} that the model reads "
        "today: from its original context this is a shorter window"
    )


def make_plan(
    config: Mapping[str, Any],
    recipe: Extend,
    name: str = "MODEL",
    carries: Callable[[Model], Carrier] = ConfigCarrier,
    origin: Mapping[str, Any] | None = None,
) -> Plan:
    """The plan for a config dict; raises where the request cannot be carried exactly. `carries`
    makes what carries it, of the model as it is read; `origin` is the config to extend from, where
    that is recorded and `config` does not say it."""
    read = dict(origin or config)
    model = families.read(read, context=recipe.context, original=recipe.original_context)
    carrier = carries(model)
    context = _context(model, recipe)
    _require_length(model, recipe)
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
    others = recipe.changed(length_only=False)  # what the methods would do
    rows = rows_of(attempts, others, method)
    main = next(site for site in sites if site.scaled)
    readings = attempts.readings(model.scaled_sites[0], attempt)
    ways = ways_of(attempts, recipe, method)
    warnings = warnings_of(carrier, recipe, sites, context, target)
    authors = families.recipe_of(model)
    notes = tuple[str, ...]()
    if authors is not None and authors.card is not None and recipe.length_only:
        speaks = target > authors.card
    else:
        speaks = authors is not None and not recipe.length_only
    if authors is not None and speaks:
        said = authors.against(model, method, context, target)
        if authors.agrees(method, context, target):
            notes = (said,)
        else:
            warnings = (f"[published] {said}", *warnings)
        if authors.contradiction:
            warnings = (*warnings, f"[disputed] {authors.contradiction}")
    return Plan(
        name=name,
        carrier=carrier,
        recipe=recipe,
        method=method,
        knobs=asdict(knobs) if knobs else {},  # type: ignore[call-overload]
        context=context,
        target=target,
        sites=sites,
        config=written,
        edits=carrier.edits(main, target, config, written),
        methods=rows,
        recommendation=recommend(attempts, others, rows),
        warnings=(*warnings, *composed(recipe, main, readings, ways)),
        notes=notes,
        readings=readings,
        ways=ways,
        **_of_model(carrier, target),
    )


def _leaves_the_spectrum(model: Model, recipe: Extend, target: int) -> bool:
    """Whether nobody asks for a method, and none is needed: no pair needs one, or the authors'
    card reaches the target already."""
    authors = families.recipe_of(model)
    understated = authors is not None and authors.understates(model.context, target)
    if not (understated or needs_no_scaling(model)) or model.obstacles:
        return False
    given = [recipe.method, recipe.attention, *(getattr(recipe, name) for name in KNOBS)]
    return not recipe.from_original and all(value is None for value in given)


def _of_model(carrier: Carrier, target: int) -> dict[str, Any]:
    """What a plan tells of its model; no task of a composite, which does more than text."""
    model = carrier.model
    task = "text-generation" if model.text_type == model.model_type else ""
    task = "fill-mask" if model.masked_lm else task
    kv_cache_bytes = cache_bytes(carrier, target)
    return {"obstacles": model.obstacles, "kv_cache_bytes": kv_cache_bytes, "task": task}


def make_folded_plan(
    config: Mapping[str, Any], recipe: Extend, name: str, options: FoldOptions
) -> ExtensionPlan:
    """Plan window and group for a config that rotates."""
    given = [key for key in OF_SPECTRA if getattr(recipe, key) not in (None, False, ())]
    if given:
        raise UsageError(
            f"{flag(given[0])} is not for {self_extend.NAME}, which keeps the spectrum"
        )
    model = families.read(dict(config), context=recipe.context)
    spectra = tuple(site.rope.spectrum.inv_freq for site in model.scaled_sites)
    if why := why_unfolded(model):
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


def _read_again(written: dict[str, Any], method: str, wanted: Mapping[str, Spectrum]) -> None:
    """The new config stays within the ranges that ropext itself reads, and says what is wanted."""
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
