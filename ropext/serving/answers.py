"""Build the answer that a client gets: OpenAI's objects, whole or as events."""

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from transformers.cli.serving.utils import ReasoningText, ToolCall, _StreamError

from ropext.base.jsontext import Json
from ropext.serving.questions import CompletionRequest
from ropext.serving.refusals import RequestRefusal
from ropext.serving.turns import AnswerPiece, AnswerStreamer

DONE = "data: [DONE]\n\n"


@dataclass
class AnswerSoFar:
    """The pieces of the answer to one prompt that the model has written so far."""

    streamer: AnswerStreamer
    index: int  # the prompt's place in its request
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Json]] = field(default_factory=list)

    @property
    def question(self) -> CompletionRequest:
        """Return the request that this answers."""
        return self.streamer.question

    def add_piece(self, piece: AnswerPiece) -> dict[str, Json]:
        """Keep the next piece that the served model wrote; return it as the delta of a chat."""
        if isinstance(piece, _StreamError):
            raise RequestRefusal(piece.msg, 500)
        if isinstance(piece, ToolCall):
            function = {"name": piece.name, "arguments": piece.arguments}
            number = len(self.calls)
            call = {"id": f"{self.question.id}-{number}", "type": "function", "function": function}
            self.calls.append(call)
            return {"tool_calls": [{"index": number} | call]}
        if isinstance(piece, ReasoningText):
            self.thoughts.append(str(piece))
            return {"reasoning_content": str(piece)}
        self.texts.append(str(piece))
        return {"content": str(piece)}

    def answer_choice(self) -> dict[str, Json]:
        """Return the whole answer as a choice of OpenAI's completion object."""
        text = "".join(self.texts)
        whole = (self.question.echo or "") + text
        content: dict[str, Json] = {"text": whole, "logprobs": self.streamer.logprobs}
        if self.question.is_chat:
            message: dict[str, Json] = {"role": "assistant", "content": text}
            if self.thoughts:
                message["reasoning_content"] = "".join(self.thoughts)
            if self.calls:
                message["tool_calls"] = self.calls
            content = {"message": message}
        return {"index": self.index, **content, "finish_reason": self.finish_reason()}

    def event_choice(self, delta: dict[str, Json], reason: str | None = None) -> dict[str, Json]:
        """Return the next piece as the choice of an event in OpenAI's stream."""
        content: dict[str, Json] = {"text": delta.get("content", ""), "logprobs": None}
        if reason is not None:
            content["logprobs"] = self.streamer.logprobs  # of all tokens, in the last event
        if self.question.is_chat:
            content = {"delta": delta}
        return {"index": self.index, **content, "finish_reason": reason}

    def finish_reason(self) -> str:
        """Return why the served model's answer ended, as OpenAI's `finish_reason`."""
        if self.calls:
            return "tool_calls"
        written = self.streamer.ids
        end = self.question.settings.eos_token_id
        ends = end if isinstance(end, list) else [end]
        full = len(written) >= self.question.most
        ended = self.streamer.stopped or bool(set(written[-1:]) & set(ends))
        return "length" if full and not ended else "stop"


@dataclass
class CompletionAnswers:
    """The answers to the prompts of one client's request."""

    model: str  # its name
    first: CompletionRequest
    created: int = field(default_factory=lambda: int(time.time()))
    answers: list[AnswerSoFar] = field(default_factory=list)

    async def answer_prompt(
        self, streamer: AnswerStreamer, pieces: AsyncIterator[AnswerPiece]
    ) -> AsyncIterator[dict[str, Json]]:
        """Yield the answer to the next prompt of a request, as the choices of OpenAI's events."""
        question = streamer.question
        answer = AnswerSoFar(streamer, len(self.answers))
        self.answers.append(answer)
        if question.is_chat:
            yield answer.event_choice({"role": "assistant", "content": ""})
        if question.echo:
            yield answer.event_choice({"content": question.echo})
        async for piece in pieces:
            yield answer.event_choice(answer.add_piece(piece))
        yield answer.event_choice({}, answer.finish_reason())

    async def event_stream(self, choices: AsyncIterator[dict[str, Json]]) -> AsyncIterator[str]:
        """Yield the server-sent events of a streamed answer; an error in the middle is an event,
        too."""
        head = self._answer_head(
            "chat.completion.chunk" if self.first.is_chat else "text_completion"
        )
        try:
            async for choice in choices:
                yield _event_line(head | {"choices": [choice]})
            if self.first.with_usage:
                yield _event_line(head | {"choices": [], "usage": self._token_usage()})
        except RequestRefusal as error:
            yield _event_line(error.body)
        yield DONE

    def whole_answer(self) -> dict[str, Json]:
        """Return the complete answers to a request as one OpenAI completion object."""
        choices = [answer.answer_choice() for answer in self.answers]
        head = self._answer_head("chat.completion" if self.first.is_chat else "text_completion")
        return head | {"choices": choices, "usage": self._token_usage()}

    def _answer_head(self, kind: str) -> dict[str, Json]:
        """Return the keys with which each object or event of an OpenAI answer begins."""
        own = {"id": self.first.id, "object": kind}
        return own | {"created": self.created, "model": self.model}

    def _token_usage(self) -> dict[str, Json]:
        """Return the `usage` of an OpenAI answer: tokens of prompts and completions."""
        asked = sum(len(answer.question.ids) for answer in self.answers)
        written = sum(len(answer.streamer.ids) for answer in self.answers)
        return {
            "prompt_tokens": asked,
            "completion_tokens": written,
            "total_tokens": asked + written,
        }


def _event_line(event: dict[str, Json]) -> str:
    """Write one server-sent event."""
    return f"data: {json.dumps(event)}\n\n"
