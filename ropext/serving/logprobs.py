"""Compute the log-probabilities of tokens, and write them in the form of OpenAI's completions."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenizers.decoders import DecodeStream

from ropext.base.jsontext import Json, JsonObject
from ropext.evaluation.forward import NanInLogits, ReadingMode, TokenScorer, slice_for
from ropext.serving.served import ServedModel

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

MOST_CANDIDATES = 5  # for each token, as OpenAI's
LOWEST = -9999.0  # in place of the logarithm of 0, which JSON cannot state; vLLM writes the same
SLICE_BYTES = 256 << 20  # for a slice of logits, as in `ropext eval`
MOST_SILENT = 8  # tokens without text; a character has at most four


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of a token, and of the best candidates for its place."""

    value: float
    best: tuple[tuple[int, float], ...]  # ids and log-probabilities


def logprob_scorer(served: ServedModel) -> TokenScorer:
    """Return a scorer of the served model for `logprobs` of a request, after a check that the
    model can be read in slices."""
    import torch

    chunk = served.piece if served.continues else None
    slices = slice_for(SLICE_BYTES, served.vocabulary)
    scorer = TokenScorer(served.model, ReadingMode(chunk, slices))
    with torch.no_grad():
        scorer.self_check()
    return scorer


def token_logprobs(
    logits: "torch.Tensor", wanted: Sequence[int], candidates: int
) -> Iterable[TokenLogprob]:
    """Yield the log-probabilities of the tokens `wanted` of a prompt or a served answer, by the
    logits (tokens, vocabulary) before them."""
    import torch

    rows = logits.float().log_softmax(-1)
    chosen = torch.as_tensor(wanted, device=rows.device)
    values = rows.gather(1, chosen[:, None])[:, 0]
    if values.isnan().any():
        raise NanInLogits("the model's logits are not finite; try --dtype float32")
    best, ids = rows.topk(candidates)
    listed = zip(ids.tolist(), best.clamp(min=LOWEST).tolist(), strict=True)
    for value, (names, likely) in zip(values.clamp(min=LOWEST).tolist(), listed, strict=True):
        yield TokenLogprob(value, tuple(zip(names, likely, strict=True)))


def openai_logprobs(
    tokenizer: "PreTrainedTokenizerFast",
    ids: Sequence[int],
    scores: Sequence[TokenLogprob | None],
    as_ids: bool,
) -> JsonObject:
    """Return the field `logprobs` of a choice in an OpenAI answer; the first token of a text has
    no score."""
    rust = tokenizer.backend_tokenizer
    tokens = set(ids)
    for known in filter(None, scores):
        tokens.update(token for token, _ in known.best)
    names = {token: f"token_id:{token}" for token in tokens}
    if not as_ids:
        texts = rust.decode_batch([[token] for token in tokens], skip_special_tokens=False)
        names = dict(zip(tokens, texts, strict=True))
    top: list[Json] = []
    for token, score in zip(ids, scores, strict=True):
        top.append(score and _candidates_by_name(names, token, score))
    return {
        "tokens": [names[token] for token in ids],
        "token_logprobs": [score and score.value for score in scores],
        "top_logprobs": top,
        "text_offset": _text_offsets(rust, ids),
    }


def _candidates_by_name(names: dict[int, str], token: int, score: TokenLogprob) -> dict[str, Json]:
    """Return `top_logprobs` of one token: its candidates and itself by name; of two with one
    name, the likelier."""
    listed: dict[str, Json] = {}
    for candidate, value in (*score.best, (token, score.value)):
        listed.setdefault(names[candidate], value)
    return listed


def _text_offsets(rust: Any, ids: Sequence[int]) -> list[int]:
    """Return `text_offset` of an OpenAI answer: the place in the text at which each token
    begins.

    A token that ends inside of a character gets no length; the token that ends the character
    does.
    """
    stream = DecodeStream([], skip_special_tokens=True)
    offsets: list[int] = []
    place = silent = 0
    for token in ids:
        offsets.append(place)
        text = stream.step(rust, token) or ""
        place += len(text)
        silent = 0 if text else silent + 1
        if silent == MOST_SILENT:  # these tokens are no text, and a stream decodes them each time
            stream = DecodeStream([], skip_special_tokens=True)
            silent = 0
    return offsets
