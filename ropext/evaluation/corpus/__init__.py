"""Read documents, encode them as token arrays, and choose which of them to use.

The result is deterministic: the same data, tokenizer and seed give the same documents in the same
order, whatever the files' names. Documents are never silently cut into several or joined.
"""

from ropext.evaluation.corpus.encoding import Document, DocumentEncoder, content_hash
from ropext.evaluation.corpus.selection import (
    MOST_TOKENS,
    Corpus,
    DistinctTexts,
    SmallestKeys,
    Wanted,
    choose_documents,
    glue_documents,
    split_documents,
    texts_of,
)
from ropext.evaluation.corpus.sources import (
    RawDocument,
    Source,
    read_documents,
    require_data,
    unread_files,
)

__all__ = [
    "MOST_TOKENS",
    "Corpus",
    "DistinctTexts",
    "Document",
    "DocumentEncoder",
    "RawDocument",
    "SmallestKeys",
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
