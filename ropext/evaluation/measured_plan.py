"""Compare methods on a user's own documents, for `ropext plan --measure` and `--method auto`.

Every closed form that can be written competes, and next to them models that no checkpoint can hold.
One loaded checkpoint computes them in turn, and the measurements of `ropext eval` rank them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ropext import scaling
from ropext.base.errors import NotExpressible, RopextError, UnsupportedModel, UsageError
from ropext.base.jsontext import JsonObject, values_json
from ropext.base.lengths import length_text
from ropext.base.narration import NOBODY, SILENT, Call, Hooks
from ropext.evaluation.corpus import Corpus, Source, require_data
from ropext.evaluation.documents import DocumentWords
from ropext.evaluation.evaluation import Evaluation
from ropext.evaluation.lineup import Lineup
from ropext.evaluation.reader import Progress, Reader
from ropext.evaluation.request import prepare
from ropext.evaluation.variants import Computing, Variant, applied
from ropext.evaluation.workload import Workload
from ropext.files.checkpoint import Snapshot, open_snapshot, with_weights
from ropext.files.inspecting import plan_config, plan_of
from ropext.models.load import load_model, loading_of, memory_errors, out_of_memory, silenced
from ropext.options.evaluate import DocumentOptions, Evaluate
from ropext.options.extend import KNOBS, Extend
from ropext.planning import Plan
from ropext.results import BASE, EXTENDED, rules
from ropext.results.measurement import Store
from ropext.results.overlap import Overlap
from ropext.results.rules import LossRanking
from ropext.scaling import self_extend
from ropext.scaling.self_extend import FoldOptions

if TYPE_CHECKING:
    from torch import nn

# From the plainest stock form to the least plain, to break a tie.
PLAINEST = ("default", "linear", "yarn", "llama3", "longrope")


def closed_forms(snapshot: Snapshot, recipe: Extend) -> tuple[dict[str, Plan], dict[str, str]]:
    """Return, for a measured comparison on documents, the plan of every method that competes, and
    of the recipe's own method with the recipe's knobs.

    Also return the reasons why the other methods cannot be written. Raise if the recipe names a
    method that cannot be written.
    """
    no_knobs: dict[str, Any] = dict.fromkeys(KNOBS)
    methods = []
    for method in scaling.beside(recipe.method):
        if method == recipe.method or scaling.find(method).competes:
            methods.append(method)

    def plan(method: str) -> Plan:
        """Return the plan of a method for a measured comparison; only the recipe's own method gets
        the recipe's knobs."""
        if method == recipe.method:
            return plan_of(snapshot, recipe, snapshot.name)
        return plan_of(snapshot, recipe.changed(method=method, **no_knobs), snapshot.name)

    return plans_to_measure(methods, plan, recipe.method)


def plans_to_measure(
    methods: Iterable[str], plan: Callable[[str], Plan], asked: str | None = None
) -> tuple[dict[str, Plan], dict[str, str]]:
    """Return the plan of every method whose loss on documents a measurement can compare, and the
    reasons why the others cannot be written.

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


def preferred_in_ties(plans: Mapping[str, Plan]) -> list[str]:
    """Order the methods of a measured comparison (as in `plan --measure`): the earliest is taken if
    their losses on the documents are equal.

    First come methods that keep the model's mRoPE, then methods that are exact in more loaders,
    then plainer forms.
    """

    def tie_key(label: str) -> tuple[bool, int, int]:
        """Return the sort key of a method in a measured comparison: whether mRoPE is lost, the
        negative number of exact loaders, and the place of its form in PLAINEST."""
        made = plans[label]
        lost = made.model.mrope and made.main.params["rope_type"] not in ("default", "yarn")
        exact = {reading.loader for reading in made.readings if reading.verdict == "same"}
        return lost, -len(exact), PLAINEST.index(str(made.main.params["rope_type"]))

    return sorted(plans, key=tie_key)


def memory_only_variants(
    snapshot: Snapshot, recipe: Extend, folding: FoldOptions | None = None
) -> list[Variant]:
    """Return a variant for a measured comparison: the model with Self-Extend in memory, never
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


