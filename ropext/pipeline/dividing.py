"""The documents of a choice, divided by their content: those that choose the method, and those that
give the verdict."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from operator import not_
from pathlib import Path

from ropext import corpus
from ropext.atomic import write_text
from ropext.checkpoint import Snapshot
from ropext.corpus import Document, DocumentEncoder, RawDocument
from ropext.corpus.selection import MOST_TOKENS, NO_LIMIT
from ropext.errors import InputError
from ropext.lengths import length_text
from ropext.models.load import silenced
from ropext.models.tokenizer import load_tokenizer
from ropext.narration import Call
from ropext.options.evaluate import Evaluate
from ropext.results.overlap import trained
from ropext.results.values import FEWEST_DOCUMENTS

# Of the documents that reach the target a third gives the verdict: eight, if there are as many
# again, and no more than this.
MOST_OF_VERDICT = 32

Coded = tuple[RawDocument, Document]


@dataclass(frozen=True)
class Divided:
    """Documents by what a choice does with them."""

    chosen: list[Coded]  # they reach the target and choose the method
    judged: list[Coded]  # they give the verdict; none where others do
    short: list[Coded]  # they do not reach the target, and can be trained on


def encoder_of(
    snapshot: Snapshot, vocabulary: int | None, seed: int, call: Call
) -> DocumentEncoder:
    """How documents become tokens of a model."""
    with silenced():
        tokenizer = load_tokenizer(snapshot, call.trust_remote_code)
    return DocumentEncoder(tokenizer, vocabulary, seed)


def divide(options: Evaluate, encoder: DocumentEncoder, target: int, has_judges: bool) -> Divided:
    """Read the documents and divide them, where no others give the verdict; too few are refused."""
    able, short = _documents_of(options, encoder, target)
    judged = list[Coded]()
    chosen = able
    if not has_judges:
        judged, chosen = _divided(able, short, target)
    if not chosen or not (judged or has_judges):
        raise InputError(
            f"--data {options.data}: {len(able) or 'none'} of its documents reaches "
            f"{length_text(target)} tokens; two without common text are needed, one to "
            "choose by and one for the verdict (eight of each give intervals). Give more or longer "
            "documents, a smaller --factor, or evaluate.split_documents=windows"
        )
    return Divided(chosen, judged, short)


def write_documents(file: Path, documents: Sequence[RawDocument]) -> None:
    """Write documents as lines of JSON, a conversation under its own key."""
    lines = list[str]()
    for document in documents:
        key = "text" if isinstance(document.content, str) else "messages"
        lines.append(json.dumps({key: document.content}) + "\n")
    write_text(file, "".join(lines) or "\n")


def _documents_of(
    options: Evaluate, encoder: DocumentEncoder, target: int
) -> tuple[list[Coded], list[Coded]]:
    """Those that reach the target, by keys that their content and the seed decide, and the others,
    which can be trained on."""
    where = options.column, options.split, options.data_revision, options.max_document_mib
    source = corpus.Source(str(options.data), *where)
    raw = corpus.read_documents(source)
    raw = corpus.split_documents(raw, options.split_documents, encoder, target)
    basket = corpus.Basket[Coded](MOST_TOKENS)
    key_of = partial(encoder.content_key, use="choice")
    for key, text, document in corpus.DistinctTexts(raw, encoder, key_of):
        if not basket.admits(key):
            continue
        coded = encoder.document(document.name, text, NO_LIMIT)
        basket.add(key, (document, coded), max(1, len(coded)))
        if source.is_streamed and basket.tokens >= MOST_TOKENS:
            break
    pairs = basket.in_order()
    able = [(document, coded) for document, coded in pairs if len(coded) >= target]
    return able, [(document, coded) for document, coded in pairs if len(coded) < target]


def _divided(
    able: Sequence[Coded], short: Sequence[Coded], target: int
) -> tuple[list[Coded], list[Coded]]:
    """Those of the verdict, and those that choose. One that has parts in common with what a fit may
    read chooses too, and the next takes its place."""
    share = min(len(able) // 2, max(FEWEST_DOCUMENTS, len(able) // 3), MOST_OF_VERDICT)
    judged = list(able[:share])
    queue = list(able[share:])
    chosen = list[Coded]()
    shared = [True]
    while any(shared):
        known = trained(coded.known_by[1:] for _, coded in (*chosen, *queue, *short))
        # As they will be read, by their beginnings.
        shared = [known.holds(*coded.cut(target).known_by[1:]) for _, coded in judged]
        chosen += compress(judged, shared)
        judged = [*compress(judged, map(not_, shared)), *queue[: sum(shared)]]
        queue = queue[sum(shared) :]
    return judged, [*chosen, *queue]
