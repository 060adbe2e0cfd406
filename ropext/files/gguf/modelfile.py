"""The Modelfile next to a GGUF: the input of `ollama create`, with the original's own settings.

In Ollama's parser (parser/parser.go, 00dc3af8) a value in three quotes ends at the first line that
ends in three quotes. Ollama would read the rest as commands. So ropext leaves out a text with such
a line, and notes it.
"""

import json
import re
from pathlib import Path
from typing import Any

from ropext.base import bundled, guard
from ropext.base.errors import InputError
from ropext.base.inputs import read_bytes
from ropext.base.jsontext import Json

QUOTES = '"""'
LARGEST = 1 << 20  # bytes of a template, a system prompt, a licence
TEXTS = {"template": "TEMPLATE", "system": "SYSTEM", "license": "LICENSE"}
FILES = {"projector": "FROM", "adapter": "ADAPTER"}
STATED = ("renderer", "parser", "requires")  # keys of Ollama's config that become commands
ROLES = ("system", "user", "assistant")
LENGTH = "num_ctx"
NAME = re.compile(r"[A-Za-z0-9_]+")  # the name of a parameter
ELSEWHERE = ("model",)  # layers of weights, which the GGUF itself holds


class Modelfile:
    """The commands of a Modelfile, and notes on settings that it cannot hold."""

    def __init__(self, name: str) -> None:
        """Begin the Modelfile that ropext writes next to a GGUF file, without commands or notes."""
        self.name = name  # the original's name
        self.commands: list[str] = []
        self.notes: list[str] = []

    def add(self, command: str, value: str) -> None:
        """Add a command with a quoted value. If quotes cannot hold the value, leave it out with a
        note."""
        why = _why_not(value)
        if why:
            self.leave_out(command, why)
            return
        self.commands.append(f"{command} {QUOTES}{value}{QUOTES}")

    def leave_out(self, what: str, why: str) -> None:
        """Note a setting that is not in the Modelfile, and why."""
        self.notes.append(f"{what} of {self.name} is left out of the Modelfile: {why}")


def _why_not(value: str) -> str:
    """Return why a Modelfile cannot hold a text, or "" if it can."""
    lines = re.split("[\r\n]", value)
    if any(line.rstrip().endswith(QUOTES) for line in lines[:-1]):
        return "a line of it ends in three quotes"
    if any(line.startswith(guard.SIGNATURE) for line in value.split("\n")):
        return "a line of it looks like the mark of ropext"
    kept = re.sub("[ \t\r\n]", "", value)
    if not kept.isprintable():
        return "it has characters that Ollama drops"
    return ""


def modelfile(name: str, file: str, target: int) -> tuple[str, list[str]]:
    """Return the text of the Modelfile of an extended GGUF, and notes on missing settings. `name`
    is the original's. Its settings are kept if Ollama holds them."""
    made = Modelfile(name)
    kept = bundled.kept_by_ollama(name)
    if kept is not None:
        for layer in kept.layers:
            if layer.blob is not None:
                _add_layer(made, layer.kind, layer.blob)
        for key in STATED:
            if isinstance(kept.config.get(key), str) and kept.config[key]:
                made.add(key.upper(), kept.config[key])
        for layer in kept.layers:
            if layer.blob is None:
                made.leave_out(f"the layer {layer.kind[:80]}", "its file is not there")
    lines = [f"FROM ./{file}", *made.commands, f"PARAMETER {LENGTH} {target}"]
    return guard.signed("".join(f"{line}\n" for line in lines)), made.notes


def _add_layer(made: Modelfile, kind: str, blob: Path) -> None:
    """Add one layer of an Ollama model to its Modelfile, or note why it is left out."""
    if kind in ELSEWHERE:
        return
    if kind in FILES:
        made.add(FILES[kind], str(blob))
        return
    if kind not in (*TEXTS, "params", "messages"):
        made.leave_out(f"the layer {kind[:80]}", "ropext does not know it")
        return
    try:
        text = read_bytes(blob, LARGEST).decode()
        if kind in TEXTS:
            made.add(TEXTS[kind], text)
        elif kind == "params":
            _add_parameters(made, json.loads(text))
        else:
            _add_messages(made, json.loads(text))
    except (InputError, ValueError, RecursionError) as error:
        made.leave_out(f"the layer {kind}", f"it cannot be read ({str(error)[:200]})")


def _add_parameters(made: Modelfile, given: Json) -> None:
    """Add the parameters of an Ollama model to its Modelfile, without the old context."""
    if not isinstance(given, dict):
        raise ValueError("no JSON object")
    for name, value in given.items():
        if name == LENGTH:
            continue  # the target's
        if not NAME.fullmatch(name):
            made.leave_out(f"the parameter {name[:80]!r}", "its name is none")
            continue
        values = [value]
        if isinstance(value, list):
            values = value
        for one in values:
            if isinstance(one, bool):
                made.add(f"PARAMETER {name}", str(one).lower())
            elif isinstance(one, str | int | float):
                made.add(f"PARAMETER {name}", str(one))
            else:
                made.leave_out(f"the parameter {name}", "its value is no text and no number")


def _add_messages(made: Modelfile, given: Json) -> None:
    """Add the messages of an Ollama model to its Modelfile, each turn as a whole."""
    if not isinstance(given, list):
        return
    for turn in _turns(given):
        unfit = ""
        for message in turn:
            unfit = unfit or _why_no_message(message)
        if not unfit:
            for message in turn:
                made.add(f"MESSAGE {message['role']}", message["content"])
        elif len(turn) == 1:
            made.leave_out("a message", unfit)
        else:
            made.leave_out("a question and its answer", unfit)


def _turns(messages: list[Json]) -> list[list[Any]]:
    """Group the messages for a GGUF's Modelfile. An answer belongs to the question before it."""
    turns = list[list[Any]]()
    for message in messages:
        before = turns[-1] if turns else []
        if len(before) == 1 and _role(message) == "assistant" and _role(before[0]) == "user":
            before.append(message)
        else:
            turns.append([message])
    return turns


def _role(message: Json) -> Json:
    """Return the role of a message in an Ollama model, or None."""
    return message.get("role") if isinstance(message, dict) else None


def _why_no_message(message: Json) -> str:
    """Return why a Modelfile cannot hold a message, or "" if it can."""
    if _role(message) not in ROLES or not isinstance(message.get("content"), str):
        return "it has no role that Ollama takes, or no text"
    return _why_not(message["content"])
