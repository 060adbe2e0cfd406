"""Ask a running server whether it reads a checkpoint as planned.

vLLM, SGLang and llama-server all speak OpenAI's completions API, take a prompt of token ids and
tell the top log-probabilities of one generated token. Those, after prompts inside and beyond the
old context, are compared with what transformers computes from the same directory, or from the
dequantised weights of the GGUF that is served.
"""

import http.client
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean as mean
from typing import Any

from ropext.errors import InputError, ProofFailed, Stopped
from ropext.ports.server import Server, served_model, server_at

TOP = 5  # log-probabilities asked for; the most that every server gives
TOLERANCE = 0.2  # nats: bfloat16 kernels differ by some hundredths, an ignored scaling by more
# The same for a GGUF, in the mean: llama.cpp also rounds what it multiplies by quantised weights.
# Seen alike: 0.03 to 0.1 (Q8_0, Q4_1; single positions 0.8); an attention factor lost alone: 0.3.
MEAN_TOLERANCE = 0.15
ASKED = 8  # prompts of each text of a GGUF, all beginnings of it: the server keeps what it has read
TRIES = 4  # ends of a prompt: llama-server tells nothing where the next token is no whole character
SPECIAL = ("bos", "eos", "pad")

# Token ids -> the log-probability of every next token.
Reference = Callable[[Sequence[int]], Sequence[float]]
LOWEST = -1e9  # what a server may write for the logarithm of 0


@dataclass(frozen=True)
class Prompt:
    """One comparison: how long the prompt was, and how far the top log-probabilities differ."""

    tokens: int
    beyond: bool  # longer than the old context
    difference: float  # largest, in nats


@dataclass(frozen=True)
class Probe:
    """What a server said."""

    model: str
    limit: int | None  # tokens it takes; None = it does not say
    tolerance: float
    prompts: tuple[Prompt, ...]
    # Of a GGUF: what a reading by the spectrum before the extension differs by, beyond the old
    # context in the mean; None where nothing was extended.
    lost: float | None = None


def top_logprobs(answer: Any) -> list[tuple[int | None, float]]:
    """Token id (where given) and log-probability of the first generated token's best candidates."""
    try:
        logprobs = answer["choices"][0]["logprobs"]
        if logprobs.get("content"):  # llama-server: a list of candidates with their ids
            best = logprobs["content"][0]["top_logprobs"]
            pairs = [(entry.get("id"), entry["logprob"]) for entry in best]
        else:  # vLLM and SGLang: a dict from the token's text
            pairs = [(_token_id(k), v) for k, v in logprobs["top_logprobs"][0].items()]
        if not all(type(v) in (int, float) and LOWEST <= v <= 1 for _, v in pairs):
            pairs = []
    except (KeyError, IndexError, TypeError, AttributeError, ValueError):
        pairs = []
    return sorted(pairs, key=lambda pair: -pair[1])[:TOP]


def _token_id(text: str) -> int | None:
    """vLLM's `return_tokens_as_token_ids` names a token by its id."""
    match = re.fullmatch(r"token_id:(\d+)", text)
    return int(match[1]) if match else None


def _matched(pairs: Sequence[tuple[int | None, float]], wanted: Sequence[float]) -> list[float]:
    """The wanted log-probability of each of the server's: by id, else by rank.

    A dict by text holds one entry where two tokens look alike, so a rank may be skipped for each
    that is missing.
    """
    if all(type(token) is int and 0 <= token < len(wanted) for token, _ in pairs):
        return [wanted[token] for token, _ in pairs if token is not None]
    ranked = sorted(wanted, reverse=True)[:TOP]
    out, rank = [], 0
    for index, (_, value) in enumerate(pairs):
        last = len(ranked) - (len(pairs) - index)
        rank = min(range(rank, last + 1), key=lambda r: abs(ranked[r] - value))
        out.append(ranked[rank])
        rank += 1
    return out


