"""Ask a running server whether it reads a checkpoint as planned.

vLLM, SGLang and llama-server all speak OpenAI's completions API, take a prompt of token ids and
tell the top log-probabilities of one generated token. Those, after prompts inside the old context
and from there up to the target, are compared with what transformers computes from the same
directory, or from the dequantised weights of the GGUF that is served. They are compared with the
neighbours of the plan too: a server with another factor is not far from it either.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean as mean

from ropext import families
from ropext.base.errors import ProofFailed
from ropext.base.jsontext import JsonObject, untagged
from ropext.base.narration import Say, Show, duration, no_messages, no_progress
from ropext.endpoint.logprobs import (
    TOP,
    Pairs,
    next_token,
    no_logprobs_error,
    require_logprobs,
    special_tokens,
    token_ids,
)
from ropext.endpoint.server import Server, served_model, server_at
from ropext.proof.neighbours import JudgedNeighbour, Neighbour, judge

# Nats, the mean of eight prompts. bfloat16 kernels differ by some hundredths. llama.cpp also rounds
# the inputs of quantised weights: a right Q4_1 server measured 0.145 ± 0.035, a server with the
# factor × 1.25 measured 0.27 inside the original context and 0.42 beyond it
# (benchmarks/results/endpoint-tolerance-2026-11-28.md).
TOLERANCE = 0.25
ASKED = 8  # prompts of each text, all beginnings of it: the server's cache then serves the next one
LONG = 120  # seconds of work here after which ropext suggests --plain

# Token ids and lengths -> the log-probability of every next token after each of these beginnings.
Rows = Callable[[Sequence[int], Sequence[int]], list[list[float]]]


@dataclass(frozen=True)
class Prompt:
    """One comparison: the length of the prompt, and the difference of the top log-probabilities."""

    tokens: int
    beyond: bool  # longer than the old context
    difference: float  # in the mean, in nats


@dataclass(frozen=True)
class Probe:
    """The answers of a server to all prompts."""

    model: str
    limit: int | None  # tokens it takes; None = it does not say
    tolerance: float
    prompts: tuple[Prompt, ...]
    neighbours: tuple[JudgedNeighbour, ...] = ()

    @property
    def reached(self) -> int:
        """The tokens of the longest prompt."""
        return max(prompt.tokens for prompt in self.prompts)


def _matched(pairs: Sequence[tuple[int | None, float]], wanted: Sequence[float]) -> list[float]:
    """Pair each wanted log-probability with the server's, by id, else by rank.

    A dict by text holds one entry if two tokens look alike, so a rank may be skipped for each
    missing one.
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
    """The model that transformers runs for comparison with a server."""

    directory: Path
    config: JsonObject | None = None  # in place of the directory's
    dtype: str = "auto"
    device: str = "cpu"
    trust_remote_code: bool = False


@dataclass(frozen=True)
class ReadLengths:
    """The number of tokens that a model reads."""

    context: int  # before its extension
    target: int


def transformers_rows(reference: ReferenceModel) -> Rows:
    """Load a model by stock transformers, to read with."""
    import inspect

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from ropext.models.load import silenced

    config = None  # the directory's
    if reference.config is not None:
        with silenced():
            config = AutoConfig.for_model(**untagged(reference.config))
    with silenced():
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
    """A running server that accepts token ids and returns log-probabilities."""

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


@dataclass(frozen=True)
class ServerQuestion:
    """A comparison: a model and its neighbours, the lengths, and the listener."""

    reference: ReferenceModel
    lengths: ReadLengths
    neighbours: Sequence[Neighbour] = ()
    tolerance: float = TOLERANCE
    vocab_size: int | None = None  # None: as many as the model has logits
    say: Say = field(default=no_messages, repr=False)
    show: Show = field(default=no_progress, repr=False)

    @property
    def texts(self) -> tuple[int, ...]:
        """The tokens of each text: inside the old context, and up to the target."""
        longest = self.lengths.target - 1  # one more is generated
        inside = min(self.lengths.context, longest)
        return tuple(sorted({inside, longest}))

    @property
    def computed(self) -> Sequence[Neighbour]:
        """The neighbours that a config can state."""
        return [each for each in self.neighbours if each.config is not None]

    @property
    def work(self) -> int:
        """The tokens that transformers reads: both texts as planned, and the longest by each
        neighbour."""
        return sum(self.texts) + len(self.computed) * self.texts[-1]


Texts = dict[int, list[int]]  # by their number of tokens
Read = dict[tuple[int, int], Sequence[float]]  # text and length of the prompt -> log-probabilities


def probe(url: str, question: ServerQuestion) -> Probe:
    """Compare a running server with a model; ProofFailed says how it differs."""
    opened = _opened(url, question.reference.directory, question.lengths)
    context = question.lengths.context
    at = {size: beginnings(size, context) for size in question.texts}
    _announce(question, at)
    work = _Work(question)
    planned = work.planned(at, opened.avoid)
    others = {each.name: work.neighbour(each, at) for each in question.computed}
    answers = _answers(opened, work, at)
    done = list[Prompt]()
    for (size, length), pairs in answers.items():
        gap = _mean_gap(pairs, planned[size, length])
        done.append(Prompt(length, length > context, gap))
    judged = list[JudgedNeighbour]()
    for each in question.neighbours:
        judged.append(JudgedNeighbour(each))
        if each.name in others:
            judged[-1] = _judged(each, answers, planned, others[each.name])
    probed = Probe(opened.model, opened.limit, question.tolerance, tuple(done), tuple(judged))
    _require_agreement(probed, context)
    return probed


