"""Documents to token arrays: where they come from, how they are encoded, which are taken.

Deterministic: the same data, tokenizer and seed give the same documents in the same order, whatever
the files are called. A document is never cut into several or glued to another silently.
"""

from ropext.corpus.encoding import Document, DocumentEncoder, content_hash
from ropext.corpus.selection import (
    MOST_TOKENS,
    Basket,
    Corpus,
    DistinctTexts,
    Wanted,
    choose_documents,
    glue_documents,
    split_documents,
    texts_of,
)
from ropext.corpus.sources import (
    RawDocument,
    Source,
    read_documents,
    require_data,
    unread_files,
)

__all__ = [
    "MOST_TOKENS",
    "Basket",
    "Corpus",
    "DistinctTexts",
    "Document",
    "DocumentEncoder",
    "RawDocument",
    "Source",
    "Wanted",
    "choose_documents",
    "content_hash",
    "glue_documents",
    "read_documents",
    "require_data",
    "split_documents",
    "texts_of",
    "unread_files",
]
