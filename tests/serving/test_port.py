"""The port's rules: the clients it answers, the requests it refuses, and how it is opened."""

import json
import socket

import pytest
from serving.conftest import TARGET, opened

ASK = {"prompt": "the fox", "max_tokens": 3}


def message(answer):
    return answer["error"]["message"]


def test_one_model_is_served_and_its_length_is_listed(client):
    entry = client.get("/v1/models")[1]["data"]
    assert [(own["id"], own["max_model_len"]) for own in entry] == [("tiny", TARGET)]
    status, answer = client.ask("/v1/completions", ASK | {"model": "meta-llama/Llama-3-8B"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert client.ask("/load_model", {"model": "other"})[0] == 404
    assert client.get("/v1/models/other")[0] == 404
    for path in ("/reset", "/v1/audio/transcriptions", "/v1/responses", "/docs", "/openapi.json"):
        connection, answer = client.open(path, {})
        assert answer.status == 404, path
        connection.close()


@pytest.mark.parametrize(
    ("tokens", "most", "words"),
    [
        (TARGET, None, "your prompt resulted in 256 tokens"),
        (TARGET - 2, 3, "you requested 257 tokens (254 in the prompt, 3 in the completion)"),
    ],
)
def test_a_prompt_beyond_the_target_is_refused_and_never_cut(client, tokens, most, words):
    status, answer = client.ask("/v1/completions", {"prompt": [5] * tokens, "max_tokens": most})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    start = f"This model's maximum context length is {TARGET} tokens. However, {words}."
    assert message(answer).startswith(start)


def test_tokens_are_counted_as_an_answer_reads_them(client, loaded):
    tokenizer = loaded["self-extend"].tokenizer
    messages = [{"role": "user", "content": "the fox"}]
    ids = tokenizer("<user>the fox\n<assistant>", add_special_tokens=False)["input_ids"]
    theirs = {"chat_template": "{{ 7 }}"}  # in a request: never rendered
    for more in ({}, {"chat_template_kwargs": theirs}):
        status, told = client.ask("/tokenize", {"messages": messages} | more)
        assert (status, told["tokens"], told["max_model_len"]) == (200, ids, TARGET)
    told = client.ask("/tokenize", {"prompt": "[" * 2000})[1]  # brackets in a text are no arrays
    assert told["count"] == 2001
    assert (
        client.ask("/tokenize", {"prompt": "the fox"})[1]["tokens"]
        == tokenizer("the fox").input_ids
    )


def test_serve_answers_up_to_the_whole_target(client):
    asked = {"prompt": [5] * (TARGET - 2), "max_tokens": 2, "temperature": 0}
    status, answer = client.ask("/v1/completions", asked)
    assert (status, answer["usage"]["total_tokens"]) == (200, TARGET)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("completions", {"prompt": "x", "n": 2}, "n=2 is not supported"),
        ("chat/completions", {"logprobs": True}, "logprobs=True is not supported"),
        ("chat/completions", {"echo": True}, "echo=True is not supported"),
        ("completions", {"prompt": [1, 300]}, "token ids from 0 to 299"),
        ("completions", {"prompt": ["a", 5]}, "token ids from 0 to 299, or a list of these"),
        ("completions", {"prompt": ["a"] * 2049}, "2,049 prompts, more than 2048"),
        ("completions", {"prompt": "x", "temperature": "hot"}, "temperature must be a number"),
        ("completions", {"prompt": "x", "max_tokens": True}, "max_tokens must be a whole"),
        ("completions", {"prompt": "x", "stop": [""]}, "stop must be a text"),
        ("completions", {"prompt": "x", "generation_config": "["}, "JSON object in a string"),
        ("chat/completions", {"messages": "hello"}, "messages must be a list"),
        ("chat/completions", {"messages": [{"content": "x"}]}, "[0] must be an object with a role"),
        ("chat/completions", {"messages": [7]}, "messages[0] must be an object with a role"),
    ],
)
def test_an_unanswerable_request_is_refused_in_a_sentence(client, path, body, words):
    status, answer = client.ask(f"/v1/{path}", body)
    assert status == 400
    assert words in message(answer)
    assert client.lines == []  # nothing was generated


