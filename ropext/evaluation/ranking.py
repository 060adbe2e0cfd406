"""A loaded model that reads the same documents again and again, each time as another model: the
closed forms ranked on a user's own text, the steps of a training judged.

The readings are those of `ropext eval`, and nothing is written.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ropext import scaling
from ropext.checkpoint import open_snapshot
from ropext.checkpoint.provenance import read_record
from ropext.checkpoint.snapshot import Snapshot, with_weights
from ropext.corpus import (
    Corpus,
    DocumentEncoder,
    Wanted,
)
from ropext.errors import (
    InputError,
    NotExpressible,
    NothingKept,
    RopextError,
    UnsupportedModel,
    UsageError,
)
from ropext.evaluation import loading
from ropext.evaluation.costs import manner_of
from ropext.evaluation.forward import Ids, NanInLogits, TokenScorer
from ropext.evaluation.pinning import pass_lengths
from ropext.evaluation.preparing import read_corpus
from ropext.evaluation.reading import (
    Masking,
    forward_tokens,
    read_pass,
    read_short,
    short_windows,
)
from ropext.files import read_text
from ropext.inspecting import plan_of
from ropext.lengths import length_text, tail_tokens
from ropext.narration import SILENT, Hooks
from ropext.options.evaluate import DocumentOptions, Evaluate
from ropext.options.extend import KNOBS, Extend, parse_extend
from ropext.planning import Plan
from ropext.results.comparison import Ranking, rank_readings
from ropext.results.overlap import Overlap, as_json, overlap, trained_in
from ropext.results.perplexity import Frame, Reading, TokenNll
from ropext.results.values import Bootstrap


def frame_of(context: int, target: int, seed: int = 0) -> Frame:
    """One length, the target, with the tail that `ropext eval` takes."""
    return Frame(context, (target,), tail_tokens(context), Bootstrap(seed))


def base_tokens(frame: Frame) -> int:
    """Forward tokens of one document read through the short window."""
    return forward_tokens(short_windows(frame.longest, frame.context))


@dataclass
class DocumentReader:
    """`documents` are token ids, each `frame.longest` long."""

    scorer: TokenScorer
    frame: Frame
    documents: Sequence[Ids]
    hooks: Hooks = field(default_factory=Hooks)
    masking: Masking | None = None  # of a masked language model
    total: int = 0  # forward tokens expected, for the progress shown
    tokens: int = 0  # forward tokens spent

    def whole(self, label: str, config: Mapping[str, Any] | None) -> Reading:
        """Every document in one pass, the model computing as `config` says (None: as it is)."""
        model = self.scorer.model
        with computing(model, config):
            # A spectrum that depends on the length has another one inside the context.
            wanted = replace(self.frame, lengths=(self.frame.longest,)).read_lengths
            return self._passes(label, wanted if self.masking else pass_lengths(model, wanted))

    def _passes(self, label: str, lengths: Sequence[int]) -> Reading:
        def compute(ids: Ids, length: int) -> TokenNll:
            tail = self.frame.tail
            return read_pass(self.scorer, ids, length, self.masking, tail)

        times = self.frame.mask_stride or 1
        return self._read(label, {length: times * length for length in lengths}, compute)

    def short_window(self, label: str = "base") -> Reading:
        """Every document through the short window by the model as it is."""
        if self.masking is not None:
            return self._passes(label, [self.frame.context])

        def compute(ids: Ids, _: int) -> TokenNll:
            return read_short(self.scorer, ids, self.frame.context)

        return self._read(label, {self.frame.longest: base_tokens(self.frame)}, compute)

    def _read(
        self, label: str, costs: Mapping[int, int], compute: Callable[[Ids, int], TokenNll]
    ) -> Reading:
        """Every document by each pass length; `costs` are the forward tokens that each takes."""
        import torch

        cost = sum(costs.values()) * len(self.documents)
        self.total, what = max(self.total, self.tokens + cost), f"documents read by {label}"
        self.hooks.show(self.tokens, self.total, what)
        passes: dict[int, list[TokenNll]] = {length: [] for length in costs}
        for length, ids in itertools.product(costs, self.documents):
            if self.hooks.stop():
                raise NothingKept("interrupted; a measurement keeps nothing")
            # Not inference_mode: buffers made in it could not be trained through afterwards.
            with torch.no_grad():
                try:
                    passes[length].append(compute(ids, length))
                except NanInLogits as error:
                    raise NanInLogits(f"{label}: {error}") from error
            self.tokens += costs[length]
            self.hooks.show(self.tokens, self.total, what)
        return Reading(label, passes)


@contextmanager
def computing(model: Any, config: Mapping[str, Any] | None) -> Iterator[None]:
    from ropext.patching import apply_config, unpatch

    if config is None:
        yield
        return
    apply_config(model, config)
    try:
        yield
    finally:
        unpatch(model)


def document_reader(
    model: Any,
    documents: Sequence[Ids],
    frame: Frame,
    options: DocumentOptions | None = None,
    hooks: Hooks = SILENT,
    masking: Masking | None = None,
) -> DocumentReader:
    """Set up a loaded model (in PEFT or not), which is read as `ropext eval` reads it; what follows
    a document's first `frame.longest` tokens is not read."""
    import torch

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    scorer = TokenScorer(model, manner_of(base, frame.longest, options or DocumentOptions()))
    with torch.no_grad():
        scorer.self_check()
    arrays = [np.asarray(ids, np.int32)[: frame.longest] for ids in documents]
    return DocumentReader(scorer, frame, arrays, hooks, masking)


