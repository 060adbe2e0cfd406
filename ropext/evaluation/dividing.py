"""Divide the documents of a choice (`--method auto`) by their content: some choose the method,
others judge it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ropext.base.atomic import write_text
from ropext.base.errors import InputError
from ropext.base.lengths import length_text
from ropext.evaluation.corpus import (
    MOST_TOKENS,
    DistinctTexts,
    Document,
    DocumentEncoder,
    SmallestKeys,
    texts_of,
)
from ropext.evaluation.corpus.selection import NO_LIMIT
from ropext.evaluation.documents import source_of
from ropext.options.evaluate import Evaluate
from ropext.results.overlap import training_documents
from ropext.results.values import FEWEST_DOCUMENTS

# A third of the documents that reach the target gives the verdict: eight, if there are as many
# again, and no more than this.
MOST_OF_VERDICT = 32


@dataclass(frozen=True)
class Divided:
    """The documents of a choice, by their use."""

    chosen: list[Document]  # they reach the target and choose the method
    judged: list[Document]  # they give the verdict; none if other documents do
    short: list[Document]  # they do not reach the target, and can be trained on


def divide(options: Evaluate, encoder: DocumentEncoder, target: int, has_judges: bool) -> Divided:
    """Read the documents for a measured comparison of methods and divide them: some choose the
    method, the others give the verdict. If `has_judges`, documents elsewhere give it, and all of
    these choose.

    Raise InputError if there are too few documents.
    """
    able, short = _documents_of(options, encoder, target)
    judged = list[Document]()
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


def write_documents(file: Path, documents: Sequence[Document]) -> None:
    """Write divided documents, which the models of a measured comparison of methods read, as lines
    of JSON, a conversation under its own key."""
    lines = list[str]()
    for document in documents:
        key = "text" if isinstance(document.content, str) else "messages"
        lines.append(json.dumps({key: document.content}) + "\n")
    write_text(file, "".join(lines) or "\n")


def _documents_of(
    options: Evaluate, encoder: DocumentEncoder, target: int
) -> tuple[list[Document], list[Document]]:
    """Return the documents that reach the target, and the shorter ones, which can be trained on.

    Their keys depend on the content and the seed alone.
    """
    source = source_of(options)
    key_of = partial(encoder.content_key, use="choice")
    texts = DistinctTexts(texts_of(source, encoder, target), encoder, key_of)
    smallest = SmallestKeys(MOST_TOKENS)
    for key, found, text in texts.drawn():
        if smallest.admits(key):
            document = encoder.document(found.name, text, NO_LIMIT)
            kept = replace(document, content=found.content, number=texts.read)
            smallest.add(key, kept, max(1, len(document)))
        if source.is_streamed and smallest.tokens >= MOST_TOKENS:
            break
    able = list[Document]()
    short = list[Document]()
    for document in smallest.in_order():
        if len(document) >= target:
            able.append(document)
        else:
            short.append(document)
    return able, short


def _divided(
    able: Sequence[Document], short: Sequence[Document], target: int
) -> tuple[list[Document], list[Document]]:
    """Return the documents for the verdict of a measured comparison, and the documents for its
    choice.

    A document that shares passages with possible training text of a fit moves to the choice, and
    the next one replaces it.
    """
    share = min(len(able) // 2, max(FEWEST_DOCUMENTS, len(able) // 3), MOST_OF_VERDICT)
    judged = list(able[:share])
    queue = list(able[share:])
    chosen = list[Document]()
    while True:
        known = training_documents(
            document.known_by[1:] for document in chosen + queue + list(short)
        )
        kept = list[Document]()
        for document in judged:
            # The evaluation reads its beginning alone.
            read = document.cut(target).fingerprint
            if known.holds(read.contents, read.passages):
                chosen.append(document)
            else:
                kept.append(document)
        left_out = len(judged) - len(kept)
        if not left_out:
            return judged, chosen + queue
        judged = kept + queue[:left_out]
        queue = queue[left_out:]
