"""How models predict tokens, and what that decides for all that is read: each token from those
before it, or masked tokens from all others. What reads asks nothing else of which of the two a
model is; loading it, and refusing options, does."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import ClassVar, TypeVar

import numpy as np

from ropext.corpus import DocumentEncoder
from ropext.errors import InputError, UsageError
from ropext.evaluation.forward import Ids, TokenNll, TokenScorer
from ropext.evaluation.reading import pinned, read_pass
from ropext.jsontext import JsonObject
from ropext.lengths import tail_tokens
from ropext.options.evaluate import DocumentOptions, Evaluate
from ropext.results.perplexity import MASK_STRIDE, PROTOCOLS, Frame, Protocol
from ropext.results.scoring import ALL_TOKENS, MaskedTail, Scoring
from ropext.results.values import Bootstrap

ReadPass = Callable[[TokenScorer], TokenNll]
Asked = TypeVar("Asked", bound=DocumentOptions)


@dataclass(frozen=True)
class NextToken:
    """Each token is predicted from those before it, all of a text in one pass."""

    scoring: ClassVar[Scoring] = ALL_TOKENS

    def frame(self, context: int, lengths: tuple[int, ...], seed: int) -> Frame:
        """The lengths at which documents are read, and what is scored there."""
        return Frame(context, lengths, tail_tokens(context), Bootstrap(seed), self.scoring)

    def protocol(self, name: str) -> Protocol:
        """How what is read becomes a perplexity, by the name of --protocol."""
        return PROTOCOLS[name]

    def options(self, options: Asked, longest: int) -> Asked:
        """How texts of a length are read, of what was asked for."""
        return options

    def reading(self, ids: Ids, length: int, frame: Frame) -> ReadPass:
        """What reads the first `length` tokens of a document."""
        return partial(read_pass, ids=ids, length=length)

    def key(self) -> JsonObject:
        """What of it decides a loss, for the manifest of a run."""
        return {}


@dataclass(frozen=True)
class MaskedTokens:
    """Tokens are predicted where a mask stands in their place, from all others: only the last ones
    of a text are, in several passes. A tokenizer puts special tokens before and after a text."""

    scoring: ClassVar[Scoring] = MaskedTail(MASK_STRIDE)

    token: int  # the mask
    before: tuple[int, ...]
    after: tuple[int, ...]

    def text_in(self, length: int) -> int:
        """Tokens of text in a window of a length."""
        room = length - len(self.before) - len(self.after)
        if room < 1:
            raise UsageError(f"--lengths {length} has no room for text next to the special tokens")
        return room

    def frame(self, context: int, lengths: tuple[int, ...], seed: int) -> Frame:
        """Every length scores the same tokens, so that the shortest bounds the tail."""
        tail = min(tail_tokens(context), self.text_in(lengths[0]))
        return Frame(context, lengths, tail, Bootstrap(seed), self.scoring)

    def protocol(self, name: str) -> Protocol:
        """The one that masks tokens; another is refused before."""
        return PROTOCOLS["pseudo-perplexity"]

    def options(self, options: Asked, longest: int) -> Asked:
        """All at once, for all tokens see one another."""
        return options.model_copy(update={"chunk": longest})

    def reading(self, ids: Ids, length: int, frame: Frame) -> ReadPass:
        """What reads the window of `length` tokens at the end of a document."""
        return partial(read_masked, ids=ids, length=length, masked=self, tail=frame.tail)

    def key(self) -> JsonObject:
        """The mask and the special tokens."""
        return {"masking": asdict(self)}


Prediction = NextToken | MaskedTokens
NEXT_TOKEN = NextToken()


def checked_prediction(options: Evaluate, encoder: DocumentEncoder, name: str) -> MaskedTokens:
    """How an evaluation reads a masked language model; options of causal ones are refused."""
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
    for flag, is_given in (("--kl", options.kl), ("--kv", bool(options.kv))):
        if is_given:
            raise UsageError(f"{flag} is of models that predict the next token, not of masked ones")
    return masked_tokens(encoder, name)


def masked_tokens(encoder: DocumentEncoder, name: str) -> MaskedTokens:
    """What a masked language model is read with; documents are then text alone."""
    token = encoder.tokenizer.mask_token_id
    if token is None:
        raise InputError(f"the tokenizer of {name} has no mask token")
    encoder.bos = None  # every window has its own
    before, after = encoder.around()
    return MaskedTokens(int(token), before, after)


def read_masked(
    scorer: TokenScorer, ids: Ids, length: int, masked: MaskedTokens, tail: int
) -> TokenNll:
    """Read the NLL of the last `tail` tokens, each masked once, in the window of `length` tokens
    at the end of `ids`; NaN before them."""
    text = ids[-masked.text_in(length) :]
    row = np.concatenate([masked.before, text, masked.after]).astype(np.int32)
    end = len(row) - len(masked.after)
    nll = np.full(len(ids), np.nan, np.float32)
    with pinned(scorer.model, length):
        nll[-tail:] = scorer.masked_nll(row, range(end - tail, end), masked.token)
    return nll
