"""Build the answer that a client gets: OpenAI's objects, whole or as events."""

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from transformers.cli.serving.utils import ReasoningText, ToolCall, _StreamError

from ropext.base.jsontext import Json
from ropext.serving.questions import Refusal, Turn
from ropext.serving.turns import Item, TurnStreamer

DONE = "data: [DONE]\n\n"


@dataclass
class AnswerSoFar:
    """The pieces of an answer that the model has written so far."""

    name: str  # of the model
    question: Turn
    streamer: TurnStreamer
    created: int = field(default_factory=lambda: int(time.time()))
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Json]] = field(default_factory=list)

    def add(self, item: Item) -> dict[str, Json]:
        """Take the next piece; return it as the delta of a chat."""
        if isinstance(item, _StreamError):
            raise Refusal(item.msg, 500)
        if isinstance(item, ToolCall):
            function = {"name": item.name, "arguments": item.arguments}
            number = len(self.calls)
            call = {"id": f"{self.question.id}-{number}", "type": "function", "function": function}
            self.calls.append(call)
            return {"tool_calls": [{"index": number} | call]}
        if isinstance(item, ReasoningText):
            self.thoughts.append(str(item))
            return {"reasoning_content": str(item)}
        self.texts.append(str(item))
        return {"content": str(item)}

    def whole(self) -> dict[str, Json]:
        """Return the answer as one object."""
        text = "".join(self.texts)
        if not self.question.is_chat:
            return self._object("text_completion", {"text": text, "logprobs": None}, self._reason())
        message: dict[str, Json] = {"role": "assistant", "content": text}
        if self.thoughts:
            message["reasoning_content"] = "".join(self.thoughts)
        if self.calls:
            message["tool_calls"] = self.calls
        return self._object("chat.completion", {"message": message}, self._reason())

    async def events(self, items: AsyncIterator[Item]) -> AsyncIterator[str]:
        """Yield the answer piece by piece; an error in the middle is an event, too."""
        try:
            if self.question.is_chat:
                yield self._event({"role": "assistant", "content": ""}, None)
            async for item in items:
                yield self._event(self.add(item), None)
            yield self._event({}, self._reason())
            if self.question.with_usage:
                yield _line(self._head(self._kind) | {"choices": [], "usage": self._usage()})
        except Refusal as error:
            yield _line(error.body)
        yield DONE

    @property
    def _kind(self) -> str:
        return "chat.completion.chunk" if self.question.is_chat else "text_completion"

    def _event(self, delta: dict[str, Json], reason: str | None) -> str:
        choice: dict[str, Json] = {"delta": delta}
        if not self.question.is_chat:
            choice = {"text": delta.get("content", ""), "logprobs": None}
        choice |= {"index": 0, "finish_reason": reason}
        return _line(self._head(self._kind) | {"choices": [choice]})

    def _head(self, kind: str) -> dict[str, Json]:
        name = self.question.id
        return {"id": name, "object": kind, "created": self.created, "model": self.name}

    def _object(self, kind: str, choice: dict[str, Json], reason: str) -> dict[str, Json]:
        choice = {"index": 0, **choice, "finish_reason": reason}
        return self._head(kind) | {"choices": [choice], "usage": self._usage()}

    def _reason(self) -> str:
        if self.calls:
            return "tool_calls"
        written = self.streamer.ids
        end = self.question.settings.eos_token_id
        ends = end if isinstance(end, list) else [end]
        full = len(written) >= self.question.most
        return (
            "length" if full and not self.streamer.stopped and written[-1] not in ends else "stop"
        )

    def _usage(self) -> dict[str, Json]:
        asked = len(self.question.ids)
        written = len(self.streamer.ids)
        return {
            "prompt_tokens": asked,
            "completion_tokens": written,
            "total_tokens": asked + written,
        }


def _line(event: dict[str, Json]) -> str:
    return f"data: {json.dumps(event)}\n\n"
