"""Where a fit begins: what may move, and the closed forms inside of it."""

from collections.abc import Mapping
from typing import Any

from ropext import scaling
from ropext.checkpoint import Snapshot
from ropext.errors import NotExpressible, RopextError, UnsupportedModel, UsageError
from ropext.options.training import WITHIN, Fit
from ropext.planning import Plan, PlannedSite, make_plan

# Which methods may be the start of what moves.
STARTS = {"yarn": ("yarn",), "ntk": ("ntk", "dynamic")}


def choose_starts(snapshot: Snapshot, name: str, options: Fit) -> tuple[str, dict[str, Plan]]:
    """What may move, and the closed forms inside of it that can be written here.

    Where nothing is asked, the widest form that this family and the loaders of --for read exactly.
    """
    refusal: RopextError | None = None
    widest = WITHIN[1:] if options.search else WITHIN
    for within in (options.within,) if options.within else widest:
        try:
            found = _closed_forms(snapshot, name, options, within)
            example = next(iter(found.values()))
            moved = example_knobs(within, example.main, example.target)
            _plan(snapshot, name, options, *moved)
            return within, found
        except NotExpressible as error:
            refusal = refusal or error
    if refusal is None:
        raise AssertionError("a form was neither found nor refused")
    raise refusal


def _plan(
    snapshot: Snapshot, name: str, options: Fit, method: str, knobs: Mapping[str, Any]
) -> Plan:
    return make_plan(snapshot.config, options.extend(method, **knobs), name)


def _closed_forms(snapshot: Snapshot, name: str, options: Fit, within: str) -> dict[str, Plan]:
    allowed = STARTS.get(within, _without_numbers())
    if options.start is not None:
        scaling.find(options.start, "--start")
        if options.start not in allowed:
            raise UsageError(
                f"--start {options.start} is not inside of --within {within}, which begins at one "
                f"of {', '.join(allowed)}"
            )
        return {options.start: _plan(snapshot, name, options, options.start, {})}
    found: dict[str, Plan] = {}
    refusal: NotExpressible | UsageError | None = None
    for method in allowed:
        try:
            made = _plan(snapshot, name, options, method, {})
        except (NotExpressible, UsageError) as error:
            refusal = refusal or error
            continue
        found[method] = made
    if not found and refusal is not None:
        raise refusal
    return found


def _without_numbers() -> tuple[str, ...]:
    """Methods that factor and target determine, at their default knobs."""
    return tuple(name for name in scaling.METHODS if name not in ("abf", "longrope"))


def example_knobs(within: str, site: PlannedSite, target: int) -> tuple[str, dict[str, Any]]:
    """Method and knobs of a spectrum inside of `within` that is no closed form."""
    if within == "yarn":
        knobs = {"beta_fast": 20.5, "beta_slow": 1.25, "truncate": False, "attention_factor": 1.25}
        return "yarn", knobs
    if within == "ntk":
        return "abf", {"theta": site.rope.theta * 1.5}
    pairs = site.rope.dim // 2
    factors = tuple(1.5 + 0.25 * (pair % 3) for pair in range(pairs))
    return "longrope", {"pair_factors": factors, "attention_factor": 1.25}


def check_geometry(plan: Plan) -> None:
    """One set of numbers moves, so that several embeddings must start from the same."""
    scaled = [site for site in plan.sites if site.scaled]
    geometries = {(site.rope.dim, site.rope.spectrum) for site in scaled}
    if len(geometries) > 1:
        raise UnsupportedModel(
            f"{plan.name}: its full-attention layers have rotary embeddings that differ "
            f"({', '.join(site.label for site in scaled)}); fit moves one set of numbers"
        )
