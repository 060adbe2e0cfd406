"""A tiny random Llama behind the port, in this process, on a free port of the loopback."""

import http.client
import json
import threading
import time
from contextlib import contextmanager

import pytest
import torch
from small_tokenizer import make_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from ropext.options.evaluate import DocumentOptions
from ropext.options.extend import parse_extend

CONTEXT, TARGET = 64, 256
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def directory(tmp_path_factory):
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
    path = tmp_path_factory.mktemp("serving") / "model"
    model.save_pretrained(path)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def loaded(directory):
    """Load the model by each of two methods, as `serve` does."""
    pytest.importorskip("uvicorn")
    from ropext.serving.served import ServeOptions, load_served_model

    methods = ("self-extend", "yarn")
    wishes = {m: parse_extend({"method": m, "target": TARGET}) for m in methods}
    how = DocumentOptions(device="cpu")
    return {
        m: load_served_model(ServeOptions(str(directory), "tiny", wish), how)
        for m, wish in wishes.items()
    }


class Client:
    """Asks the port in plain HTTP."""

    def __init__(self, port, lines):
        self.port = port
        self.lines = lines  # the log

    def open(self, path, body=None, headers=(), method="POST"):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json"} | dict(headers)
        connection.request(method, path, data, sent)
        return connection, connection.getresponse()

    def ask(self, path, body=None, **how):
        """Return status and JSON object."""
        connection, answer = self.open(path, body, **how)
        text = answer.read()
        connection.close()
        return answer.status, json.loads(text)

    def get(self, path, **how):
        return self.ask(path, method="GET", **how)

    def events(self, path, body):
        """Return the events of a streamed answer; the last one must be [DONE]."""
        connection, answer = self.open(path, body | {"stream": True})
        lines = answer.read().decode().split("\n\n")
        connection.close()
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]

    def wait_for(self, *words):
        """Return the first line of the log that has the words, as soon as it appears."""
        for _ in range(600):
            for line in list(self.lines):
                if all(word in line for word in words):
                    return line
            time.sleep(0.05)
        raise AssertionError((words, self.lines))


@contextmanager
def opened(served, only_local=True, port=0):
    from ropext.serving import app

    lines = []
    taken = app.reserve_address("127.0.0.1", port)
    server = app.uvicorn_server(app.ModelServer(served, lines.append, only_local))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [taken]})
    taken.listen()
    thread.start()
    try:
        yield Client(taken.getsockname()[1], lines)
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def client(loaded):
    with opened(loaded["self-extend"]) as made:
        yield made
