"""Each method for a model: which stock rope dict carries what it asks for, and which method to take
where none is named."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ropext import families, forms, loaders, scaling
from ropext.errors import NotExpressible, UsageError, listed
from ropext.families import Model
from ropext.options.extend import KNOBS, Extend, knobs_for
from ropext.options.fields import flag
from ropext.planning.plan import (
    LENGTH_ONLY,
    WRONG,
    MethodRow,
    Recommendation,
    Way,
    by_options,
    nearest_form,
    newest,
    readings_of,
)
from ropext.rope import Rope, RopeSite, Spectrum, explain, turns


def _extended(site: RopeSite, recipe: Extend) -> Rope:
    return site.rope.original() if recipe.from_original else site.rope


def plan_site(
    model: Model, site: RopeSite, method: str, target: int, knobs: object, recipe: Extend
) -> RopeSite:
    if not site.scaled:
        return site
    rope = _extended(site, recipe)
    wanted: Spectrum = rope.spectrum
    native: forms.Params | None
    if recipe.length_only:
        native = _stated_anew(site, target)
    else:
        scaled = scaling.scale(rope, method, target, knobs, recipe.attention)
        wanted = scaling.compose(rope, scaled, target)
        native = scaling.native(rope, scaled)
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
    return replace(site, rope=rope, wanted=wanted, params=params)


def _stated_anew(site: RopeSite, target: int) -> forms.Params:
    """The rope dict as it stands, beside a stated length of `target`.

    Of a longrope vLLM and Phi-3's own class derive the attention factor from the two lengths, so
    that the dict has their ratio, and an attention factor that is another has to be written.
    """
    params = site.params
    if params["rope_type"] != "longrope" or params.get("mscale_all_dim"):
        return params  # DeepSeek's softmax reads the factor itself
    return params | {"factor": target / params["original_max_position_embeddings"]}


def needs_no_scaling(model: Model) -> bool:
    """Whether every pair that turns does so as often as YaRN's fast ones, which no ramp moves: it
    showed every phase in training many times over, and shows no new one further on."""
    return _fewest_turns(model) >= forms.BETA_FAST


def _fewest_turns(model: Model) -> float:
    """How often the slowest pair turns inside the context; 0 where none turns."""
    ropes = [site.rope for site in model.scaled_sites]
    turning = [turn for rope in ropes for turn in turns(rope.spectrum, rope.context) if turn]
    return min(turning, default=0.0)


def require_lasting(model: Model, target: int) -> None:
    """Refuse the length alone where the scaling goes by the stated length.

    Stock's dynamic turns plainly up to max_position_embeddings L, and an input of T tokens beyond
    by theta (F T/L - F + 1)^(d/(d-2)).
    """
    for site in model.scaled_sites:
        params = site.params
        rope = site.rope
        if params["rope_type"] != "dynamic" or params.get("alpha") or rope.dim == 2:
            continue
        factor = params["factor"]
        stated = model.stated_context
        grown = factor * target / stated - factor + 1
        theta = rope.theta * grown ** (rope.dim / (rope.dim - 2))
        raise NotExpressible(
            f"--length-only: the model's dynamic scaling begins at the stated length, so that "
            f"another one would switch it off between {stated} and {target} tokens; --method abf "
            f"--theta {theta:.9g} writes what it computes at {target} tokens"
        )


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
    hint += "; --length-only raises that length, which is all that is needed" * (
        needs_no_scaling(model) and not recipe.from_original
    )
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
    site: RopeSite,
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
        misread = _misread(model, names, carried(recipe.changed(for_loaders=())))
        if misread:
            form = trusted["rope_type"]
            other = f"--even-so writes {form} scaling instead, which was not measured there"
            return f"--method {method} --for {','.join(names)}: {misread}; {other}"
        unsure = [name for name in names if not exact((name,), trusted, False)]
        said = (
            f"--for {','.join(unsure)}: how {_they(unsure, 'reads')} {trusted['rope_type']} scaling"
            f" in {model.model_type} was not measured"
        )
        if not model.container:
            kind = model.model_type
            halves = [
                loaders.unmeasured(name, model.text_type, trusted, model_type=kind)
                for name in unsure
            ]
            said += f" ({'; '.join(halves)})"
        return f"{said}; --even-so writes it anyway"
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


def _misread(model: Model, names: Sequence[str], params: forms.Params | None) -> str:
    """Say which of the loaders of --for is known to read this dict as something else, if any is."""
    if params is None or model.container:
        return ""
    for name in names:
        why = loaders.misread(name, model.text_type, params, model_type=model.model_type)
        if why:
            return why
    return ""


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
    params = model.scaled_sites[0].params
    kept = _kept(params) if ITS_METHOD.get(params["rope_type"]) == first else {}
    if kept:
        wish = recipe.changed(method=first, from_original=True, factor=None, target=target, **kept)
        carried = method_row(model, first, first, target, wish).form is not None
        options += _as_flags(kept) if carried else f" (without its own{_as_flags(kept)})"
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


# The method whose own form a scaling has; of another's pair factors nobody has the file.
ITS_METHOD = {"yarn": "yarn", "llama3": "llama3", "linear": "pi", "dynamic": "dynamic"}


def ways_of(model: Model, recipe: Extend, method: str, target: int) -> tuple[Way, ...]:
    """Both ways to extend a model that is scaled already: on from what it turns now, or in one step
    from before its scaling. Which is right, only its owner knows."""
    if recipe.length_only or not any(site.rope.is_scaled for site in model.scaled_sites):
        return ()
    on = recipe.changed(from_original=False)
    first = on if recipe.from_original else recipe
    name = "by-parts" if recipe.from_original else method
    row = method_row(model, name, method, target, first)
    again = "its weights were trained since that scaling, or nobody knows"
    ways = [_way(f"--target {target} --method {name}", again, row)]
    if model.asks_original:
        return tuple(ways)
    options, row = _in_one_step(model, recipe, target)
    condition = "its weights were not trained since that scaling"
    if model.scaled_sites[0].params["rope_type"] == "longrope":
        condition += "; its own pair factors are dropped"
    ways.append(_way(options, condition, row))
    return tuple(ways)


def _way(options: str, condition: str, row: MethodRow) -> Way:
    return Way(options, f"where {condition}", row.form, row.read_by, row.misread_by)


def _in_one_step(model: Model, recipe: Extend, target: int) -> tuple[str, MethodRow]:
    """The options that scale the model from its original context, with every key of its own
    scaling, and what they give."""
    params = model.scaled_sites[0].params
    own = ITS_METHOD.get(params["rope_type"], "yarn")
    plain: dict[str, Any] = dict.fromkeys((*KNOBS, "attention_factor", "temperature"))
    for name in dict.fromkeys((own, "yarn", "by-parts")):
        kept = _kept(params) if name == own else {}
        wish = plain | kept | {"method": name, "from_original": True, "factor": None}
        row = method_row(model, name, name, target, recipe.changed(**wish, target=target))
        if row.form is not None:
            break
    return f"--from-original --target {target} --method {name}{_as_flags(kept)}", row


def _as_flags(options: Mapping[str, Any]) -> str:
    """Options as one types them after others."""
    words = ""
    for key, value in options.items():
        words += f" --no-{key}" if value is False else f" {flag(key)} {value:g}"
    return words


def _kept(params: forms.Params) -> dict[str, Any]:
    """The options that say the keys of a scaling which are not the default ones."""
    kind = params["rope_type"]
    if kind not in ITS_METHOD:
        return {}
    method = scaling.find(ITS_METHOD[kind])
    defaults = method.knobs()
    kept: dict[str, Any] = {}
    for name in method.knob_names():
        value = params.get(name)
        if value is not None and value != getattr(defaults, name):
            kept[name] = value
    attention = params.get("attention_factor")
    if kind == "yarn" and attention is not None:
        usual = forms.default_attention({**params, "attention_factor": None})
        if not math.isclose(attention, usual, rel_tol=forms.EXACT):
            kept["attention_factor"] = attention
    return kept


# Below this many pairs a ramp has too few steps to act on: on a model with four pairs llama3 and
# dynamic lose most inside the window, ntk least (benchmarks/results/untrained-2026-11-22.md).
FEW_PAIRS = 8
UNKNOWN = ". Its cost on short inputs is unknown for this model; measure it with --measure DATA"
# YaRN loses least beyond the window (benchmarks/results/real-model-2026-11-22.md); docs/methods.md
# has the measured cases in which llama3 is the better one.
PREFERRED = ("yarn", "llama3", "ntk", "pi")
PREFERRED_MROPE = ("yarn", "ntk")


@dataclass(frozen=True)
class _Case:
    """What the model or the request is like, and the method that this speaks for."""

    said: str
    method: str


def recommend(
    model: Model,
    recipe: Extend,
    target: int,
    rows: Sequence[MethodRow],
    from_original: Callable[[], Sequence[MethodRow]],
) -> Recommendation:
    """The first case that applies and whose method can be written; of a scaled model where none
    can, the first from its original spectrum (whose rows `from_original` makes)."""
    if model.obstacles:
        said = "scaling cannot help this model, as the warnings say"
        return Recommendation("none", False, f"{said}; --length-only raises its length")
    authors = families.recipe_of(model)
    if authors is not None and authors.understates(model.context, target):
        return Recommendation(LENGTH_ONLY, False, authors.why_length_alone)
    if needs_no_scaling(model) and recipe.attention is None and not recipe.from_original:
        return Recommendation(LENGTH_ONLY, False, _why_no_scaling(model))
    cases = _cases(model, recipe)
    first = _first(model, recipe, cases, rows)
    if first is not None:
        return Recommendation(first[0], recipe.from_original, first[1])
    scaled = any(site.rope.is_scaled for site in model.scaled_sites)
    if scaled and not recipe.from_original and not model.asks_original:
        first = _first(model, recipe, _unscaled_cases(model, recipe), from_original())
        if first is not None:
            why = f"nothing can be written{_for(recipe)} that scales its current wavelengths"
            return Recommendation(first[0], True, f"{why}; {first[1]}")
    return Recommendation("none", False, f"no method can be written exactly{_for(recipe)}")


def _why_no_scaling(model: Model) -> str:
    fewest = _fewest_turns(model)
    context = model.context
    return (
        f"no pair needs scaling: each turns at least {fewest:,.0f} times in the {context:,} tokens "
        "of training, so that none meets a phase further on that it never showed. How well the "
        "model reads there is unknown; measure it with ropext eval"
    )


def _for(recipe: Extend) -> str:
    return f" for {listed(recipe.for_loaders)}" if recipe.for_loaders else ""


def _three_axes(model: Model) -> bool:
    return model.mrope and not model.container


def _cases(model: Model, recipe: Extend) -> list[_Case]:
    """Every case that applies, the most specific first."""
    cases = _unscaled_cases(model, recipe)
    scaled = any(site.rope.is_scaled for site in model.scaled_sites)
    if recipe.from_original or not scaled or _three_axes(model):
        return cases
    said = "the model is scaled already, and this goes on from its current wavelengths"
    return [_Case(said, method) for method in ("by-parts", *(case.method for case in cases))]


def _unscaled_cases(model: Model, recipe: Extend) -> list[_Case]:
    pairs = model.scaled_sites[0].rope.dim // 2
    windowed = any("sliding" in kind or "chunked" in kind for kind in model.layer_types)
    cases = []
    if windowed and len(model.sites) == 1 and not _three_axes(model):
        said = "windowed and full layers share one rope dict, so that both are scaled"
        cases.append(_Case(said, "by-parts"))
    if pairs < FEW_PAIRS:
        cases.append(_Case(f"only {pairs} pairs rotate, too few for a ramp", "ntk"))
    if recipe.attention is not None:
        cases.append(_Case("an attention factor of your own is carried by yarn", "yarn"))
    said = "it will be fine-tuned" if recipe.finetune else "without fine-tuning"
    if _three_axes(model):
        said += ", and it turns images by three axes (mRoPE), which vLLM and SGLang keep with a "
        said += "yarn or a theta alone"
    return [*cases, *(_Case(said, method) for method in _preferred(model))]


def _preferred(model: Model) -> tuple[str, ...]:
    return PREFERRED_MROPE if _three_axes(model) else PREFERRED


def _first(
    model: Model, recipe: Extend, cases: Sequence[_Case], rows: Sequence[MethodRow]
) -> tuple[str, str] | None:
    """Method and reason of the first case whose method can be written."""
    by_name = {row.method: row for row in rows}
    passed: dict[str, list[str]] = {}
    for case in cases:
        row = by_name[case.method]
        lost = _three_axes(model) and row.form not in ("default", "yarn")
        if row.form is None or lost:
            note = row.note or f"as {row.form} it loses mRoPE"
            passed.setdefault(note, []).append(row.method)
            continue
        others = [f"{listed(names)}: {note}" for note, names in passed.items()]
        said = "; ".join([case.said, *others, _readers(row)])
        return row.method, said + UNKNOWN * (not recipe.finetune)
    return None


def _readers(row: MethodRow) -> str:
    out = f"written as {'a theta' if row.form == 'default' else row.form}"
    if row.misread_by:
        return f"{out}, not read as planned by {listed(row.misread_by)}"
    if len(row.read_by) < 2:
        return f"{out}, measured in {' and '.join(row.read_by) or 'no loader'} alone"
    return f"{out}, read as planned by every loader that was measured"


def default_method(model: Model, recipe: Extend, target: int) -> str:
    """The first of those recommended that can be written (with --for, that every loader named reads
    exactly) and has the knobs that were given."""
    knobs = {name for name in KNOBS if getattr(recipe, name) is not None}

    def takes(method: str) -> bool:
        return knobs <= {*scaling.find(method).knob_names()}

    preferred = _preferred(model)
    cases = [case for case in _cases(model, recipe) if takes(case.method)]
    rows = [method_row(model, each, "", target, recipe) for each in scaling.METHODS]
    first = _first(model, recipe, cases, rows)
    return first[0] if first else next(filter(takes, preferred), preferred[0])
