"""The demo's tokenizer: byte-level BPE of 1,024 entries, every digit a token of its own."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

VOCABULARY = 1024
END_OF_TEXT = "<|endoftext|>"
"""Between documents, and padding. There is no beginning-of-text token."""


def train_tokenizer(texts: Sequence[str]) -> Any:
    """Train a `transformers` tokenizer on `texts`; the same texts give the same tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


class CachedEncoder:
    """A tokenizer as tasks want it, remembering the few thousand short strings they use."""

    def __init__(self, tokenizer: Any) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        ids = self._known.get(text)
        if ids is None:
            ids = list(self._backend.encode(text, add_special_tokens=False).ids)
            if len(self._known) < 200_000:  # keeps a long training's memory bounded
                self._known[text] = ids
        return ids


def load_encoder(folder: Path) -> CachedEncoder:
    from transformers import AutoTokenizer

    return CachedEncoder(AutoTokenizer.from_pretrained(folder))
