"""Ask a running server whether it reads a checkpoint as planned.

vLLM, SGLang and llama-server all speak OpenAI's completions API, take a prompt of token ids and
tell the top log-probabilities of one generated token. Those, after prompts inside the old context
and from there up to the target, are compared with what transformers computes from the same
directory, or from the dequantised weights of the GGUF that is served. They are compared with the
neighbours of the plan too: a server with another factor is not far from it either.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean as mean

from ropext import families
from ropext.base.errors import ProofFailed
from ropext.base.jsontext import JsonObject, untagged
from ropext.base.narration import Say, duration, no_messages, progress_lines
from ropext.endpoint.logprobs import (
    TOP,
    Pairs,
    next_token,
    no_logprobs_error,
    require_logprobs,
    special_tokens,
    token_ids,
)
from ropext.endpoint.server import Server, model_and_limit, server_at
from ropext.verifying.judging import JudgedNeighbour, Neighbour, judge_neighbour

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
class ComparedPrompt:
    """One prompt to a server: its length, and how far the answer's log-probabilities are from
    transformers'."""

    tokens: int
    beyond: bool  # longer than the old context
    difference: float  # in the mean, in nats


@dataclass(frozen=True)
class ServerAnswers:
    """The answers of a server to all prompts."""

    model: str
    limit: int | None  # tokens it takes; None = it does not say
    tolerance: float
    prompts: tuple[ComparedPrompt, ...]
    neighbours: tuple[JudgedNeighbour, ...] = ()

    @property
    def reached(self) -> int:
        """Return the tokens of the longest prompt that the checked server answered."""
        return max(prompt.tokens for prompt in self.prompts)

    @property
    def passed(self) -> bool | None:
        """Return True if the server's answers exclude every neighbour that decides; None: it is not
        known."""
        deciding = [each for each in self.neighbours if each.neighbour.decides]
        return True if all(each.is_excluded for each in deciding) else None

    @property
    def sentence(self) -> str:
        """Describe the server, how far its answers are from the plan's, and which neighbours they
        exclude."""
        limit = "no stated limit"
        if self.limit is not None:
            limit = f"a limit of {self.limit}"
        gaps = [prompt.difference for prompt in self.prompts]
        measured = (
            f"serves {self.model} with {limit}; after {len(gaps)} prompts of up to "
            f"{self.reached:,} tokens its log-probabilities differ from transformers' by "
            f"{mean(gaps):.1e} in the mean (tolerance {self.tolerance:g})"
        )
        return "; ".join([measured, *(judged.sentence for judged in self.neighbours)])


def _reference_values(pairs: Pairs, wanted: Sequence[float]) -> list[float]:
    """Return transformers' log-probability for each of the server's top tokens: by token id, else
    by rank.

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


def load_reference(reference: ReferenceModel) -> Rows:
    """Load the model to compare a server with by stock transformers.

    Return the function that computes its log-probabilities of the next token.
    """
    import inspect

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from ropext.models.load import device_of, silenced

    device = device_of(reference.device)
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
    model = model.to(device).eval()
    # The logits of a whole long prompt would not fit.
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters

    def reference_rows(ids: Sequence[int], lengths: Sequence[int]) -> list[list[float]]:
        """Return the log-probabilities of the next token after each beginning of a text, to compare
        a server's with."""
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

    return reference_rows


@dataclass(frozen=True)
class ServerQuestion:
    """A comparison: a model and its neighbours, the lengths that they read, and the listener."""

    reference: ReferenceModel
    context: int  # tokens before the extension
    target: int
    neighbours: Sequence[Neighbour] = ()
    tolerance: float = TOLERANCE
    vocab_size: int | None = None  # None: as many as the model has logits
    say: Say = field(default=no_messages, repr=False)

    @property
    def longest(self) -> int:
        """Return the tokens of the longest prompt by which `verify` checks a server, which
        generates one more."""
        return self.target - 1

    @cached_property
    def prompts(self) -> dict[int, list[int]]:
        """Return the lengths of the prompts by which `verify` checks a server, by the tokens of
        their text: one inside the old context, one up to the target."""
        texts = sorted({min(self.context, self.longest), self.longest})
        return {size: prompt_lengths_of_text(size, self.context) for size in texts}

    @property
    def computed(self) -> Sequence[Neighbour]:
        """Return the neighbours, to compare the server's answers with, that a config can state."""
        return [each for each in self.neighbours if each.config is not None]

    @property
    def work(self) -> int:
        """Return the tokens that transformers reads to check a server: both texts as planned, and
        the longest by each neighbour."""
        return sum(self.prompts) + len(self.computed) * self.longest


