"""Ask a running server whether it reads a checkpoint as planned.

vLLM, SGLang and llama-server all speak OpenAI's completions API, take a prompt of token ids and
tell the top log-probabilities of one generated token. Those, after prompts inside and beyond the
old context, are compared with what transformers computes from the same directory, or from the
dequantised weights of the GGUF that is served.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean as mean

from ropext.errors import ProofFailed
from ropext.jsontext import JsonObject, untagged
from ropext.ports.logprobs import (
    TOP,
    first_told,
    next_token,
    require_logprobs,
    special_tokens,
    token_ids,
    untold,
)
from ropext.ports.server import Server, served_model, server_at

TOLERANCE = 0.2  # nats: bfloat16 kernels differ by some hundredths, an ignored scaling by more
# The same for a GGUF, in the mean: llama.cpp also rounds what it multiplies by quantised weights.
# Seen alike: 0.03 to 0.1 (Q8_0, Q4_1; single positions 0.8); an attention factor lost alone: 0.3.
MEAN_TOLERANCE = 0.15
DRAWS = (2, 8)  # prompts of a length, of which one is taken: at least, and at most
DRAWN_TOKENS = 8192  # of a length together, where the fewest have no more
ORDER = 10  # times the tolerance that the plain model is to lie off
ASKED = 8  # prompts of each text of a GGUF, all beginnings of it: the server keeps what it has read

# Token ids -> the log-probability of every next token.
Reference = Callable[[Sequence[int]], Sequence[float]]
Rows = dict[tuple[int, ...], Sequence[float]]  # the same, by the prompt


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
    drawn: int = 0  # prompts of the shortest length, of which the furthest was taken


def _matched(pairs: Sequence[tuple[int | None, float]], wanted: Sequence[float]) -> list[float]:
    """The wanted log-probability of each of the server's: by id, else by rank.

    A dict by text holds one entry where two tokens look alike, so a rank may be skipped for each
    that is missing.
    """
    if all(type(token) is int and 0 <= token < len(wanted) for token, _ in pairs):
        return [wanted[token] for token, _ in pairs if token is not None]
    ranked = sorted(wanted, reverse=True)[:TOP]
    out = []
    rank = 0
    for index, (_, value) in enumerate(pairs):
        last = len(ranked) - (len(pairs) - index)
        rank = min(range(rank, last + 1), key=lambda r: abs(ranked[r] - value))
        out.append(ranked[rank])
        rank += 1
    return out


@dataclass(frozen=True)
class ReferenceModel:
    """What transformers runs, for a server to be held against."""

    directory: Path
    config: JsonObject | None = None  # in place of the directory's
    dtype: str = "auto"
    device: str = "cpu"
    trust_remote_code: bool = False


@dataclass(frozen=True)
class ReadLengths:
    """How many tokens a model reads."""

    context: int  # before its extension
    target: int


def lengths(context: int, target: int) -> tuple[int, int, int]:
    """One prompt inside the old context and two beyond, short enough for transformers to run."""
    first = min((context + target) // 2, context + context // 4)
    return context // 2, first, min(target - 1, 2 * context)


def transformers_reference(model: ReferenceModel) -> Reference:
    """Log-probabilities of the next token by stock transformers, the model loaded once."""
    read = transformers_rows(model)
    return lambda ids: read(ids, [len(ids)])[0]


def transformers_rows(
    reference: ReferenceModel,
) -> Callable[[Sequence[int], Sequence[int]], list[list[float]]]:
    """Token ids and lengths -> by stock transformers, the log-probabilities of every next token
    after the beginnings of these lengths."""
    import inspect

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = None  # the directory's
    if reference.config is not None:
        config = AutoConfig.for_model(**untagged(reference.config))
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        reference.directory,
        config=config,
        dtype=reference.dtype,
        trust_remote_code=reference.trust_remote_code,
        use_safetensors=True,
    )
    device = reference.device
    model = model.to(device).eval()
    # The logits of a whole long prompt would not fit.
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters

    def rows(ids: Sequence[int], lengths: Sequence[int]) -> list[list[float]]:
        at = torch.tensor(lengths, device=device) - 1
        some = dict[str, object]()
        if keeps:
            some["logits_to_keep"] = at
        if keeps and len(at) == 1:
            some["logits_to_keep"] = 1
        with torch.inference_mode():
            row = torch.tensor([list(ids)], device=device)
            logits = model(row, use_cache=False, **some).logits[0]
            if not keeps:
                logits = logits[at]
            values: list[list[float]] = logits.float().log_softmax(-1).tolist()
            return values

    return rows


@dataclass(frozen=True)
class OpenedServer:
    """A running server that takes what a model reads, and tells log-probabilities."""

    server: Server
    model: str  # as the server calls it
    limit: int | None  # tokens it takes; None = it does not say
    avoid: Sequence[int]  # tokens that no prompt holds


def _opened(url: str, directory: Path, read_lengths: ReadLengths) -> OpenedServer:
    """Refuse a server that takes less than the model of this directory reads, or tells nothing."""
    server = server_at(url)
    model, limit = served_model(server, url)
    target = read_lengths.target
    if limit is not None and limit < target:
        old = ""
        if limit == read_lengths.context:
            old = ", its context before the extension"
        raise ProofFailed(
            f"endpoint: the server takes {limit} tokens{old}; the checkpoint reads {target}: start "
            f"it with that length (vLLM --max-model-len, SGLang --context-length, llama-server -c)"
        )
    require_logprobs(server, model)
    return OpenedServer(server, model, limit, special_tokens(directory))


def compare(
    server: Server, model: str, prompts: Sequence[Sequence[int]], context: int, wanted: Reference
) -> tuple[Prompt, ...]:
    """Ask for each prompt and hold the answer against the reference."""
    out = []
    for ids in prompts:
        ids, pairs = first_told(server, model, ids)
        answers = zip(pairs, _matched(pairs, wanted(ids)), strict=True)
        worst = max(abs(value - truth) for (_, value), truth in answers)
        out.append(Prompt(len(ids), len(ids) > context, worst))
    return tuple(out)


def probe(
    url: str,
    reference: ReferenceModel,
    read_lengths: ReadLengths,
    before: JsonObject | None = None,
    tolerance: float | None = None,
) -> Probe:
    """Compare a running server with a directory; ProofFailed says which prompt differs.

    `before` is the config before the extension: where it is given, prompts are taken after which
    its reading lies far off.
    """
    if tolerance is None:
        tolerance = TOLERANCE
    context = read_lengths.context
    target = read_lengths.target
    opened = _opened(url, reference.directory, read_lengths)
    server = opened.server
    model = opened.model
    plain = Rows()
    if before is not None:
        read = transformers_reference(replace(reference, config=before))
        for ids in _candidates(context, target, len(read([0])), opened.avoid):
            plain[tuple(ids)] = read(ids)
        del read  # the weights once more beside it would not fit
    wanted = transformers_reference(reference)
    vocab_size = len(wanted([0]))
    prompts = [
        _furthest(token_ids(length, vocab_size, opened.avoid), plain, wanted, ORDER * tolerance)
        for length in lengths(context, target)
    ]
    done = compare(server, model, prompts, context, wanted)
    lost = None
    if plain:
        lost = max(_apart(plain[tuple(ids)], wanted(ids)) for ids in prompts)
    for number, prompt in enumerate(done, 1):
        if not prompt.difference <= tolerance:
            where = f"inside the old {context}"
            if prompt.beyond:
                where = f"beyond the old {context}"
            why = "it does not read the scaling as planned"
            if plain and _answers_alike(server, model, prompts, plain, tolerance):
                why = "these are the answers of the model before the extension: the scaling is off"
            raise ProofFailed(
                f"endpoint: after prompt {number} of {len(done)} ({prompt.tokens} tokens, {where}) "
                f"the server's top log-probabilities differ from transformers' by up to "
                f"{prompt.difference:.2f} (tolerance {tolerance:g}): {why}"
            )
    drawn = 0
    if plain:
        drawn = draws(min(lengths(context, target)))
    return Probe(model, opened.limit, tolerance, done, lost, drawn)


def draws(length: int) -> int:
    """How many prompts of a length are read to take one of them: fewer of a long one."""
    least, most = DRAWS
    return max(least, min(most, DRAWN_TOKENS // length))


def _candidates(
    context: int, target: int, vocab_size: int, avoid: Sequence[int]
) -> Iterator[list[int]]:
    """Some prompts of each length, of which one is taken."""
    for length in lengths(context, target):
        for draw in range(draws(length)):
            yield token_ids(length, vocab_size, avoid, draw)


def _furthest(first: list[int], plain: Rows, wanted: Reference, enough: float) -> list[int]:
    """The prompt, of those as long as the first, after which a reading without the extension lies
    furthest off, or the first one after which that is enough."""
    best = first
    furthest = 0.0
    for ids, row in plain.items():
        if len(ids) != len(first):
            continue
        gap = _apart(row, wanted(ids))
        if gap > furthest:
            best = list(ids)
            furthest = gap
        if gap >= enough:
            break
    return best


def _apart(row: Sequence[float], truth: Sequence[float]) -> float:
    """Nats between two readings, over the best candidates of the first."""
    told = sorted(enumerate(row), key=lambda pair: -pair[1])[:TOP]
    return max(abs(value - truth[token]) for token, value in told)


def _answers_alike(
    server: Server, model: str, prompts: Sequence[Sequence[int]], plain: Rows, tolerance: float
) -> bool:
    """Whether a server answers every prompt as the model before the extension does."""
    for ids in prompts:
        pairs = next_token(server, model, ids)
        matched = zip(pairs, _matched(pairs, plain[tuple(ids)]), strict=True)
        if not pairs or max(abs(value - truth) for (_, value), truth in matched) > tolerance:
            return False
    return True


def probe_gguf(
    url: str,
    reference: ReferenceModel,
    read_lengths: ReadLengths,
    before: JsonObject | None,
    vocab_size: int,
    tolerance: float | None = None,
) -> Probe:
    """Compare a running server with the dequantised weights of the GGUF that it serves.

    `before` is their config with the spectrum before the extension. What a server would tell that
    reads by it says whether these prompts can tell the two readings apart.
    """
    if tolerance is None:
        tolerance = MEAN_TOLERANCE
    context = read_lengths.context
    target = read_lengths.target
    opened = _opened(url, reference.directory, read_lengths)
    server = opened.server
    model = opened.model
    longest = min(target - 1, 2 * context)
    done = list[Prompt]()
    texts = {}
    for size in {min(context, longest), longest}:
        texts[size] = token_ids(size, vocab_size, opened.avoid)
    at = {size: beginnings(size, context) for size in texts}
    read = transformers_rows(reference)
    wanted = {size: read(text, at[size]) for size, text in texts.items()}
    del read
    for size, text in texts.items():
        heard = [next_token(server, model, text[:length]) for length in at[size]]
        answered = sum(map(bool, heard))
        if not answered:
            raise untold(server)
        if 2 * answered < len(heard):
            few = f"log-probabilities after {answered} of {len(heard)} prompts alone"
            raise untold(server, few)
        for length, pairs, row in zip(at[size], heard, wanted[size], strict=True):
            if pairs:
                done.append(Prompt(length, length > context, _mean_gap(pairs, row)))
    lost = None
    if before is not None and longest > context:
        read_before = transformers_rows(replace(reference, config=before))
        others = read_before(texts[longest], at[longest])
        # What a server would tell whose log-probabilities these are.
        told = (sorted(enumerate(row), key=lambda pair: -pair[1])[:TOP] for row in others)
        lost = mean(map(_mean_gap, told, wanted[longest]))
    for beyond, where in ((True, "beyond"), (False, "inside")):
        gaps = [prompt.difference for prompt in done if prompt.beyond is beyond]
        if gaps and not mean(gaps) <= tolerance:
            said = ""
            if lost is not None:
                said = f"; a reading without the extension differs by {lost:.2f}"
            raise ProofFailed(
                f"endpoint: after {len(gaps)} prompts {where} the old context of {context} tokens "
                f"the server's top log-probabilities differ from transformers' by {mean(gaps):.2f} "
                f"in the mean (tolerance {tolerance:g}{said}): it does not read the file as "
                "planned"
            )
    return Probe(model, opened.limit, tolerance, tuple(done), lost)


def beginnings(length: int, context: int) -> list[int]:
    """Lengths of the prompts from one text: its second half, or what lies beyond the context."""
    first = max(length // 2, 1)
    if length > context:
        first = context + 1
    steps = min(ASKED, length - first + 1)
    return [length - step * (length - first) // max(steps - 1, 1) for step in range(steps)][::-1]


def _mean_gap(pairs: Sequence[tuple[int | None, float]], row: Sequence[float]) -> float:
    both = zip(pairs, _matched(pairs, row), strict=True)
    return mean(abs(value - truth) for (_, value), truth in both)
