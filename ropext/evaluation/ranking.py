"""The closed forms ranked on a user's own documents. The readings are those of `ropext eval`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from ropext import scaling
from ropext.checkpoint import open_snapshot
from ropext.checkpoint.snapshot import Snapshot, with_weights
from ropext.corpus import Corpus
from ropext.errors import NotExpressible, RopextError, UnsupportedModel, UsageError
from ropext.evaluation.documents import DocumentWords
from ropext.evaluation.lineup import Lineup
from ropext.evaluation.preparing import prepare
from ropext.evaluation.reader import Progress, Reader
from ropext.evaluation.reads import Reads
from ropext.evaluation.variants import Computing, Variant, applied
from ropext.inputs import read_text
from ropext.inspecting import plan_of
from ropext.jsontext import values_json
from ropext.lengths import length_text, tail_tokens
from ropext.models.load import load_model, loading_of, silenced
from ropext.models.memory import memory_errors, out_of_memory
from ropext.narration import NOBODY, SILENT, Call, Hooks
from ropext.options.evaluate import DocumentOptions, Evaluate, SelfExtend
from ropext.options.extend import KNOBS, Extend, parse_extend
from ropext.planning import Plan, plan_config
from ropext.results import BASE, EXTENDED, rules
from ropext.results.measurement import Store
from ropext.results.overlap import Overlap
from ropext.results.perplexity import Frame
from ropext.results.rules import Ranking
from ropext.results.values import Bootstrap
from ropext.scaling import self_extend
from ropext.scaling.self_extend import FoldOptions


def frame_of(context: int, target: int, seed: int = 0) -> Frame:
    """One length, the target, with the tail that `ropext eval` takes."""
    return Frame(context, (target,), tail_tokens(context), Bootstrap(seed))


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
    return [Variant(options.name, EXTENDED, snapshot, made.config, fold=made.fold)]


def readable(computing: Computing, beside: Sequence[Variant]) -> list[Variant]:
    """Those that the code of the loaded model can be read by: not all attention can be folded."""
    able = list[Variant]()
    for variant in beside:
        with suppress(RopextError), computing(variant):
            able.append(variant)
    return able


def contenders(
    snapshot: Snapshot, plans: Mapping[str, Plan], beside: Sequence[Variant] = ()
) -> list[Variant]:
    """The base, the model as each plan makes it, and what no checkpoint says."""
    return [
        Variant(BASE, BASE, snapshot),
        *(Variant(label, EXTENDED, snapshot, made.config) for label, made in plans.items()),
        *beside,
    ]


def rank(
    model: Any,
    snapshot: Snapshot,
    reads: Reads,
    plans: Mapping[str, Plan],
    hooks: Hooks = SILENT,
    options: DocumentOptions | None = None,
    beside: Sequence[Variant] = (),
) -> Ranking:
    """Read the documents once with every plan, and through the base's short window.

    Nothing is written, and the model is given back as it came.
    """
    computing = partial(applied, model)
    beside = readable(computing, beside)
    everyone = contenders(snapshot, plans, beside)
    reader = Reader(computing, options)
    stores = {variant.label: Store() for variant in everyone}
    measured = reader.measure(everyone, reads, stores, Progress(hooks=hooks))
    return rules.rank(measured, preference(plans), [variant.label for variant in beside])


@dataclass(frozen=True)
class Measured:
    """What `ropext plan --measure` found."""

    ranking: Ranking
    plans: Mapping[str, Plan]
    left_out: Mapping[str, str]
    corpus: Corpus
    tokens: int  # forward tokens spent
    overlap: Overlap | None  # of the documents that the model was trained on

    @property
    def taken(self) -> Plan:
        """The plan of the method to take."""
        return self.plans[self.ranking.taken]

    def to_json(self) -> dict[str, Any]:
        return self.ranking.to_json() | {
            "left_out": dict(self.left_out),
            "data": self.corpus.to_json(),
            "forward_tokens": self.tokens,
            "overlap": values_json(self.overlap),
        }


# How `ropext plan --measure` names the documents and their length.
AS_PLAN = DocumentWords(data="--measure", shorter="a smaller --factor")


def measure(
    model: str,
    data: str,
    call: Call = NOBODY,
    *,
    revision: str | None = None,
    reading: Mapping[str, Any] | None = None,
    folding: Mapping[str, Any] | None = None,
    **extend: Any,
) -> Measured:
    """Rank the closed forms on documents; `extend` are the fields of Extend, `reading` those of
    evaluation's Options that say how documents are read (column, max_docs, dtype, device ...),
    `folding` those of its SelfExtend."""
    hooks = call.hooks
    snapshot = open_snapshot(model, revision=revision)
    recipe = parse_extend(extend, read_text)
    plans, left_out = closed_forms(snapshot, recipe, model)
    asked = SelfExtend(**folding).fold if folding else None
    beside = rivals(snapshot, recipe, asked)
    first = next(iter(plans.values()))
    if first.model.masked_lm:
        raise UnsupportedModel(
            f"{model} is a masked language model ({first.model.model_type}): it has no perplexity "
            "to rank by; leave --measure out"
        )
    options = {"data": data, "lengths": (first.target,)} | dict(reading or {})
    everyone = tuple(contenders(snapshot, plans, beside))
    lineup = Lineup(everyone, first.model.context, first.target)
    # The documents that `ropext eval --lengths TARGET` would read.
    trust = call.trust_remote_code
    evaluation = prepare(Evaluate(**options), lineup, trust, words=AS_PLAN)
    assert evaluation.corpus is not None  # --measure names it
    reads = evaluation.reads
    known = evaluation.overlaps.get(next(iter(plans)))
    if known and known.sentence:
        hooks.say(f"warning: [seen] {known.sentence}")
    tokens = sum(map(reads.tokens, lineup.variants))
    methods = [*plans, *(variant.label for variant in beside)]
    _announce(hooks, reads.frame, evaluation.corpus, methods, tokens)
    snapshot = with_weights(snapshot)
    said = out_of_memory(model, "a measurement keeps nothing")
    with silenced(), memory_errors(said):
        loaded = load_model(snapshot, loading_of(evaluation.options, call.trust_remote_code))
        ranking = rank(loaded, snapshot, reads, plans, hooks, evaluation.options, beside)
    for variant in beside:
        if variant.label not in ranking.beside:  # could not be read
            tokens -= reads.tokens(variant)
    return Measured(ranking, plans, left_out, evaluation.corpus, tokens, known)


def _announce(
    hooks: Hooks, frame: Frame, corpus: Corpus, methods: Sequence[str], tokens: int
) -> None:
    """What it takes, before it begins."""
    num = len(corpus.documents)
    if num < 8:
        hooks.say(
            f"warning: [few-documents] only {num} documents reach {length_text(frame.longest)} "
            "tokens: no intervals (8 or more give them), and the lowest is taken as it stands"
        )
    hooks.say(
        f"measuring {', '.join(methods)} on {num} documents of {length_text(frame.longest)} "
        f"tokens, and the base through its short window: {tokens:,} forward tokens"
    )
