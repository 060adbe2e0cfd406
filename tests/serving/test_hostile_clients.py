"""Hostile clients and models are refused or bounded, and the next request is answered."""

import json
import shutil
import socket
import threading

import pytest
from command_line import run
from serving.conftest import TARGET, opened
from tiny_checkpoints import write_checkpoint

from ropext.options.evaluate import DocumentOptions
from ropext.options.extend import parse_extend

ASK = {"prompt": "the fox", "max_tokens": 3}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "temperature": 0}
HOW = DocumentOptions(device="cpu")


def message(answer):
    return answer["error"]["message"]


def changed(directory, place, name, **keys):
    """Copy the model with other keys in one of its files."""
    shutil.copytree(directory, place)
    path = place / name
    content = json.loads(path.read_text("utf-8")) if path.exists() else {}
    path.write_text(json.dumps(content | keys), "utf-8")
    return place


def served_from(directory):
    from ropext.serving.served import ServeOptions, load_served_model

    wish = parse_extend({"method": "yarn", "target": TARGET})
    return load_served_model(ServeOptions(str(directory), "tiny", wish), HOW)


# Hosts and keys


@pytest.mark.parametrize(
    "host",
    [
        "{.evil.example:80",
        "a`.evil.example",
        'a".evil.example',
        "x{y}.evil.example",
        "evil.example:99999",
        "evil.example/",
        "evil.example|x",
        "localhost/health?",
        "localhost:80:80",
        "[::1",
        "user@localhost",
        "",
    ],
)
def test_a_host_that_is_no_local_name_is_refused(client, host):
    assert client.get("/v1/models", headers={"Host": host})[0] == 403


def test_names_and_addresses_of_this_machine_are_answered(client, loaded):
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1", "[::1]:8000", "[::1]"):
        assert client.get("/v1/models", headers={"Host": host})[0] == 200, host
    with opened(loaded["yarn"], only_local=False) as wider:
        assert wider.get("/v1/models", headers={"Host": "ours.example:8000"})[0] == 200
        assert wider.get("/v1/models", headers={"Host": "ours.example/health?"})[0] == 403


def test_the_host_does_not_say_which_path_needs_no_key(loaded, monkeypatch):
    """starlette 0.46 puts the address of a request together from its Host header."""
    from starlette.datastructures import URL
    from starlette.requests import Request

    def old(request):
        return URL(f"http://{request.headers['host']}{request.scope['path']}")

    monkeypatch.setattr(Request, "url", property(old))
    monkeypatch.setenv("ROPEXT_ENDPOINT_KEY", "s3cret")
    with opened(loaded["yarn"], only_local=False) as client:
        assert client.get("/health")[0] == 200
        for host in ("localhost/health?", "localhost/health#"):
            status, _ = client.ask("/v1/completions", ASK, headers={"Host": host})
            assert status in (401, 403)
        monkeypatch.setattr(Request, "url", property(lambda _: URL("http://localhost/health")))
        assert client.ask("/v1/completions", ASK)[0] == 401


# What a model's files say


def test_a_response_template_that_never_ends_stops_neither_the_server_nor_the_next_chat(
    loaded, monkeypatch
):
    from ropext.models import sandbox

    served = loaded["self-extend"]
    template = {
        "start_anchor_pattern": "(\\w|[a-z])+[@#]",
        "fields": {"content": {"content": "text"}},
    }
    monkeypatch.setattr(served.tokenizer, "response_template", template, raising=False)
    with opened(served) as client:
        assert client.ask("/v1/chat/completions", CHAT)[0] == 200
        monkeypatch.setattr(sandbox, "SECONDS", 1.0)
        long = CHAT | {"messages": [{"role": "user", "content": "a" * 40}]}
        connection, answer = client.open("/v1/chat/completions", long | {"stream": True})
        assert client.get("/health") == (200, {"status": "ok"})
        events = answer.read().decode()
        connection.close()
        assert "the response template of tiny fails on this answer: it takes more than" in events
        assert "Traceback" not in "".join(client.lines)
        monkeypatch.undo()
        monkeypatch.setattr(served.tokenizer, "response_template", template, raising=False)
        assert client.ask("/v1/chat/completions", CHAT)[0] == 200


