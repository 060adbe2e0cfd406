"""Compute each method for a model and target: its spectrum, the stock rope dict that carries it,
and the engines that read it. Recommend the method to take if the user gives none.

`Attempts` computes each of these once, for all rows, ways and refusals that mention it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ropext import families, scaling
from ropext.base.errors import NotExpressible, UsageError, listed
from ropext.families import Model
from ropext.families.loaders import WRONG, LoaderReading, newest
from ropext.options.extend import KNOBS, Extend, knobs_for
from ropext.options.fields import flag
from ropext.planning.carrier import Carrier
from ropext.scaling import forms
from ropext.scaling.rope import Explanation, Rope, RopeSite, explain, turns

LENGTH_ONLY = "length-only"  # takes the place of a method


@dataclass(frozen=True)
class MethodRow:
    """A method's two numbers for this model and target; None if it needs an input of its own."""

    method: str
    explanation: Explanation | None
    form: str | None  # the rope type that would carry it; None if nothing can
    note: str = ""
    attention_factor: float = 1.0
    read_by: tuple[str, ...] = ()  # loaders that read it as planned, in their newest version ...
    misread_by: tuple[str, ...] = ()  # ... and loaders that were measured to misread it


@dataclass(frozen=True)
class Attempt:
    """The part of a request that decides the result of a method at a site."""

    method: str
    knobs: object  # the method's, frozen
    from_original: bool
    attention: float | None
    for_loaders: tuple[str, ...]
    even_so: bool


def attempt_of(recipe: Extend, method: str, knobs: object) -> Attempt:
    """Return the attempt that a request makes with a method."""
    return Attempt(
        method,
        knobs,
        recipe.from_original,
        recipe.attention,
        recipe.for_loaders,
        recipe.even_so,
    )


@dataclass(frozen=True)
class WantedSite:
    """The spectrum that a method wants at a site, and the method's own dict for it."""

    site: RopeSite  # with the embedding that is scaled, the wanted spectrum, and the dict as it was
    native: forms.Params | None

    @property
    def moves(self) -> bool:
        """Return whether the method makes any rotary pair of the site rotate otherwise than
        before."""
        return self.site.wanted.inv_freq != self.site.rope.spectrum.inv_freq


