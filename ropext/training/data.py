"""Divide `--data` into documents to train on and documents held out to judge by, for finetune and
fit, and hold all facts of a training known before weights are loaded.

Content and seed alone decide which documents are held out. A document's key is the hash of both,
and every key in the lowest tenth is drawn. Steps, batches, file names and the order of files decide
nothing.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ropext.base.errors import InputError
from ropext.base.lengths import length_text
from ropext.evaluation import corpus
from ropext.evaluation.corpus import DocumentEncoder
from ropext.evaluation.corpus.selection import NO_LIMIT, REMEDY
from ropext.evaluation.documents import DocumentWords, read_corpus
from ropext.evaluation.workload import NEXT_TOKEN, Prediction, Workload
from ropext.files.checkpoint import Snapshot
from ropext.files.checkpoint.provenance import Record
from ropext.options.evaluate import DocumentOptions, Evaluate
from ropext.options.training import Finetune, Fit, TrainingOptions
from ropext.results.overlap import (
    NO_DOCUMENTS,
    Overlap,
    TrainingDocuments,
    overlap_of_documents,
    training_documents,
)
from ropext.results.values import FEWEST_DOCUMENTS
from ropext.training.defaults import Settings
from ropext.training.learning import NEXT_TOKEN_LEARNING, Learning
from ropext.training.rows import TrainingRows, join_documents
from ropext.training.turns import scored_tokens

# One in SHARE of the documents that can judge is held out: at least eight documents, but never
# more than one in LARGEST_SHARE.
SHARE = 10
LARGEST_SHARE = 4
DRAWN = f"{2**256 // SHARE:064x}"  # keys below it


@dataclass(frozen=True)
class Division:
    """How DATA is divided into documents to train on and documents held out."""

    wanted_tokens: int  # to train on
    row: int  # tokens of a row; only whole rows of a document count
    target: int  # tokens that a document must have to be held out
    judging: int  # windows of the target's length that will be read; 0 = none is held out
    joined: bool = False  # judging documents are joined, so that shorter ones can be held out too
    streamed: bool = False  # read until there is enough for both parts
    # Earlier training data of the checkpoint; documents that gave its verdict are in neither part.
    before: TrainingDocuments | None = None


@dataclass(frozen=True)
class TrainingData:
    """The two parts of DATA; no document is in both."""

    documents: tuple[corpus.Document, ...]  # to train on, in the order found
    held_out: tuple[corpus.Document, ...]  # in the order of their keys
    read: int
    longest: int = 0  # tokens
    trained: TrainingDocuments = (
        NO_DOCUMENTS  # all data that the result is trained on, for its record
    )
    kept_out: int = 0  # documents that gave a verdict
    notes: tuple[str, ...] = ()  # warnings about files that are not read, and unknown tokens

    @property
    def tokens(self) -> int:
        """Return the number of tokens to train on."""
        return sum(len(document) for document in self.documents)

    def digest(self) -> str:
        """Return the SHA-256 of the training documents: their ids, and the mask of tokens that
        the loss is taken on."""
        digest = hashlib.sha256()
        for document in self.documents:
            digest.update(document.ids.astype("<i4").tobytes())
            digest.update(np.packbits(document.mask()).tobytes())
        return digest.hexdigest()


def read_training_data(
    source: str, options: TrainingOptions, encoder: corpus.DocumentEncoder, division: Division
) -> TrainingData:
    """Read --data of a fine-tuning or a fit, and divide it into documents to train on and
    documents held out."""
    place = corpus.Source(
        source,
        column=options.column,
        split=options.split,
        largest=options.max_document_mib,
        default_split="train",
        pieces=options.split_documents,
    )
    row = 1 if options.packing == "glued" else division.row
    division = replace(division, row=row, streamed=place.is_streamed)
    divided = divide_training_data(
        corpus.texts_of(place, encoder, division.target), encoder, division
    )
    notes = corpus.unread_files(place)
    if unknown := encoder.unknown(divided.documents or divided.held_out):
        notes.append(unknown)
    return replace(divided, notes=tuple(notes))


class _TrainingDataParts:
    """The documents of --data with drawn keys, which can be held out of a training, and all
    others."""

    def __init__(self, division: Division, encoder: corpus.DocumentEncoder) -> None:
        """Begin both parts of --data without documents: to train on, and held out."""
        most = max(division.wanted_tokens, corpus.MOST_TOKENS)
        self.division = division
        self.encoder = encoder
        self.apart = division.before and division.before.judged
        # fewest tokens of a held-out document
        self.least = 1 if division.joined else division.target
        self.drawn_below = DRAWN if division.judging else ""  # keys that are drawn
        self.drawn = corpus.SmallestKeys(most)
        self.others = corpus.SmallestKeys(most)
        self.enough = division.judging * division.target
        self.held = 0  # tokens of the drawn documents, as they will be read
        self.longest = 0
        self.kept_out = 0

    def take(self, key: str, raw: corpus.RawDocument, text: str, number: int) -> None:
        """Encode a text of --data that one of the parts may keep: to train on, or held out."""
        if not (key < self.drawn_below or self.others.admits(key)):
            return
        division = self.division
        document = replace(_encoded_document(self.encoder, raw, text), number=number)
        known = document.fingerprint
        if self.apart is not None and self.apart.holds(known.contents, known.passages):
            self.kept_out += 1
            return
        size = len(document)
        self.longest = max(self.longest, size)
        if key < self.drawn_below and size >= self.least:
            if self.drawn.admits(key) and not (division.streamed and self.held >= self.enough):
                self.drawn.add(key, document, size)
                self.held += min(size, division.target)
        elif self.others.admits(key):
            self.others.add(key, document, size - size % division.row)

    @property
    def is_full(self) -> bool:
        """Return whether --data gave as many tokens to train on, and to hold out, as the division
        wants."""
        return self.others.tokens >= self.division.wanted_tokens and self.held >= self.enough


def divide_training_data(
    raw: Iterable[corpus.RawDocument], encoder: corpus.DocumentEncoder, division: Division
) -> TrainingData:
    """Put each document into one of the parts: to train on, or held out. If there are more than
    wanted and more than MOST_TOKENS, take the smallest keys, in whole rows.

    The drawn documents are held out. If they are fewer than eight, the documents with the next
    keys are held out too, but never more than a quarter of all.
    """
    texts = corpus.DistinctTexts(raw, encoder, encoder.content_key)
    parts = _TrainingDataParts(division, encoder)
    for key, found, text in texts.drawn():
        parts.take(key, found, text, texts.read)
        if division.streamed and parts.is_full:
            break
    drawn = parts.drawn.in_order()
    documents = drawn + parts.others.in_order()
    held_out = list[corpus.Document]()
    if division.judging:
        held_out = [document for document in documents if len(document) >= parts.least]
        # The length of text that was not kept is unknown, and there is enough of it.
        seen = len(held_out) if len(documents) == texts.different else texts.different
        del held_out[min(max(len(drawn), FEWEST_DOCUMENTS), seen // LARGEST_SHARE) :]
    judging = {document.number for document in held_out}
    training = [document for document in documents if document.number not in judging]
    training.sort(key=lambda document: document.number)
    now = training_documents(document.known_by[1:] for document in training)
    return TrainingData(
        documents=tuple(document.to_train_on() for document in training),
        held_out=tuple(held_out),
        read=texts.read,
        longest=parts.longest,
        trained=now if division.before is None else division.before.with_more(now),
        kept_out=parts.kept_out,
    )


def _encoded_document(
    encoder: corpus.DocumentEncoder, raw: corpus.RawDocument, text: str
) -> corpus.Document:
    """Encode a document to train on; in a conversation the loss is taken on the assistant's
    turns alone."""
    document = encoder.document(raw.name, text, NO_LIMIT)
    if isinstance(raw.content, str):
        return document
    return replace(document, scored=scored_tokens(document, raw, text, encoder))


def judging_workload(
    documents: Sequence[corpus.Document],
    lengths: tuple[int, int],
    seed: int,
    bos: int | None = None,
    prediction: Prediction = NEXT_TOKEN,
) -> Workload:
    """Return the reads by which held-out documents of the target's length judge a training;
    `lengths` are the context and the target."""
    frame = prediction.frame(lengths[0], lengths, seed)
    return Workload(frame, tuple(documents), prediction=prediction, bos=bos)


def count_judging_tokens(reads: Workload | None) -> int:
    """Count the tokens that a judgement of a training reads through windows of the target's
    length."""
    if reads is None:
        return 0
    return len(reads.documents) * reads.frame.longest * reads.frame.scoring.passes


def judging_documents(
    data: TrainingData, options: Finetune, encoder: corpus.DocumentEncoder, target: int
) -> Sequence[corpus.Document]:
    """Return the documents that judge a fine-tuning: documents of --eval that reach the target,
    or documents held out of --data."""
    count = options.eval_documents
    if not count or options.evaluate is None:
        return tuple(document.cut(target) for document in data.held_out[:count])
    # As `ropext eval` reads them: a datasets id by its test split.
    shared = options.model_dump(include=DocumentOptions.model_fields.keys() - {"split"})
    reading = Evaluate.model_validate(shared | {"data": options.evaluate})
    wanted = corpus.Wanted((target,), given=True, max_documents=count)
    return read_corpus(reading, encoder, wanted, DocumentWords(data="--eval")).documents


def read_fit_data(
    source: str,
    options: Fit,
    encoder: corpus.DocumentEncoder,
    target: int,
    wanted_tokens: int,
    before: TrainingDocuments | None = None,
) -> TrainingData:
    """Divide the documents of a fit as `finetune` does; at most --held-out of them judge, each
    as a window of the target's length."""
    glued = options.packing == "glued"
    division = Division(wanted_tokens, target, target, options.held_out, glued, before=before)
    data = read_training_data(source, options, encoder, division)
    if glued:
        return _joined_fit_data(data, encoder, options, target)
    if not data.held_out:
        raise _too_few_to_fit(data, target)
    judging = tuple(document.cut(target) for document in data.held_out[: options.held_out])
    return replace(data, held_out=judging)


