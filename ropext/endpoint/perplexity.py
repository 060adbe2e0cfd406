"""Measure the perplexity of a server over the user's texts, and of an unscaled server through the
short window. The losses of each document are kept in a file of its own.

The request for the loss of every token is OpenAI's `echo` with `logprobs`, which
lm-evaluation-harness sends, too. vLLM, SGLang and `ropext serve` answer it.
"""

import http.client
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ropext.base.errors import InputError
from ropext.base.jsontext import JsonObject
from ropext.base.lengths import short_windows
from ropext.endpoint.logprobs import LOWEST, PROBED, token_id
from ropext.endpoint.remote_model import PATHS, RemoteModel, error_text
from ropext.results import BASE
from ropext.results.measurement import Store, loss_file_name
from ropext.results.metrics import ReadText, text_values
from ropext.results.numbers import ModelNumbers
from ropext.results.perplexity import (
    SHORT_WINDOW,
    LossStatistics,
    MeasuredDocuments,
    Reading,
    TokenNll,
    loss_by_position,
    truncation_verdicts,
)

PATH = PATHS["completions"]
TOKEN_BYTES = 512  # in an answer, for each token: it names two candidates
WHOLE, SHORT = "pass", "short"  # folders of readings
Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class TokenLosses:
    """A server that returns the losses of a prompt."""

    served: RemoteModel

    def read(self, ids: Ids) -> TokenNll:
        """Return the losses that the server gives the tokens of a text in one pass; position 0 is
        not-a-number."""
        prompt = [int(token) for token in ids]
        most = max(self.served.server.most_bytes, TOKEN_BYTES * len(prompt))
        served = replace(self.served, server=replace(self.served.server, most_bytes=most))
        status, body = served.post(PATH, _echo_request(served.model, prompt))
        where = f"--endpoint {served.server.root}"
        if status >= 400:
            raise InputError(
                f"{where} refuses a text of {len(prompt)} tokens ({error_text(status, body)})"
            )
        losses = _losses_in_answer(served.server.parse_answer(PATH, body), prompt)
        if losses is None:
            raise InputError(
                f"{where} tells no log-probability of each of {len(prompt)} tokens, though it did "
                "of a short prompt"
            )
        return np.array([np.nan, *losses], np.float32)

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


def losses_of(served: RemoteModel) -> TokenLosses | None:
    """Return how a server gives the losses of a prompt (`echo`). Return None if it does not."""
    prompt = list(PROBED)
    try:
        answer = served.server.ask(PATH, _echo_request(served.model, prompt))
    except (InputError, OSError, http.client.HTTPException):
        return None  # an answer of another kind, such as LM Studio's for a path that it lacks
    if answer is None or _losses_in_answer(answer, prompt) is None:
        return None
    return TokenLosses(served)


def _echo_request(model: str, prompt: Sequence[int]) -> JsonObject:
    """Return a request to a server for the losses of a prompt of token ids."""
    request = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    return request | {"echo": True, "logprobs": 1, "return_tokens_as_token_ids": True}


def _losses_in_answer(answer: JsonObject, prompt: Sequence[int]) -> list[float] | None:
    """Return the loss of each token but the first in a server's answer. Return None if one is
    missing or of another token.

    SGLang names tokens by their text, vLLM and `ropext serve` by their ids. One token more is
    generated.
    """
    try:
        logprobs = answer["choices"][0]["logprobs"]
        names = logprobs["tokens"][:-1]
        values = logprobs["token_logprobs"][:-1]
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


@dataclass(frozen=True)
class ServerTexts:
    """The texts as tokens: the same ones that an evaluation of a directory takes from this data."""

    documents: MeasuredDocuments
    ids: tuple[Ids, ...]
    bos: int | None  # the first token of each
    counts: JsonObject  # of documents, for results


@dataclass(frozen=True)
class TextPlan:
    """The servers that read the texts; `base` is a server of the unscaled model."""

    frame: LossStatistics
    texts: ServerTexts
    losses: TokenLosses
    base: TokenLosses | None = None

    @property
    def hashes(self) -> list[str]:
        """Return the hashes that identify the texts that a server reads."""
        return [one[self.frame.longest] for one in self.texts.documents.prefix_hashes]

    @property
    def decides(self) -> JsonObject:
        """Return the values that decide the losses that a server returns for texts."""
        bos = self.texts.bos
        return {"documents": self.hashes, "bos": bos, "short_window": SHORT_WINDOW}

    def regimes(self, label: str) -> dict[str, int]:
        """Return the pass length of each folder of a server's losses."""
        longest = self.frame.longest
        if label == BASE:
            return {SHORT: longest}
        return {f"{WHOLE}-{longest}": longest}

    def units(self, label: str) -> Iterator[tuple[str, Ids]]:
        """Yield the file of a server's losses for each text, and the text as tokens."""
        (regime,) = self.regimes(label)
        for ids, name in zip(self.texts.ids, self.hashes, strict=True):
            yield loss_file_name(regime, name), ids

    def read(self, label: str, ids: Ids) -> TokenNll:
        """Return the losses that the server of a row gives one text."""
        if label == BASE and self.base is not None:
            return self.base.read_short(ids, self.frame.context, self.texts.bos)
        return self.losses.read(ids)

    def numbers(self, stores: Mapping[str, Store]) -> dict[str, ModelNumbers]:
        """Return the perplexities that follow from the servers' losses, by row."""
        readings = dict[str, Reading]()
        for label, store in stores.items():
            readings[label] = store.reading(label, self.regimes(label), self.hashes)
        numbers = dict[str, ModelNumbers]()
        for label, reading in readings.items():
            base: Reading | None = None
            if label != BASE:
                base = readings.get(BASE)
            text = ReadText(self.frame, reading, base, self.texts.documents)
            values = text_values(text)
            says = list[str]()
            if base is not None:
                says = truncation_verdicts(self.frame, values, self.losses.served.model)
            positions = tuple(loss_by_position(self.frame, reading, base))
            numbers[label] = ModelNumbers(values, positions, verdicts=tuple(says))
        return numbers