@dataclass(frozen=True)
class MethodComparison:
    """The models of a measured comparison of methods: the base, the model under each plan, and
    variants that no checkpoint can hold."""

    snapshot: Snapshot
    plans: Mapping[str, Plan]
    beside: Sequence[Variant] = ()  # measured in memory, never recommended

    @property
    def variants_of_plans(self) -> list[Variant]:
        """Return a variant for each plan of the measured comparison; it reads the documents."""
        variants = list[Variant]()
        for label, plan in self.plans.items():
            variants.append(Variant(label, EXTENDED, self.snapshot, plan.config))
        return variants

    @property
    def variants(self) -> tuple[Variant, ...]:
        """Return all variants that read the documents of the measured comparison, the base
        first."""
        return (Variant(BASE, BASE, self.snapshot), *self.variants_of_plans, *self.beside)

    @property
    def labels(self) -> list[str]:
        """Return the labels of all variants in the measured comparison except the base."""
        return [variant.label for variant in self.variants[1:]]

    def readable(self, computing: Computing) -> "MethodComparison":
        """Return the measured comparison without the variants in memory that the loaded model's
        code cannot compute: not all attention can be folded."""
        able = list[Variant]()
        for variant in self.beside:
            with suppress(RopextError), computing(variant):
                able.append(variant)
        return replace(self, beside=able)

    def rank(
        self,
        model: "nn.Module",
        reads: Workload,
        hooks: Hooks = SILENT,
        options: DocumentOptions | None = None,
    ) -> LossRanking:
        """Read the documents once with every plan, and with the base through its short window;
        return the methods ranked by their loss.

        Nothing is written, and the loaded model is unchanged afterwards.
        """
        computing = partial(applied, model)
        compared = self.readable(computing)
        reader = Reader(computing, options or DocumentOptions())
        stores = {variant.label: Store() for variant in compared.variants}
        measured = reader.measure(compared.variants, reads, stores, Progress(hooks=hooks))
        beside = [variant.label for variant in compared.beside]
        return rules.rank_methods(measured, preferred_in_ties(self.plans), beside)


# The words of `ropext plan --measure` for the documents and their length.
AS_PLAN = DocumentWords(data="--measure", shorter="a smaller --factor")


@dataclass(frozen=True)
class RankingRequest:
    """The model to extend, its target, and the documents that rank the methods."""

    model: str
    data: str
    recipe: Extend
    revision: str | None = None
    reading: DocumentOptions = field(default_factory=DocumentOptions)
    folding: FoldOptions | None = None  # for Self-Extend, if the user gave any


@dataclass(frozen=True)
class Measured:
    """The result of `ropext plan --measure`."""

    ranking: LossRanking
    plans: Mapping[str, Plan]
    left_out: Mapping[str, str]
    corpus: Corpus
    tokens: int  # forward tokens spent
    overlap: Overlap | None  # the documents that the model was trained on

    @property
    def taken(self) -> Plan:
        """Return the plan of the method that a measured comparison on documents recommends."""
        return self.plans[self.ranking.taken]

    def to_json(self) -> JsonObject:
        """Return the ranking of a measured comparison on documents, with its data, as `ropext plan
        --measure` prints it."""
        return self.ranking.to_json() | {
            "left_out": dict(self.left_out),
            "data": self.corpus.to_json(),
            "forward_tokens": self.tokens,
            "overlap": values_json(self.overlap),
        }


def measure(request: RankingRequest, call: Call = NOBODY) -> Measured:
    """Run a measured comparison: rank the closed forms by their loss on a user's documents, and
    return the ranking with its plans."""
    hooks = call.hooks
    trust = call.trust_remote_code
    model = request.model
    require_data(Source(request.data, flag=AS_PLAN.data))
    snapshot = open_snapshot(model, revision=request.revision)
    plans, left_out = closed_forms(snapshot, request.recipe)
    beside = memory_only_variants(snapshot, request.recipe, request.folding)
    first = next(iter(plans.values()))
    if first.model.masked_lm:
        raise UnsupportedModel(
            f"{model} is a masked language model ({first.model.model_type}): it has no perplexity "
            "to rank by; leave --measure out"
        )
    # The documents that `ropext eval --lengths TARGET` would read.
    reading = dict(request.reading)
    options = Evaluate(**reading, data=request.data, lengths=(first.target,))
    compared = MethodComparison(snapshot, plans, beside)
    lineup = Lineup(compared.variants, first.model.context, first.target)
    evaluation = prepare(options, lineup, trust, words=AS_PLAN)
    corpus = evaluation.corpus
    assert corpus is not None  # --measure names it
    overlap = evaluation.overlaps.get(next(iter(plans)))
    if overlap is not None and overlap.sentence:
        hooks.say(f"warning: [seen] {overlap.sentence}")
    reads = evaluation.reads
    tokens = sum(map(reads.tokens, lineup.variants))
    _announce(hooks, evaluation, compared.labels, tokens)
    compared = replace(compared, snapshot=with_weights(snapshot))
    said = out_of_memory(model, "a measurement keeps nothing")
    with silenced(), memory_errors(said):
        loaded = load_model(compared.snapshot, loading_of(evaluation.options, trust))
        ranking = compared.rank(loaded, reads, hooks, evaluation.options)
    for variant in beside:
        if variant.label not in ranking.beside:  # its code could not compute it
            tokens -= reads.tokens(variant)
    return Measured(ranking, plans, left_out, corpus, tokens, overlap)


def _announce(hooks: Hooks, evaluation: Evaluation, methods: list[str], tokens: int) -> None:
    """Report the costs of a measured comparison (`ropext plan --measure`) before the model reads
    the documents."""
    length = length_text(evaluation.reads.frame.longest)
    num = len(evaluation.reads.documents)
    if num < 8:
        hooks.say(
            f"warning: [few-documents] only {num} documents reach {length} tokens: no intervals "
            "(8 or more give them); ropext takes the lowest"
        )
    hooks.say(
        f"measuring {', '.join(methods)} on {num} documents of {length} tokens, and the base "
        f"on truncated text: {tokens:,} forward tokens"
    )
