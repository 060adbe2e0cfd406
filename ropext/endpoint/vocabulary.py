"""Load a user's tokenizer, from a directory or a GGUF, to count tokens if the server does not.

From a GGUF the vocabulary and the merges are read, and words are split as GPT-2 splits them. Such a
count is exact to some hundredths; it is compared with the server's own usage.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ropext.base.errors import InputError, UsageError

Counted = Callable[[str], int]
TOKENIZER = "tokenizer.json"
MODEL = "tokenizer.ggml.model"
TOKENS = "tokenizer.ggml.tokens"
MERGES = "tokenizer.ggml.merges"


class FileTokenizer:
    """A tokenizer.json, or the tokenizer of a GGUF file, with the interface that documents need of
    a tokenizer, without transformers."""

    is_fast = True

    def __init__(self, file: Path) -> None:
        """Load tokenizer.json or a GGUF's vocabulary, to encode texts for a running server
        untruncated and unpadded."""
        coder = _file_tokenizer(file)
        coder.no_truncation()
        coder.no_padding()
        self.coder = coder
        self.name_or_path = str(file)

    @property
    def bos_token_id(self) -> int | None:
        """Return the token that the tokenizer puts before a text for a server. Return None if it
        puts none."""
        alone = self.encode("a", add_special_tokens=False)
        whole = self.encode("a", add_special_tokens=True)
        if whole[:1] == alone[:1]:
            return None
        return whole[0]

    def encode(self, text: str, *, add_special_tokens: bool, verbose: bool = False) -> list[int]:
        """Return the token ids of a text that a server will get."""
        return list(self.coder.encode(text, add_special_tokens=add_special_tokens).ids)

    def __call__(self, text: str, *, add_special_tokens: bool, **_: bool) -> dict[str, list[Any]]:
        """Return the token ids of a text that a server will get, and the offsets at which each
        token begins and ends."""
        coded = self.coder.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": list(coded.ids), "offset_mapping": list(coded.offsets)}


def text_tokenizer(place: Path) -> FileTokenizer:
    """Return the tokenizer of the directory in --tokenizer or --against, which encodes texts for a
    server as its model reads them."""
    if not (place / TOKENIZER).is_file():
        raise UsageError(
            f"perplexity is read of token ids, and {place} holds no {TOKENIZER}: give --tokenizer "
            "DIR, the model's directory"
        )
    return FileTokenizer(place / TOKENIZER)


def tokenizer_at(place: str) -> Counted:
    """Return a function that counts the tokens of a prompt for a server by --tokenizer: a
    directory, a tokenizer.json or a GGUF file."""
    path = Path(place)
    file = path
    if path.is_dir():
        file = path / TOKENIZER
    if not file.is_file():
        raise InputError(
            f"--tokenizer {place} is neither a directory with tokenizer.json nor a file"
        )
    tokenizer = FileTokenizer(file)
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


def _file_tokenizer(file: Path) -> Any:
    """Return the tokenizer in a tokenizer.json or a GGUF file, to encode texts for a
    server."""
    try:
        import tokenizers
    except ImportError:
        raise UsageError(
            "--tokenizer needs the package tokenizers (pip install tokenizers); without it the "
            "server's usage counts"
        ) from None
    if file.suffix == ".gguf":
        return _gguf_tokenizer(file)
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no class of its own
        raise InputError(f"--tokenizer {file}: {str(error)[:200]}") from None


def _gguf_tokenizer(file: Path) -> Any:
    """Return a tokenizer from the vocabulary and merges of a GGUF file, to count a server's
    prompts."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    from ropext.files.gguf.header import read_gguf

    head = read_gguf(file)
    tokens = head.texts(TOKENS)
    merges = head.texts(MERGES)
    if not tokens or not merges:
        raise InputError(
            f"--tokenizer {file}: its tokenizer ({head.text(MODEL)}) has no merges to count by; "
            "give the directory that it was converted from"
        )
    ranks = {token: number for number, token in enumerate(tokens)}
    known = list[tuple[str, str]]()
    for merge in merges:
        left, space, right = merge.partition(" ")
        if space and left in ranks and right in ranks and left + right in ranks:
            known.append((left, right))
    coder = Tokenizer(models.BPE(vocab=ranks, merges=known))
    coder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return coder