def _joined_fit_data(
    data: TrainingData, encoder: corpus.DocumentEncoder, options: Fit, target: int
) -> TrainingData:
    """Join the documents of a fit after the division (--packing glued): no window holds text of
    both parts, and no document is in two of the judging windows."""
    separator = document_separator(encoder)
    windows = corpus.glue_documents(data.held_out, target, options.held_out, separator)
    if not windows or data.tokens < target:
        held = sum(map(len, data.held_out))
        ways = "more text, or a smaller --factor" if data.read >= LARGEST_SHARE else REMEDY
        raise InputError(
            f"--packing glued: of {data.tokens + held} tokens in {data.read} documents {held} are "
            f"held out to judge the fit, and each part must reach {length_text(target)}: {ways}"
        )
    fitted = join_documents(data.documents, separator, options.seed)
    return replace(data, documents=tuple(fitted), held_out=windows)


def document_separator(encoder: corpus.DocumentEncoder) -> int | None:
    """Return the token between joined training documents; None if each document begins with its
    BOS."""
    return encoder.tokenizer.eos_token_id if encoder.bos is None else None


def _too_few_to_fit(data: TrainingData, target: int) -> InputError:
    """Return the error of a fit whose documents are too few or too short."""
    long = sum(len(document) >= target for document in data.documents)
    ways = "longer documents, a smaller --factor, or --packing glued to join them"
    if data.read < LARGEST_SHARE:
        ways = f"more documents, or {REMEDY}"
    return InputError(
        f"{long or 'none'} of the {data.read} documents reaches {length_text(target)} tokens (the "
        f"longest has {data.longest}). A fit needs at least {LARGEST_SHARE}, one of them to "
        f"judge it: {ways}"
    )


