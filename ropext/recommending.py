"""Which method to take: a rule with reasons, from the config and what was asked for."""

from collections.abc import Mapping
from dataclasses import dataclass

from ropext.families import Model
from ropext.recipe import Recipe

# Below this many pairs the ramp of yarn and by-parts has too few steps to act on: on a model with
# four pairs, theta methods beat both at every length.
FEW_PAIRS = 8


@dataclass(frozen=True)
class Recommendation:
    """The method to take, whether from the original spectrum, and why."""

    method: str
    from_original: bool
    reason: str


SCALED_FOR_GGUF = Recommendation(
    "yarn",
    True,
    "the model is scaled already; composed, its spectrum becomes a longrope, which llama.cpp "
    "ignores, while one yarn from the original context is read exactly",
)
SCALED = Recommendation(
    "by-parts",
    False,
    "the model is scaled already: scaling its current wavelengths keeps what it was trained on, "
    "and its temperature, if it has one, stays as trained",
)
SHARED = Recommendation(
    "by-parts",
    False,
    "sliding and full layers share one rope dict: by-parts keeps the fast pairs that the windows "
    "use, and has no temperature, which would act on those layers too",
)
TUNED_LATER = Recommendation(
    "llama3",
    False,
    "it will be fine-tuned: this one has no temperature, which training replaces, leaves short "
    "inputs closest, and is how Llama 3.1 was extended",
)
UNTRAINED = Recommendation(
    "yarn",
    False,
    "without fine-tuning: yarn extrapolates no pair, keeps the fast ones, and its temperature "
    "makes up for the longer context",
)
WIDELY_READ = Recommendation("ntk", False, "a theta is what every loader reads")


def recommend(model: Model, recipe: Recipe, carried: Mapping[str, str | None]) -> Recommendation:
    """The first rule that applies and whose method can be carried here."""
    for choice in _choices(model, recipe):
        if choice.from_original and not recipe.from_original:
            return choice  # the table was computed for the current spectrum
        if carried.get(choice.method):
            return choice
    able = next((method for method, form in carried.items() if form), None)
    if able is None:
        return Recommendation("none", False, "no method can be written exactly for this request")
    return Recommendation(able, False, "the only kind of scaling that can be written exactly here")


def _choices(model: Model, recipe: Recipe) -> list[Recommendation]:
    """Every rule that applies, the most specific first."""
    rope = next(site.rope for site in model.sites if site.scaled)
    windowed = any("sliding" in kind or "chunked" in kind for kind in model.layer_types)
    shared = windowed and len(model.sites) == 1
    gguf = any(name.startswith("llama.cpp") for name in recipe.for_loaders)
    few = Recommendation(
        "dynamic",
        False,
        f"only {rope.dim // 2} pairs rotate, too few for a ramp; a theta moves all",
    )
    rules = (
        (rope.is_scaled and gguf, SCALED_FOR_GGUF),
        (rope.is_scaled and not gguf, SCALED),
        (shared, SHARED),
        (rope.dim // 2 < FEW_PAIRS, few),
        (bool(recipe.finetune), TUNED_LATER),
        (True, UNTRAINED),
        (True, WIDELY_READ),
    )
    return [choice for applies, choice in rules if applies]