def test_a_response_template_of_patterns_finds_the_models_answer(loaded, monkeypatch):
    """Its parts are the parts of the greedy answer, cut by hand."""
    import re

    served = loaded["yarn"]
    body = CHAT | {"max_tokens": 60}
    with opened(served) as client:
        path = "/v1/chat/completions"
        text = client.ask(path, body)[1]["choices"][0]["message"]["content"]
        start, end = 5, 9
        while text.index(text[start : start + 3]) != start:
            start += 1
        end = start + 3
        while text.index(text[end : end + 3], start) != end:
            end += 1
        fields = {
            "reasoning_content": {
                "open_pattern": re.escape(text[start : start + 3]),
                "close_pattern": re.escape(text[end : end + 3]),
                "content": "text",
            },
            "content": {"content": "text"},
        }
        template = {"start_anchor": "<assistant>", "fields": fields}
        monkeypatch.setattr(served.tokenizer, "response_template", template, raising=False)
        found = client.ask(path, body)[1]["choices"][0]["message"]
        pieces = [event["choices"][0]["delta"] for event in client.events(path, body)]
    thought = text[start + 3 : end]
    said = text[:start] + text[end + 3 :]
    assert (found["content"], found.get("reasoning_content", "")) == (said, thought)
    assert "".join(piece.get("content", "") for piece in pieces) == said
    assert "".join(piece.get("reasoning_content", "") for piece in pieces) == thought


@pytest.mark.parametrize(
    ("name", "keys", "words"),
    [
        ("tokenizer_config.json", {"response_template": {"fields": 5}}, "response_template in"),
        ("tokenizer_config.json", {"response_template": "x"}, "response_template in"),
        ("generation_config.json", {"prompt_lookup_num_tokens": 3}, "generation_config.json"),
        ("generation_config.json", {"token_healing": True}, "generation_config.json"),
        ("generation_config.json", {"do_sample": True, "temperature": 1e-40}, "at least 0.001"),
    ],
)
def test_a_model_that_can_answer_nothing_is_refused_at_start(
    directory, tmp_path, capsys, name, keys, words
):
    pytest.importorskip("uvicorn")
    wrong = changed(directory, tmp_path / "wrong", name, **keys)
    code, said = run("serve", str(wrong), "--port", "0", "--device", "cpu", capsys=capsys)
    assert code == 2
    assert words in said.err
    assert "Traceback" not in said.err
    assert said.out == ""


# Panics of tokenizers, which no `except Exception` catches


@pytest.fixture(scope="module")
def panicking(directory, tmp_path_factory):
    """Write a decoder and a splitter whose regular expressions give up on a long text."""
    pytest.importorskip("uvicorn")
    rules = json.loads((directory / "tokenizer.json").read_text("utf-8"))
    pattern = {"Regex": "(.|..)+[\u4e00\u4e01]"}
    replacing = {"type": "Replace", "pattern": pattern, "content": ""}
    decoders = [rules["decoder"], replacing]
    split = {
        "type": "Split",
        "pattern": {"Regex": "(e|ee|[a-z])+@@"},
        "behavior": "Isolated",
        "invert": False,
    }
    splitters = [split, rules["pre_tokenizer"]]
    wrong = changed(
        directory,
        tmp_path_factory.mktemp("panicking") / "model",
        "tokenizer.json",
        decoder={"type": "Sequence", "decoders": decoders},
        pre_tokenizer={"type": "Sequence", "pretokenizers": splitters},
    )
    return served_from(wrong)


def test_a_panic_while_an_answer_is_decoded_ends_this_answer_alone(panicking, monkeypatch):
    monkeypatch.setattr(panicking.model.generation_config, "eos_token_id", None)
    with opened(panicking) as client:
        long = {"prompt": [5], "max_tokens": 200, "temperature": 0}
        status, answer = client.ask("/v1/completions", long)
        assert (status, "PanicException" in message(answer)) == (500, True)
        assert client.ask("/v1/completions", ASK)[0] == 200
        assert client.get("/health")[0] == 200


def test_a_panic_while_a_prompt_is_encoded_is_a_sentence(panicking):
    with opened(panicking) as client:
        status, answer = client.ask("/v1/completions", ASK | {"prompt": "e" * 45})
        assert status == 400
        assert message(answer).startswith("the tokenizer of tiny cannot read the prompt: ")
        assert client.ask("/v1/completions", ASK)[0] == 200


