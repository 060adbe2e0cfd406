"""A tokenizer of the user's, which counts where a server does not: a directory's, or a GGUF's.

Of a GGUF the vocabulary and the merges are read, and words are split as GPT-2 splits them: a count
to within some hundredths, which the server's own usage is then held against.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ropext.errors import InputError, UsageError

Counted = Callable[[str], int]
MODEL, TOKENS, MERGES = (f"tokenizer.ggml.{name}" for name in ("model", "tokens", "merges"))


def tokenizer_at(place: str) -> Counted:
    """How many tokens a text has for the tokenizer of a directory or of a GGUF file."""
    try:
        import tokenizers
    except ImportError:
        raise UsageError(
            "--tokenizer needs the package tokenizers (pip install tokenizers); without it the "
            "server's usage counts"
        ) from None
    path = Path(place)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise InputError(
            f"--tokenizer {place} is neither a directory with tokenizer.json nor a file"
        )
    coder: Any
    if file.suffix == ".gguf":
        coder = _of_gguf(file)
    else:
        try:
            coder = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises no class of its own
            raise InputError(f"--tokenizer {file}: {str(error)[:200]}") from None
    return lambda text: len(coder.encode(text, add_special_tokens=False).ids)


def _of_gguf(file: Path) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    from ropext.gguf.header import read_gguf

    head = read_gguf(file)
    tokens = head.texts(TOKENS)
    merges = head.texts(MERGES)
    if not tokens or not merges:
        raise InputError(
            f"--tokenizer {file}: its tokenizer ({head.text(MODEL)}) has no merges to count by; "
            "give the directory that it was converted from"
        )
    ranks = {token: number for number, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    known = [pair for pair in pairs if len(pair) == 2 and {*pair, "".join(pair)} <= ranks.keys()]
    coder = Tokenizer(models.BPE(vocab=ranks, merges=known))
    coder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return coder