def _judged(
    neighbour: Neighbour, answers: "Answers", planned: Read, other: Read
) -> JudgedNeighbour:
    """Judge a neighbour after the prompts that it has read."""
    told = list[list[float]]()
    wanted = list[list[float]]()
    changed = list[list[float]]()
    for at, pairs in answers.items():
        if at in other:
            told.append([value for _, value in pairs])
            wanted.append(_matched(pairs, planned[at]))
            changed.append(_matched(pairs, other[at]))
    return judge(neighbour, told, wanted, changed)


def _require_agreement(probed: Probe, context: int) -> None:
    """Raise ProofFailed if the answers are not the plan's, or are a neighbour's rather."""
    nearer = [each for each in probed.neighbours if each.is_it]
    if nearer:
        best = min(nearer, key=lambda each: abs(each.at - 1))
        raise ProofFailed(
            "endpoint: the server does not read the scaling as planned: its answers are nearer to "
            f"{best.neighbour.name} than to the plan ({best.at:.2f} ± {best.margin:.2f} of the "
            f"way, {best.apart:.2g} nats)"
        )
    for beyond, where in ((False, "inside"), (True, "beyond")):
        gaps = [prompt.difference for prompt in probed.prompts if prompt.beyond is beyond]
        if gaps and not mean(gaps) <= probed.tolerance:
            raise ProofFailed(
                f"endpoint: after {len(gaps)} prompts {where} the old context of {context} tokens "
                f"the server's top log-probabilities differ from transformers' by {mean(gaps):.2f} "
                f"in the mean (tolerance {probed.tolerance:g}): it does not read the scaling as "
                "planned"
            )


def _announce(question: ServerQuestion, at: Mapping[int, Sequence[int]]) -> None:
    """Say what will be read, before anything is."""
    count = sum(map(len, at.values()))
    tokens = sum(map(sum, at.values()))
    question.say(
        f"the server is asked {count} prompts of up to {question.texts[-1]:,} tokens ({tokens:,} "
        "together; most servers read what prompts share only once)"
    )
    question.say(
        f"transformers reads {question.work:,} tokens here, by the plan and by "
        f"{len(question.computed)} readings next to it"
    )


class _Work:
    """A counter of the tokens read on this machine, which estimates the remaining time."""

    def __init__(self, question: ServerQuestion) -> None:
        self.question = question
        self.texts: Texts = {}
        self.done = 0

    def planned(self, at: Mapping[int, Sequence[int]], avoid: Sequence[int]) -> Read:
        """Read every text as planned."""
        question = self.question
        rows = transformers_rows(question.reference)
        vocab_size = question.vocab_size or len(rows([0], [1])[0])
        read = Read()
        for size in question.texts:
            self.texts[size] = token_ids(size, vocab_size, avoid)
            begun = time.monotonic()
            read |= self._rows(rows, size, at[size], question.reference.config)
            if size == question.texts[0]:
                self._estimate(time.monotonic() - begun)
        return read

    def neighbour(self, neighbour: Neighbour, at: Mapping[int, Sequence[int]]) -> Read:
        """Read the longest text by another config."""
        longest = self.question.texts[-1]
        rows = transformers_rows(replace(self.question.reference, config=neighbour.config))
        return self._rows(rows, longest, at[longest], neighbour.config)

    def _rows(
        self, rows: Rows, size: int, lengths: Sequence[int], config: JsonObject | None
    ) -> Read:
        if config is not None and follows_length(config):
            found = [rows(self.texts[size][:length], [length])[0] for length in lengths]
        else:
            found = rows(self.texts[size], lengths)
        self.done += size
        self.question.show(self.done, self.question.work, "read by transformers")
        return {(size, length): row for length, row in zip(lengths, found, strict=True)}

    def _estimate(self, seconds: float) -> None:
        """Say how long the rest takes, by the shorter text: attention grows with the length."""
        first = self.question.texts[0]
        left = (self.question.work - self.done) / first * seconds
        slowest = left * self.question.texts[-1] / first
        said = f"that takes about {duration(left)} to {duration(slowest)} here"
        if slowest > LONG:
            said += (
                "; --plain URL asks a server of the unscaled model instead, and reads nothing here"
            )
        self.question.say(said)


Answers = dict[tuple[int, int], Pairs]


def _answers(opened: "OpenedServer", work: _Work, at: Mapping[int, Sequence[int]]) -> Answers:
    """Ask for every prompt; some answers may hold no log-probabilities, but not most."""
    total = sum(map(sum, at.values()))
    answers = Answers()
    done = 0
    for size in at:
        heard = 0
        for length in at[size]:
            pairs = next_token(opened.server, opened.model, work.texts[size][:length])
            done += length
            work.question.show(done, total, "asked of the server")
            if pairs:
                answers[size, length] = pairs
                heard += 1
        if not heard:
            raise no_logprobs_error(opened.server)
        if 2 * heard < len(at[size]):
            raise no_logprobs_error(
                opened.server, f"log-probabilities after only {heard} of {len(at[size])} prompts"
            )
    return answers


def follows_length(config: JsonObject) -> bool:
    """Return True if a config's frequencies depend on the length of the prompt."""
    return any(site.params["rope_type"] == "dynamic" for site in families.read(dict(config)).sites)


def beginnings(length: int, context: int) -> list[int]:
    """Return the lengths of the prompts from one text: in its second half, or beyond the
    context."""
    first = max(length // 2, 1)
    if length > context:
        first = context + 1
    steps = min(ASKED, length - first + 1)
    return [length - step * (length - first) // max(steps - 1, 1) for step in range(steps)][::-1]


def _mean_gap(pairs: Sequence[tuple[int | None, float]], row: Sequence[float]) -> float:
    both = zip(pairs, _matched(pairs, row), strict=True)
    return mean(abs(value - truth) for (_, value), truth in both)
