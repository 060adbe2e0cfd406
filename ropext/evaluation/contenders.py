"""The models that compete on a user's own documents: one of each closed form that can be written,
and those that no checkpoint holds."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ropext import scaling
from ropext.checkpoint.snapshot import Snapshot
from ropext.errors import NotExpressible, RopextError, UsageError
from ropext.evaluation.variants import Computing, Variant
from ropext.inspecting import plan_config, plan_of
from ropext.options.extend import KNOBS, Extend
from ropext.planning import Plan
from ropext.results import BASE, EXTENDED
from ropext.scaling import self_extend
from ropext.scaling.self_extend import FoldOptions

# From the plainest stock form to the least: where a tie has to be broken.
PLAINEST = ("default", "linear", "yarn", "llama3", "longrope")


def closed_forms(
    snapshot: Snapshot, recipe: Extend, name: str = "MODEL"
) -> tuple[dict[str, Plan], dict[str, str]]:
    """The plan of every method that competes, of the one that the recipe names with its knobs; and
    why the others cannot be written as asked. Of a named one that is an error.
    """
    no_knobs: dict[str, Any] = dict.fromkeys(KNOBS)
    methods = []
    for method in scaling.beside(recipe.method):
        if method == recipe.method or scaling.find(method).competes:
            methods.append(method)

    def plan(method: str) -> Plan:
        if method == recipe.method:
            return plan_of(snapshot, recipe, name)
        return plan_of(snapshot, recipe.changed(method=method, **no_knobs), name)

    return plans_of(methods, plan, recipe.method)


def plans_of(
    methods: Iterable[str], plan: Callable[[str], Plan], asked: str | None = None
) -> tuple[dict[str, Plan], dict[str, str]]:
    """The plan of every method that can be written here, and why the others cannot. Where that is
    the method `asked` for, or all of them, it is an error: the first one."""
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
    """Which method to take of several that measure alike: one that keeps mRoPE where there is any,
    the one that more loaders read exactly, then the plainer form."""

    def rank_of(label: str) -> tuple[bool, int, int]:
        made = plans[label]
        lost = made.model.mrope and made.main.params["rope_type"] not in ("default", "yarn")
        exact = {reading.loader for reading in made.readings if reading.verdict == "same"}
        return lost, -len(exact), PLAINEST.index(str(made.main.params["rope_type"]))

    return sorted(plans, key=rank_of)


def rivals(snapshot: Snapshot, recipe: Extend, folding: FoldOptions | None = None) -> list[Variant]:
    """The model as Self-Extend reads it in memory, where it can: measured, and never taken. What
    was asked of its `folding` is refused where it cannot."""
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
    """Those that the code of the loaded model can be read by: not all attention can be folded."""
    able = list[Variant]()
    for variant in beside:
        with suppress(RopextError), computing(variant):
            able.append(variant)
    return able


@dataclass(frozen=True)
class Contenders:
    """The base, the model as each plan makes it, and what no checkpoint holds."""

    snapshot: Snapshot
    plans: Mapping[str, Plan]
    beside: Sequence[Variant] = ()  # read in memory, never taken

    @property
    def variants(self) -> tuple[Variant, ...]:
        """All that is read, the base first."""
        variants = [Variant(BASE, BASE, self.snapshot)]
        for label, plan in self.plans.items():
            variants.append(Variant(label, EXTENDED, self.snapshot, plan.config))
        variants += self.beside
        return tuple(variants)

    @property
    def labels(self) -> list[str]:
        """The names of those that compete; the base does not."""
        return [variant.label for variant in self.variants[1:]]

    def readable(self, computing: Computing) -> "Contenders":
        """Leave out what the code of the loaded model cannot be read by."""
        return replace(self, beside=readable(computing, self.beside))