# From the plainest stock form to the least: where a tie has to be broken.
PLAINEST = ("default", "linear", "yarn", "llama3", "longrope")


def closed_forms(
    snapshot: Snapshot, recipe: Extend, name: str = "MODEL"
) -> tuple[dict[str, Plan], dict[str, str]]:
    """The plan of every method that needs no input of its own, of the one that the recipe names
    with its knobs; and why the others cannot be written as asked. Of a named one that is an error.
    """
    plans, left_out = dict[str, Plan](), dict[str, str]()
    first: RopextError | None = None
    no_knobs: dict[str, Any] = dict.fromkeys(KNOBS)
    for method in scaling.METHODS:
        if method in ("abf", "longrope") and method != recipe.method:
            continue  # needs a theta or a file of factors
        wish = recipe if method == recipe.method else recipe.changed(method=method, **no_knobs)
        try:
            plans[method] = plan_of(snapshot, wish, name)
        except (NotExpressible, UsageError) as error:
            if method == recipe.method:
                raise
            first = first or error
            left_out[method] = str(error)
    if not plans and first is not None:
        raise first
    return plans, left_out


def preference(plans: Mapping[str, Plan]) -> list[str]:
    """Which method to take of several that measure alike: the one that more loaders read exactly,
    then the plainer form."""

    def rank_of(label: str) -> tuple[int, int]:
        made = plans[label]
        exact = {own.loader for own in made.readings if own.verdict == "same"}
        return -len(exact), PLAINEST.index(str(made.main.params["rope_type"]))

    return sorted(plans, key=rank_of)


def rank(reader: DocumentReader, plans: Mapping[str, Plan]) -> Ranking:
    """Read the reader's documents once with every plan, and through the base's short window.

    The model is given back as it came.
    """
    num = len(reader.documents)
    reader.total = reader.tokens + expected_tokens(reader.frame, num, len(plans))
    base = reader.short_window()
    readings = {label: reader.whole(label, made.config) for label, made in plans.items()}
    return rank_readings(reader.frame, readings, base, preference(plans))


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
    plans, left_out = closed_forms(snapshot, parse_extend(extend, read_text), model)
    first = next(iter(plans.values()))
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
    _announce(hooks, frame, corpus, list(plans))
    snapshot = with_weights(snapshot)
    said = loading.out_of_memory(model, "a measurement keeps nothing")
    with loading.silenced(), loading.memory_errors(said):
        loaded = loading.load_model(snapshot, options, trust_remote_code)
    reader = document_reader(
        loaded,
        [document.ids for document in corpus.documents],
        frame,
        options,
        hooks,
    )
    with loading.silenced(), loading.memory_errors(said):
        ranking = rank(reader, plans)
    return Measured(ranking, plans, left_out, corpus, reader.tokens, found)


def _documents(
    snapshot: Snapshot, options: Evaluate, made: Plan, trust_remote_code: bool
) -> Corpus:
    """The documents that `ropext eval --lengths TARGET` would read."""
    with loading.silenced():
        tokenizer = loading.load_tokenizer(snapshot, trust_remote_code)
    encoder = DocumentEncoder(tokenizer, made.model.vocab_size, options.seed)
    remedy = "give a smaller --factor, longer documents, or --pack to glue them"
    try:
        return read_corpus(options, encoder, Wanted((made.target,), True, options.max_docs, remedy))
    except InputError as error:
        raise InputError(str(error).replace("--data", "--measure")) from error


def _announce(hooks: Hooks, frame: Frame, corpus: Corpus, methods: Sequence[str]) -> None:
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
    tokens = expected_tokens(frame, num, len(methods))
    hooks.say(
        f"measuring {', '.join(methods)} on {num} documents of {length_text(frame.longest)} "
        f"tokens, and the base through its short window: {tokens:,} forward tokens"
    )
