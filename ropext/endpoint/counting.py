"""Count the tokens of a prompt as the server will see it, its chat template included.

vLLM and SGLang count messages themselves. For llama-server, ropext has it apply its template and
tokenize the result. For any other server, the user's tokenizer counts; without one, ropext
interpolates the `usage` of two first answers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ropext.base.errors import InputError
from ropext.base.jsontext import Json, JsonObject
from ropext.endpoint.remote_model import RemoteModel
from ropext.endpoint.server import MOST_TOKENS

Count = Callable[[str], int]
LEAST_SLACK = 16  # special tokens that one of the two counts may omit


@dataclass(frozen=True)
class Counting:
    """A way to count tokens, and whether it is exact."""

    how: str
    is_exact: bool
    of_kind: Callable[[str], Count]  # a text of the same kind -> its count

    def slack(self, counted: int, error: float) -> float:
        """Return by how many tokens a server's usage may be below the count of a whole prompt.

        `error` is the largest difference of usage and count at a shorter length, as a share.
        """
        if self.is_exact:
            return LEAST_SLACK
        return max(LEAST_SLACK, 2 * error * counted)


def counting_of(served: RemoteModel, tokenizer: str | None) -> Counting:
    """Return the most exact way to count prompts that this server allows."""
    if tokenizer is not None:
        return _count_by_tokenizer(served, tokenizer)
    for how, count in (
        ("the server's tokenize", _count_by_messages(served)),
        ("the server's template and tokenize", _count_by_template(served)),
    ):
        if _counts_tokens(count):
            return Counting(how, True, lambda kind, count=count: count)  # type: ignore[misc]
    return Counting("the server's usage of first answers", False, _count_by_usage(served))


def _counts_tokens(count: Count) -> bool:
    """Return whether the server counts tokens in this way."""
    try:
        return count("one two three") > 0
    except InputError:
        return False


def _token_count(value: Json, served: RemoteModel) -> int:
    """Return the number of tokens that a server's /tokenize gave. Raise if it is none."""
    if type(value) is int and 0 < value < MOST_TOKENS:
        return value
    raise InputError(
        f"--endpoint {served.server.root}: /tokenize returned no token count; give --tokenizer DIR"
    )


def _count_by_messages(served: RemoteModel) -> Count:
    """Return the count of a prompt by /tokenize of a server of vLLM or SGLang."""

    def count(text: str) -> int:
        """Return how many tokens a prompt has, as the server counts them."""
        request = served.prompt_request(text)
        if served.api == "chat":
            request["add_generation_prompt"] = True
        answer = served.server.ask("/tokenize", request) or {}
        return _token_count(answer.get("count", _number_of_tokens(answer)), served)

    return count


def _number_of_tokens(answer: JsonObject) -> int | None:
    """Return the number of tokens that a server's answer of /tokenize lists."""
    tokens = answer.get("tokens")
    if isinstance(tokens, list):
        return len(tokens)
    return None


def _count_by_template(served: RemoteModel) -> Count:
    """Return the count of a prompt by llama-server, which takes two requests."""

    def count(text: str) -> int:
        """Return how many tokens a prompt has in the server's chat template."""
        content = text
        if served.api == "chat":
            applied = served.server.ask("/apply-template", served.prompt_request(text)) or {}
            content = applied.get("prompt", "")
        if not isinstance(content, str) or not content:
            raise InputError(
                f"--endpoint {served.server.root}: /apply-template returned no prompt; use --api "
                "completions"
            )
        request = {"content": content, "add_special": True, "parse_special": True}
        return _token_count(
            _number_of_tokens(served.server.ask("/tokenize", request) or {}), served
        )

    return count


def _tokens_by_usage(served: RemoteModel, text: str) -> int:
    """Return the number of tokens that the `usage` in a server's answer states for a prompt."""
    reply = served.ask(text, 1)
    if reply.error or reply.tokens is None:
        raise InputError(
            f"--endpoint {served.server.root} neither counts tokens nor tells the usage of an "
            f"answer ({reply.error or 'it has none'}): give --tokenizer DIR, or a GGUF"
        )
    if reply.cached >= reply.tokens:  # it counts only tokens that it had not read before
        return reply.tokens + reply.cached
    return reply.tokens


def _count_by_usage(served: RemoteModel) -> Callable[[str], Count]:
    """Return a count by linear interpolation between the server's usage for a short text and for a
    text of the kind."""

    def of_kind(kind: str) -> Count:
        """Return the count for texts like this one, after two requests to the server."""
        short = kind[: max(len(kind) // 8, 1)]
        at_short = _tokens_by_usage(served, short)
        at_long = _tokens_by_usage(served, kind)
        rate = max(at_long - at_short, 1) / max(len(kind) - len(short), 1)
        return lambda text: math.ceil(at_long + rate * (len(text) - len(kind)))

    return of_kind


def _count_by_tokenizer(served: RemoteModel, place: str) -> Counting:
    """Return a count by the user's tokenizer, plus the tokens that the server's template adds,
    found from the usage of an answer."""
    from ropext.endpoint.vocabulary import tokenizer_at

    encoded = tokenizer_at(place)
    probe = "one two three"
    reply = served.ask(probe, 1)
    added = max((reply.tokens or 0) - encoded(probe), 0)

    def count(text: str) -> int:
        """Return how many tokens a prompt has in the server's template."""
        return encoded(text) + added

    return Counting(f"the tokenizer of {Path(place).name}", False, lambda kind: count)
