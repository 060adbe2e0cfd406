"""Define the work of a model in units: how it predicts tokens, its documents and its questions.

A unit is one document in one regime, or the questions about one haystack; its result is one file in
a variant's store. Only `Workload.units` lists them: for the work, for its cost, and to load the
results. Only `read_unit` reads one.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from ropext.base.errors import InputError, UsageError
from ropext.base.jsontext import JsonObject, digest, read_values, values_json
from ropext.base.lengths import length_text, short_windows, strided_windows, tail_tokens
from ropext.evaluation.corpus import Document, DocumentEncoder
from ropext.evaluation.divergence import (
    Against,
    against_key,
    divergence_folders,
    read_against,
    read_base,
    served_lengths,
    states_folder,
)
from ropext.evaluation.forward import Ids, TokenNll, TokenScorer
from ropext.evaluation.reading import (
    Decode,
    hf_stride,
    pinned,
    read_pass,
    read_short,
    read_strided,
    score_items,
)
from ropext.evaluation.variants import Variant
from ropext.options.evaluate import Evaluate
from ropext.results import BASE
from ropext.results.measurement import MeasuredModel, Measurement, Store, loss_file_name
from ropext.results.perplexity import (
    ALL_TOKENS,
    MASK_STRIDE,
    LossStatistics,
    MeasuredDocuments,
    Scoring,
)
from ropext.results.retrieval import ItemScore
from ropext.results.values import Bootstrap
from ropext.tasks import Item
from ropext.tasks.item import truncated

ANSWERS = "items/"  # folder in a store


@dataclass(frozen=True)
class NextToken:
    """The prediction of each token from the tokens before it, for all of a text in one pass."""

    scoring: ClassVar[Scoring] = ALL_TOKENS
    protocol: ClassVar[str | None] = None  # as --protocol names it
    sees_all: ClassVar[bool] = False

    def frame(self, context: int, lengths: tuple[int, ...], seed: int) -> LossStatistics:
        """Return the lengths at which models read documents, and the tokens scored there."""
        return LossStatistics(context, lengths, tail_tokens(context), Bootstrap(seed), self.scoring)

    def read(self, scorer: TokenScorer, ids: Ids, length: int, frame: LossStatistics) -> TokenNll:
        """Return the NLL of the first `length` tokens of a document, read in one pass."""
        return read_pass(scorer, ids, length)

    def key(self) -> JsonObject:
        """Return the settings that decide a document's loss, for the manifest of a run."""
        return {}


@dataclass(frozen=True)
class MaskedTokens:
    """The prediction of tokens under a mask from all other tokens, in several passes.

    Only the last tokens of a text are masked. The tokenizer's special tokens are put before and
    after a text.
    """

    scoring: ClassVar[Scoring] = Scoring(MASK_STRIDE)
    protocol: ClassVar[str | None] = "pseudo-perplexity"
    sees_all: ClassVar[bool] = True  # all tokens see one another: no text is read in chunks

    token: int  # the mask
    before: tuple[int, ...]
    after: tuple[int, ...]

    def text_in(self, length: int) -> int:
        """Return the number of a document's tokens in a masked language model's window of a
        length."""
        room = length - len(self.before) - len(self.after)
        if room < 1:
            raise UsageError(f"--lengths {length} has no room for text next to the special tokens")
        return room

    def frame(self, context: int, lengths: tuple[int, ...], seed: int) -> LossStatistics:
        """Return a frame in which every length scores the same tokens of a document, so that the
        shortest length bounds the tail."""
        tail = min(tail_tokens(context), self.text_in(lengths[0]))
        return LossStatistics(context, lengths, tail, Bootstrap(seed), self.scoring)

    def read(self, scorer: TokenScorer, ids: Ids, length: int, frame: LossStatistics) -> TokenNll:
        """Return the NLL of a document's last `frame.tail` tokens, each masked once, in the window
        of `length` tokens at the end of `ids`.

        It is NaN before them.
        """
        text = ids[-self.text_in(length) :]
        row = np.concatenate([self.before, text, self.after]).astype(np.int32)
        end = len(row) - len(self.after)
        nll = np.full(len(ids), np.nan, np.float32)
        with pinned(scorer.model, length):
            nll[-frame.tail :] = scorer.masked_nll(row, range(end - frame.tail, end), self.token)
        return nll

    def key(self) -> JsonObject:
        """Return the mask and the special tokens that decide a document's loss, for the manifest of
        a run."""
        return {"masking": asdict(self)}


Prediction = NextToken | MaskedTokens
NEXT_TOKEN = NextToken()


def checked_prediction(options: Evaluate, encoder: DocumentEncoder, name: str) -> MaskedTokens:
    """Return how a masked language model predicts; raise UsageError for options of causal
    models."""
    given = {
        "--tasks": bool(options.tasks),
        "--lm-eval": bool(options.lm_eval),
        "--chunk": bool(options.chunk),
        "--protocol": options.protocol != "ropext",
    }
    for flag, is_given in given.items():
        if is_given:
            raise UsageError(
                f"{flag} is for models that predict the next token, and {name} fills in masked "
                "ones: --data TEXTS alone measures its pseudo-perplexity"
            )
    for flag, is_given in (("--kl", options.kl), ("--kv", bool(options.kv))):
        if is_given:
            raise UsageError(f"{flag} is of models that predict the next token, not of masked ones")
    return masked_tokens(encoder, name)


