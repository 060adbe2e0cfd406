"""Read the log-probabilities of the next token, as vLLM, SGLang and llama-server return them after
a prompt of token ids."""

import http.client
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path

from ropext.base.errors import InputError, ProofFailed, Stopped
from ropext.base.jsontext import Json
from ropext.endpoint.server import Server

TOP = 5  # requested log-probabilities; the most that every server gives
SPECIAL = ("bos", "eos", "pad")
# The error of llama-server from b10434 on if the next token is no whole character.
UNFIT = b"does not match the expected"
# The status of a server that refuses the field `logprobs`.
UNWILLING = (400, 422)
LOWEST = -1e9  # a server may write this for the logarithm of 0
PROBED = (40, 41, 42, 43)  # token ids of a first prompt, which every vocabulary has
LOG_LINES = "`n_ctx_train`, `rope scaling` and `freq_scale_train`"

Pairs = list[tuple[int | None, float]]  # token id, if it is given, and log-probability


def top_logprobs(answer: Json) -> Pairs:
    """Return from a running server's JSON answer the token id (if given) and log-probability of the
    best candidates for its first token."""
    try:
        logprobs = answer["choices"][0]["logprobs"]
        if logprobs.get("content"):  # llama-server: a list of candidates with their ids
            best = logprobs["content"][0]["top_logprobs"]
            pairs = [(entry.get("id"), entry["logprob"]) for entry in best]
        else:  # vLLM and SGLang: a dict from the token's text
            pairs = [(token_id(k), v) for k, v in logprobs["top_logprobs"][0].items()]
        if not all(type(v) in (int, float) and LOWEST <= v <= 1 for _, v in pairs):
            pairs = []
    except (KeyError, IndexError, TypeError, AttributeError, ValueError):
        pairs = []
    return sorted(pairs, key=lambda pair: -pair[1])[:TOP]


def token_id(text: str) -> int | None:
    """Return the id in a token's name in a server's answer, as vLLM's `return_tokens_as_token_ids`
    makes it. Return None if it has none."""
    match = re.fullmatch(r"token_id:(\d+)", text)
    if match is None:
        return None
    return int(match[1])


def token_ids(length: int, vocab_size: int, avoid: Sequence[int] = (), draw: int = 0) -> list[int]:
    """Return a prompt with which to ask a running server: fixed pseudo-random token ids, in which a
    block repeats every quarter.

    Repetition makes the next token predictable for a model that can look back by position. The ids
    are from the lower half of the vocabulary, which has no reserved ones. Another `draw` gives
    other ids.
    """
    rng = random.Random(length + (draw << 40))
    low = min(vocab_size // 16, 1000)
    high = max(vocab_size // 2, 2)
    pool = [token for token in range(low, high) if token not in set(avoid)]
    block = [rng.choice(pool) for _ in range(max(length // 4, 1))]
    return [block[i % len(block)] for i in range(length)]


def next_token(server: Server, model: str, ids: Sequence[int]) -> Pairs:
    """Return the log-probabilities that a server gives the next token's best candidates."""
    url = server.root
    body = {"model": model, "prompt": list(ids), "max_tokens": 1, "temperature": 0}
    body |= {"logprobs": TOP, "return_tokens_as_token_ids": True}
    try:
        status, answer = server.call("/v1/completions", body)
    except (OSError, http.client.HTTPException) as error:
        raise Stopped(
            f"endpoint: {url} went away during a prompt of {len(ids)} tokens ({error})"
        ) from None
    if status == 500 and UNFIT in answer:
        return []
    if status in UNWILLING and b"logprobs" in answer:
        return []
    if status >= 400:
        reason = " ".join(answer[:300].decode(errors="replace").split())
        raise ProofFailed(
            f"endpoint: {url} refuses a prompt of {len(ids)} tokens (HTTP {status}: {reason})"
        )
    return top_logprobs(server.parse_answer("/v1/completions", answer))


def no_logprobs_error(server: Server, some: str = "no log-probabilities") -> InputError:
    """Return an error that a running server's /v1/completions gives no log-probabilities, with
    other ways to check it."""
    return InputError(
        f"--endpoint {server.root} returns {some} for /v1/completions, as LM Studio and Ollama do. "
        "What remains: `ropext eval --endpoint` asks it in words, and the log of llama.cpp (-lv 4) "
        f"says in {LOG_LINES} whether a scaling is on"
    )


def require_logprobs(server: Server, model: str) -> None:
    """Raise InputError if a running server's endpoint returns no log-probabilities to short
    prompts, before a model is loaded."""
    for end in range(len(PROBED), 0, -1):
        if next_token(server, model, PROBED[:end]):
            return
    raise no_logprobs_error(server)


def special_tokens(directory: Path) -> list[int]:
    """Return the ids that begin, end or pad a text, from config.json; a prompt of ids for a running
    server avoids them."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    tokens = list[int]()
    for part in (config, *config.values()):
        if not isinstance(part, dict):
            continue
        for name in SPECIAL:
            token = part.get(f"{name}_token_id")
            if isinstance(token, int):
                tokens.append(token)
    return tokens