class Attempts:
    """The attempts for one model and target."""

    def __init__(self, carrier: Carrier, target: int) -> None:
        """Begin without attempts to reach the target; `carrier` is the place that would hold a
        result."""
        self.carrier = carrier
        self.model = carrier.model
        self.target = target
        self._wishes: dict[tuple[str, Attempt], WantedSite] = {}
        self._planned: dict[tuple[str, Attempt], RopeSite | None] = {}
        self._readings: dict[tuple[str, Attempt], tuple[LoaderReading, ...]] = {}

    def wish(self, site: RopeSite, attempt: Attempt) -> WantedSite:
        """Return the site with the spectrum that a method wants there, and the method's own rope
        dict; raise UsageError if the method cannot run so."""
        # Who reads the result does not change it.
        key = (site.label, replace(attempt, for_loaders=(), even_so=False))
        if key in self._wishes:
            return self._wishes[key]
        rope = site.rope
        if attempt.from_original:
            rope = site.rope.original()
        if attempt.method == LENGTH_ONLY:
            wish = WantedSite(site.of(rope), _with_stated_length(site, self.target))
        else:
            knobs = attempt.knobs
            scaled = scaling.scale(rope, attempt.method, self.target, knobs, attempt.attention)
            wanted = scaling.compose(rope, scaled, self.target)
            native = scaling.native(rope, scaled)
            wish = WantedSite(replace(site, rope=rope, wanted=wanted), native)
        self._wishes[key] = wish
        return wish

    def planned(self, site: RopeSite, attempt: Attempt) -> RopeSite | None:
        """Return the site with the rope dict that carries the attempted method as requested. Return
        None if no rope dict does."""
        key = (site.label, attempt)
        if key not in self._planned:
            wish = self.wish(site, attempt)
            names = attempt.for_loaders
            self._planned[key] = None
            for params in self.carrier.offers(wish.site, wish.native, self.target):
                planned = replace(wish.site, params=params)
                if self.carrier.are_exact(names, planned, even_so=attempt.even_so):
                    self._planned[key] = planned
                    break
        return self._planned[key]

    def readings(self, site: RopeSite, attempt: Attempt) -> tuple[LoaderReading, ...]:
        """Return the reading of an attempted method's rope dict by each loader."""
        key = (site.label, attempt)
        if key not in self._readings:
            planned = self.planned(site, attempt)
            assert planned is not None  # who asks has seen that it can be written
            self._readings[key] = self.carrier.readings(planned, self.target)
        return self._readings[key]

    def row(self, recipe: Extend, method: str, chosen: str = "") -> MethodRow:
        """Return the row of a method in the plan's table: its two numbers, and the rope type that
        would carry it. The chosen method has the request's knobs, any other its defaults."""
        if method == chosen:
            knobs = knobs_for(recipe, method)
        elif needs := scaling.find(method).needs:
            return MethodRow(method, None, None, f"needs {needs}")
        else:
            knobs = scaling.find(method).knobs()
        attempt = attempt_of(recipe, method, knobs)
        site = self.model.scaled_sites[0]
        try:
            wish = self.wish(site, attempt)
        except UsageError as error:
            return MethodRow(method, None, None, str(error))
        explanation = explain(site.rope, wish.site.wanted, self.target)
        if not wish.moves and attempt.attention is None and not attempt.even_so:
            return MethodRow(method, explanation, None, "moves no pair here")
        planned = self.planned(site, attempt)
        if planned is None:
            where = f"for {listed(attempt.for_loaders)}" if attempt.for_loaders else "here"
            return MethodRow(method, explanation, None, f"cannot be written exactly {where}")
        readings = newest(self.readings(site, attempt))
        return MethodRow(
            method,
            explanation,
            planned.params["rope_type"],
            attention_factor=planned.wanted.attention_factor,
            read_by=tuple(r.loader for r in readings if r.verdict == "same"),
            misread_by=tuple(r.loader for r in readings if r.verdict in WRONG),
        )

    def able(self, recipe: Extend) -> list[str]:
        """Return the methods whose result the carrier can hold exactly, at their default knobs."""
        rows = [self.row(recipe, method) for method in scaling.METHODS]
        return [row.method for row in rows if row.form]


def _with_stated_length(site: RopeSite, target: int) -> forms.Params:
    """Return the rope dict that --length-only writes for a site and a `target`.

    For a longrope, vLLM and Phi-3's own class derive the attention factor from the two lengths. So
    the dict gets their ratio, and a different attention factor has to be written.
    """
    params = site.params
    if params["rope_type"] != "longrope" or params.get("mscale_all_dim"):
        return params  # DeepSeek's softmax reads the factor itself
    return params | {"factor": target / params["original_max_position_embeddings"]}


@dataclass(frozen=True)
class Way:
    """One of the two ways to extend a model that is scaled already."""

    options: str  # as one types them
    condition: str  # if it is the right one
    form: str | None  # the rope type that carries it; None if nothing can
    read_by: tuple[str, ...]
    misread_by: tuple[str, ...]

    def sentence(self) -> str:
        """Return the sentence of the plan about a way to extend a scaled model: options, condition,
        and the engines that read the result."""
        if self.form is None:
            return f"{self.options}: {self.condition}; cannot be written exactly"
        said = f"{self.options}: {self.condition}; written as {form_name(self.form)}"
        said += f", exact in {listed(self.read_by)}" if self.read_by else ""
        return said + (f", wrong in {listed(self.misread_by)}" if self.misread_by else "")


@dataclass(frozen=True)
class Recommendation:
    """The method to take ("none" if none helps), whether from the original spectrum, and why."""

    method: str
    from_original: bool
    reason: str


def form_name(rope_type: str | None) -> str:
    """Return how a plan and docs/methods.md name the rope type to be written. `default` is theta:
    it holds nothing else."""
    return "theta" if rope_type == "default" else rope_type or "-"


