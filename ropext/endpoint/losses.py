"""Read the loss of every token of a prompt of token ids, as vLLM and SGLang return it."""

import http.client
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ropext.base.errors import InputError
from ropext.base.jsontext import Json, JsonObject
from ropext.endpoint.logprobs import LOWEST, PROBED
from ropext.endpoint.port import PATHS, Port, error_text
from ropext.results.perplexity import TokenNll
from ropext.results.windows import short_windows

VLLM, SGLANG = PATHS["completions"], "/generate"
TOKEN_BYTES = 512  # in an answer, for each token: vLLM returns two candidates with their text
Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class TokenLosses:
    """A server that returns the losses of a prompt, and the path of the request."""

    port: Port
    path: str

    def read(self, ids: Ids) -> TokenNll:
        """Return the losses of a text in one pass; position 0 is not-a-number."""
        prompt = [int(token) for token in ids]
        most = max(self.port.server.most_bytes, TOKEN_BYTES * len(prompt))
        port = replace(self.port, server=replace(self.port.server, most_bytes=most))
        status, body = port.reached(self.path, _request(self.path, port.model, prompt))
        where = f"--endpoint {port.server.root}"
        if status >= 400:
            raise InputError(
                f"{where} refuses a text of {len(prompt)} tokens ({error_text(status, body)})"
            )
        told = _losses(self.path, port.server.parsed(self.path, body), prompt)
        if told is None:
            raise InputError(
                f"{where} tells no log-probability of each of {len(prompt)} tokens, though it did "
                "of a short prompt"
            )
        return np.array([np.nan, *told], np.float32)

    def read_short(self, ids: Ids, context: int, bos: int | None) -> TokenNll:
        """Return the losses of a text through the short window, as an evaluation measures its
        base."""
        nll = np.full(len(ids), np.nan, np.float32)
        for window in short_windows(len(ids), context):
            row = ids[window.begin : window.end].copy()
            if bos is not None:
                row[0] = bos
            nll[window.first : window.end] = self.read(row)[window.first - window.begin :]
        return nll


def losses_of(port: Port) -> TokenLosses | None:
    """Return how a server gives the losses of a prompt; None if it does not."""
    prompt = list(PROBED)
    for path in (VLLM, SGLANG):
        try:
            answer = port.server.post(path, _request(path, port.model, prompt))
        except (InputError, OSError, http.client.HTTPException):
            # An answer of another kind, such as LM Studio's for a path that it lacks.
            continue
        if answer is not None and _losses(path, answer, prompt) is not None:
            return TokenLosses(port, path)
    return None


def _request(path: str, model: str, prompt: Sequence[int]) -> JsonObject:
    if path == SGLANG:
        sampling = {"max_new_tokens": 1, "temperature": 0}
        told = {"return_logprob": True, "logprob_start_len": 0}
        return {"input_ids": prompt, "sampling_params": sampling} | told
    request = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    return request | {"prompt_logprobs": 1}


def _losses(path: str, answer: JsonObject, prompt: Sequence[int]) -> list[float] | None:
    """Return the loss of each token but the first; None if one is missing or belongs to another
    token."""
    try:
        if path == SGLANG:
            values = _of_sglang(answer["meta_info"]["input_token_logprobs"], prompt)
        else:
            values = _of_vllm(answer["choices"][0]["prompt_logprobs"], prompt)
    except (KeyError, IndexError, TypeError, ValueError):
        return None
    losses = list[float]()
    for value in values:
        if type(value) not in (int, float) or not LOWEST <= value <= 1:
            return None
        losses.append(-value)
    return losses


def _of_sglang(told: Json, prompt: Sequence[int]) -> list[float]:
    """Return the values from entries of a log-probability, an id and perhaps a text, one for each
    token."""
    values = []
    for token, entry in zip(prompt, told, strict=True):
        if entry[1] != token:
            raise ValueError("another token")
        values.append(entry[0])
    return values[1:]


def _of_vllm(told: Json, prompt: Sequence[int]) -> list[float]:
    """Return the values from a dict of candidates by id for each token, the token itself among
    them."""
    values = []
    for token, entry in zip(prompt[1:], told[1:], strict=True):
        values.append(entry[str(token)]["logprob"])
    return values
