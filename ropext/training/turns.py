"""Find the assistant's turns in a conversation of --data: the tokens on which a training takes its
loss.

A template that marks them by {% generation %} is believed. In any other, ropext finds the words of
a message by difference: it renders the conversation once more with a number in their place.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import numpy as np

from ropext.base.errors import InputError
from ropext.base.jsontext import Json, JsonObject
from ropext.evaluation.corpus import Document, DocumentEncoder, RawDocument
from ropext.evaluation.corpus.encoding import Flags

Place = tuple[int, int]  # the first character, and the one after the last

GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def scored_tokens(
    document: Document, raw: RawDocument, text: str, encoder: DocumentEncoder
) -> Flags:
    """Return the tokens of a rendered conversation that are in an assistant's turn, as a mask.

    A token that reaches beyond a turn's end counts only if the template marks the turns, as in
    transformers.
    """
    ends = np.cumsum(document.token_bytes)
    begins = ends - document.token_bytes
    marked = marks_turns(encoder)
    scored = np.zeros(len(document), bool)
    for begin, end in assistant_turns(raw, text, encoder):
        first = len(text[:begin].encode("utf-8", "replace"))
        last = first + len(text[begin:end].encode("utf-8", "replace"))
        scored |= (ends > first) & (ends <= last)
        if marked:
            scored |= (begins < last) & (ends > last)
    return scored


def marks_turns(encoder: DocumentEncoder) -> bool:
    """Return whether the chat template marks the turns to train on."""
    return bool(GENERATION.search(encoder.tokenizer.get_chat_template()))


def assistant_turns(raw: RawDocument, text: str, encoder: DocumentEncoder) -> Iterator[Place]:
    """Yield the place of each assistant turn in the rendered text of a conversation to train on,
    its end mark included."""
    rendered = RenderedConversation(raw, text, encoder)
    if marks_turns(encoder):
        yield from encoder.marked_turns(rendered.messages)
        return
    for index, message in enumerate(rendered.messages):
        if message["role"] == "assistant":
            yield rendered.turn(index)


class RenderedConversation:
    """A conversation to train on with its text, and the places of its messages there."""

    def __init__(self, raw: RawDocument, text: str, encoder: DocumentEncoder) -> None:
        """Keep a conversation to train on with its text, and choose the number that replaces the
        words of a message."""
        self.raw = raw
        self.text = text
        self.encoder = encoder
        self.messages: list[Json] = list(raw.content)
        # Digits, which no template escapes or writes in capitals.
        self.number = "1000000000"
        while self.number in text:
            self.number += "0"
        self._places: dict[int, Place | None] = {}
        self._written: dict[tuple[int | str, bool], str] = {}

    def turn(self, index: int) -> Place:
        """Return the place of an assistant's turn to train on: from the end of its header, which
        a prompt contains, to the end of its end mark."""
        place = self.words(index)
        before = self.words(index - 1)
        following = self.words(index + 1)
        limit = len(self.text)
        if following:
            limit = following[0]
        if place is None or place[1] > limit or (before and before[1] > place[0]):
            raise self._unclear(index)
        begin, end = place
        if before:
            begin = self._begin(index, before[1], place)
        if index + 1 == len(self.messages):
            return begin, len(self.text)
        closing = self._after(index).removesuffix(self.header)
        if not self.text.startswith(closing, end, limit):
            raise self._unclear(index)
        return begin, end + len(closing)

    def words(self, index: int) -> Place | None:
        """Return the place of a message's words in the text to train on; None if the template shows
        none of them, or there is no such message."""
        if not 0 <= index < len(self.messages):
            return None
        if index not in self._places:
            replaced = replace(self.raw, content=self._with_number(index))
            self._places[index] = self._difference(self.encoder.text_of(replaced))
        return self._places[index]

    def _difference(self, rendered: str) -> Place | None:
        """Return the part of the text to train on that `rendered` has the number for; None if it
        has no number."""
        left, found, _ = rendered.partition(self.number)
        if not found:
            return None
        right = rendered.rpartition(self.number)[2]
        begin = _equal_start(self.text, left)
        rest = self.text[begin:]
        return begin, len(self.text) - _equal_start(rest[::-1], right[::-1])

    @cached_property
    def header(self) -> str:
        """Return the text with which the template opens an answer in this conversation to train
        on."""
        for index, message in enumerate(self.messages):
            if message["role"] == "user":
                opened = self._after(index)
                return opened[_equal_start(opened, self._after(index, opening=False)) :]
        return ""

    def _begin(self, index: int, before: int, words: Place) -> int:
        """Return the first character of a turn to train on; the words before it end at `before`.

        If the text has no header there, the turn begins with its words. A turn that calls tools has
        text before them, so that a part of the header is enough.
        """
        prompt = self._after(index - 1)
        equal = _equal_start(self.text[before : words[1]], prompt)
        whole = self.header and equal == len(prompt)
        part = self.messages[index].get("tool_calls") and equal >= len(prompt) - len(self.header)
        if prompt and (whole or part):
            return before + equal
        return words[0]

    def _after(self, index: int, opening: bool = True) -> str:
        """Return the template's text after a message's words if the conversation to train on ends
        with it; `opening` begins the next answer.

        It is the same for all messages of one role, except for those that call tools.
        """
        message = self.messages[index]
        key = (index if message.get("tool_calls") else str(message["role"]), opening)
        if key not in self._written:
            beginning = self._with_number(index)[: index + 1]
            rendered = self.encoder.converse(beginning, opening)
            _, found, rest = rendered.rpartition(self.number)
            if not found:
                rest = ""
            self._written[key] = rest
        return self._written[key]

    def _with_number(self, index: int) -> list[JsonObject]:
        """Return the messages to train on with the number in place of the words of one, and of the
        arguments of its tool calls."""
        message = dict(self.messages[index])
        calls = message.get("tool_calls")
        if calls:
            message["tool_calls"] = _with_arguments(calls, self.number)
        if isinstance(message["content"], list):
            message["content"] = [{"type": "text", "text": self.number}]
        elif message["content"] is not None or not calls:
            message["content"] = self.number
        return [*self.messages[:index], message, *self.messages[index + 1 :]]

    def _unclear(self, index: int) -> InputError:
        """Return the error of a turn to train on that ropext cannot find in the text."""
        return InputError(
            f"--data {self.raw.name}: the chat template renders turn {index + 1} so that it cannot "
            "be found in the whole conversation; mark the assistant's turns in the template "
            "({% generation %}), or give plain text (--column)"
        )


def _equal_start(text: str, other: str) -> int:
    """Return the number of characters that two texts to train on have in common at their start."""
    return bisect_left(
        range(len(other)), True, key=lambda last: not text.startswith(other[: last + 1])
    )


def _with_arguments(calls: Json, number: str) -> Json:
    """Return tool calls to train on with a number in place of all their arguments."""
    if isinstance(calls, list):
        return [_with_arguments(call, number) for call in calls]
    if not isinstance(calls, dict):
        return calls
    changed = {key: _with_arguments(value, number) for key, value in calls.items()}
    arguments = calls.get("arguments")
    if isinstance(arguments, dict):
        changed["arguments"] = dict.fromkeys(arguments or [number], number)
    elif arguments is not None:
        changed["arguments"] = number
    return changed
