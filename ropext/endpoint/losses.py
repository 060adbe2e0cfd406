"""Ask a server for the loss of every token of a prompt of token ids.

The request is OpenAI's `echo` with `logprobs`, which lm-evaluation-harness sends, too. vLLM, SGLang
and `ropext serve` answer it.
"""

import http.client
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ropext.base.errors import InputError
from ropext.base.jsontext import JsonObject
from ropext.base.lengths import short_windows
from ropext.endpoint.logprobs import LOWEST, PROBED, token_id
from ropext.endpoint.port import PATHS, Port, error_text
from ropext.results.perplexity import TokenNll

PATH = PATHS["completions"]
TOKEN_BYTES = 512  # in an answer, for each token: it names two candidates
Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class TokenLosses:
    """A server that returns the losses of a prompt."""

    port: Port

    def read(self, ids: Ids) -> TokenNll:
        """Return the losses that the server gives the tokens of a text in one pass; position 0 is
        not-a-number."""
        prompt = [int(token) for token in ids]
        most = max(self.port.server.most_bytes, TOKEN_BYTES * len(prompt))
        port = replace(self.port, server=replace(self.port.server, most_bytes=most))
        status, body = port.reached(PATH, _echo_request(port.model, prompt))
        where = f"--endpoint {port.server.root}"
        if status >= 400:
            raise InputError(
                f"{where} refuses a text of {len(prompt)} tokens ({error_text(status, body)})"
            )
        told = _losses_in_answer(port.server.parsed(PATH, body), prompt)
        if told is None:
            raise InputError(
                f"{where} tells no log-probability of each of {len(prompt)} tokens, though it did "
                "of a short prompt"
            )
        return np.array([np.nan, *told], np.float32)

    def read_short(self, ids: Ids, context: int, bos: int | None) -> TokenNll:
        """Return the losses that the server gives a text through the short window, as an evaluation
        measures its base."""
        nll = np.full(len(ids), np.nan, np.float32)
        for window in short_windows(len(ids), context):
            row = ids[window.begin : window.end].copy()
            if bos is not None:
                row[0] = bos
            nll[window.first : window.end] = self.read(row)[window.first - window.begin :]
        return nll


def losses_of(port: Port) -> TokenLosses | None:
    """Return how a server gives the losses of a prompt (`echo`); None if it does not."""
    prompt = list(PROBED)
    try:
        answer = port.server.ask(PATH, _echo_request(port.model, prompt))
    except (InputError, OSError, http.client.HTTPException):
        return None  # an answer of another kind, such as LM Studio's for a path that it lacks
    if answer is None or _losses_in_answer(answer, prompt) is None:
        return None
    return TokenLosses(port)


def _echo_request(model: str, prompt: Sequence[int]) -> JsonObject:
    """Return a request to a server for the losses of a prompt of token ids."""
    request = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    return request | {"echo": True, "logprobs": 1, "return_tokens_as_token_ids": True}


def _losses_in_answer(answer: JsonObject, prompt: Sequence[int]) -> list[float] | None:
    """Return the loss of each token but the first in a server's answer; None if one is missing or
    of another token.

    SGLang names tokens by their text, vLLM and `ropext serve` by their ids. One token more is
    generated.
    """
    try:
        told = answer["choices"][0]["logprobs"]
        names = told["tokens"][:-1]
        values = told["token_logprobs"][:-1]
        for name, token in zip(names, prompt, strict=True):
            if token_id(name) not in (None, token):
                return None
    except (KeyError, IndexError, TypeError, ValueError):
        return None
    if len(values) != len(prompt) or values[0] is not None:
        return None
    losses = list[float]()
    for value in values[1:]:
        if type(value) not in (int, float) or not LOWEST <= value <= 1:
            return None
        losses.append(-value)
    return losses