def masked_tokens(encoder: DocumentEncoder, name: str) -> MaskedTokens:
    """Return how a masked language model predicts the tokens of documents.

    The encoder then adds no BOS to documents.
    """
    token = encoder.tokenizer.mask_token_id
    if token is None:
        raise InputError(f"the tokenizer of {name} has no mask token")
    encoder.bos = None  # every window has its own special tokens
    before, after = encoder.around()
    return MaskedTokens(int(token), before, after)


@dataclass(frozen=True)
class Unit:
    """One piece of work whose result is one file: the questions about one haystack, or a document
    in one regime."""

    name: str  # its file in the store of its variant
    what: str  # for messages
    kind: str  # kind of work: the regime, or the task and length of questions
    sizes: tuple[int, ...]  # tokens of each pass
    beside: tuple[str, ...] = ()  # further files from the same passes
    items: tuple[Item, ...] = ()  # the questions
    document: Document | None = None
    digest: str = ""  # digest of the document's tokens
    regime: str = ""  # short, pass-LENGTH or stride-LENGTH; of questions, only short
    served: tuple[int, ...] = ()  # lengths at which a pass is compared with the base

    @property
    def longest(self) -> int:
        """Return the tokens of the longest pass over this document or group of questions."""
        return max(self.sizes)

    @property
    def tokens(self) -> int:
        """Return the forward tokens of all passes over this document or group of questions."""
        return sum(self.sizes)

    @property
    def asks(self) -> bool:
        """Return whether the unit is questions, not a document."""
        return self.document is None

    @property
    def files(self) -> tuple[str, ...]:
        """Return all files of the unit's losses or answers, its own last: if that file is in a
        store, all are."""
        return (*self.beside, self.name)

    def is_in(self, store: Store) -> bool:
        """Return whether a store has all files of the unit."""
        return all(store.has(name) for name in self.files)


