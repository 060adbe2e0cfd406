"""Turn the messages of a chat into a text, through the model's chat template.

If ropext cannot pass on a part of a chat, it refuses the chat; it drops no part in silence.
"""

import re
from dataclasses import dataclass, replace

from ropext.base.errors import InputError
from ropext.base.jsontext import Json, JsonObject, parse_object
from ropext.models.tokenizer import ask
from ropext.serving.refusals import Refusal
from ropext.serving.served import LiveModel

# Types of content parts -> the key of their text. `input_text` and `output_text` are of OpenAI's
# Responses API.
PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
MARK = re.compile("ropext[0-9]+mark")
NOT_READ = {"audio": "ropext serve reads only text", "function_call": "send tool_calls"}


@dataclass(frozen=True)
class Chat:
    """A conversation with everything else that its chat template reads."""

    template: str
    messages: list[dict[str, Json]]
    tools: list[dict[str, Json]]
    words: dict[str, Json]  # special tokens, and the request's own
    opens: bool  # whether the template begins the answer

    def rendered(self) -> str:
        """Render the messages in a process that can be stopped."""
        words = {**self.words, "tools": self.tools or None}
        question = {"template": self.template, "messages": self.messages}
        try:
            return str(ask("render", {**question, "words": words, "opening": self.opens}))
        except (ValueError, TimeoutError) as error:
            raise _refusal(f"the chat template refuses this: {error}") from None


def rendered(served: LiveModel, body: JsonObject) -> str:
    """Return the text of a request's messages; refuse it if the template drops a part of them."""
    tokenizer = served.tokenizer
    messages = _messages(body.get("messages"))
    tools = [] if body.get("tool_choice") == "none" else _tools(body.get("tools"))
    words = body.get("chat_template_kwargs") or {}
    if not isinstance(words, dict):
        raise Refusal("chat_template_kwargs must be an object", 400, "chat_template_kwargs")
    if not tokenizer.chat_template:
        raise _refusal(f"{served.name} has no chat template; use /v1/completions")
    try:
        template = tokenizer.get_chat_template(None, tools or None)
    except ValueError as error:
        raise _refusal(f"the chat template refuses this: {error}") from None
    if "'developer'" not in template and '"developer"' not in template:
        for message in messages:  # it knows OpenAI's newer name of the system role as any other
            if message["role"] == "developer":
                message["role"] = "system"
    opens = bool(body.get("add_generation_prompt", True))
    chat = Chat(template, messages, tools, {**tokenizer.special_tokens_map, **words}, opens)
    text = chat.rendered()
    _check_losses(chat, served.name)
    return text


class Marks:
    """Short texts in place of the parts of a chat, each with the sentence for its loss."""

    def __init__(self, name: str) -> None:
        self.template = f"the chat template of {name}"
        self.sentences: dict[str, str] = {}

    def new(self, loss: str) -> str:
        """Return another mark."""
        mark = f"ropext{len(self.sentences)}mark"  # as in MARK
        self.sentences[mark] = f"{self.template} {loss}"
        return mark

    def named(self, holders: list[dict[str, Json]], loss: str) -> list[dict[str, Json]]:
        """Return tools or tool calls with marks as the names of their functions."""
        return [{**own, "function": {**own["function"], "name": self.new(loss)}} for own in holders]

    def message(self, message: dict[str, Json], place: str) -> dict[str, Json]:
        """Return a message with marks as its content and in its tool calls."""
        calls = message.get("tool_calls", [])
        marked = dict(message)
        if calls:
            marked["tool_calls"] = self.named(calls, f"drops the tool calls of {place}")
        if message["content"].strip():
            role = f"role {message['role'][:40]}" + (", next to its tool calls" if calls else "")
            marked["content"] = self.new(f"drops the content of {place} ({role}); leave it out")
        return marked


def _check_losses(chat: Chat, name: str) -> None:
    """Refuse a chat if its template drops a text, a tool or a tool call.

    The template renders marks in their place, because it may change a text that it does not drop.
    """
    marks = Marks(name)
    tools = marks.named(chat.tools, "has no place for tools; leave them out")
    messages = [marks.message(own, f"messages[{i}]") for i, own in enumerate(chat.messages)]
    try:
        text = replace(chat, messages=messages, tools=tools).rendered()
    except Refusal:
        return  # the template takes only these texts
    found = set(MARK.findall(text))  # all at once: a request may have very many messages
    for mark, sentence in marks.sentences.items():
        if mark not in found:
            raise _refusal(sentence)


def _messages(given: Json) -> list[dict[str, Json]]:
    """Check the messages of a request; return them as chat templates read them."""
    if not isinstance(given, list) or not given:
        raise _refusal("messages must be a list of at least one message")
    return [_message(one, f"messages[{number}]") for number, one in enumerate(given)]


def _message(given: Json, place: str) -> dict[str, Json]:
    """Return a message without its nulls, its content as one text, the arguments of tool calls as
    objects."""
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise _refusal(f"{place} must be an object with a role")
    message = {key: value for key, value in given.items() if value is not None}
    for key, reason in NOT_READ.items():
        if key in message:
            raise _refusal(f"{place} has the key {key}: {reason}")
    message["content"] = _text(message.get("content", ""), f"{place}.content")
    calls = message.pop("tool_calls", [])
    if not isinstance(calls, list):
        raise _refusal(f"{place}.tool_calls must be a list")
    for number, call in enumerate(calls):
        called = _call(call, f"{place}.tool_calls[{number}]")
        message.setdefault("tool_calls", []).append(called)
    return message


def _text(content: Json, place: str) -> str:
    """Return the text of a content, which may be in parts."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise _refusal(f"{place} must be a text, or parts of type text")
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in PARTS:
            raise _refusal(f"{place} has a part of type {kind[:40]}; ropext serve reads only text")
        text = part.get(PARTS[kind]) if isinstance(kind, str) else None
        if not isinstance(text, str):
            raise _refusal(f"{place} must be a text, or parts of type text")
        texts.append(text)
    return " ".join(texts)


def _call(given: Json, place: str) -> dict[str, Json]:
    """Return a tool call with its arguments as an object."""
    function = _function(given, place)
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = parse_object(arguments.encode("utf-8", "replace"), f"{place}: arguments")
        except InputError as error:
            raise _refusal(str(error)) from None
    return {**given, "function": {**function, "arguments": arguments}}


def _tools(given: Json) -> list[dict[str, Json]]:
    """Check the tools of a request, and return them."""
    if given is not None and not isinstance(given, list):
        raise Refusal("tools must be a list", 400, "tools")
    for number, tool in enumerate(given or []):
        _function(tool, f"tools[{number}]")
    return given or []


def _function(given: Json, place: str) -> dict[str, Json]:
    """Return the function of a tool or of a tool call; it must have a name."""
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _refusal(f"{place} must be of type function, with a function that has a name")
    return function


def _refusal(sentence: str) -> Refusal:
    return Refusal(sentence, 400, "messages")
