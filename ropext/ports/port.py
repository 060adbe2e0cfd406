"""One served model: how it is asked a question in words, and what it replies."""

import http.client
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ropext.errors import InputError, Stopped
from ropext.ports.server import BUSY, KEY, MOST_TOKENS, Server

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
    template_args: Mapping[str, Any] = field(default_factory=dict)

    def named(self, text: str) -> dict[str, Any]:
        """The part of a request that says which model is to read what."""
        if self.api == "completions":
            return {"model": self.model, "prompt": text}
        request: dict[str, Any] = {
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

    def reached(self, path: str, request: Mapping[str, Any]) -> tuple[int, bytes]:
        """A status and an answer; a server that is lost, wants a key or has no such path ends the
        run."""
        root = self.server.root
        try:
            status, body = self.server.patiently(path, request)
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise Stopped(
                f"endpoint: {root} gave no answer ({reason}); what was answered is kept with -o, "
                "and the same command goes on (--deadline gives an answer longer)"
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
                f"endpoint: {root} stays busy (HTTP {status}); what was answered is kept with -o, "
                "and the same command goes on"
            )
        return status, body


def error_text(status: int, body: bytes) -> str:
    """A server's own words on one line, and no more of them than a line shows."""
    words = " ".join(body[: 4 * SHOWN].decode(errors="replace").split())
    return f"HTTP {status}: {words[:SHOWN]}"


def reply_of(answer: Mapping[str, Any]) -> Reply:
    """What a completion says, whatever of it is missing or of another kind."""
    choices = answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        return Reply(error="an answer without choices")
    message = choice.get("message")
    told = message if isinstance(message, dict) else choice
    written = _text(told.get("content") if told is message else told.get("text"))
    thoughts = [_text(told.get(name)) for name in REASONING]
    said = THOUGHT.sub("", written).strip()
    ran_out = choice.get("finish_reason") == "length"
    if not said and not ran_out:  # it ended by itself: what it thought is all that it says
        said = "".join(thoughts).strip()
    usage = answer.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    details = usage.get("prompt_tokens_details")
    return Reply(
        said[:KEPT],
        any(thoughts) or "<think>" in written,
        ran_out,
        _count(usage.get("prompt_tokens")),
        _count(details.get("cached_tokens") if isinstance(details, dict) else None) or 0,
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < MOST_TOKENS else None
