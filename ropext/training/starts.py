"""Find where a fit begins: the form that may move, and the closed forms that it can start from."""

from collections.abc import Mapping

from ropext import scaling
from ropext.base.errors import NotExpressible, UnsupportedModel, UsageError
from ropext.base.jsontext import JsonObject
from ropext.evaluation.measured_plan import plans_to_measure
from ropext.files.checkpoint import Snapshot
from ropext.files.inspecting import plan_of
from ropext.options.training import WITHIN, Fit
from ropext.planning import Plan
from ropext.scaling.rope import RopeSite

POSE_START = "yarn"


def plan_by_method(snapshot: Snapshot, options: Fit, method: str, knobs: JsonObject) -> Plan:
    """Plan the model of a fit by a method, for the loaders that read it."""
    request = options.extend(method, **knobs)
    plan = plan_of(snapshot, request, snapshot.name)
    if plan.carrier.in_transformers or not request.for_loaders:
        return plan
    # They read the GGUF, not this directory.
    return plan_of(snapshot, request.changed(for_loaders=()), snapshot.name)


def choose_starts(snapshot: Snapshot, options: Fit) -> tuple[str, Mapping[str, Plan]]:
    """Return the form in which a fit may move the spectrum, and the closed forms inside of it
    that can be written here.

    Without --within it is the widest form that this family and the loaders of --for read
    exactly.
    """
    refusal: NotExpressible | None = None
    for within in WITHIN:
        if options.within and WITHIN.index(within) < WITHIN.index(options.within):
            continue
        try:
            forms = _closed_forms(snapshot, options, within)
            example = next(iter(forms.values()))
            method, knobs = example_knobs(within, example.main)
            plan_by_method(snapshot, options, method, knobs)
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
    """Return the plans of the closed forms that a fit may start from (--start)."""
    allowed = [method.name for method in scaling.METHODS.values() if within in method.fits]
    if options.strategy == "pose" and options.start is None and POSE_START in allowed:
        # Reading every closed form at the target would cost more than the fit.
        options = options.model_copy(update={"start": (POSE_START,)})
    if options.start:
        for start in options.start:
            scaling.find(start, "--start")
            if start not in allowed:
                raise UsageError(
                    f"--within {within} cannot start from --start {start}; it starts from one "
                    f"of {', '.join(allowed)}"
                )
        return {start: plan_by_method(snapshot, options, start, {}) for start in options.start}
    forms, _ = plans_to_measure(
        allowed, lambda method: plan_by_method(snapshot, options, method, {})
    )
    return forms


def example_knobs(within: str, site: RopeSite) -> tuple[str, JsonObject]:
    """Return the method and the knobs of a spectrum that a fit inside of `within` could reach,
    and that is no closed form."""
    if within == "yarn":
        knobs = {"beta_fast": 20.5, "beta_slow": 1.25, "truncate": False, "attention_factor": 1.25}
        return "yarn", knobs
    if within == "ntk":
        return "abf", {"theta": site.rope.theta * 1.5}
    factors = tuple(1.5 + 0.25 * (pair % 3) for pair in range(site.rope.dim // 2))
    return "longrope", {"pair_factors": factors, "attention_factor": 1.25}


def check_geometry(plan: Plan) -> None:
    """Refuse to fit several embeddings that differ: one set of numbers moves, so all must start
    from the same."""
    scaled = [site for site in plan.sites if site.scaled]
    if len({(site.rope.dim, site.rope.spectrum) for site in scaled}) > 1:
        raise UnsupportedModel(
            f"{plan.name}: its full-attention layers have rotary embeddings that differ "
            f"({', '.join(site.label for site in scaled)}); fit moves one set of numbers"
        )