def test_bodies_are_bounded_and_must_be_json(client):
    status, answer = client.ask("/v1/completions", b"[1]")
    assert status == 400
    assert "object" in message(answer)
    form = {"Content-Type": "text/plain"}  # a form that a web page may send unasked
    assert client.ask("/v1/completions", ASK, headers=form)[0] == 415
    most = 64 * TARGET + (1 << 20)
    body = json.dumps({"prompt": "", "max_tokens": 3}).encode()
    filled = body.replace(b'"",', b'"x",' + b" " * (most - len(body) - 1))
    assert len(filled) == most
    assert client.ask("/v1/completions", filled)[0] == 200
    assert client.ask("/v1/completions", filled + b" ")[0] == 413
    assert client.ask("/v1/completions", ASK)[0] == 200


def test_a_page_under_another_name_is_refused(client):
    stranger = {"Host": "evil.example:80"}
    assert client.get("/v1/models", headers=stranger)[0] == 403
    connection, answer = client.open(
        "/v1/models", headers={"Origin": "http://evil.example"}, method="GET"
    )
    assert not [name for name, _ in answer.getheaders() if name.startswith("access-control")]
    connection.close()


def test_a_key_is_required_if_one_is_set(loaded, monkeypatch):
    monkeypatch.setenv("ROPEXT_ENDPOINT_KEY", "s3cret")
    with opened(loaded["yarn"]) as client:
        assert client.get("/v1/models")[0] == 401
        assert client.ask("/v1/completions", ASK, headers={"Authorization": "Bearer no"})[0] == 401
        right = {"Authorization": "Bearer s3cret"}
        assert client.ask("/v1/completions", ASK, headers=right)[0] == 200
        assert client.get("/health")[0] == 200
    assert "s3cret" not in "".join(client.lines)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_ends_its_generation(client, loaded, monkeypatch, stream):
    """And the next one has its turn; it had waited behind the first, with its place in the log."""
    served = loaded["self-extend"]
    monkeypatch.setattr(served.model.generation_config, "eos_token_id", None)
    asked = {"prompt": "the fox", "max_tokens": 240, "temperature": 0, "stream": stream}
    slow = served.model.forward

    def forward(*args, **kwargs):
        import time

        time.sleep(0.02)
        return slow(*args, **kwargs)

    monkeypatch.setattr(served.model, "forward", forward)
    connection = socket.create_connection(("127.0.0.1", client.port))
    data = json.dumps(asked).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    connection.sendall(head.encode() + data)
    client.wait_for("tokens")
    second, _ = client.open("/v1/completions", ASK | {"stream": True})
    client.wait_for("1 before it")
    connection.close()
    line = client.wait_for("its client has gone")
    written = int(line.split(" written")[0].split()[-1])
    assert written < 200
    second.close()
    assert client.ask("/v1/completions", ASK)[0] == 200


def test_an_error_of_the_model_is_reported_and_the_next_question_is_answered(
    client, loaded, monkeypatch
):
    model = loaded["self-extend"].model

    def broken(*args, **kwargs):
        raise RuntimeError('no memory for "this"')

    with monkeypatch.context() as patched:
        patched.setattr(model, "forward", broken)
        status, answer = client.ask("/v1/completions", ASK)
        events = client.events("/v1/completions", ASK)
    assert (status, message(answer)) == (500, 'RuntimeError: no memory for "this"')
    assert events[-1]["error"]["message"] == message(answer)
    assert "Traceback" in "".join(client.lines)
    assert client.ask("/v1/completions", ASK)[0] == 200


def test_a_port_that_is_in_use_is_refused_before_anything_is_loaded():
    pytest.importorskip("uvicorn")
    from ropext.base.errors import InputError
    from ropext.serving import app

    with socket.create_server(("127.0.0.1", 0)) as used:
        number = used.getsockname()[1]
        with pytest.raises(InputError, match=f"--port {number} cannot be opened"):
            app.reserve_address("127.0.0.1", number)
