"""Encode a text as token ids, and fingerprint it so that it can be recognised later."""

import hashlib
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ropext.base.errors import InputError
from ropext.base.jsontext import Json
from ropext.evaluation.corpus.sources import Messages, RawDocument
from ropext.models.tokenizer import ask_sandbox, tokenizer_panics_refused
from ropext.results.overlap import Hashes, unique_hashes

PASSAGE = 64
EVERY = 64
BLOCK = 2**20  # characters hashed at once
# An odd number has an inverse modulo 2^64: a sum over powers can be moved to power 0.
FACTOR = 0x9E3779B97F4A7C15
INVERSE = pow(FACTOR, -1, 2**64)
NONE = np.empty(0, np.uint64)


def normalised(text: str) -> str:
    """Return the characters of a document of the corpus in one Unicode form, without white space.

    Line ends and indents belong to a file, not to the text.
    """
    return "".join(unicodedata.normalize("NFKC", text).split())


def content_hash(text: str) -> str:
    """Return the SHA-256 of the normalised text of a document of the corpus."""
    return hashlib.sha256(normalised(text).encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True)
class Fingerprint:
    """Whole texts, by the beginnings of their hashes, and passages of the parts that a model
    reads."""

    contents: tuple[int, ...] = ()
    passages: Hashes = field(default_factory=lambda: NONE)  # hashes
    places: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty(0))  # 0 start, 1 end

    def cut(self, share: float) -> "Fingerprint":
        """Return the fingerprint of a document that the corpus cuts to the first `share` of the
        part that a model reads."""
        inside = self.places < share
        return Fingerprint(self.contents, self.passages[inside], self.places[inside] / share)


