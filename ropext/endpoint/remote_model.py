"""Ask one served model a question in words, and parse its reply."""

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
REASONING = ("reasoning_content", "reasoning")  # keys in which servers return a model's thoughts


@dataclass(frozen=True)
class Reply:
    """The reply of a server: an answer, or the error with which it refused."""

    said: str = ""
    has_thought: bool = False
    ran_out: bool = False  # it was still writing when its tokens were spent
    tokens: int | None = None  # the prompt's tokens, as the server counted
    cached: int = 0  # its tokens that the server had read before
    error: str = ""


@dataclass(frozen=True)
class RemoteModel:
    """A server, and the model that it serves."""

    server: Server
    model: str
    limit: int | None  # the most tokens, as the server states
    api: str = "chat"
    template_args: JsonObject = field(default_factory=dict)
    # values that distinguish this model from another one there
    properties: JsonObject = field(default_factory=dict)

    @property
    def identity(self) -> dict[str, Json]:
        """Return the facts of the server by which a run notices another model at its next call."""
        return {
            "url": self.server.root,
            "model": self.model,
            "limit": self.limit,
            **self.properties,
        }

    def prompt_request(self, text: str) -> dict[str, Json]:
        """Return the part of a request to the server with the model and the prompt."""
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
        """Return the server's reply to a prompt, decoded greedily, with `room` tokens for the
        answer."""
        request = self.prompt_request(text)
        request |= {"max_tokens": room, "temperature": 0, "stream": False}
        status, body = self.post(PATHS[self.api], request)
        if status >= 400:
            return Reply(error=error_text(status, body))
        return reply_of(self.server.parse_answer(PATHS[self.api], body))

    def post(self, path: str, request: JsonObject) -> tuple[int, bytes]:
        """Return the status and the body of a server's answer. Raise, which ends the run, if the
        server is lost or busy, wants an API key, or lacks the path or a chat template."""
        root = self.server.root
        try:
            status, body = self.server.call_patiently(path, request)
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
        if path == PATHS["chat"] and status >= 400:
            reason = error_text(status, body)
            if "chat template" in reason.lower():
                raise InputError(
                    f"--endpoint {root} has no chat template for its model ({reason}): give --api "
                    "completions"
                )
        if status in BUSY:
            raise Stopped(
                f"endpoint: {root} stays busy (HTTP {status}); with -o the answers so far are "
                "kept, and the same command resumes"
            )
        return status, body


def error_text(status: int, body: bytes) -> str:
    """Return a server's own words on one line, cut to the length that a line shows."""
    text = scrub(body.decode(errors="replace"))  # a server may repeat its key
    words = " ".join(text[: 4 * SHOWN].split())
    return f"HTTP {status}: {words[:SHOWN]}"


def reply_of(answer: JsonObject) -> Reply:
    """Return the reply in a server's answer to a prompt, also if parts of it are missing or of
    another kind."""
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return Reply(error="an answer without choices")
    choice = choices[0]
    message = choice
    written = _text_at(choice, "text")
    if isinstance(choice.get("message"), dict):
        message = choice["message"]
        written = _text_at(message, "content")
    thought = "".join(_text_at(message, name) for name in REASONING)
    said = THOUGHT.sub("", written).strip()
    ran_out = choice.get("finish_reason") == "length"
    if not said and not ran_out:  # it ended by itself: its thoughts are its whole answer
        said = thought.strip()
    usage = _object_at(answer, "usage")
    return Reply(
        scrub(said)[:KEPT],
        has_thought=bool(thought) or "<think>" in written,
        ran_out=ran_out,
        tokens=_token_count(usage, "prompt_tokens"),
        cached=_token_count(_object_at(usage, "prompt_tokens_details"), "cached_tokens") or 0,
    )


def _object_at(data: JsonObject, key: str) -> JsonObject:
    """Return an object in a server's answer; an empty one if there is none."""
    value = data.get(key)
    if isinstance(value, dict):
        return value
    return {}


def _text_at(data: JsonObject, key: str) -> str:
    """Return a text in a server's answer; an empty one if there is none."""
    value = data.get(key)
    if isinstance(value, str):
        return value
    return ""


def _token_count(data: JsonObject, key: str) -> int | None:
    """Return a number of tokens in a server's answer, if it has a credible one."""
    value = data.get(key)
    if type(value) is int and 0 <= value < MOST_TOKENS:
        return value
    return None