def test_health_reports_that_the_thread_has_ended(loaded, monkeypatch):
    from ropext.serving.turns import AnswerThread

    def end(*_):
        raise SystemExit

    with monkeypatch.context() as patched:
        patched.setattr(AnswerThread, "_answer_question", end)
        with opened(loaded["yarn"]) as client:
            assert client.get("/health")[0] == 200
            connection, _ = client.open("/v1/completions", ASK | {"stream": True})
            for _ in range(200):
                status, answer = client.get("/health")
                if status == 503:
                    break
            connection.close()
            assert (status, "restart the server" in message(answer)) == (503, True)
            assert client.ask("/v1/completions", ASK)[0] == 503


# Requests


FLAGS = ["stream", "echo", "return_tokens_as_token_ids", "add_special_tokens", "do_sample"]
WRONG_FLAGS = ["false", 0, 1, []]
MOST_DIGITS = 10**4300 - 1  # Python writes an integer of 4300 digits, but not one of 4301


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"temperature": 1e-40}, "temperature must be 0, or at least 0.001"),
        ({"temperature": 1e-320}, "temperature must be 0, or at least 0.001"),
        ({"generation_config": '{"do_sample": true, "temperature": 1e-9}'}, "temperature must be"),
        ({"logit_bias": {"5": 1e39}}, "logit_bias must be numbers from -100 to 100"),
        ({"logit_bias": {"5": -1e39}}, "logit_bias must be numbers from -100 to 100"),
        ({"logit_bias": {"5": 101}}, "logit_bias must be numbers from -100 to 100"),
        ({"generation_config": '{"max_new_tokens": "5"}'}, "max_new_tokens must be a whole"),
        ({"generation_config": '{"max_new_tokens": [1]}'}, "max_new_tokens must be a whole"),
        ({"generation_config": '{"max_new_tokens": NaN}'}, "max_new_tokens must be a whole"),
        ({"generation_config": '{"max_new_tokens": -5}'}, "max_new_tokens must be a whole"),
        ({"n": "\ud800"}, "n=? is not supported"),
        ({"max_tokens": MOST_DIGITS}, "max_tokens must be a whole number from 1 to"),
        ({"max_completion_tokens": MOST_DIGITS}, "max_completion_tokens must be a whole"),
        ({"generation_config": f'{{"max_new_tokens": {MOST_DIGITS}}}'}, "max_new_tokens must be a"),
        ({"top_k": MOST_DIGITS}, "top_k must be a whole number from -1 to"),
        ({"logit_bias": {"5": MOST_DIGITS}}, "logit_bias must be numbers from -100 to 100"),
    ],
)
def test_wrong_settings_are_refused_in_a_sentence(client, more, words):
    status, answer = client.ask("/v1/completions", {"prompt": "x"} | more)
    assert status == 400
    assert words in message(answer)
    assert client.lines == []


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_length_beyond_the_context_is_refused_in_openais_words(client, path):
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2**62}
    status, answer = client.ask(f"/v1/{path}", body)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    status, answer = client.ask(f"/v1/{path}", body | {"max_tokens": MOST_DIGITS})
    assert (status, answer["error"]["param"]) == (400, "max_tokens")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        *((key, value, f"{key} must be true or false") for key in FLAGS for value in WRONG_FLAGS),
        ("stream_options", {"include_usage": "false"}, "include_usage must be true or false"),
        ("stream_options", [], "stream_options must be an object"),
        ("generation_config", '{"do_sample": "false"}', "do_sample must be true or false"),
        ("stop", 0, "stop must be a text"),
        ("stop", False, "stop must be a text"),
        ("logit_bias", [], "logit_bias must be an object"),
        ("logit_bias", {"5": "7"}, "logit_bias must be numbers"),
    ],
)
def test_a_value_of_another_type_is_refused(client, key, value, words):
    status, answer = client.ask("/v1/completions", ASK | {key: value})
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert words in message(answer)
    assert client.lines == []


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("stream", "false", "stream must be true or false"),
        ("add_generation_prompt", "false", "add_generation_prompt must be true or false"),
        ("chat_template_kwargs", [], "chat_template_kwargs must be an object"),
        ("stop", 0, "stop must be a text"),
    ],
)
def test_a_value_of_another_type_in_a_chat_is_refused(client, key, value, words):
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    status, answer = client.ask("/v1/chat/completions", body | {key: value})
    assert status == 400
    assert words in message(answer)