def plan_site(attempts: Attempts, site: RopeSite, attempt: Attempt, recipe: Extend) -> RopeSite:
    """Return the site as a method leaves it; raise NotExpressible if no rope dict carries that."""
    if not site.scaled:
        return site
    planned = attempts.planned(site, attempt)
    if planned is None:
        raise NotExpressible(_why_not(attempts, site, attempt, recipe))
    return planned


def needs_no_scaling(model: Model) -> bool:
    """Return whether a plan for this model needs no method: every pair that rotates does so as
    often as YaRN's fast pairs, which no ramp moves. Such a pair showed every phase in training many
    times, and shows no new one beyond."""
    return fewest_turns([site.rope for site in model.scaled_sites]) >= forms.BETA_FAST


def fewest_turns(ropes: Iterable[Rope]) -> float:
    """Return, for the choice of a plan's method, the rotations of the slowest rotating pair inside
    the context; 0 if none rotates. The plan needs no method if they reach YaRN's beta_fast."""
    seen = list[float]()
    for rope in ropes:
        seen += filter(None, turns(rope.spectrum, rope.context))
    return min(seen, default=0.0)


def require_lasting(model: Model, target: int) -> None:
    """Raise NotExpressible for the length alone if the scaling depends on the stated length.

    Stock's dynamic rotates unscaled up to max_position_embeddings L. Beyond it, an input of T
    tokens has theta (F T/L - F + 1)^(d/(d-2)) times the original.
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


def require_motion(attempts: Attempts, attempt: Attempt, recipe: Extend) -> None:
    """Raise NotExpressible for a method that leaves every pair as it is, unless the request has a
    temperature, an attention factor or --even-so."""
    model = attempts.model
    method = attempt.method
    wishes = [attempts.wish(site, attempt) for site in model.scaled_sites]
    moved = any(wish.moves for wish in wishes)
    if moved or recipe.attention is not None or recipe.even_so:
        return
    ropes = [wish.site.rope for wish in wishes]
    fewest = fewest_turns(ropes)
    if not fewest:
        raise NotExpressible(f"--method {method}: every pair of this model stands still already")
    able = attempts.able(recipe)
    hint = f"; these methods move some: {', '.join(able)}" if able else ""
    if needs_no_scaling(model) and not recipe.from_original:
        hint += "; --length-only raises that length, which is all that is needed"
    raise NotExpressible(
        f"--method {method} changes no frequency of this model: each pair makes at least "
        f"{fewest:.4g} rotations in its {ropes[0].context} tokens; only the stated length would "
        f"grow{hint} (--even-so extends it anyway)"
    )


def _why_not(attempts: Attempts, site: RopeSite, attempt: Attempt, recipe: Extend) -> str:
    """Return the sentence that refuses a method: the part of the request that nothing carries, and
    the options that could be carried instead."""
    carrier = attempts.carrier
    method = attempt.method
    names = recipe.for_loaders
    trusted = attempts.planned(site, replace(attempt, even_so=True))
    free = attempts.planned(site, replace(attempt, for_loaders=()))
    if trusted is not None:
        misread = _first_misreading(carrier, names, free)
        if misread:
            form = trusted.params["rope_type"]
            other = f"--even-so writes {form} scaling instead, which was not measured there"
            return f"--method {method} --for {','.join(names)}: {misread}; {other}"
        return _not_measured(carrier, names, trusted)
    knobs = []
    for key in KNOBS:
        value = getattr(recipe, key)
        if isinstance(value, float | int):
            knobs.append(f"{flag(key)} {value:g}")
    wish = " ".join([f"--method {method}", *knobs])
    if recipe.attention is not None:
        wish += f" with an attention factor of {recipe.attention:g}"
    wish += " cannot"
    able = attempts.able(recipe)
    hint = ""
    if able:
        alone = ", without such options" if knobs else ""
        hint = f"; these methods can{alone}: {', '.join(able)}"
    elif recipe.attention is not None:
        able = attempts.able(recipe.changed(attention_factor=None, temperature=None))
        if able:
            hint = f"; without that factor these methods can: {', '.join(able)}"
    if not able:
        hint = _from_original(attempts, method, recipe)
    if free is not None and not able and not hint:
        near = {name: carrier.nearest(name, free.params, attempts.target) for name in names}
        for options, readers in loaders_by_options(near).items():
            if options:
                who = _loaders_with_verb(readers, "reads")
                hint += f"; {options} is the nearest form that {who} exactly"
        if not hint and (misread := _first_misreading(carrier, names, free)):
            hint = f": {misread}"
    if recipe.method is None and recipe.attention is None and not knobs and not able:
        wish = "no method can"  # nobody asked for this one
    return f"{wish} be written exactly in the {_place_and_loaders(carrier, names)}{hint}"


def _not_measured(carrier: Carrier, names: Sequence[str], trusted: RopeSite) -> str:
    """Return the refusal of a plan because loaders of --for were not measured with the rope dict
    that would carry it."""
    unsure = []
    known = []
    for name in names:
        if not carrier.are_exact((name,), trusted):
            unsure.append(name)
            known.append(carrier.unmeasured(name, trusted))
    said = (
        f"--for {','.join(unsure)}: how {_loaders_with_verb(unsure, 'reads')} "
        f"{trusted.params['rope_type']} scaling in {carrier.model.model_type} was not measured"
    )
    if any(known):
        said += f" ({'; '.join(known)})"
    return f"{said}; --even-so writes it anyway"


def loaders_by_options(nearest: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return, for a plan or its refusal, the loaders by the `extend` options whose result each
    reads exactly. Under "" are the loaders without any."""
    grouped = dict[str, list[str]]()
    for loader, options in nearest.items():
        grouped.setdefault(options, []).append(loader)
    return {options: tuple(names) for options, names in grouped.items()}