@dataclass(kw_only=True, eq=False, repr=False)
class Training:
    """A training before its weights are loaded: documents read and divided, settings chosen."""

    snapshot: Snapshot  # the checkpoint that is trained
    record: Record | None  # how that was made
    options: TrainingOptions
    context: int
    target: int
    settings: Settings
    data: TrainingData
    encoder: DocumentEncoder
    rows: TrainingRows
    judge: Workload | None  # None if no document is read
    chooses_step: bool  # the documents that judge choose the step that is written
    learning: Learning = NEXT_TOKEN_LEARNING

    @property
    def judging_count(self) -> int:
        """Return the number of held-out documents that are read before, during and after the
        training."""
        return len(self.judge.documents) if self.judge else 0

    @property
    def padding(self) -> int:
        """Return the token that fills up rows of a training batch."""
        return self.encoder.tokenizer.pad_token_id or 0

    @property
    def used(self) -> TrainingDocuments:
        """Return the documents that the result will have been trained on, and the documents that
        chose its step."""
        if not self.chooses_step or self.judge is None:
            return self.data.trained
        chose = training_documents(document.known_by[1:] for document in self.judge.documents)
        return self.data.trained.with_more(replace(NO_DOCUMENTS, chose=chose))

    @cached_property
    def overlap_before(self) -> Overlap | None:
        """Return the overlap known before the training: how many judging documents are trained on,
        or chose something earlier. None if no document judges."""
        return self._overlap_with(self.data.trained)

    @cached_property
    def overlap(self) -> Overlap | None:
        """Return the overlap known after the training: some judging documents may have chosen the
        step."""
        return self._overlap_with(self.used if self.settings.patience else self.data.trained)

    def _overlap_with(self, known: TrainingDocuments) -> Overlap | None:
        """Return the overlap of the judging documents with `known` training documents; None if
        no document judges."""
        documents = self.judge.documents if self.judge else ()
        return overlap_of_documents(known, [document.known_by for document in documents])

    def lineage(self, known: Overlap | None) -> str:
        """Return the sentences on the judging documents' `known` overlap with training
        documents, and on documents that are kept out of the training."""
        sentences = list[str]()
        if known is not None and known.sentence:
            sentences.append(known.sentence)
        if self.data.kept_out:
            out = f"{self.data.kept_out} documents of the verdict are kept out of training"
            sentences.append(out)
        return "; ".join(sentences)
