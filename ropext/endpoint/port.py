"""One served model: how it is asked a question in words, and what it replies."""

import http.client
import re
from dataclasses import dataclass, field

from ropext.base.errors import InputError, Stopped
from ropext.base.jsontext import Json, JsonObject
from ropext.base.narration import scrub
from ropext.endpoint.server import BUSY, KEY, MOST_TOKENS, Server

SHOWN = 300  # characters of a server's error
KEPT = 2000  # characters of an answer
THOUGHT = re.compile(r"(?s)<think>.*?(?:</think>|\Z)")
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
REASONING = ("reasoning_content", "reasoning")  # where servers put what a model thinks


@dataclass(frozen=True)
class Reply:
    """What came back: an answer, or the error with which a server refused."""

    said: str = ""
    has_thought: bool = False
    ran_out: bool = False  # it was still writing when its tokens were spent
    tokens: int | None = None  # of the prompt, as the server counted
    cached: int = 0  # of these, what it had read before
    error: str = ""


@dataclass(frozen=True)
class Port:
    """A server, and the model that it serves."""

    server: Server
    model: str
    limit: int | None  # tokens that it says it takes
    api: str = "chat"
    template_args: JsonObject = field(default_factory=dict)
    told: JsonObject = field(default_factory=dict)  # what tells this model from another one there

    @property
    def identity(self) -> dict[str, Json]:
        """Return what a run stores of the server, to notice another model at its next call."""
        return {"url": self.server.root, "model": self.model, "limit": self.limit, **self.told}

    def named(self, text: str) -> dict[str, Json]:
        """The part of a request that says which model is to read what."""
        if self.api == "completions":
            return {"model": self.model, "prompt": text}
        request: dict[str, Json] = {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
        }
        if self.template_args:
            request["chat_template_kwargs"] = dict(self.template_args)
        return request

    def ask(self, text: str, room: int) -> Reply:
        """Ask greedily, with so many tokens for the answer."""
        request = self.named(text) | {"max_tokens": room, "temperature": 0, "stream": False}
        status, body = self.reached(PATHS[self.api], request)
        if status >= 400:
            return Reply(error=error_text(status, body))
        return reply_of(self.server.parsed(PATHS[self.api], body))

    def reached(self, path: str, request: JsonObject) -> tuple[int, bytes]:
        """A status and an answer; a server that is lost, wants a key or has no such path ends the
        run."""
        root = self.server.root
        try:
            status, body = self.server.patiently(path, request)
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise Stopped(
                f"endpoint: {root} gave no answer ({reason}); with -o the answers so far are kept, "
                "and the same command resumes (--deadline allows more time)"
            ) from None
        if status in (401, 403):
            raise InputError(f"--endpoint {root} wants a key (HTTP {status}): put it into {KEY}")
        if status in (404, 405):
            raise InputError(
                f"--endpoint {root} has no {path} (HTTP {status}: {error_text(status, body)}); "
                "--api chat and --api completions ask in two ways"
            )
        if status in BUSY:
            raise Stopped(
                f"endpoint: {root} stays busy (HTTP {status}); with -o the answers so far are "
                "kept, and the same command resumes"
            )
        return status, body


def error_text(status: int, body: bytes) -> str:
    """A server's own words on one line, and no more of them than a line shows."""
    text = scrub(body.decode(errors="replace"))  # a server may repeat its key
    words = " ".join(text[: 4 * SHOWN].split())
    return f"HTTP {status}: {words[:SHOWN]}"


def reply_of(answer: JsonObject) -> Reply:
    """What a completion says, whatever of it is missing or of another kind."""
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return Reply(error="an answer without choices")
    choice = choices[0]
    told = choice
    written = _text(choice, "text")
    if isinstance(choice.get("message"), dict):
        told = choice["message"]
        written = _text(told, "content")
    thought = "".join(_text(told, name) for name in REASONING)
    said = THOUGHT.sub("", written).strip()
    ran_out = choice.get("finish_reason") == "length"
    if not said and not ran_out:  # it ended by itself: what it thought is all that it says
        said = thought.strip()
    usage = _object(answer, "usage")
    return Reply(
        scrub(said)[:KEPT],
        has_thought=bool(thought) or "<think>" in written,
        ran_out=ran_out,
        tokens=_count(usage, "prompt_tokens"),
        cached=_count(_object(usage, "prompt_tokens_details"), "cached_tokens") or 0,
    )


def _object(data: JsonObject, key: str) -> JsonObject:
    """An object in another one; an empty one where there is none."""
    value = data.get(key)
    if isinstance(value, dict):
        return value
    return {}


def _text(data: JsonObject, key: str) -> str:
    """A text in an object; an empty one where there is none."""
    value = data.get(key)
    if isinstance(value, str):
        return value
    return ""


def _count(data: JsonObject, key: str) -> int | None:
    """A number of tokens in an object, where there is a credible one."""
    value = data.get(key)
    if type(value) is int and 0 <= value < MOST_TOKENS:
        return value
    return None