def lengths(context: int, target: int) -> tuple[int, int, int]:
    """One prompt inside the old context and two beyond, short enough for transformers to run."""
    first = min((context + target) // 2, context + context // 4)
    return context // 2, first, min(target - 1, 2 * context)


def token_ids(length: int, vocab_size: int, avoid: Sequence[int] = ()) -> list[int]:
    """Fixed pseudo-random ids, in which a block comes round every quarter.

    Repetition makes the next token predictable for a model that can look back by position. Ids are
    drawn from the lower half of the vocabulary, where no reserved ones stand.
    """
    draw = random.Random(length)
    low, high = min(vocab_size // 16, 1000), max(vocab_size // 2, 2)
    pool = [token for token in range(low, high) if token not in set(avoid)]
    block = [draw.choice(pool) for _ in range(max(length // 4, 1))]
    return [block[i % len(block)] for i in range(length)]


def transformers_reference(directory: Path, **loading: Any) -> Reference:
    """Log-probabilities of the next token by stock transformers, the model loaded once."""
    read = transformers_rows(directory, **loading)
    return lambda ids: read(ids, [len(ids)])[0]


def transformers_rows(
    directory: Path,
    *,
    config: Mapping[str, Any] | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> Callable[[Sequence[int], Sequence[int]], list[list[float]]]:
    """Token ids and lengths -> by stock transformers, with another config if one is given, the
    log-probabilities of every next token after the beginnings of these lengths."""
    import inspect

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    other = {} if config is None else {"config": AutoConfig.for_model(**config)}
    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, trust_remote_code=trust_remote_code, use_safetensors=True, **other
    )
    model = model.to(device).eval()
    # The logits of a whole long prompt would not fit.
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters

    def rows(ids: Sequence[int], lengths: Sequence[int]) -> list[list[float]]:
        at = torch.tensor(lengths, device=device) - 1
        some: dict[str, Any] = {"logits_to_keep": 1 if len(at) == 1 else at} if keeps else {}
        with torch.inference_mode():
            row = torch.tensor([list(ids)], device=device)
            logits = model(row, use_cache=False, **some).logits[0]
            logits = logits if keeps else logits[at]
            values: list[list[float]] = logits.float().log_softmax(-1).tolist()
            return values

    return rows


def _ask(server: Server, model: str, ids: Sequence[int]) -> list[tuple[int | None, float]]:
    """What is told of the next token."""
    url = server.root
    body = {"model": model, "prompt": list(ids), "max_tokens": 1, "temperature": 0}
    body |= {"logprobs": TOP, "return_tokens_as_token_ids": True}
    try:
        status, answer = server.call("/v1/completions", body)
    except (OSError, http.client.HTTPException) as error:
        raise Stopped(
            f"endpoint: {url} went away during a prompt of {len(ids)} tokens ({error})"
        ) from None
    if status >= 400:
        reason = " ".join(answer[:300].decode(errors="replace").split())
        raise ProofFailed(
            f"endpoint: {url} refuses a prompt of {len(ids)} tokens (HTTP {status}: {reason})"
        )
    return top_logprobs(server.parsed("/v1/completions", answer))


def _untold(server: Server, some: str = "no log-probabilities") -> InputError:
    return InputError(f"--endpoint {server.root} returns {some} for /v1/completions")


def _check_limit(limit: int | None, context: int, target: int) -> None:
    if limit is not None and limit < target:
        old = ", its context before the extension" if limit == context else ""
        raise ProofFailed(
            f"endpoint: the server takes {limit} tokens{old}; the checkpoint reads {target}: start "
            f"it with that length (vLLM --max-model-len, SGLang --context-length, llama-server -c)"
        )


def compare(
    server: Server, model: str, prompts: Sequence[Sequence[int]], context: int, wanted: Reference
) -> tuple[Prompt, ...]:
    """Ask for each prompt and hold the answer against the reference."""
    out = []
    for ids in prompts:
        ids, pairs = _first_told(server, model, ids)
        answers = zip(pairs, _matched(pairs, wanted(ids)), strict=True)
        worst = max(abs(value - truth) for (_, value), truth in answers)
        out.append(Prompt(len(ids), len(ids) > context, worst))
    return tuple(out)


def _first_told(
    server: Server, model: str, ids: Sequence[int]
) -> tuple[Sequence[int], list[tuple[int | None, float]]]:
    """A prompt and its answer; where nothing is told, a prompt that ends a few tokens earlier."""
    for end in range(len(ids), max(len(ids) - TRIES, 0), -1):
        if pairs := _ask(server, model, ids[:end]):
            return ids[:end], pairs
    raise _untold(server)


def special_tokens(directory: Path) -> list[int]:
    """Ids that end or pad a text, from the config."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    parts = [config, *(value for value in config.values() if isinstance(value, dict))]
    tokens = [part.get(f"{name}_token_id") for part in parts for name in SPECIAL]
    return [token for token in tokens if isinstance(token, int)]


def probe(
    url: str,
    directory: Path,
    *,
    context: int,
    target: int,
    tolerance: float = TOLERANCE,
    **loading: Any,
) -> Probe:
    """Compare a running server with a directory; ProofFailed says which prompt differs.

    `context` is the one before the extension; `loading` goes to transformers_reference.
    """
    server = server_at(url)
    model, limit = served_model(server, url)
    _check_limit(limit, context, target)
    wanted = transformers_reference(directory, **loading)
    vocab_size, avoid = len(wanted([0])), special_tokens(directory)
    prompts = [token_ids(length, vocab_size, avoid) for length in lengths(context, target)]
    done = compare(server, model, prompts, context, wanted)
    for number, prompt in enumerate(done, 1):
        if not prompt.difference <= tolerance:
            where = f"beyond the old {context}" if prompt.beyond else f"inside the old {context}"
            raise ProofFailed(
                f"endpoint: after prompt {number} of {len(done)} ({prompt.tokens} tokens, {where}) "
                f"the server's top log-probabilities differ from transformers' by up to "
                f"{prompt.difference:.2f} (tolerance {tolerance}): it does not read the scaling as "
                "planned"
            )
    return Probe(model, limit, tolerance, done)


def probe_gguf(
    url: str,
    directory: Path,
    before: Mapping[str, Any] | None,
    *,
    context: int,
    target: int,
    vocab_size: int,
    **loading: Any,
) -> Probe:
    """Compare a running server with the dequantised weights of the GGUF that it serves.

    `before` is their config with the spectrum before the extension. What a server would tell that
    reads by it says whether these prompts can tell the two readings apart.
    """
    server = server_at(url)
    model, limit = served_model(server, url)
    _check_limit(limit, context, target)
    avoid, longest, done = special_tokens(directory), min(target - 1, 2 * context), list[Prompt]()
    texts = {size: token_ids(size, vocab_size, avoid) for size in {min(context, longest), longest}}
    at = {size: beginnings(size, context) for size in texts}
    read = transformers_rows(directory, **loading)
    wanted = {size: read(text, at[size]) for size, text in texts.items()}
    del read
    for size, text in texts.items():
        heard = [_ask(server, model, text[:length]) for length in at[size]]
        if 2 * sum(map(bool, heard)) < len(heard):
            few = f"log-probabilities after {sum(map(bool, heard))} of {len(heard)} prompts alone"
            raise _untold(server, few if any(heard) else "no log-probabilities")
        for length, pairs, row in zip(at[size], heard, wanted[size], strict=True):
            if pairs:
                done.append(Prompt(length, length > context, _mean_gap(pairs, row)))
    lost = None
    if before is not None and longest > context:
        others = transformers_rows(directory, config=before, **loading)(texts[longest], at[longest])
        # What a server would tell whose log-probabilities these are.
        told = (sorted(enumerate(row), key=lambda pair: -pair[1])[:TOP] for row in others)
        lost = mean(map(_mean_gap, told, wanted[longest]))
    for beyond, where in ((True, "beyond"), (False, "inside")):
        gaps = [prompt.difference for prompt in done if prompt.beyond is beyond]
        if gaps and not mean(gaps) <= MEAN_TOLERANCE:
            said = (
                "" if lost is None else f"; a reading without the extension differs by {lost:.2f}"
            )
            raise ProofFailed(
                f"endpoint: after {len(gaps)} prompts {where} the old context of {context} tokens "
                f"the server's top log-probabilities differ from transformers' by {mean(gaps):.2f} "
                f"in the mean (tolerance {MEAN_TOLERANCE}{said}): it does not read the file as "
                "planned"
            )
    return Probe(model, limit, MEAN_TOLERANCE, tuple(done), lost)


def beginnings(length: int, context: int) -> list[int]:
    """Lengths of the prompts from one text: its second half, or what lies beyond the context."""
    first = context + 1 if length > context else max(length // 2, 1)
    steps = min(ASKED, length - first + 1)
    return [length - step * (length - first) // max(steps - 1, 1) for step in range(steps)][::-1]


def _mean_gap(pairs: Sequence[tuple[int | None, float]], row: Sequence[float]) -> float:
    both = zip(pairs, _matched(pairs, row), strict=True)
    return mean(abs(value - truth) for (_, value), truth in both)
