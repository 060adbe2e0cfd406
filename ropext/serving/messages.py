"""Turn the messages of a chat into a text, through the model's chat template.

If ropext cannot pass on a part of a chat, it refuses the chat; it drops no part in silence.
"""

import re
from dataclasses import dataclass, replace

from ropext.base.errors import InputError
from ropext.base.jsontext import Json, JsonObject, parse_object
from ropext.models.tokenizer import ask_sandbox
from ropext.serving.refusals import RequestRefusal, flag_in, object_in
from ropext.serving.served import ServedModel

# Types of content parts -> the key of their text. `input_text` and `output_text` are of OpenAI's
# Responses API.
PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
MARK = re.compile("ropext[0-9]+mark")
NOT_READ = {"audio": "ropext serve reads only text", "function_call": "send tool_calls"}


@dataclass(frozen=True)
class TemplatedChat:
    """A client's conversation with everything else that the chat template reads."""

    template: str
    messages: list[dict[str, Json]]
    tools: list[dict[str, Json]]
    words: dict[str, Json]  # special tokens, and the request's own
    opens: bool  # whether the template begins the answer

    def rendered(self) -> str:
        """Render the messages of a posted chat in a process that can be stopped."""
        words = {**self.words, "tools": self.tools or None}
        question = {"template": self.template, "messages": self.messages}
        try:
            return str(ask_sandbox("render", {**question, "words": words, "opening": self.opens}))
        except (ValueError, TimeoutError) as error:
            raise _messages_refusal(f"the chat template refuses this: {error}") from None


def rendered_chat(served: ServedModel, body: JsonObject) -> str:
    """Return the text of a request's messages, through the chat template; refuse the request if
    the template drops a part of them."""
    tokenizer = served.tokenizer
    messages = _checked_messages(body.get("messages"))
    tools = [] if body.get("tool_choice") == "none" else _checked_tools(body.get("tools"))
    words = object_in(body, "chat_template_kwargs")
    if not tokenizer.chat_template:
        raise _messages_refusal(f"{served.name} has no chat template; use /v1/completions")
    try:
        template = tokenizer.get_chat_template(None, tools or None)
    except ValueError as error:
        raise _messages_refusal(f"the chat template refuses this: {error}") from None
    if "'developer'" not in template and '"developer"' not in template:
        for message in messages:  # it knows OpenAI's newer name of the system role as any other
            if message["role"] == "developer":
                message["role"] = "system"
    opens = flag_in(body, "add_generation_prompt", True)
    chat = TemplatedChat(
        template, messages, tools, {**tokenizer.special_tokens_map, **words}, opens
    )
    text = chat.rendered()
    _check_template_losses(chat, served.name)
    return text


class ChatMarks:
    """Short texts in place of the parts of a posted chat, each with the sentence for its loss."""

    def __init__(self, name: str) -> None:
        self.template = f"the chat template of {name}"
        self.sentences: dict[str, str] = {}

    def new_mark(self, loss: str) -> str:
        """Return another mark, and keep the sentence that refuses a chat if its template drops
        the mark."""
        mark = f"ropext{len(self.sentences)}mark"  # as in MARK
        self.sentences[mark] = f"{self.template} {loss}"
        return mark

    def mark_functions(self, holders: list[dict[str, Json]], loss: str) -> list[dict[str, Json]]:
        """Return the tools or tool calls of a posted chat with marks as the names of their
        functions."""
        return [
            {**own, "function": {**own["function"], "name": self.new_mark(loss)}} for own in holders
        ]

    def mark_message(self, message: dict[str, Json], place: str) -> dict[str, Json]:
        """Return a message of a posted chat with marks as its content and in its tool calls."""
        calls = message.get("tool_calls", [])
        marked = dict(message)
        if calls:
            marked["tool_calls"] = self.mark_functions(calls, f"drops the tool calls of {place}")
        if message["content"].strip():
            role = f"role {message['role'][:40]}" + (", next to its tool calls" if calls else "")
            marked["content"] = self.new_mark(
                f"drops the content of {place} ({role}); leave it out"
            )
        return marked


def _check_template_losses(chat: TemplatedChat, name: str) -> None:
    """Refuse a posted chat if its template drops a text, a tool or a tool call.

    The template renders marks in their place, because it may change a text that it does not
    drop.
    """
    marks = ChatMarks(name)
    tools = marks.mark_functions(chat.tools, "has no place for tools; leave them out")
    messages = [marks.mark_message(own, f"messages[{i}]") for i, own in enumerate(chat.messages)]
    try:
        text = replace(chat, messages=messages, tools=tools).rendered()
    except RequestRefusal:
        return  # the template takes only these texts
    found = set(MARK.findall(text))  # all at once: a request may have very many messages
    for mark, sentence in marks.sentences.items():
        if mark not in found:
            raise _messages_refusal(sentence)


def _checked_messages(given: Json) -> list[dict[str, Json]]:
    """Check the `messages` of a posted chat; return them as chat templates read them."""
    if not isinstance(given, list) or not given:
        raise _messages_refusal("messages must be a list of at least one message")
    return [_checked_message(one, f"messages[{number}]") for number, one in enumerate(given)]


def _checked_message(given: Json, place: str) -> dict[str, Json]:
    """Return a message of a posted chat without its nulls, its content as one text, the
    arguments of tool calls as objects."""
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise _messages_refusal(f"{place} must be an object with a role")
    message = {key: value for key, value in given.items() if value is not None}
    for key, reason in NOT_READ.items():
        if key in message:
            raise _messages_refusal(f"{place} has the key {key}: {reason}")
    message["content"] = _content_text(message.get("content", ""), f"{place}.content")
    calls = message.pop("tool_calls", [])
    if not isinstance(calls, list):
        raise _messages_refusal(f"{place}.tool_calls must be a list")
    for number, call in enumerate(calls):
        called = _checked_tool_call(call, f"{place}.tool_calls[{number}]")
        message.setdefault("tool_calls", []).append(called)
    return message


def _content_text(content: Json, place: str) -> str:
    """Return the text of the `content` of a posted message, which may be in parts."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise _messages_refusal(f"{place} must be a text, or parts of type text")
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in PARTS:
            raise _messages_refusal(
                f"{place} has a part of type {kind[:40]}; ropext serve reads only text"
            )
        text = part.get(PARTS[kind]) if isinstance(kind, str) else None
        if not isinstance(text, str):
            raise _messages_refusal(f"{place} must be a text, or parts of type text")
        texts.append(text)
    return " ".join(texts)


def _checked_tool_call(given: Json, place: str) -> dict[str, Json]:
    """Return a tool call of a posted message with its arguments as an object."""
    function = _tool_function(given, place)
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = parse_object(arguments.encode("utf-8", "replace"), f"{place}: arguments")
        except InputError as error:
            raise _messages_refusal(str(error)) from None
    return {**given, "function": {**function, "arguments": arguments}}


def _checked_tools(given: Json) -> list[dict[str, Json]]:
    """Check the `tools` of a posted chat, and return them."""
    if given is not None and not isinstance(given, list):
        raise RequestRefusal("tools must be a list", 400, "tools")
    for number, tool in enumerate(given or []):
        _tool_function(tool, f"tools[{number}]")
    return given or []


def _tool_function(given: Json, place: str) -> dict[str, Json]:
    """Return the function of a tool or tool call in a posted chat; it must have a name."""
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _messages_refusal(
            f"{place} must be of type function, with a function that has a name"
        )
    return function


def _messages_refusal(sentence: str) -> RequestRefusal:
    """Return the refusal of a client's request because of its `messages`."""
    return RequestRefusal(sentence, 400, "messages")