def test_null_is_as_good_as_an_absent_key(loaded):
    pytest.importorskip("uvicorn")
    from ropext.serving.questions import completion_requests

    keys = [*FLAGS, "stop", "stream_options", "logit_bias", "chat_template_kwargs"]
    body = dict.fromkeys(keys)
    served = loaded["yarn"]
    (prompt,) = completion_requests(served, {"prompt": "the fox"} | body, "x", is_chat=False)
    assert prompt.ids == tuple(served.tokenizer("the fox").input_ids)
    unset = (prompt.stream, prompt.with_usage, prompt.echo, prompt.as_ids, prompt.stop)
    assert unset == (False, False, None, False, ())
    chat = {"messages": [{"role": "user", "content": "the fox"}]} | body
    (turn,) = completion_requests(served, chat, "x", is_chat=True)
    text = served.tokenizer.decode(turn.ids)
    assert text.endswith("<assistant>")


def test_the_smallest_settings_that_are_taken(client):
    more = {"temperature": 1e-3, "logit_bias": {"5": 100, "6": -100}}
    assert client.ask("/v1/completions", ASK | more)[0] == 200


def test_arguments_of_a_tool_call_that_are_nested_without_end_are_refused(client):
    call = {"function": {"name": "f", "arguments": "[" * 20_000}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    status, answer = client.ask("/v1/chat/completions", {"messages": messages})
    wanted = "messages[0].tool_calls[0]: arguments is nested too deeply to be a config"
    assert (status, message(answer)) == (400, wanted)


def test_objects_and_values_are_counted_outside_of_strings_before_they_are_parsed(loaded):
    from ropext.serving.questions import parse_request
    from ropext.serving.refusals import RequestRefusal

    served = loaded["yarn"]
    inside = json.dumps({"prompt": '[{,\\" \\\\' * 300_000}).encode()
    assert json.loads(inside) == parse_request(served, inside)
    nested = b'{"prompt":"a\\\\","x":[' + b"[]," * 500_000 + b"[]]}"
    with pytest.raises(RequestRefusal, match="more than 500,000 objects and arrays"):
        parse_request(served, nested)
    flat = b'{"prompt":"a\\"","x":[' + b'"",' * 600_000 + b"1]}"
    with pytest.raises(RequestRefusal, match="more than 501,024 values"):
        parse_request(served, flat)


def test_a_long_text_is_refused_by_the_tokens_of_its_beginning(client, loaded, monkeypatch):
    """And never a text that fits, although its beginning alone has many tokens."""
    served = loaded["self-extend"]
    tokenizer = type(served.tokenizer)
    read = []
    call = tokenizer.__call__

    def counted(self, text, *args, **kwargs):
        read.append(len(text))
        return call(self, text, *args, **kwargs)

    monkeypatch.setattr(tokenizer, "__call__", counted)
    status, answer = client.ask("/v1/completions", {"prompt": "q" * 1_000_000, "max_tokens": 1})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert read == [16 * TARGET]


def test_a_text_of_long_tokens_that_fits_is_answered(directory, tmp_path):
    """Of 40 characters each: more than are tokenised at first."""
    word = "fox" * 13 + "!"
    rules = json.loads((directory / "tokenizer.json").read_text("utf-8"))
    long = {"id": 299, "content": word, "special": False}
    long |= {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [*rules["added_tokens"], long]
    vocabulary = {k: v for k, v in rules["model"]["vocab"].items() if v != 299}
    merges = [m for m in rules["model"]["merges"] if "".join(m) in vocabulary]
    model = rules["model"] | {"vocab": vocabulary, "merges": merges}
    place = tmp_path / "long"
    changed(directory, place, "tokenizer.json", added_tokens=added, model=model)
    with opened(served_from(place)) as client:
        asked = {"prompt": word * (TARGET - 10), "max_tokens": 1}
        status, answer = client.ask("/v1/completions", asked)
        assert (status, answer["usage"]["prompt_tokens"]) == (200, TARGET - 9)


def test_four_requests_are_read_at_a_time_and_none_in_the_event_loop(loaded, monkeypatch):
    from ropext.serving import app

    reading, most, threads = [], [], set()
    everyone = threading.Semaphore(0)
    real = app.parse_request

    def watched(served, data):
        reading.append(1)
        most.append(len(reading))
        threads.add(threading.current_thread())
        everyone.acquire(timeout=60)
        reading.pop()
        return real(served, data)

    monkeypatch.setattr(app, "parse_request", watched)
    with opened(loaded["yarn"]) as client:
        askers = [
            threading.Thread(target=client.ask, args=("/v1/completions", ASK)) for _ in range(7)
        ]
        for asker in askers:
            asker.start()
        for _ in range(200):
            assert client.get("/health")[0] == 200
            if len(most) >= 4:
                break
        everyone.release(len(askers))
        for asker in askers:
            asker.join()
    assert max(most) == 4
    assert len(most) == 7


# Connections


def silent_connection(port, sent=b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-a: "):
    connection = socket.create_connection(("127.0.0.1", port), timeout=20)
    connection.sendall(sent)
    return connection


def is_closed(connection):
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True
    finally:
        connection.close()


def test_connections_without_a_request_are_closed_and_streams_are_not(loaded, monkeypatch):
    """With deadlines that an answer of some seconds outlasts."""
    from ropext.serving import connections

    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.3)
    monkeypatch.setattr(connections, "BODY_SECONDS", 0.3)
    served = loaded["self-extend"]
    monkeypatch.setattr(served.model.generation_config, "eos_token_id", None)
    slow = served.model.forward

    def forward(*args, **kwargs):
        threading.Event().wait(0.02)
        return slow(*args, **kwargs)

    monkeypatch.setattr(served.model, "forward", forward)
    with opened(served) as client:
        started, answer = client.open("/v1/completions", ASK | {"max_tokens": 100, "stream": True})
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
        kinds = (b"", b"GET /health HTTP/1.1\r\nX-a: ", head + b"\r\nContent-Length: 9\r\n\r\n{")
        for connection in [
            silent_connection(client.port, sent) for sent in kinds for _ in range(5)
        ]:
            assert is_closed(connection)
        lines = answer.read().decode().split("\n\n")
        started.close()
    assert lines[-2:] == ["data: [DONE]", ""]
    assert sum('"text"' in line for line in lines) > 40


def test_a_connection_too_many_is_closed_and_the_others_are_answered(loaded, monkeypatch):
    from ropext.serving import connections

    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 10)
    with opened(loaded["yarn"]) as client:
        held = [silent_connection(client.port) for _ in range(10)]
        assert all(is_closed(silent_connection(client.port)) for _ in range(20))
        held[0].close()
        for _ in range(200):
            try:
                status = client.get("/health")[0]
                break
            except ConnectionError:
                continue
        assert status == 200
        for connection in held[1:]:
            connection.close()


@pytest.mark.needs("fork")
def test_fewer_connections_are_opened_if_few_files_may_be_open(monkeypatch):
    resource = pytest.importorskip("resource")
    from ropext.serving import connections

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        assert 50 < connections.most_connections() < 112
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert connections.most_connections() == 256


def test_the_tokenizers_panic_is_a_sentence_of_eval(tmp_path, capsys):
    """The exit code is 2, and the message names the document."""
    model = write_checkpoint(tmp_path / "model")
    path = model / "tokenizer.json"
    rules = json.loads(path.read_text("utf-8"))
    split = {"type": "Split", "pattern": {"Regex": "(e|ee|[a-z])+@@"}, "behavior": "Isolated"}
    splitters = [split | {"invert": False}, rules["pre_tokenizer"]]
    rules["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": splitters}
    path.write_text(json.dumps(rules), "utf-8")
    data = tmp_path / "texts.jsonl"
    data.write_text(json.dumps({"text": "e" * 45 + " the fox" * 200}) + "\n", "utf-8")
    words = ("--data", data, "--lengths", "128", "-o", tmp_path / "run")
    code, said = run("eval", model, *words, capsys=capsys)
    assert code == 2, said.err
    assert f"the tokenizer of {model} cannot read " in said.err
    assert "Traceback" not in said.err
