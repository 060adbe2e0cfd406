"""What a fit may move, and the closed forms that it can start from."""

from collections.abc import Mapping
from typing import Any

from ropext import scaling
from ropext.checkpoint import Snapshot
from ropext.errors import NotExpressible, UnsupportedModel, UsageError
from ropext.inspecting import plan_of
from ropext.options.training import WITHIN, Fit
from ropext.planning import Plan, PlannedSite, make_plan

# Which methods may be the start of what moves: by default those that factor and target determine.
STARTS = {"yarn": ("yarn",), "ntk": ("ntk", "dynamic")}
POSE_START = "yarn"
DETERMINED = tuple(name for name in scaling.METHODS if name not in ("abf", "longrope"))


def plan_with(snapshot: Snapshot, options: Fit, method: str, knobs: Mapping[str, Any]) -> Plan:
    request = options.extend(method, **knobs)
    if snapshot.container:  # where the GGUF would not carry the result, it is refused here
        make_plan(snapshot.config, request, snapshot.name, snapshot.container)
        request = request.changed(for_loaders=())  # they read that, not this directory
    return plan_of(snapshot, request, snapshot.name)


def choose_starts(snapshot: Snapshot, options: Fit) -> tuple[str, dict[str, Plan]]:
    """What may move, and the closed forms inside of it that can be written here.

    Where nothing is asked, the widest form that this family and the loaders of --for read exactly.
    """
    refusal: NotExpressible | None = None
    for within in WITHIN:
        if options.within and WITHIN.index(within) < WITHIN.index(options.within):
            continue
        try:
            forms = _closed_forms(snapshot, options, within)
            example = next(iter(forms.values()))
            plan_with(snapshot, options, *example_knobs(within, example.main))
        except NotExpressible as error:
            refusal = refusal or error
            continue
        if refusal is None or not options.within:
            return within, forms
        raise NotExpressible(
            f"--within {options.within}: {refusal}; of the narrower forms, --within {within} is"
            " carried exactly"
        )
    assert refusal is not None  # a form was either found or refused
    raise refusal


def _closed_forms(snapshot: Snapshot, options: Fit, within: str) -> dict[str, Plan]:
    allowed = STARTS.get(within, DETERMINED)
    if options.strategy == "pose" and options.start is None and POSE_START in allowed:
        # Reading every closed form at the target would cost more than the fit.
        options = options.model_copy(update={"start": (POSE_START,)})
    if options.start:
        for start in options.start:
            scaling.find(start, "--start")
            if start not in allowed:
                raise UsageError(
                    f"--start {start} is not inside of --within {within}, which begins at one "
                    f"of {', '.join(allowed)}"
                )
        return {start: plan_with(snapshot, options, start, {}) for start in options.start}
    forms: dict[str, Plan] = {}
    refusal: NotExpressible | UsageError | None = None
    for method in allowed:
        try:
            forms[method] = plan_with(snapshot, options, method, {})
        except (NotExpressible, UsageError) as error:
            refusal = refusal or error
    if not forms and refusal is not None:
        raise refusal
    return forms


def example_knobs(within: str, site: PlannedSite) -> tuple[str, dict[str, Any]]:
    """Method and knobs of a spectrum inside of `within` that is no closed form."""
    if within == "yarn":
        knobs = {"beta_fast": 20.5, "beta_slow": 1.25, "truncate": False, "attention_factor": 1.25}
        return "yarn", knobs
    if within == "ntk":
        return "abf", {"theta": site.rope.theta * 1.5}
    factors = tuple(1.5 + 0.25 * (pair % 3) for pair in range(site.rope.dim // 2))
    return "longrope", {"pair_factors": factors, "attention_factor": 1.25}


def check_geometry(plan: Plan) -> None:
    """One set of numbers moves, so that several embeddings must start from the same."""
    scaled = [site for site in plan.sites if site.scaled]
    if len({(site.rope.dim, site.rope.spectrum) for site in scaled}) > 1:
        raise UnsupportedModel(
            f"{plan.name}: its full-attention layers have rotary embeddings that differ "
            f"({', '.join(site.label for site in scaled)}); fit moves one set of numbers"
        )
