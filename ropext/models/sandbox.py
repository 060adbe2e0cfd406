"""Run strangers' chat templates and tokenizers within limits, in a child process.

A template is a program that can loop for ever. A regular expression that reads an answer can
backtrack for ever. A dozen of a tokenizer's normalizers can each double a text. Nothing inside the
process can stop them.

This file runs as a script: each line of its stdin is a question in JSON, each line of its stdout
the answer. `ropext.models.tokenizer` sends the questions.
"""

import faulthandler
import json
import signal
import string
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ropext.base.systems import limit_memory

if TYPE_CHECKING:  # the child does not need it
    from ropext.base.jsontext import Json

SECONDS = 20.0  # for one answer, which takes milliseconds
MEMORY = 4 << 30  # bytes of address space, if the system limits them
# transformers takes more to build a tokenizer from larger files, most if it converts them: for
# Gemma's 4 MB half a minute, and a hundred bytes of memory for each byte of tokenizer.json.
SECONDS_A_MEGABYTE = 30.0
MEMORY_A_BYTE = 200
MOST_CHARACTERS = 1 << 26  # in a rendered conversation
MOST_TOKENS = 100  # for one character: bytes make four at most, NFKC eighteen


def build_tokenizer(directory: str) -> int:
    """Load the tokenizer of a model on trial in the sandbox, before ropext loads it into memory,
    and return its length."""
    from transformers import AutoTokenizer

    return len(AutoTokenizer.from_pretrained(directory, trust_remote_code=False))


def encode_text(file: str) -> tuple[int, int]:
    """Encode a short text in the sandbox by the tokenizer of a model to load; return the numbers of
    characters and tokens.

    The text has all the strings that the tokenizer's normalizers replace.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(file)
    rules = json.loads(tokenizer.normalizer.__getstate__() if tokenizer.normalizer else "{}")
    text = string.printable + json.dumps(rules, ensure_ascii=False)[:10_000]
    return len(text), len(tokenizer.encode(text).ids)


def render_chat_template(
    template: str, messages: "Json", words: "dict[str, Json]", opening: bool, marked: bool = False
) -> "Json":
    """Render a conversation through a loaded model's own chat template in the sandbox, with
    transformers' function for it. `marked` asks for the places that {% generation %} marks."""
    from transformers.utils.chat_template_utils import render_jinja_template

    words |= {"chat_template": template, "add_generation_prompt": opening}
    words["return_assistant_tokens_mask"] = marked
    rendered: Json = render_jinja_template([messages], **words)
    text = str(rendered[0][0])
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"it makes {len(text):,} characters of one")
    if marked:
        return rendered[1][0]
    return text


class AnswerParser:
    """The parser of transformers that finds thoughts and tool calls in the answer that a model is
    writing.

    All pieces of one answer together have the time limit of one question.
    """

    def __init__(self) -> None:
        """Begin the sandbox's parser without an answer of a loaded model; the first template begins
        one."""
        self.parser: Any = None
        self.spent = 0.0  # seconds, on this answer

    def __call__(self, template: "Json", prompt: str, text: str, ends: bool) -> "Json":
        """Return the events of the next piece of text that a model in memory writes, parsed in the
        sandbox. A template begins another answer to `prompt`."""
        started = time.perf_counter()
        events = []
        if template is not None:
            from transformers.utils.chat_parsing.response_parser import ResponseParser

            self.spent = 0.0
            self.parser = ResponseParser(template, prefix=prompt)
            events += self.parser.initial_events
        events += self.parser.feed(text)
        if ends:
            events += self.parser.finalize()[1]
        self.spent += time.perf_counter() - started
        if self.spent > SECONDS:
            raise TimeoutError(f"it takes more than {SECONDS:.0f} seconds")
        return events


def main() -> None:
    """Answer each question about a loaded model's tokenizer, chat template or answer in the
    sandbox, until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    answers: dict[str, Callable[..., object]] = {
        "render": render_chat_template,
        "encode": encode_text,
        "build": build_tokenizer,
        "parse": AnswerParser(),
    }
    answer_to = answers[sys.argv[1]]
    # Imports are done before the time is counted.
    if answer_to is render_chat_template:
        render_chat_template("", [], {}, False)
    elif answer_to is build_tokenizer:
        from transformers import AutoTokenizer  # noqa: F401
    elif isinstance(answer_to, AnswerParser):
        from transformers.utils.chat_parsing.response_parser import ResponseParser  # noqa: F401
    for line in sys.stdin:
        seconds, memory, question = json.loads(line)
        limit_memory(memory)
        faulthandler.dump_traceback_later(seconds, exit=True)  # also inside of C
        try:
            answer = {"made": answer_to(**question)}
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}"[:300]}
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