# Tokens of the text and length of the prompt -> the log-probabilities of the next token.
Read = dict[tuple[int, int], Sequence[float]]
Answers = dict[tuple[int, int], Pairs]  # the same of the server's top tokens


def probe_server(url: str, question: ServerQuestion) -> ServerAnswers:
    """Compare a running server's answers with the planned model's. Raise ProofFailed if they
    differ."""
    server = server_at(url)
    model, limit = model_and_limit(server, url)
    _require_limit(limit, question)
    require_logprobs(server, model)
    work = _ReferenceTexts(question, special_tokens(question.reference.directory))
    _announce_prompts(question)
    planned = work.read_planned()
    others = {each.name: work.read_neighbour(each) for each in question.computed}
    answers = _ask_prompts(server, model, work)
    done = list[ComparedPrompt]()
    for (size, length), pairs in answers.items():
        gap = _mean_answer_gap(pairs, planned[size, length])
        done.append(ComparedPrompt(length, length > question.context, gap))
    judged = list[JudgedNeighbour]()
    for each in question.neighbours:
        judged.append(JudgedNeighbour(each))
        if each.name in others:
            judged[-1] = _judge_answers(each, answers, planned, others[each.name])
    probed = ServerAnswers(model, limit, question.tolerance, tuple(done), tuple(judged))
    _require_agreement(probed, question.context)
    return probed


def _require_limit(limit: int | None, question: ServerQuestion) -> None:
    """Raise ProofFailed if a server's limit is below the length that the checkpoint reads."""
    if limit is None or limit >= question.target:
        return
    old = ""
    if limit == question.context:
        old = ", its context before the extension"
    raise ProofFailed(
        f"endpoint: the server takes {limit} tokens{old}; the checkpoint reads {question.target}: "
        "start it with that length (vLLM --max-model-len, SGLang --context-length, llama-server -c)"
    )


def _judge_answers(
    neighbour: Neighbour, answers: Answers, planned: Read, other: Read
) -> JudgedNeighbour:
    """Judge a neighbour by the server's answers to the prompts that the neighbour has read."""
    answered = list[list[float]]()
    wanted = list[list[float]]()
    changed = list[list[float]]()
    for at, pairs in answers.items():
        if at in other:
            answered.append([value for _, value in pairs])
            wanted.append(_reference_values(pairs, planned[at]))
            changed.append(_reference_values(pairs, other[at]))
    return judge_neighbour(neighbour, answered, wanted, changed)


def _require_agreement(probed: ServerAnswers, context: int) -> None:
    """Raise ProofFailed if the server's answers are nearer to a neighbour, or not the plan's."""
    nearer = [each for each in probed.neighbours if each.is_nearer]
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


def _announce_prompts(question: ServerQuestion) -> None:
    """Report to the check's listener how many prompts the server gets, and how many tokens
    transformers reads here to check it."""
    lengths = [length for prompts in question.prompts.values() for length in prompts]
    question.say(
        f"the server is asked {len(lengths)} prompts of up to {question.longest:,} tokens "
        f"({sum(lengths):,} together; most servers read what prompts share only once)"
    )
    question.say(
        f"transformers reads {question.work:,} tokens here, by the plan and by "
        f"{len(question.computed)} readings next to it"
    )


