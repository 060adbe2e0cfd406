"""Stock transformers judges ropext's readings and plans, in a process without ropext."""

from dataclasses import dataclass, field, replace
from typing import Any

import tiny
from building import Case, Stock, differences

from ropext.planning import Plan
from ropext.scaling.rope import Spectrum


@dataclass
class Verdicts:
    """The number of judged plans, and their errors."""

    equal: int = 0
    refused: dict[str, int] = field(default_factory=dict)  # by the stock side: reason -> count
    wrong: list[str] = field(default_factory=list)


# Built whole by stock: no wide or deep model, which would take seconds each.
SIZES = {
    "hidden_size": 512,
    "num_hidden_layers": 64,
    "intermediate_size": 4096,
    "vocab_size": 1 << 16,
    "num_attention_heads": 64,
    "max_position_embeddings": 1 << 31,
}


def _small(config: dict[str, Any]) -> bool:
    parts = [config, *(v for v in config.values() if isinstance(v, dict))]
    sizes = [(part.get(key), most) for part in parts for key, most in SIZES.items()]
    return all(not isinstance(size, int | float) or size <= most for size, most in sizes)


def _cases(number: int, config: dict[str, Any], plan: Plan) -> list[Case]:
    kind = plan.model.model_type
    before = {site.label: _as_built(site.rope.spectrum) for site in plan.model.sites}
    thetas = {site.label: site.params["rope_theta"] for site in plan.model.sites}
    after = {site.label: _as_built(site.wanted) for site in plan.sites}
    new_thetas = {site.label: site.params["rope_theta"] for site in plan.sites}
    cases = []
    if kind != "dbrx":  # transformers 5 forgets the theta in attn_config, which ropext reads
        cases.append(Case(kind, f"base of plan {number}", config, before, thetas))
    if not any(label.startswith("theta ") for label in after):  # named after the changed value
        case = Case(kind, f"plan {number} by-parts", plan.config, after, new_thetas)
        cases.append(
            replace(case, factor=plan.target / plan.model.scaled_sites[0].rope.original_context)
        )
    return cases


def _as_built(spectrum: Spectrum) -> Spectrum:
    """Return the short one of two sets, because stock builds the module with it."""
    if spectrum.short_inv_freq is None:
        return spectrum
    return replace(spectrum, inv_freq=spectrum.short_inv_freq)


def judge(planned: list[tuple[dict[str, Any], Plan]], most: int) -> Verdicts:
    """Compare up to `most` plans, spread over the campaign, with stock's tables."""
    fit = [(i, config, plan) for i, (config, plan) in enumerate(planned) if _judged(config, plan)]
    chosen = fit[:: max(1, len(fit) // most)][:most] if most else []
    verdicts = Verdicts()
    stock = Stock()
    try:
        for number, config, plan in chosen:
            if plan.model.model_type not in stock.tasks:
                continue
            for case in _cases(number, config, plan):
                _count(case, stock.build(case), verdicts)
    finally:
        stock.close()
    return verdicts


def _judged(config: dict[str, Any], plan: Plan) -> bool:
    """Return whether a plan can be judged: a given context, or one below the original, is no fact
    of the config."""
    return (
        _small(config)
        and plan.recipe.context is None
        and tiny.text_part(plan.model.model_type) is not None
    )


def _count(case: Case, answer: dict[str, Any], verdicts: Verdicts) -> None:
    if "error" in answer:
        reason = answer["error"].splitlines()[0][:90] if answer["error"] else "?"
        verdicts.refused[reason] = verdicts.refused.get(reason, 0) + 1
        return
    found = differences(case, answer)
    if found:
        verdicts.wrong.append(f"{case.id}: {found[0]}")
    else:
        verdicts.equal += 1
