"""Collect the models that compete on a user's own documents.

They are one for each closed form that can be written, and the models that no checkpoint can hold.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ropext import scaling
from ropext.base.errors import NotExpressible, RopextError, UsageError
from ropext.evaluation.variants import Computing, Variant
from ropext.files.checkpoint.snapshot import Snapshot
from ropext.files.inspecting import plan_config, plan_of
from ropext.options.extend import KNOBS, Extend
from ropext.planning import Plan
from ropext.results import BASE, EXTENDED
from ropext.scaling import self_extend
from ropext.scaling.self_extend import FoldOptions

# From the plainest stock form to the least plain, to break a tie.
PLAINEST = ("default", "linear", "yarn", "llama3", "longrope")


def closed_forms(
    snapshot: Snapshot, recipe: Extend, name: str = "MODEL"
) -> tuple[dict[str, Plan], dict[str, str]]:
    """Return the plan of every method that competes on the documents, and of the recipe's own
    method, which has the recipe's knobs.

    Also return the reasons why the other methods cannot be written. Raise if the recipe names a
    method that cannot be written.
    """
    no_knobs: dict[str, Any] = dict.fromkeys(KNOBS)
    methods = []
    for method in scaling.beside(recipe.method):
        if method == recipe.method or scaling.find(method).competes:
            methods.append(method)

    def plan(method: str) -> Plan:
        """Return the plan of a method; only the recipe's own method gets the recipe's knobs."""
        if method == recipe.method:
            return plan_of(snapshot, recipe, name)
        return plan_of(snapshot, recipe.changed(method=method, **no_knobs), name)

    return plans_of(methods, plan, recipe.method)


def plans_of(
    methods: Iterable[str], plan: Callable[[str], Plan], asked: str | None = None
) -> tuple[dict[str, Plan], dict[str, str]]:
    """Return the plan of every method that can be written for a model, and the reasons why the
    others cannot.

    Raise the error of `asked` if it cannot be written, or the first error if no method can.
    """
    plans = dict[str, Plan]()
    left_out = dict[str, str]()
    first: RopextError | None = None
    for method in methods:
        try:
            plans[method] = plan(method)
        except (NotExpressible, UsageError) as error:
            if method == asked:
                raise
            first = first or error
            left_out[method] = str(error)
    if not plans and first is not None:
        raise first
    return plans, left_out


def preference(plans: Mapping[str, Plan]) -> list[str]:
    """Return the methods in the order in which one is preferred if their losses are equal.

    First come methods that keep the model's mRoPE, then methods that are exact in more loaders,
    then plainer forms.
    """

    def rank_of(label: str) -> tuple[bool, int, int]:
        """Return a method's sort key: whether mRoPE is lost, the negative number of exact loaders,
        and the place of its form in PLAINEST."""
        made = plans[label]
        lost = made.model.mrope and made.main.params["rope_type"] not in ("default", "yarn")
        exact = {reading.loader for reading in made.readings if reading.verdict == "same"}
        return lost, -len(exact), PLAINEST.index(str(made.main.params["rope_type"]))

    return sorted(plans, key=rank_of)


def memory_only_variants(
    snapshot: Snapshot, recipe: Extend, folding: FoldOptions | None = None
) -> list[Variant]:
    """Return the model with Self-Extend in memory, which is measured on the documents but never
    recommended; nothing if the model has no such plan.

    Raise the error instead if the user gave `folding`.
    """
    options = folding or FoldOptions()
    wish: dict[str, Any] = dict.fromkeys(KNOBS) | {"method": self_extend.NAME}
    try:
        made = plan_config(snapshot.config, recipe.changed(**wish), snapshot.name, options)
    except RopextError:
        if folding is not None:
            raise
        return []
    return [Variant(options.name, EXTENDED, snapshot, made.config, made.in_memory)]


def readable(computing: Computing, beside: Sequence[Variant]) -> list[Variant]:
    """Return the variants that the loaded model's code can compute: not all attention can be
    folded."""
    able = list[Variant]()
    for variant in beside:
        with suppress(RopextError), computing(variant):
            able.append(variant)
    return able


@dataclass(frozen=True)
class Contenders:
    """The base, the model under each plan, and variants that no checkpoint can hold."""

    snapshot: Snapshot
    plans: Mapping[str, Plan]
    beside: Sequence[Variant] = ()  # measured in memory, never recommended

    @property
    def variants_of_plans(self) -> list[Variant]:
        """Return the model under each competing plan as a variant that reads the documents."""
        variants = list[Variant]()
        for label, plan in self.plans.items():
            variants.append(Variant(label, EXTENDED, self.snapshot, plan.config))
        return variants

    @property
    def variants(self) -> tuple[Variant, ...]:
        """Return all variants that read the documents, the base first."""
        return (Variant(BASE, BASE, self.snapshot), *self.variants_of_plans, *self.beside)

    @property
    def labels(self) -> list[str]:
        """Return the labels of the variants that compete on the documents, all except the base."""
        return [variant.label for variant in self.variants[1:]]

    def readable(self, computing: Computing) -> "Contenders":
        """Return the contenders, except variants that the loaded model's code cannot compute."""
        return replace(self, beside=readable(computing, self.beside))
