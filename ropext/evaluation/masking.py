"""How masked language models are read: what stands around a text, and which tokens are masked."""

from dataclasses import dataclass

import numpy as np

from ropext.corpus import DocumentEncoder
from ropext.errors import InputError, UsageError
from ropext.evaluation.forward import Ids, TokenNll, TokenScorer
from ropext.evaluation.reading import pinned
from ropext.options.evaluate import Evaluate


@dataclass(frozen=True)
class Masking:
    """A mask, and the special tokens that a tokenizer puts before and after a text."""

    token: int
    before: tuple[int, ...]
    after: tuple[int, ...]

    def text_in(self, length: int) -> int:
        """Tokens of text in a window of a length."""
        room = length - len(self.before) - len(self.after)
        if room < 1:
            raise UsageError(f"--lengths {length} has no room for text beside special tokens")
        return room


def masking_for(options: Evaluate, encoder: DocumentEncoder, name: str) -> Masking:
    """What an evaluation reads a masked language model with; options of causal ones are refused."""
    given = {
        "--tasks": bool(options.tasks),
        "--lm-eval": bool(options.lm_eval),
        "--chunk": bool(options.chunk),
        "--protocol": options.protocol != "ropext",
    }
    for flag, is_given in given.items():
        if is_given:
            raise UsageError(
                f"{flag} is for models that predict the next token, and {name} fills in masked "
                "ones: --data TEXTS alone measures its pseudo-perplexity"
            )
    return masking_of(encoder, name)


def masking_of(encoder: DocumentEncoder, name: str) -> Masking:
    """What a masked language model is read with; documents are then text alone."""
    token = encoder.tokenizer.mask_token_id
    if token is None:
        raise InputError(f"the tokenizer of {name} has no mask token")
    encoder.bos = None  # every window has its own
    before, after = encoder.around()
    return Masking(int(token), before, after)


def read_masked(
    scorer: TokenScorer, ids: Ids, length: int, masking: Masking, tail: int
) -> TokenNll:
    """Read the NLL of the last `tail` tokens, each masked once, in the window of `length` tokens
    at the end of `ids`; NaN before them."""
    text = ids[-masking.text_in(length) :]
    row = np.concatenate([masking.before, text, masking.after]).astype(np.int32)
    end = len(row) - len(masking.after)
    nll = np.full(len(ids), np.nan, np.float32)
    with pinned(scorer.model, length):
        nll[-tail:] = scorer.masked_nll(row, range(end - tail, end), masking.token)
    return nll