def fingerprint(text: str, read: str) -> Fingerprint:
    """Fingerprint a document for the corpus; a model reads its beginning, `read`.

    The hash of a passage is a polynomial in its characters, rolled along the text. One hash in
    EVERY is kept. SplitMix64's finaliser (Steele et al. 2014) mixes it first, so that every bit
    depends on every other.
    """
    plain = normalised(read)
    places = [np.empty(0, np.intp)]
    passages = [NONE]
    size = min(BLOCK, len(plain))
    up = np.multiply.accumulate(np.full(size, FACTOR, np.uint64))
    down = np.multiply.accumulate(np.full(size, INVERSE, np.uint64))
    for start in range(0, len(plain) - PASSAGE + 1, BLOCK - PASSAGE + 1):
        block = plain[start : start + BLOCK].encode("utf-32-le", "surrogatepass")
        codes = np.frombuffer(block, "<u4").astype(np.uint64)
        sums = np.cumsum(codes * up[: len(codes)], dtype=np.uint64)
        sums[PASSAGE:] -= sums[:-PASSAGE].copy()
        hashes = sums[PASSAGE - 1 :] * down[: len(codes) - PASSAGE + 1]
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            hashes = (hashes ^ (hashes >> np.uint64(shift))) * np.uint64(factor)
        hashes ^= hashes >> np.uint64(31)
        chosen = np.flatnonzero(hashes < np.uint64(2**64 // EVERY))
        places.append(chosen + start)
        passages.append(hashes[chosen])
    whole = int(content_hash(text)[:16], 16)
    shares = np.concatenate(places) / max(1, len(plain))
    return Fingerprint((whole,), np.concatenate(passages), shares)


def joined(parts: Iterable[Fingerprint]) -> Fingerprint:
    """Return one fingerprint for several documents of the corpus that are joined into one."""
    prints = list(parts)
    contents = tuple(content for part in prints for content in part.contents)
    passages = unique_hashes([part.passages for part in prints])
    return Fingerprint(contents, passages, np.zeros(len(passages)))


Ids = npt.NDArray[np.signedinteger[Any]]
Flags = npt.NDArray[np.bool_]
Counts = npt.NDArray[np.int32]
NO_BYTES = np.empty(0, np.int32)

# Characters encoded at first for each wanted token; a document that gives fewer tokens gets more.
CHARACTERS_PER_TOKEN = 8
# An example answer, to see what text a chat template puts in front of an answer.
MANY_UNKNOWN = 0.1  # share of unknown tokens from which a warning is printed
ANSWER = "ropext-answer"
# Tokens near the end of a cut text may differ from the tokens of the whole text.
CUT_MARGIN = 16


@dataclass(frozen=True)
class Document:
    """The token ids of one document from its start, and facts about its text."""

    ids: Ids
    scored: Flags | None = None  # the ids that a training takes its loss on; None = all
    token_bytes: Counts = field(default_factory=lambda: NO_BYTES)  # bytes of text; a BOS has 0
    name: str = ""
    key: str = ""  # SHA-256 of the content, salted with the seed
    number: int = 0  # its place among the documents found
    has_bos: bool = False
    fingerprint: Fingerprint = field(default_factory=Fingerprint)
    content: str | Messages | None = None  # the content as found, if it is written again

    def __len__(self) -> int:
        """Return the number of the document's tokens."""
        return len(self.ids)

    @property
    def known_by(self) -> tuple[str, tuple[int, ...], Hashes]:
        """Return the document's name, and the hashes that show whether a model was trained on
        it."""
        return self.name, self.fingerprint.contents, self.fingerprint.passages

    def cut(self, length: int) -> "Document":
        """Return the document's first `length` tokens."""
        if length >= len(self.ids):
            return self
        return replace(
            self,
            ids=self.ids[:length],
            scored=None if self.scored is None else self.scored[:length],
            token_bytes=self.token_bytes[:length],
            fingerprint=self.fingerprint.cut(length / len(self.ids)),
        )

    def mask(self) -> Flags:
        """Return the document's ids on which a training takes its loss, as a mask."""
        return np.ones(len(self.ids), bool) if self.scored is None else self.scored

    def to_train_on(self) -> "Document":
        """Return only the document's ids and their mask, in half of the memory."""
        return Document(self.ids, self.scored)

    def prefix_hashes(self, lengths: Iterable[int]) -> dict[int, str]:
        """Return the SHA-256 of the document's first C token ids (little-endian int32), for each
        length C that it reaches."""
        digest = hashlib.sha256()
        hashes = dict[int, str]()
        done = 0
        for length in sorted(lengths):
            if length > len(self.ids):
                break
            digest.update(self.ids[done:length].astype("<i4").tobytes())
            hashes[length], done = digest.copy().hexdigest(), length
        return hashes


class DocumentEncoder:
    """A transformers tokenizer with the methods that documents need."""

    def __init__(
        self, tokenizer: Any, vocabulary: int | None = None, seed: int = 0, chat: bool = False
    ) -> None:
        """Keep the tokenizer that encodes the documents, and the seed that chooses among them."""
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary
        self.seed = seed
        self.chat = chat  # questions go through the template
        self.template_args: dict[str, Json] = {}  # further arguments of the template

    def encode(self, text: str) -> list[int]:
        """Return the ids of a part of a document or question without special tokens, as
        `ropext.tasks` needs them."""
        with tokenizer_panics_refused(self.tokenizer.name_or_path, "a text"):
            ids = list(self.tokenizer.encode(text, add_special_tokens=False, verbose=False))
        # The reader puts the BOS. It is removed from the ids of a template, never from its text:
        # some tokenizers split the first word differently if no BOS precedes it.
        if self.chat and self.bos is not None and ids[:1] == [self.bos]:
            return ids[1:]
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the ids of a question's answer, without special tokens."""
        return str(
            self.tokenizer.decode(
                list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def render(self, content: str, opening: str, between: str = "\n") -> str:
        """Return the prompt of a retrieval question, plain or as a user's turn, and the beginning
        of its answer."""
        if not self.chat:
            return f"{content}{between}{opening}"
        if not getattr(self.tokenizer, "chat_template", None):
            raise InputError("--chat needs a chat template, and this tokenizer has none")
        prompt = self.converse([{"role": "user", "content": content}], opening=True)
        return prompt + self.answer_lead + opening

    @cached_property
    def answer_lead(self) -> str:
        """Return the text that the chat template puts between a question's prompt and its answer:
        the channel of gpt-oss, the empty thoughts of Qwen 3."""
        question = {"role": "user", "content": "a"}
        answer = {"role": "assistant", "content": ANSWER}
        prompt = self.converse([question], opening=True)
        try:
            answered = self.converse([question, answer])
        except InputError:  # a template may refuse to end with an answer
            return ""
        if not answered.startswith(prompt):
            return ""
        lead, answer_found, _ = answered.removeprefix(prompt).partition(ANSWER)
        return lead if answer_found else ""

    @cached_property
    def bos(self) -> int | None:
        """Return the BOS id if the tokenizer itself puts one before a document.

        A model that was trained without one gets none.
        """
        bos = self.tokenizer.bos_token_id
        if bos is None:
            return None
        probe = self.tokenizer.encode("a", add_special_tokens=True)
        return int(bos) if probe and probe[0] == bos else None

    def around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the special tokens that the tokenizer puts before and after a document."""
        coded = self.tokenizer("a", return_special_tokens_mask=True)
        ids = coded["input_ids"]
        special = coded["special_tokens_mask"]
        end = len(ids) - special[::-1].index(0)
        return tuple(ids[: special.index(0)]), tuple(ids[end:])

    def text_of(self, raw: RawDocument) -> str:
        """Return a document's plain text unchanged, and a conversation through the chat
        template."""
        text = raw.content
        if not isinstance(text, str):
            if not getattr(self.tokenizer, "chat_template", None):
                raise InputError(
                    f"{raw.name} is a conversation, but the tokenizer has no chat template; give a "
                    "text column (--column) or a model with a template"
                )
            text = self.converse(text)
        try:
            text.encode()
        except UnicodeEncodeError:
            # JSON can escape half of a surrogate pair, which no tokenizer takes.
            return text.encode("utf-8", "replace").decode()
        return text

    def converse(self, messages: Messages, opening: bool = False) -> str:
        """Render the messages of a document or question through the chat template; `opening` begins
        the next answer."""
        return str(self._ask_template({"messages": messages, "opening": opening}))

    def marked_turns(self, messages: Messages) -> list[tuple[int, int]]:
        """Return the places that the chat template marks by {% generation %} in the text of a
        document."""
        question = {"messages": messages, "opening": False, "marked": True}
        return [(begin, end) for begin, end in self._ask_template(question)]

    def _ask_template(self, question: dict[str, Json]) -> Json:
        """Return the sandbox's answer to a question about a document or question in the chat
        template."""
        question["words"] = {**self.tokenizer.special_tokens_map, **self.template_args}
        try:
            question["template"] = self.tokenizer.get_chat_template()
            return ask_sandbox("render", question)
        except (ValueError, TimeoutError) as error:
            raise InputError(f"the tokenizer's chat template fails: {error}") from None

    def unknown(self, documents: Iterable[Document]) -> str | None:
        """Return a warning if many tokens of the documents are the unknown token."""
        token = self.tokenizer.unk_token_id
        parts = [document.ids for document in documents]
        if token is None or not parts:
            return None
        share = float(np.mean(np.concatenate(parts) == token))
        if share < MANY_UNKNOWN:
            return None
        return (
            f"[unknown-tokens] {share:.0%} of the documents' tokens are the unknown token "
            f"{self.tokenizer.unk_token!r}: the tokenizer does not know this text, or is another "
            "model's, so no number over it says how the model reads"
        )

    def key(self, text: str) -> str:
        """Hash a document's text with the seed; the hash decides which documents the corpus
        takes."""
        salted = f"{self.seed}\0".encode() + text.encode("utf-8", "surrogatepass")
        return hashlib.sha256(salted).hexdigest()

    def content_key(self, text: str, use: str = "") -> str:
        """Hash a document's normalised content and the seed; another use draws other documents."""
        salt = f"{use}\0" if use else ""
        salted = f"{self.seed}\0{salt}{content_hash(text)}"
        return hashlib.sha256(salted.encode()).hexdigest()

    def document(self, name: str, text: str, limit: int) -> Document:
        """Return a document: at most `limit` tokens from the start of a text, BOS included."""
        size = limit * CHARACTERS_PER_TOKEN
        while True:
            with tokenizer_panics_refused(self.tokenizer.name_or_path, name):
                ids, sizes = self._encode(text[:size])
            if size >= len(text) or len(ids) >= limit + CUT_MARGIN:
                break
            size *= 2
        has_bos = self.bos is not None
        if has_bos and (not len(ids) or ids[0] != self.bos):
            ids = np.concatenate([[self.bos], ids])
            sizes = np.concatenate([[0], sizes])
        elif has_bos:
            # The text (a chat template, say) brings its own BOS: one is enough.
            sizes[0] = 0
        ids = ids[:limit].astype(np.int32)
        sizes = sizes[:limit].astype(np.int32)
        if self.vocabulary is not None and len(ids) and int(ids.max()) >= self.vocabulary:
            raise InputError(
                f"the tokenizer does not match the model: {name} holds token {int(ids.max())}, but "
                f"the model has {self.vocabulary} embeddings"
            )
        read = text.encode("utf-8", "replace")[: int(sizes.sum())].decode("utf-8", "ignore")
        return Document(
            ids=ids,
            token_bytes=sizes,
            name=name,
            key=self.key(text),
            has_bos=has_bos,
            fingerprint=fingerprint(text, read),
        )

    def _encode(self, text: str) -> tuple[Ids, Counts]:
        """Return the ids of a document's text, and the number of bytes of text for each.

        A character that takes several tokens counts at the first of them.
        """
        if not getattr(self.tokenizer, "is_fast", False):
            ids = np.array(self.encode(text), np.int32)
            # Without offsets the bytes are spread evenly; their sum over the text is right.
            size = len(text.encode("utf-8", "replace"))
            edges = np.linspace(0, size, len(ids) + 1).astype(np.int32)
            return ids, np.diff(edges)
        # Not verbose: texts longer than the model's context are expected here.
        coded = self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        ids = np.array(coded["input_ids"], np.int32)
        ends = [end for _, end in coded["offset_mapping"]]
        if text.isascii():
            offsets = np.maximum.accumulate(np.array([0, *ends], np.int64))
            return ids, np.diff(offsets).astype(np.int32)
        sizes = np.zeros(len(ends), np.int32)
        reached = 0
        for k, end in enumerate(ends):
            if end > reached:
                sizes[k] = len(text[reached:end].encode("utf-8", "replace"))
                reached = end
        return ids, sizes
