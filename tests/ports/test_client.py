"""One request: its waiting times, and the values that it never writes."""

import dataclasses
import json

import pytest
from fake_server import Fake, serving

from ropext.base.errors import InputError, NoServer, ProofFailed
from ropext.endpoint import logprobs
from ropext.endpoint import server as client

QUESTION = {"messages": [{"content": "What is the pass key?"}], "max_tokens": 9}


def test_a_busy_server_is_waited_for_and_one_that_stays_busy_is_reported() -> None:
    fake = Fake(busy=2)
    with serving(fake) as url:
        port = dataclasses.replace(client.server_at(url), pauses=(0.01, 0.02))
        assert port.call_patiently("/v1/chat/completions", QUESTION)[0] == 200
        assert len(fake.asked) == 3
        fake.busy = 100
        hasty = dataclasses.replace(port, patience=0.05)
        assert hasty.call_patiently("/v1/chat/completions", QUESTION)[0] == 429


def test_an_answer_beyond_the_limit_of_bytes_is_not_read_to_its_end() -> None:
    with serving(Fake(body=b"x" * 3_000_000)) as url:
        port = dataclasses.replace(client.server_at(url), most_bytes=1 << 20)
        with pytest.raises(InputError, match="answers more than 1 MiB"):
            port.call("/v1/chat/completions", QUESTION)


def test_the_key_is_sent_and_occurs_in_no_text(monkeypatch) -> None:
    monkeypatch.setenv(client.KEY, "secret-key")
    fake = Fake()
    with serving(fake) as url:
        port = client.server_at(url)
        port.call("/v1/chat/completions", QUESTION)
    assert fake.keys == ["Bearer secret-key"]
    assert "secret-key" not in repr(port)
    assert "secret-key" not in json.dumps(QUESTION)


def test_no_server_has_an_exit_code_of_its_own() -> None:
    with pytest.raises(NoServer, match="no answer from the server") as caught:
        client.model_and_limit(client.server_at("http://127.0.0.1:9"), "http://127.0.0.1:9")
    assert caught.value.exit_code == 5
    assert "start it, or name the address that it prints" in str(caught.value)


def test_a_model_is_chosen_by_its_name() -> None:
    with serving(Fake(limit=64)) as url:
        port = client.server_at(url)
        assert client.model_and_limit(port, url, "fake") == ("fake", 64)
        with pytest.raises(InputError, match="serves no model 'other'; it lists fake"):
            client.model_and_limit(port, url, "other")


def test_next_token_returns_nothing_for_a_token_that_is_no_whole_character(monkeypatch) -> None:
    """As its b10434 says of a token that is no whole character; any other error is a refusal."""
    port = client.server_at("http://127.0.0.1:9")
    body = b'{"error": {"message": "The model produced output that does not match the expected"}}'
    monkeypatch.setattr(client.Server, "call", lambda *args: (500, body))
    assert logprobs.next_token(port, "m", [1, 2]) == []
    monkeypatch.setattr(client.Server, "call", lambda *args: (500, b"too long"))
    with pytest.raises(ProofFailed, match="refuses a prompt of 2 tokens"):
        logprobs.next_token(port, "m", [1, 2])


def test_next_token_returns_nothing_if_the_server_refuses_log_probabilities(monkeypatch) -> None:
    body = b'{"error": {"message": "logprobs=5 is not supported"}}'
    monkeypatch.setattr(client.Server, "call", lambda *args: (400, body))
    assert logprobs.next_token(client.server_at("http://127.0.0.1:9"), "m", [1, 2]) == []
