"""A server of the standard library behind an OpenAI-compatible port, which can misbehave on
request.

It answers questions over a text by searching the text, so it is right if it received the whole
text. A word is a token.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = dict[str, Any]
TEMPLATE = 4  # tokens of the chat template


def words(text: str) -> list[str]:
    return text.split()


def looked_up(text: str) -> str:
    """Return the text's answer to its last question: about a key, or about its first word."""
    if "first word" in text.rsplit("\n", 1)[-1]:
        return text.split()[0]
    asked = re.findall(r"What is the (?:pass key|key of (\S+)|secret \S+ of (\S+))\?", text)
    if not asked:
        return "I do not know."
    name = next((part for part in asked[-1] if part), "")
    stated = re.findall(rf"{re.escape(name)} is (\S+)\." if name else r"pass key is (\d+)\.", text)
    return f"It is {stated[-1]}." if stated else "I cannot find it."


@dataclass
class Fake:
    """A server's behaviour, and the requests that it received."""

    limit: int | None = None  # stated as vLLM states it
    cut: int | None = None  # keeps the last tokens alone, and says nothing of it
    refuses: int | None = None  # answers 400 from so many tokens on
    counts: bool = True  # /tokenize with messages
    template: bool = True  # without one it answers no messages
    usage: Callable[[int], Answer | None] = lambda read: {"prompt_tokens": read}
    thinks: int = 0  # tokens of thinking before an answer
    busy: int = 0  # requests that get 429 first
    shared: int | None = None  # tokens that the requests in hand may have together
    body: bytes | None = None  # in place of every answer to a question
    drips: bool = False  # a byte now and then
    says: Callable[[str], str] = looked_up
    losses: Callable[[tuple[int, ...]], tuple[float, ...]] | None = None  # log-probabilities
    by_ids: bool = True  # it names tokens by their ids, as vLLM, and SGLang by their texts
    card: Answer = field(default_factory=dict)  # more of its entry in /v1/models
    asked: list[tuple[str, Answer]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    in_hand: list[int] = field(default_factory=list)  # tokens of each

    def answered(self, question: Answer) -> tuple[int, Answer]:
        """Return a status and the answer to a question."""
        if isinstance(question.get("prompt"), list):
            return self.read(question["prompt"], question)
        chat = "messages" in question
        if chat and not self.template:
            return 400, {"error": {"message": "tiny has no chat template"}}
        text = question["messages"][-1]["content"] if chat else question["prompt"]
        tokens = words(text)
        count = len(tokens) + TEMPLATE * chat
        if self.shared is not None and not self.has_room(count, self.shared):
            return 500, {"error": {"message": "Context size has been exceeded."}}
        if self.refuses is not None and count + question["max_tokens"] > self.refuses:
            return 400, {"error": {"message": f"the request has {count} tokens <b>too many</b>"}}
        read = count
        if self.cut is not None and count > self.cut:
            starts = [word.start() for word in re.finditer(r"\S+", text)]
            text = text[starts[TEMPLATE - self.cut] :]
            read = self.cut
        reply = self.replied(text, question["max_tokens"], chat)
        usage = self.usage(read)
        return 200, {"choices": [reply]} | ({} if usage is None else {"usage": usage})

    def has_room(self, count: int, shared: int) -> bool:
        """Return whether a prompt fits next to the prompts read at the same time, as in the one
        cache of llama-server's slots."""
        self.in_hand.append(count)
        time.sleep(0.05)
        together = sum(self.in_hand)
        self.in_hand.remove(count)
        return together <= shared

    def read(self, ids: list[int], question: Answer) -> tuple[int, Answer]:
        """Return the log-probability of each token of a prompt, in the form of vLLM or SGLang."""
        if self.limit is not None and len(ids) + 1 > self.limit:
            return 400, {"error": f"{len(ids)} tokens and one more"}
        choice: Answer = {"text": "", "finish_reason": "length"}
        if self.losses is not None:
            assert question["echo"]
            assert question["logprobs"] == question["max_tokens"] == 1
            named = [f"token_id:{token}" if self.by_ids else "x" for token in [*ids, 1]]
            values = [None, *self.losses(tuple(ids)), -0.5]
            choice["logprobs"] = {"tokens": named, "token_logprobs": values}
        return 200, {"choices": [choice]}

    def replied(self, text: str, room: int, chat: bool) -> Answer:
        if room <= self.thinks:
            spent: Answer = {"content": None, "reasoning_content": "so I look " * room}
            return {"message": spent, "finish_reason": "length"}
        said = self.says(text)
        if chat:
            return {"message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
        return {"text": said, "finish_reason": "stop"}


@contextmanager
def serving(fake: Fake) -> Iterator[str]:
    """Yield the address of the server while it runs."""

    class Handler(BaseHTTPRequestHandler):
        def tell(self, status: int, data: Any) -> None:
            body = data if isinstance(data, bytes) else json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            entry = {"id": "fake"} | ({} if fake.limit is None else {"max_model_len": fake.limit})
            entry |= fake.card
            known = self.path == "/v1/models"
            self.tell(200 if known else 404, {"data": [entry]} if known else {})

        def do_POST(self) -> None:
            question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with suppress(OSError):  # the other side had enough
                self.answer(question)

        def answer(self, question: Answer) -> None:
            if self.path == "/tokenize" and fake.counts:
                chat = "messages" in question
                text = question["messages"][-1]["content"] if chat else question["prompt"]
                self.tell(200, {"count": len(words(text)) + TEMPLATE * chat})
                return
            if self.path not in ("/v1/chat/completions", "/v1/completions"):
                self.tell(404, {})
                return
            fake.asked.append((self.path, question))
            fake.keys.append(self.headers.get("Authorization"))
            if fake.busy > 0:
                fake.busy -= 1
                self.tell(429, {"error": "slow down"})
            elif fake.drips:
                self.drip()
            elif fake.body is not None:
                self.tell(200, fake.body)
            else:
                self.tell(*fake.answered(question))

        def drip(self) -> None:
            self.send_response(200)
            self.end_headers()
            for _ in range(100):
                self.wfile.write(b" ")
                time.sleep(0.1)

        def log_message(self, *args: object) -> None:
            """Print nothing on stderr."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        server.shutdown()