class _ReferenceTexts:
    """The texts that transformers reads here for a server's check, and how many tokens are done."""

    def __init__(self, question: ServerQuestion, avoid: Sequence[int]) -> None:
        """Begin with no text read; `read_planned` makes the texts that the server gets."""
        self.question = question
        self.avoid = avoid  # tokens that no prompt holds
        self.show = progress_lines(question.say)
        self.texts: dict[int, list[int]] = {}  # by their number of tokens
        self.done = 0

    def read_planned(self) -> Read:
        """Return the planned log-probabilities after every prompt that the server gets."""
        question = self.question
        rows = load_reference(question.reference)
        vocab_size = question.vocab_size or len(rows([0], [1])[0])
        read = Read()
        for size in question.prompts:
            self.texts[size] = token_ids(size, vocab_size, self.avoid)
            begun = time.monotonic()
            read |= self._read_text(rows, size, question.reference.config)
            if len(self.texts) == 1:
                self._estimate_rest(size, time.monotonic() - begun)
        return read

    def read_neighbour(self, neighbour: Neighbour) -> Read:
        """Return a neighbour's log-probabilities, as transformers computes them, after the prompts
        of the longest text that the checked server gets."""
        rows = load_reference(replace(self.question.reference, config=neighbour.config))
        return self._read_text(rows, self.question.longest, neighbour.config)

    def _read_text(self, rows: Rows, size: int, config: JsonObject | None) -> Read:
        """Return transformers' log-probabilities after each prompt of one text that the server
        gets."""
        lengths = self.question.prompts[size]
        if config is not None and depends_on_length(config):
            found = [rows(self.texts[size][:length], [length])[0] for length in lengths]
        else:
            found = rows(self.texts[size], lengths)
        self.done += size
        self.show(self.done, self.question.work, "read by transformers")
        return {(size, length): row for length, row in zip(lengths, found, strict=True)}

    def _estimate_rest(self, first: int, seconds: float) -> None:
        """Report to the check's listener how long transformers takes, from the seconds of the first
        and shorter text: attention grows with the length."""
        left = (self.question.work - self.done) / first * seconds
        slowest = left * self.question.longest / first
        said = f"that takes about {duration(left)} to {duration(slowest)} here"
        if slowest > LONG:
            said += (
                "; --plain URL asks a server of the unscaled model instead, and reads nothing here"
            )
        self.question.say(said)


def _ask_prompts(server: Server, model: str, work: _ReferenceTexts) -> Answers:
    """Return the server's top log-probabilities after each prompt of its check.

    Some of the answers may hold none; raise an error if most of them hold none.
    """
    prompts = work.question.prompts
    total = sum(map(sum, prompts.values()))
    answers = Answers()
    done = 0
    for size, lengths in prompts.items():
        replies = 0
        for length in lengths:
            pairs = next_token(server, model, work.texts[size][:length])
            done += length
            work.show(done, total, "asked of the server")
            if pairs:
                answers[size, length] = pairs
                replies += 1
        if not replies:
            raise no_logprobs_error(server)
        if 2 * replies < len(lengths):
            raise no_logprobs_error(
                server, f"log-probabilities after only {replies} of {len(lengths)} prompts"
            )
    return answers


def depends_on_length(config: JsonObject) -> bool:
    """Return whether a config's frequencies depend on the length of the prompt to the checked
    server."""
    return any(site.params["rope_type"] == "dynamic" for site in families.read(dict(config)).sites)


def prompt_lengths_of_text(length: int, context: int) -> list[int]:
    """Return the lengths of the prompts by which a server is compared with its plan, from one text:
    in its second half, or beyond the context."""
    first = max(length // 2, 1)
    if length > context:
        first = context + 1
    steps = min(ASKED, length - first + 1)
    return [length - step * (length - first) // max(steps - 1, 1) for step in range(steps)][::-1]


def _mean_answer_gap(pairs: Pairs, row: Sequence[float]) -> float:
    """Return the mean difference of a server's top log-probabilities from transformers', in
    nats."""
    both = zip(pairs, _reference_values(pairs, row), strict=True)
    return mean(abs(value - truth) for (_, value), truth in both)
