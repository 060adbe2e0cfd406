"""Compare a server with a server of the unscaled model: whether they answer as two models or as
one.

This is for a model that nobody loads in transformers. The unscaled server gets every prompt twice:
the difference of its two answers is its noise, and only a difference well above that counts. A
positive result shows that a scaling is on, not that it is the planned one.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from ropext.base.errors import InputError, OutputExists, ProofFailed
from ropext.base.jsontext import Json, read_object, write_json
from ropext.endpoint.logprobs import Pairs, next_token, token_ids
from ropext.endpoint.server import Server, model_and_limit, server_at

ASKED = 6  # prompts
SCHEMA = 1
NOISES = 10  # a difference of so many times the noise is well above it
LEAST = 0.02  # nats: a smaller difference is none, however quiet the plain server is
ALIKE = 2  # times the noise: two answers of one model
QUIET = 0.1  # nats: a plain server noisier than this may hide a scaling

Candidates = dict[int | None, float]


@dataclass(frozen=True)
class KeptAnswers:
    """The answers of an unscaled server, given twice."""

    model: str
    lengths: tuple[int, ...]
    vocab_size: int
    first: list[Pairs]
    second: list[Pairs]

    @property
    def noise(self) -> float:
        """Return the noise for the check of a server: the largest difference between the unscaled
        server's two answers to one prompt, in nats."""
        return max(candidates_gap(a, b) for a, b in zip(self.first, self.second, strict=True))


@dataclass(frozen=True)
class PlainComparison:
    """The result of the comparison: True if the scaling is on, False if it is off, None if not
    known."""

    is_on: bool | None
    sentence: str


def prompt_lengths(context: int, target: int, *, beyond: bool) -> tuple[int, ...]:
    """Return the lengths of the prompts for a server and its unscaled one: inside the original
    context, or beyond it if the plan leaves shorter prompts alone."""
    low = max(context // 4, 2)
    high = max(context // 2, 3)
    if beyond:
        low = context + max((target - context) // 8, 1)
        high = min(target - 1, 2 * context)
    step = max((high - low) // (ASKED - 1), 0)
    return tuple(low + step * at for at in range(ASKED))


def ask_next_tokens(
    server: Server, model: str, lengths: Sequence[int], vocab_size: int
) -> list[Pairs]:
    """Ask a running server to verify for the next token after a prompt of each length. Return the
    log-probabilities of its best candidates. Each prompt has other token ids."""
    answers = list[Pairs]()
    for draw, length in enumerate(lengths):
        answers.append(next_token(server, model, token_ids(length, vocab_size, draw=draw)))
    return answers


def answers_twice(url: str, lengths: tuple[int, ...], vocab_size: int) -> KeptAnswers:
    """Return the answers of an unscaled server, to compare another with, to prompts of these
    lengths, requested twice."""
    server = server_at(url)
    model, _ = model_and_limit(server, url)
    first = ask_next_tokens(server, model, lengths, vocab_size)
    second = ask_next_tokens(server, model, lengths, vocab_size)
    return KeptAnswers(model, lengths, vocab_size, first, second)


def write_kept_answers(answers: KeptAnswers, path: Path) -> None:
    """Write an unscaled server's answers to the file of --fingerprint, so that it need not run when
    `verify` compares another server with it."""
    if path.exists():
        raise OutputExists(
            f"--fingerprint {path} is there already; give another name, or leave --plain out"
        )
    write_json(path, {"schema": SCHEMA, **asdict(answers)})


def read_kept_answers(path: Path) -> KeptAnswers:
    """Return from the file of --fingerprint the unscaled server's answers, for `verify` to compare
    another server with. `write_kept_answers` wrote the file."""
    data = read_object(path)
    try:
        if data["schema"] != SCHEMA:
            raise ValueError("another schema")
        first = _kept_pairs(data["first"])
        second = _kept_pairs(data["second"])
        lengths = tuple(map(int, data["lengths"]))
        if not len(lengths) == len(first) == len(second):
            raise ValueError("not an answer to each prompt")
        return KeptAnswers(str(data["model"]), lengths, int(data["vocab_size"]), first, second)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"--fingerprint {path} holds no kept answers ({str(error)[:80]}); --plain URL "
            "--fingerprint FILE writes one"
        ) from None


def _kept_pairs(rows: Json) -> list[Pairs]:
    """Return from a file the unscaled server's candidates after each prompt, to check another
    server with."""
    every = list[Pairs]()
    for row in rows:
        every.append([(token, float(value)) for token, value in row])
    return every


def candidates_gap(left: Pairs, right: Pairs) -> float:
    """Return, for the check of a server against its unscaled one, the mean difference between the
    best candidates of two answers to one prompt, in nats. Return 0 if one has none. The answers are
    of both servers, or of one.

    If both lists have ids, candidates are matched by id. A candidate that the other list lacks
    counts with its excess over the lowest value of that list, at least 0. Without ids, candidates
    are matched by rank.
    """
    if not left or not right:
        return 0.0
    first = dict(left)
    second = dict(right)
    if None in first or None in second:
        return fmean(abs(a - b) for (_, a), (_, b) in zip(left, right, strict=False))
    return fmean(_nats_apart(token, first, second) for token in first | second)


def _nats_apart(token: int | None, first: Candidates, second: Candidates) -> float:
    """Return, for the check of a server against its unscaled one, how far two answers are apart
    about one candidate token, in nats."""
    if token not in first:
        return max(second[token] - min(first.values()), 0.0)
    if token not in second:
        return max(first[token] - min(second.values()), 0.0)
    return abs(first[token] - second[token])


def compare_with_plain(server: Server, model: str, plain: KeptAnswers) -> PlainComparison:
    """Compare a server with the kept answers of an unscaled server."""
    answers = ask_next_tokens(server, model, plain.lengths, plain.vocab_size)
    pairs = [(a, b) for a, b in zip(answers, plain.first, strict=True) if a and b]
    if len(pairs) * 2 < len(answers):
        return PlainComparison(
            None, f"only {len(pairs)} of {len(answers)} prompts were answered by both"
        )
    difference = fmean(candidates_gap(a, b) for a, b in pairs)
    said = (
        f"after {len(pairs)} prompts of {plain.lengths[0]} to {plain.lengths[-1]} tokens it "
        f"differs from the plain server by {difference:.3f} nats in the mean; the plain one "
        f"differs from itself by {plain.noise:.3f} at most"
    )
    if difference > max(NOISES * plain.noise, LEAST):
        return PlainComparison(True, f"{said}: a scaling is on (which one, this does not tell)")
    if plain.noise <= QUIET and difference <= max(ALIKE * plain.noise, LEAST / NOISES):
        return PlainComparison(False, f"{said}: the scaling is off")
    return PlainComparison(None, f"{said}: too little to tell the two apart")


@dataclass(frozen=True)
class PlainServer:
    """A server of the unscaled model, or a file with its answers; with both, the file is
    written."""

    url: str | None = None
    kept: Path | None = None

    def answers(self, lengths: tuple[int, ...], vocab_size: int) -> KeptAnswers:
        """Return the plain server's answers to prompts of these lengths; a file has answers to its
        own prompts."""
        if self.url is None:
            assert self.kept is not None
            return read_kept_answers(self.kept)
        try:
            answers = answers_twice(self.url, lengths, vocab_size)
        except ProofFailed as refused:
            raise InputError(
                f"--plain {self.url} refused a prompt of {lengths[0]} to "
                f"{lengths[-1]} tokens: start it with that length and no scaling ({refused})"
            ) from None
        if self.kept is not None:
            write_kept_answers(answers, self.kept)
        return answers