def _place_and_loaders(carrier: Carrier, names: Sequence[str]) -> str:
    """Return the clause of a refusal about the place that would have to carry a method's spectrum,
    and the loaders of --for."""
    where = carrier.place_for_refusal
    if names:
        where += f" and that {_loaders_with_verb(names, 'reads')} exactly (--for {','.join(names)})"
    return where


def _first_misreading(carrier: Carrier, names: Sequence[str], site: RopeSite | None) -> str:
    """Return how the first loader of --for that is known to misread a planned rope dict does so;
    else ""."""
    if site is None:
        return ""
    for name in names:
        why = carrier.misread(name, site)
        if why:
            return why
    return ""


def _loaders_with_verb(names: Sequence[str], verb: str) -> str:
    """Return the names of loaders with a verb in singular or plural, for a refusal of a plan."""
    return f"{listed(names)} {verb.removesuffix('s') if len(names) > 1 else verb}"


def _from_original(attempts: Attempts, method: str, recipe: Extend) -> str:
    """Return the options, methods included, that can extend a scaled model from its original
    context, as a clause of a refusal. Return "" if there are none."""
    model = attempts.model
    target = attempts.target
    scaled = any(site.rope.is_scaled for site in model.scaled_sites)
    if not scaled or recipe.from_original or model.asks_original:
        return ""
    able = attempts.able(recipe.changed(from_original=True))
    if not able:
        return ""
    first = method if method in able else able[-1]
    others = [each for each in able if each != first]
    # A factor would count from the original context there, and mean fewer tokens.
    options = f"--from-original --target {target} --method {first}"
    params = model.scaled_sites[0].params
    kept = _kept_scaling_options(params) if ITS_METHOD.get(params["rope_type"]) == first else {}
    if kept:
        wish = recipe.changed(method=first, from_original=True, factor=None, target=target, **kept)
        carried = attempts.row(wish, first, first).form is not None
        options += _as_flags(kept) if carried else f" (without its own{_as_flags(kept)})"
    if others:
        options += f" (or {listed(others)})"
    return f"; {options} can"


# The method whose own form a scaling has; of another's pair factors nobody has the file.
ITS_METHOD = {"yarn": "yarn", "llama3": "llama3", "linear": "pi", "dynamic": "dynamic"}


