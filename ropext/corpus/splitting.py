"""Several documents of one text: `--split-documents` by blank lines, a separator or windows."""

import re
from collections.abc import Iterable, Iterator

import numpy as np

from ropext.corpus.encoding import CUT_MARGIN, DocumentEncoder
from ropext.corpus.sources import RawDocument

BLANK_LINES, WINDOWS = "blank-lines", "windows"
REMEDY = (
    f"--split-documents makes several documents of one text ({BLANK_LINES}, a separator, or "
    f"{WINDOWS})"
)
# More tokens than any text has.
NO_LIMIT = 2**31 - 1


def split_documents(
    raw: Iterable[RawDocument], how: str | None, encoder: DocumentEncoder, length: int
) -> Iterator[RawDocument]:
    """Texts cut at blank lines, at a separator, or into windows of `length` tokens; with None, and
    of conversations, what was found."""
    for document in raw:
        if how is None or not isinstance(document.content, str):
            yield document
            continue
        pieces = [piece for piece in _pieces(document, how, encoder, length) if piece.strip()]
        for number, piece in enumerate(pieces, 1):
            name = f"{document.name}#{number}" if len(pieces) > 1 else document.name
            yield RawDocument(name, piece)


def _pieces(
    document: RawDocument, how: str, encoder: DocumentEncoder, length: int
) -> list[str] | Iterator[str]:
    text = encoder.text_of(document)
    if how == WINDOWS:
        return _windows(document.name, text, encoder, length)
    if how == BLANK_LINES:
        return re.split(r"\n[^\S\n]*\n\s*", text)
    return text.split(how.replace("\\n", "\n").replace("\\t", "\t"))


def _windows(name: str, text: str, encoder: DocumentEncoder, length: int) -> Iterator[str]:
    """Windows that follow one another; each a little longer, for a cut can change a token."""
    coded = encoder.document(name, text, NO_LIMIT)
    ends = np.concatenate([[0], np.cumsum(coded.token_bytes)])
    data = text.encode("utf-8", "replace")
    for start in range(0, max(1, len(coded) - length + 1), length):
        stop = min(start + length + CUT_MARGIN, len(coded))
        yield data[ends[start] : ends[stop]].decode("utf-8", "ignore")
