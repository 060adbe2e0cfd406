"""Rank the closed forms on a user's own documents, for `ropext plan --measure`, with the
measurements of `ropext eval`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ropext.base.errors import UnsupportedModel
from ropext.base.jsontext import JsonObject, values_json
from ropext.base.lengths import length_text
from ropext.base.narration import NOBODY, Call, Hooks
from ropext.evaluation.contenders import Contenders, closed_forms, memory_only_variants
from ropext.evaluation.corpus import Corpus, Source, require_data
from ropext.evaluation.documents import DocumentWords
from ropext.evaluation.evaluation import Evaluation
from ropext.evaluation.lineup import Lineup
from ropext.evaluation.ranking import rank
from ropext.evaluation.request import prepare
from ropext.files.checkpoint import open_snapshot, with_weights
from ropext.models.load import load_model, loading_of, memory_errors, out_of_memory, silenced
from ropext.options.evaluate import DocumentOptions, Evaluate
from ropext.options.extend import Extend
from ropext.planning import Plan
from ropext.results.overlap import Overlap
from ropext.results.rules import Ranking
from ropext.scaling.self_extend import FoldOptions

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

    ranking: Ranking
    plans: Mapping[str, Plan]
    left_out: Mapping[str, str]
    corpus: Corpus
    tokens: int  # forward tokens spent
    overlap: Overlap | None  # the documents that the model was trained on

    @property
    def taken(self) -> Plan:
        """Return the plan of the recommended method."""
        return self.plans[self.ranking.taken]

    def to_json(self) -> JsonObject:
        """Return the ranking of methods measured on documents, with its data, as `ropext plan
        --measure` prints it."""
        return self.ranking.to_json() | {
            "left_out": dict(self.left_out),
            "data": self.corpus.to_json(),
            "forward_tokens": self.tokens,
            "overlap": values_json(self.overlap),
        }


def measure(request: RankingRequest, call: Call = NOBODY) -> Measured:
    """Rank the closed forms by their loss on a user's documents, and return the ranking with its
    plans."""
    hooks = call.hooks
    trust = call.trust_remote_code
    model = request.model
    require_data(Source(request.data, flag=AS_PLAN.data))
    snapshot = open_snapshot(model, revision=request.revision)
    plans, left_out = closed_forms(snapshot, request.recipe, model)
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
    contenders = Contenders(snapshot, plans, beside)
    lineup = Lineup(contenders.variants, first.model.context, first.target)
    evaluation = prepare(options, lineup, trust, words=AS_PLAN)
    corpus = evaluation.corpus
    assert corpus is not None  # --measure names it
    overlap = evaluation.overlaps.get(next(iter(plans)))
    if overlap is not None and overlap.sentence:
        hooks.say(f"warning: [seen] {overlap.sentence}")
    reads = evaluation.reads
    tokens = sum(map(reads.tokens, lineup.variants))
    _announce(hooks, evaluation, contenders.labels, tokens)
    contenders = replace(contenders, snapshot=with_weights(snapshot))
    said = out_of_memory(model, "a measurement keeps nothing")
    with silenced(), memory_errors(said):
        loaded = load_model(contenders.snapshot, loading_of(evaluation.options, trust))
        ranking = rank(loaded, contenders, reads, hooks, evaluation.options)
    for variant in beside:
        if variant.label not in ranking.beside:  # its code could not compute it
            tokens -= reads.tokens(variant)
    return Measured(ranking, plans, left_out, corpus, tokens, overlap)


def _announce(hooks: Hooks, evaluation: Evaluation, methods: list[str], tokens: int) -> None:
    """Print the costs of `ropext plan --measure` before the model reads the documents."""
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