def ways_of(attempts: Attempts, recipe: Extend, method: str) -> tuple[Way, ...]:
    """Return both ways to extend a model that is scaled already: from its present frequencies, or
    in one step from before its scaling. Only its owner knows which is right."""
    model = attempts.model
    target = attempts.target
    if recipe.length_only or not any(site.rope.is_scaled for site in model.scaled_sites):
        return ()
    on = recipe.changed(from_original=False)
    first = on if recipe.from_original else recipe
    name = "by-parts" if recipe.from_original else method
    row = attempts.row(first, name, method)
    again = "its weights were trained after that scaling, or this is not known"
    ways = [_way_of_row(f"--target {target} --method {name}", again, row)]
    if model.asks_original:
        return tuple(ways)
    options, row = _in_one_step(attempts, recipe)
    condition = "its weights were not trained after that scaling"
    if model.scaled_sites[0].params["rope_type"] == "longrope":
        condition += "; its own pair factors are dropped"
    ways.append(_way_of_row(options, condition, row))
    return tuple(ways)


def _way_of_row(options: str, condition: str, row: MethodRow) -> Way:
    """Return a way to extend a scaled model from the row of its method."""
    return Way(options, f"if {condition}", row.form, row.read_by, row.misread_by)


def _in_one_step(attempts: Attempts, recipe: Extend) -> tuple[str, MethodRow]:
    """Return the options of `extend` that scale the model from its original context, with every key
    of its own scaling, and the method row that they give."""
    params = attempts.model.scaled_sites[0].params
    target = attempts.target
    own = ITS_METHOD.get(params["rope_type"], "yarn")
    plain: dict[str, Any] = dict.fromkeys((*KNOBS, "attention_factor", "temperature"))
    for name in dict.fromkeys((own, "yarn", "by-parts")):
        kept = _kept_scaling_options(params) if name == own else {}
        wish = plain | kept | {"method": name, "from_original": True, "factor": None}
        row = attempts.row(recipe.changed(**wish, target=target), name, name)
        if row.form is not None:
            break
    return f"--from-original --target {target} --method {name}{_as_flags(kept)}", row


def _as_flags(options: Mapping[str, Any]) -> str:
    """Return the knobs of a planned method as flags of `extend`, as a user types them after
    others."""
    words = ""
    for key, value in options.items():
        words += f" --no-{key}" if value is False else f" {flag(key)} {value:g}"
    return words


def _kept_scaling_options(params: forms.Params) -> dict[str, Any]:
    """Return the options of `extend` for those keys of a rope dict that differ from the method's
    defaults."""
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
# YaRN loses least beyond the window (benchmarks/results/real-model-2026-11-22.md); docs/methods.md
# has the measured cases in which llama3 is the better one.
PREFERRED = ("yarn", "llama3", "ntk", "pi")
PREFERRED_MROPE = ("yarn", "ntk")


@dataclass(frozen=True)
class _Case:
    """A fact about the model or the request, and the method that it recommends."""

    said: str
    method: str


def recommend(attempts: Attempts, recipe: Extend, chosen: str) -> Recommendation:
    """Return the method to recommend in a plan, from the first case whose method can be written. If
    a scaled model has none, recommend the first method that can be written from its original
    spectrum. The chosen method has the request's knobs."""
    model = attempts.model
    target = attempts.target
    if model.obstacles:
        said = "scaling cannot help this model (see the warnings)"
        return Recommendation("none", False, f"{said}; --length-only raises its stated length")
    authors = families.recipe_of(model)
    if authors is not None and authors.understates(model.context, target):
        return Recommendation(LENGTH_ONLY, False, authors.why_length_alone)
    if needs_no_scaling(model) and recipe.attention is None and not recipe.from_original:
        return Recommendation(LENGTH_ONLY, False, _why_no_scaling(model))
    cases = _cases_for_model(attempts.carrier, recipe)
    first = _first_writable_case(attempts, recipe, cases, chosen)
    if first is not None:
        return first
    scaled = any(site.rope.is_scaled for site in model.scaled_sites)
    if scaled and not recipe.from_original and not model.asks_original:
        anew = recipe.changed(from_original=True)
        first = _first_writable_case(attempts, anew, _cases_for_model(attempts.carrier, anew))
        if first is not None:
            why = f"no config can store a scaling of its current frequencies{_for_clause(recipe)}"
            return replace(first, reason=f"{why}; {first.reason}")
    return Recommendation("none", False, f"no method can be written exactly{_for_clause(recipe)}")


