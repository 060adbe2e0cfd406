"""Which method, where none is named: what suits the model, and what is known of its price."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ropext import scaling
from ropext.errors import listed
from ropext.families import Model
from ropext.options.extend import KNOBS, Extend
from ropext.planning.plan import MethodRow, Recommendation, method_row

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
    rows: Sequence[MethodRow],
    from_original: Callable[[], Sequence[MethodRow]],
) -> Recommendation:
    """The first case that applies and whose method can be written; of a scaled model where none
    can, the first from its original spectrum (whose rows `from_original` makes)."""
    if model.obstacles:
        said = "scaling cannot help this model, as the warnings say"
        return Recommendation("none", False, f"{said}; --length-only raises its length")
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
