"""Text to token ids: BOS once per document, bytes of text per token, hashes of prefixes."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ropext.corpus.fingerprints import Fingerprint, fingerprint
from ropext.corpus.sources import Messages, RawDocument
from ropext.errors import InputError
from ropext.results.overlap import Hashes

Ids = npt.NDArray[np.int32]
Counts = npt.NDArray[np.int32]

# Characters encoded at first for each wanted token; a document that gives fewer tokens gets more.
CHARACTERS_PER_TOKEN = 8
# Tokens near the end of a cut text may differ from those of the whole text.
CUT_MARGIN = 16


@dataclass(frozen=True)
class Document:
    """Token ids of one document from its start, and the bytes of text each stands for.

    The bytes of a BOS are 0. `key` is the SHA-256 of the content, salted with the seed.
    """

    name: str
    key: str
    ids: Ids
    token_bytes: Counts
    has_bos: bool
    fingerprint: Fingerprint = field(default_factory=Fingerprint)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def known_by(self) -> tuple[str, tuple[int, ...], Hashes]:
        """Its name, and what tells whether it was trained on."""
        return self.name, self.fingerprint.contents, self.fingerprint.passages

    def cut(self, length: int) -> "Document":
        """Its first `length` tokens."""
        ids, sizes = self.ids[:length], self.token_bytes[:length]
        shorter = self.fingerprint.cut(length / max(1, len(self.ids)))
        return Document(self.name, self.key, ids, sizes, self.has_bos, shorter)

    def prefix_hashes(self, lengths: Iterable[int]) -> dict[int, str]:
        """SHA-256 of the first C token ids (little-endian int32), for each length C it has."""
        digest, hashes, done = hashlib.sha256(), dict[int, str](), 0
        for length in sorted(lengths):
            if length > len(self.ids):
                break
            digest.update(self.ids[done:length].astype("<i4").tobytes())
            hashes[length], done = digest.copy().hexdigest(), length
        return hashes


class DocumentEncoder:
    """A transformers tokenizer, as documents need it."""

    def __init__(self, tokenizer: Any, vocabulary: int | None = None, seed: int = 0) -> None:
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary
        self.seed = seed

    def encode(self, text: str) -> list[int]:
        """Ids of a piece of text, no special tokens added (what `ropext.tasks` asks for)."""
        return list(self.tokenizer.encode(text, add_special_tokens=False, verbose=False))

    @cached_property
    def bos(self) -> int | None:
        """The BOS id, if this tokenizer itself puts one before a text; a model trained without one
        gets none."""
        bos = self.tokenizer.bos_token_id
        if bos is None:
            return None
        probe = self.tokenizer.encode("a", add_special_tokens=True)
        return int(bos) if probe and probe[0] == bos else None

    def text_of(self, raw: RawDocument) -> str:
        """Plain text as it is; messages through the chat template."""
        text = raw.content
        if not isinstance(text, str):
            text = self._render(raw.name, text)
        try:
            text.encode()
        except UnicodeEncodeError:
            # JSON can escape half of a surrogate pair, which no tokenizer takes.
            return text.encode("utf-8", "replace").decode()
        return text

    def _render(self, name: str, messages: Messages) -> str:
        if not getattr(self.tokenizer, "chat_template", None):
            raise InputError(
                f"{name} is a conversation, but the tokenizer has no chat template; give a text "
                "column (--column) or a model with a template"
            )
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False))

    def key(self, text: str) -> str:
        """What decides which documents are taken: the content, salted with the seed."""
        salted = f"{self.seed}\0".encode() + text.encode("utf-8", "surrogatepass")
        return hashlib.sha256(salted).hexdigest()

    def document(self, name: str, text: str, limit: int) -> Document:
        """At most `limit` tokens from the start of a text, BOS included."""
        size = limit * CHARACTERS_PER_TOKEN
        while True:
            ids, sizes = self._encode(text[:size])
            if size >= len(text) or len(ids) >= limit + CUT_MARGIN:
                break
            size *= 2
        has_bos = self.bos is not None
        if has_bos and (not len(ids) or ids[0] != self.bos):
            ids, sizes = np.concatenate([[self.bos], ids]), np.concatenate([[0], sizes])
        elif has_bos:
            # The text (a chat template, say) brings its own BOS: one is enough.
            sizes[0] = 0
        ids, sizes = ids[:limit].astype(np.int32), sizes[:limit].astype(np.int32)
        self._check(name, ids)
        read = text.encode("utf-8", "replace")[: int(sizes.sum())].decode("utf-8", "ignore")
        return Document(name, self.key(text), ids, sizes, has_bos, fingerprint(text, read))

    def _encode(self, text: str) -> tuple[Ids, Counts]:
        if getattr(self.tokenizer, "is_fast", False):
            # Not verbose: a text longer than the model's context is what this is for.
            coded = self.tokenizer(
                text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
            ends = [end for _, end in coded["offset_mapping"]]
            return np.array(coded["input_ids"], np.int32), _bytes_by_end(text, ends)
        ids = np.array(self.encode(text), np.int32)
        # Without offsets the bytes are spread evenly; their sum over the text is right.
        edges = np.linspace(0, len(text.encode("utf-8", "replace")), len(ids) + 1).astype(np.int32)
        return ids, np.diff(edges)

    def _check(self, name: str, ids: Ids) -> None:
        if self.vocabulary is not None and len(ids) and int(ids.max()) >= self.vocabulary:
            raise InputError(
                f"the tokenizer does not match the model: {name} holds token {int(ids.max())}, but "
                f"the model has {self.vocabulary} embeddings"
            )


def _bytes_by_end(text: str, ends: list[int]) -> Counts:
    """Bytes between one token's end and the next; a character that takes several tokens counts at
    the first of them."""
    if text.isascii():
        offsets = np.maximum.accumulate(np.array([0, *ends], np.int64))
        return np.diff(offsets).astype(np.int32)
    sizes, reached = np.zeros(len(ends), np.int32), 0
    for k, end in enumerate(ends):
        if end > reached:
            sizes[k] = len(text[reached:end].encode("utf-8", "replace"))
            reached = end
    return sizes
