"""Closed forms ranked on a user's own text: the recommendation, measured."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ropext import scaling
from ropext.checkpoint import open_snapshot
from ropext.checkpoint.provenance import read_record
from ropext.checkpoint.snapshot import Snapshot, with_weights
from ropext.corpus import (
    Corpus,
    DocumentEncoder,
    Source,
    Wanted,
    choose_documents,
    pack_documents,
    read_documents,
    split_documents,
)
from ropext.errors import InputError, NotExpressible, RopextError, UnsupportedModel, UsageError
from ropext.evaluation import loading
from ropext.evaluation.bench import Bench, base_tokens, frame_of, set_up
from ropext.evaluation.session import SILENT, Hooks
from ropext.inspecting import read_text
from ropext.lengths import length_text
from ropext.options.evaluate import Evaluate
from ropext.options.extend import KNOBS, Extend, parse_extend
from ropext.planning import Plan, make_plan
from ropext.results.overlap import Overlap, as_json, overlap, trained_in
from ropext.results.perplexity import Frame
from ropext.results.ranking import Ranking, rank_readings

# From the plainest stock form to the least: where a tie has to be broken.
PLAINEST = ("default", "linear", "yarn", "llama3", "longrope")


@dataclass(frozen=True)
class Forms:
    """The plan of every method that can be written as asked, and why the others cannot."""

    plans: Mapping[str, Plan]
    left_out: Mapping[str, str]


def closed_forms(config: Mapping[str, Any], recipe: Extend, name: str = "MODEL") -> Forms:
    """Every method that needs no input of its own; the one that the recipe names, with its knobs.

    A named method that cannot be written is an error; of the others it is said.
    """
    plans, left_out = dict[str, Plan](), dict[str, str]()
    first: RopextError | None = None
    for method in scaling.METHODS:
        if method in ("abf", "longrope") and method != recipe.method:
            continue  # needs a theta or a file of factors
        wish = recipe if method == recipe.method else _without_knobs(recipe, method)
        try:
            plans[method] = make_plan(config, wish, name)
        except (NotExpressible, UsageError) as error:
            if method == recipe.method:
                raise
            first = first or error
            left_out[method] = str(error)
    if not plans and first is not None:
        raise first
    return Forms(plans, left_out)


def _without_knobs(recipe: Extend, method: str) -> Extend:
    none: dict[str, Any] = dict.fromkeys(KNOBS)
    return recipe.changed(method=method, **none)


def preference(plans: Mapping[str, Plan]) -> list[str]:
    """Which method to take of several that measure alike: the one that more loaders read exactly,
    then the plainer form."""

    def rank_of(label: str) -> tuple[int, int]:
        made = plans[label]
        exact = {own.loader for own in made.readings if own.verdict == "same"}
        return -len(exact), PLAINEST.index(str(made.main.params["rope_type"]))

    return sorted(plans, key=rank_of)


def rank(bench: Bench, plans: Mapping[str, Plan]) -> Ranking:
    """Read the bench's documents once with every plan, and through the base's short window.

    The model is given back as it came.
    """
    num = len(bench.documents)
    bench.total = bench.tokens + expected_tokens(bench.frame, num, len(plans))
    base = bench.short_window()
    readings = {label: bench.whole(label, made.config) for label, made in plans.items()}
    return rank_readings(bench.frame, readings, base, preference(plans))


def expected_tokens(frame: Frame, num_documents: int, num_plans: int) -> int:
    """Forward tokens of a ranking: one pass per document and method, and the base."""
    return num_documents * (num_plans * frame.longest + base_tokens(frame))


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
            "overlap": as_json(self.overlap),
        }


def measure(
    model: str,
    data: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    reading: Mapping[str, Any] | None = None,
    hooks: Hooks = SILENT,
    **extend: Any,
) -> Measured:
    """Rank the closed forms on documents; `extend` are the fields of Extend, `reading` those of
    evaluation's Options that say how documents are read (column, max_docs, dtype, device ...)."""
    snapshot = open_snapshot(model, revision=revision)
    forms = closed_forms(snapshot.config, parse_extend(extend, read_text), model)
    first = next(iter(forms.plans.values()))
    if first.model.masked_lm:
        raise UnsupportedModel(
            f"{model} is a masked language model ({first.model.model_type}): it has no perplexity "
            "to rank by; leave --measure out"
        )
    options = Evaluate(**{"data": data, "lengths": (first.target,)} | dict(reading or {}))
    corpus = _documents(snapshot, options, first, trust_remote_code)
    frame = frame_of(first.model.context, first.target, options.seed)
    known = trained_in(read_record(snapshot.directory))
    found = overlap(known, [own.known_by for own in corpus.documents])
    if found and found.sentence:
        hooks.say(f"warning: {found.sentence}")
    _announce(hooks, frame, corpus, forms)
    snapshot = with_weights(snapshot)
    said = loading.out_of_memory(model, "a measurement keeps nothing")
    with loading.silenced(), loading.memory_errors(said):
        loaded = loading.load_model(snapshot, options, trust_remote_code)
    bench = set_up(
        loaded,
        [document.ids for document in corpus.documents],
        frame,
        chunk=options.chunk,
        slice_memory=options.slice_memory,
        hooks=hooks,
    )
    with loading.silenced(), loading.memory_errors(said):
        ranking = rank(bench, forms.plans)
    return Measured(ranking, forms.plans, forms.left_out, corpus, bench.tokens, found)


def _documents(
    snapshot: Snapshot, options: Evaluate, made: Plan, trust_remote_code: bool
) -> Corpus:
    """The documents that `ropext eval --lengths TARGET` would read."""
    with loading.silenced():
        tokenizer = loading.load_tokenizer(snapshot, trust_remote_code)
    encoder = DocumentEncoder(tokenizer, made.model.vocab_size, options.seed)
    source = Source(str(options.data), options.column, options.split, options.data_revision)
    remedy = "give a smaller --factor, longer documents, or --pack to glue them"
    wanted = Wanted((made.target,), True, options.max_docs, remedy)
    take = pack_documents if options.pack else choose_documents
    try:
        raw = split_documents(read_documents(source), options.split_documents, encoder, made.target)
        return take(raw, encoder, wanted)
    except InputError as error:
        raise InputError(str(error).replace("--data", "--measure")) from error


def _announce(hooks: Hooks, frame: Frame, corpus: Corpus, forms: Forms) -> None:
    """What it takes, before it begins."""
    num = len(corpus.documents)
    if num < 8:
        hooks.say(
            f"warning: only {num} documents reach {length_text(frame.longest)} tokens: no "
            "intervals (8 or more give them), and the lowest is taken as it stands"
        )
    if corpus.packed:
        hooks.say(
            "warning: documents were glued (--pack): the ranking says which method holds up at far "
            "positions, nothing about the use of far text; its intervals are over the glued "
            "sequences, no two of which share a document"
        )
    tokens = expected_tokens(frame, num, len(forms.plans))
    hooks.say(
        f"measuring {', '.join(forms.plans)} on {num} documents of {length_text(frame.longest)} "
        f"tokens, and the base through its short window: {tokens:,} forward tokens"
    )