@dataclass(frozen=True)
class Workload:
    """The documents and questions for every variant; a variant with the short window gets the
    questions with their text truncated to its context."""

    frame: LossStatistics
    documents: tuple[Document, ...] = ()
    questions: tuple[tuple[Item, ...], ...] = ()  # each group over one haystack
    prediction: Prediction = NEXT_TOKEN
    bos: int | None = None
    decode: Decode = str
    is_strided: bool = False  # also run the loop of the transformers documentation
    # The base's store, if the next token of each model is compared with the base's.
    against: str | None = None

    def of(self, begin: int, end: int) -> "Workload":
        """Return the workload of the documents from `begin` to `end`, without questions."""
        return replace(self, documents=self.documents[begin:end], questions=())

    def units(self, variant: Variant) -> Iterator[Unit]:
        """Yield all units of a variant: its documents, then its questions."""
        regimes = variant.regimes(self.frame)
        strides = dict[str, int]()
        if self.is_strided and not variant.reads_short:
            strides = {f"stride-{window}": window for window in self.frame.lengths}
        for document, name in zip(self.documents, self.hashes, strict=True):
            for regime, length in (regimes | strides).items():
                unit = self._of_document(document, name, variant, regime, length)
                if self.against is not None and regime.startswith("pass-"):
                    unit = replace(unit, served=served_lengths(self.frame, regimes, length))
                yield unit
        for items, name in self._groups[variant.reads_short]:
            yield self._of_questions(items, name, variant)

    @cached_property
    def hashes(self) -> tuple[str, ...]:
        """Return the digest of the tokens to read from each document."""
        longest = self.frame.longest
        return tuple(document.prefix_hashes([longest])[longest] for document in self.documents)

    @cached_property
    def _groups(self) -> dict[bool, list[tuple[tuple[Item, ...], str]]]:
        """Return each group of questions with the file of its answers, by whether the text is
        truncated to the trained context."""
        groups: dict[bool, list[tuple[tuple[Item, ...], str]]] = {False: [], True: []}
        for items in self.questions:
            groups[False].append((items, self._file_of(items)))
            shorter = truncated(items, self.frame.context - (self.bos is not None))
            if shorter:
                groups[True].append((shorter, self._file_of(shorter)))
        return groups

    def _file_of(self, items: tuple[Item, ...]) -> str:
        """Return the file name, in a store, of the answers to a group of questions."""
        content = digest([item.identity for item in items])[:8]
        return f"{ANSWERS}{items[0].task}-{self._length_of(items)}-{items[0].index}-{content}.json"

    def tokens(self, variant: Variant) -> int:
        """Count the forward tokens of a variant over its documents and questions."""
        return sum(unit.tokens for unit in self.units(variant))

    def answers(self, variant: Variant, store: Store) -> list[ItemScore]:
        """Return the scores of the questions from the variant's store, in a fixed order."""
        rows = [row for _, name in self._groups[variant.reads_short] for row in store.get(name)]
        scores = read_values(list[ItemScore], rows, variant.label)
        return sorted(scores, key=lambda s: (s.task, s.length, s.index, s.depth or 0.0))

    def measured(self, variants: Iterable[Variant], stores: Mapping[str, Store]) -> Measurement:
        """Return the measurement of the variants from the stores, by label."""
        models = dict[str, MeasuredModel]()
        for variant in variants:
            store = stores[variant.label]
            strides = None
            if self.is_strided and not variant.reads_short:
                strides = {
                    size: [store.get(loss_file_name(f"stride-{size}", one)) for one in self.hashes]
                    for size in self.frame.lengths
                }
            reading = None
            divergence = None
            agreement = None
            if self.documents:
                regimes = variant.regimes(self.frame)
                reading = store.reading(variant.label, regimes, self.hashes)
                if self.against is not None and not variant.reads_short:
                    key = against_key(self.frame, self.against)
                    compared = store.compared(variant.label, key, regimes, self.hashes)
                    divergence, agreement = compared
            models[variant.label] = MeasuredModel(
                variant.kind,
                reading,
                tuple(self.answers(variant, store)),
                strides=strides,
                divergence=divergence,
                agreement=agreement,
                unrounded=variant.unrounded,
            )
        return Measurement(self.frame, models, self.described if self.documents else None)

    @cached_property
    def described(self) -> MeasuredDocuments:
        """Return the documents as results hold them."""
        return MeasuredDocuments(
            tuple(document.name for document in self.documents),
            tuple(document.prefix_hashes(self.frame.lengths) for document in self.documents),
            tuple(document.token_bytes.astype(np.int64) for document in self.documents),
        )

    def _of_document(
        self, document: Document, name: str, variant: Variant, regime: str, length: int
    ) -> Unit:
        """Return the unit of a document: through the short window, in one long pass, or by the loop
        in the transformers documentation."""
        frame = self.frame
        beside = tuple[str, ...]()
        if regime == "short":
            kind = "truncated text"
            windows = short_windows(length, frame.context)
            sizes = [window.end - window.begin for window in windows]
            if self.against is not None and variant.kind == BASE:
                beside = (states_folder(frame),)
        elif regime.startswith("stride-"):
            kind = f"strided at {length}"
            windows = strided_windows(frame.longest, length, hf_stride(length))
            sizes = [window.end - window.begin for window in windows]
        else:
            kind = "whole"
            sizes = [length] * frame.scoring.passes
            if self.against is not None:
                beside = divergence_folders(frame, self.against, regime)
        return Unit(
            name=loss_file_name(regime, name),
            what=f"{document.name} ({variant.label}, {regime})",
            kind=kind,
            sizes=tuple(sizes),
            beside=tuple(loss_file_name(folder, name) for folder in beside),
            document=document,
            digest=name,
            regime=regime,
        )

    def _length_of(self, items: tuple[Item, ...]) -> int:
        """Return the length of the prompt of a group of questions, its BOS included."""
        return items[0].length + (self.bos is not None)

    def _of_questions(self, items: tuple[Item, ...], name: str, variant: Variant) -> Unit:
        """Return the unit of the questions about one haystack."""
        length = self._length_of(items)
        kind = f"{items[0].task} at {length_text(length)}"
        if items[0].whole:
            kind += ", truncated"
        # A haystack that several questions share is read once.
        shared = items[0].shared if len(items) > 1 else 0
        tokens = shared + sum(item.most_read - shared for item in items)
        return Unit(
            name=name,
            what=f"{items[0].task} at {length} ({variant.label})",
            kind=kind,
            sizes=(tokens,),
            items=items,
            regime="short" if variant.reads_short else "",
        )


def read_unit(
    unit: Unit, reads: Workload, scorer: TokenScorer, against: Against | None = None
) -> dict[str, Any]:
    """Read one document or group of questions with a model; return the content of each of its
    files.

    `against` is the base, if the next tokens are compared with the base's.
    """
    frame = reads.frame
    document = unit.document
    if document is None:
        length = unit.items[0].length + (reads.bos is not None)
        span = length
        if unit.regime == "short":
            span = min(length, frame.context)
        with pinned(scorer.model, span):
            scores = score_items(scorer, unit.items, reads.bos, reads.decode)
        return {unit.name: [values_json(score) | {"length": length} for score in scores]}
    ids = document.ids[: frame.longest]
    results: tuple[Any, ...]
    if unit.regime == "short":
        bos = int(ids[0]) if document.has_bos else None
        if unit.beside:
            results = read_base(scorer, ids, frame, bos)
        else:
            results = (read_short(scorer, ids, frame.context, bos),)
    elif unit.regime.startswith("stride-"):
        results = (read_strided(scorer, ids, unit.longest),)
    elif unit.beside:
        assert against is not None  # the base is read first
        states = against.states(frame, unit.digest)
        results = read_against(scorer, against, states, ids[: unit.longest], frame, unit.served)
    else:
        results = (reads.prediction.read(scorer, ids, unit.longest, frame),)
    return dict(zip(unit.files, results, strict=True))