def _why_no_scaling(model: Model) -> str:
    """Return the reason to recommend --length-only: no rotary pair needs a method."""
    fewest = fewest_turns([site.rope for site in model.scaled_sites])
    context = model.context
    return (
        f"no rotary pair needs scaling: each makes at least {fewest:,.0f} rotations in the "
        f"{context:,} tokens of training, so longer input brings no new angle. How good the model "
        "is there is unknown; measure it with ropext eval"
    )


def _for_clause(recipe: Extend) -> str:
    """Return the loaders of --for as a clause of a recommendation. Return "" without --for."""
    return f" for {listed(recipe.for_loaders)}" if recipe.for_loaders else ""


def _cases_for_model(carrier: Carrier, recipe: Extend) -> list[_Case]:
    """Return every case that applies to a model and a request, each with the method that it
    recommends, the most specific first."""
    model = carrier.model
    three_axes = carrier.three_axes
    pairs = model.scaled_sites[0].rope.dim // 2
    windowed = any("sliding" in kind or "chunked" in kind for kind in model.layer_types)
    cases = []
    if windowed and len(model.sites) == 1 and not three_axes:
        said = "sliding-window and full-attention layers share one rope dict, so both are scaled"
        cases.append(_Case(said, "by-parts"))
    if pairs < FEW_PAIRS:
        cases.append(_Case(f"only {pairs} rotary pairs, too few for a ramp", "ntk"))
    if recipe.attention is not None:
        cases.append(_Case("rope type yarn can store your attention factor", "yarn"))
    said = "the default for training" if recipe.finetune else "the default without training"
    preferred: tuple[str, ...] = PREFERRED
    if three_axes:
        preferred = PREFERRED_MROPE
        said += "; vLLM and SGLang keep the three axes of images (mRoPE) only under yarn or a new "
        said += "theta"
    for method in preferred:
        cases.append(_Case(said, method))
    scaled = any(site.rope.is_scaled for site in model.scaled_sites)
    if recipe.from_original or not scaled or three_axes:
        return cases
    said = "the model is scaled already; this scales its current frequencies"
    again = [_Case(said, "by-parts")]
    for case in cases:
        again.append(_Case(said, case.method))
    return again


def _first_writable_case(
    attempts: Attempts, recipe: Extend, cases: Sequence[_Case], chosen: str = ""
) -> Recommendation | None:
    """Return the recommendation of the first case whose method can be written. Return None if there
    is none."""
    passed: dict[str, list[str]] = {}
    for case in cases:
        row = attempts.row(recipe, case.method, chosen)
        lost = attempts.carrier.three_axes and row.form not in ("default", "yarn")
        if row.form is None or lost:
            note = row.note or f"rope type {row.form} loses mRoPE"
            passed.setdefault(note, []).append(row.method)
            continue
        others = [f"{listed(names)}: {note}" for note, names in passed.items()]
        written = "a new theta" if row.form == "default" else row.form
        exact = "exact in all engines of the table"
        if row.misread_by:
            exact += f" but {listed(row.misread_by)}"
        elif not row.read_by:
            exact = "not measured in any engine"
        elif len(row.read_by) == 1:
            exact = f"measured only in {row.read_by[0]}"
        said = "; ".join([case.said, *others, f"written as {written}, {exact}"])
        return Recommendation(row.method, recipe.from_original, said)
    return None


def default_method(attempts: Attempts, recipe: Extend) -> str:
    """Return the method for a request that names none: the first recommended method that can be
    written and has the given knobs. With --for, every loader in it must read the result exactly."""
    given = {name for name in KNOBS if getattr(recipe, name) is not None}
    able = list[_Case]()
    for case in _cases_for_model(attempts.carrier, recipe):
        if given <= set(scaling.find(case.method).knob_names()):
            able.append(case)
    first = _first_writable_case(attempts, recipe, able)
    if first is not None:
        return first.method
    preferred = PREFERRED_MROPE if attempts.carrier.three_axes else PREFERRED
    for method in preferred:
        if any(case.method == method for case in able):
            return method
    return preferred[0]
