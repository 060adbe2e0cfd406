"""What models read: documents and questions, and the units of work that these make.

A unit is one document in one regime, or the questions about one haystack; its result is one file of
a variant's store. The units are enumerated here alone: for the work, for what it will take, and for
what is read back.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from ropext.corpus import Document
from ropext.evaluation.divergence import (
    Against,
    against_key,
    divergence_folders,
    read_against,
    read_base,
    served_lengths,
    states_folder,
)
from ropext.evaluation.forward import TokenScorer
from ropext.evaluation.prediction import NEXT_TOKEN, Prediction
from ropext.evaluation.reading import (
    Decode,
    hf_stride,
    pinned,
    read_short,
    read_strided,
    score_items,
)
from ropext.evaluation.variants import Variant
from ropext.jsontext import digest, read_values, values_json
from ropext.lengths import length_text
from ropext.results import BASE
from ropext.results.measurement import MeasuredModel, Measurement, Store, array_name
from ropext.results.perplexity import Documents, Frame, Reading
from ropext.results.retrieval import ItemScore
from ropext.results.windows import Window, short_windows, strided_windows
from ropext.tasks import Item

ANSWERS = "items/"  # of a store


@dataclass(frozen=True)
class Unit:
    """One piece of work whose result is one file."""

    name: str  # its file in the store of its variant
    what: str  # for messages
    kind: str  # of work: of which regime, or questions of which task and length
    passes: int
    size: int  # tokens of a pass, or of the longest one
    tokens: int  # forward tokens of all
    compute: Callable[[TokenScorer, Against | None], Mapping[str, Any]]  # the content of each file
    beside: tuple[str, ...] = ()  # further files, of what the same passes show
    asks: bool = False  # it is questions, not a document

    @property
    def files(self) -> tuple[str, ...]:
        """All files, its own last: where that is there, all are."""
        return (*self.beside, self.name)

    def is_in(self, store: Store) -> bool:
        """Whether a store has all that it makes."""
        return all(store.has(name) for name in self.files)


@dataclass(frozen=True)
class Reads:
    """What every variant reads; one that reads through the short window answers no questions."""

    frame: Frame
    documents: tuple[Document, ...] = ()
    questions: tuple[tuple[Item, ...], ...] = ()  # each group over one haystack
    prediction: Prediction = NEXT_TOKEN
    bos: int | None = None
    decode: Decode = str
    is_strided: bool = False  # read also as the loop in the transformers documentation does
    # The base's store, where the next token of each model is held against the base's.
    against: str | None = None

    def of(self, begin: int, end: int) -> "Reads":
        """Return some of the documents alone."""
        return replace(self, documents=self.documents[begin:end], questions=())

    def units(self, variant: Variant) -> Iterator[Unit]:
        """Enumerate all that a variant reads."""
        for document, name in zip(self.documents, self.hashes, strict=True):
            yield from self._of_document(document, name, variant)
        for group, name in self._asked(variant):
            yield self._of_questions(group, name, variant.label)

    @cached_property
    def hashes(self) -> tuple[str, ...]:
        """The digest of the tokens that are read of each document."""
        longest = self.frame.longest
        return tuple(document.prefix_hashes([longest])[longest] for document in self.documents)

    @cached_property
    def _groups(self) -> tuple[tuple[tuple[Item, ...], str], ...]:
        """Each group of questions with the file of its answers."""
        pairs = []
        for items in self.questions:
            content = digest([asdict(item) for item in items])[:8]
            name = f"{items[0].task}-{self._length_of(items)}-{items[0].index}-{content}.json"
            pairs.append((items, ANSWERS + name))
        return tuple(pairs)

    def _asked(self, variant: Variant) -> tuple[tuple[tuple[Item, ...], str], ...]:
        return () if variant.reads_short else self._groups

    def tokens(self, variant: Variant) -> int:
        """Count the forward tokens of a variant."""
        return sum(unit.tokens for unit in self.units(variant))

    def reading(self, variant: Variant, store: Store) -> Reading:
        """Return what the store has of the documents."""
        return store.reading(variant.label, variant.regimes(self.frame), self.hashes)

    def answers(self, variant: Variant, store: Store) -> list[ItemScore]:
        """Return what the store has of the questions, in a fixed order."""
        rows = [row for _, name in self._asked(variant) for row in store.get(name)]
        scores = read_values(list[ItemScore], rows, variant.label)
        return sorted(scores, key=lambda s: (s.task, s.length, s.index, s.depth or 0.0))

    def measured(self, variants: Iterable[Variant], stores: Mapping[str, Store]) -> Measurement:
        """Gather what the stores, by label, have of the variants."""
        models = dict[str, MeasuredModel]()
        for variant in variants:
            store = stores[variant.label]
            strides = None
            if self.is_strided and not variant.reads_short:
                strides = {
                    size: [store.get(array_name(f"stride-{size}", one)) for one in self.hashes]
                    for size in self.frame.lengths
                }
            divergence = None
            agreement = None
            if self.documents and self.against is not None and not variant.reads_short:
                key = against_key(self.frame, self.against)
                regimes = variant.regimes(self.frame)
                compared = store.compared(variant.label, key, regimes, self.hashes)
                divergence, agreement = compared
            models[variant.label] = MeasuredModel(
                variant.kind,
                self.reading(variant, store) if self.documents else None,
                tuple(self.answers(variant, store)),
                strides=strides,
                divergence=divergence,
                agreement=agreement,
                unrounded=variant.unrounded,
            )
        return Measurement(self.frame, models, self.described if self.documents else None)

    @cached_property
    def described(self) -> Documents:
        """The documents as results hold them."""
        return Documents(
            tuple(document.name for document in self.documents),
            tuple(document.prefix_hashes(self.frame.lengths) for document in self.documents),
            tuple(document.token_bytes.astype(np.int64) for document in self.documents),
        )

    def _of_document(self, document: Document, name: str, variant: Variant) -> Iterator[Unit]:
        frame = self.frame
        ids = document.ids[: self.frame.longest]

        def unit(
            regime: str, kind: str, windows: list[Window], read: Callable[..., Any], *beside: str
        ) -> Unit:
            sizes = [window.end - window.begin for window in windows]
            what = f"{document.name} ({variant.label}, {regime})"
            files = tuple(array_name(folder, name) for folder in beside)

            def compute(scorer: TokenScorer, against: Against | None) -> Mapping[str, Any]:
                results = read(scorer, against) if beside else (read(scorer),)
                return dict(zip((*files, array_name(regime, name)), results, strict=True))

            return Unit(
                name=array_name(regime, name),
                what=what,
                kind=kind,
                passes=len(sizes),
                size=max(sizes),
                tokens=sum(sizes),
                compute=compute,
                beside=files,
            )

        read: Callable[..., Any]
        for regime, length in variant.regimes(frame).items():
            if regime == "short":
                windows = list(short_windows(frame.longest, frame.context))
                bos = int(ids[0]) if document.has_bos else None
                read = partial(read_short, ids=ids, context=frame.context, bos=bos)
                if self.against is None or variant.kind != BASE:
                    yield unit(regime, "truncated text", windows, read)
                    continue
                read = partial(read_base, ids=ids, frame=frame, bos=bos)
                yield unit(regime, "truncated text", windows, read, states_folder(frame))
                continue
            windows = [Window(0, length, 1)] * frame.scoring.passes
            if self.against is not None:
                lengths = served_lengths(frame, variant.regimes(frame), length)
                of_pass = ids[:length]
                read = partial(
                    read_against, ids=of_pass, frame=frame, lengths=lengths, document=name
                )
                beside = divergence_folders(frame, self.against, regime)
                yield unit(regime, "whole", windows, read, *beside)
                continue
            yield unit(regime, "whole", windows, self.prediction.reading(ids, length, frame))
        for size in frame.lengths if self.is_strided and not variant.reads_short else ():
            windows = list(strided_windows(frame.longest, size, hf_stride(size)))
            read = partial(read_strided, ids=ids, size=size)
            yield unit(f"stride-{size}", f"strided at {size}", windows, read)

    def _length_of(self, items: tuple[Item, ...]) -> int:
        """The length of a prompt, its BOS included."""
        return items[0].length + (self.bos is not None)

    def _of_questions(self, items: tuple[Item, ...], name: str, label: str) -> Unit:
        task = items[0].task
        length = self._length_of(items)

        def compute(scorer: TokenScorer, _: Against | None) -> Mapping[str, Any]:
            with pinned(scorer.model, length):
                scores = score_items(scorer, items, self.bos, self.decode)
            return {name: [values_json(score) | {"length": length} for score in scores]}

        # A haystack that several questions share is read once.
        shared = items[0].shared if len(items) > 1 else 0
        tokens = shared + sum(item.most_read - shared for item in items)
        kind = f"{task} at {length_text(length)}"
        what = f"{task} at {length} ({label})"
        return Unit(name, what, kind, 1, tokens, tokens, compute, asks=True)
