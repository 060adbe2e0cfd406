"""The port gives the answers of the patched model's `generate`."""

import pytest
import torch
from serving.conftest import TARGET, opened

LONG = "the quick brown fox jumps over the lazy dog " * 12  # beyond the trained context
MESSAGES = [{"role": "user", "content": LONG}]


def by_generate(served, ids, count):
    """Return the greedy answer of the model itself, from the whole prompt at once."""
    row = torch.tensor([ids])
    out = served.model.generate(row, do_sample=False, max_new_tokens=count)
    return served.tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)


@pytest.mark.parametrize("method", ["self-extend", "yarn"])
def test_greedy_answers_are_those_of_generate(loaded, method):
    served = loaded[method]
    ids = served.tokenizer(LONG)["input_ids"]
    assert 64 < len(ids) < TARGET - 20
    expected = by_generate(served, ids, 20)
    assert len(set(expected)) > 3
    asked = {"model": "tiny", "prompt": LONG, "max_tokens": 20, "temperature": 0}
    with opened(served) as client:
        status, whole = client.ask("/v1/completions", asked)
        again = client.ask("/v1/completions", asked | {"prompt": ids})[1]
        pieces = client.events("/v1/completions", asked)
    choice = whole["choices"][0]
    assert (status, choice["text"], choice["finish_reason"]) == (200, expected, "length")
    assert again["choices"][0]["text"] == expected
    assert "".join(event["choices"][0]["text"] for event in pieces) == expected
    assert pieces[-1]["choices"][0]["finish_reason"] == "length"
    usage = whole["usage"]
    assert usage["prompt_tokens"] == len(ids)
    assert usage["completion_tokens"] == 20
    assert usage["total_tokens"] == len(ids) + 20


@pytest.mark.parametrize("method", ["self-extend", "yarn"])
def test_a_continued_conversation_is_not_read_again(loaded, method):
    """Each turn is answered as if the model saw it for the first time, from fewer tokens."""
    served = loaded[method]
    messages = [{"role": "user", "content": "the quick brown fox " * 12}]
    asked = {"max_tokens": 12, "temperature": 0}
    read = []
    with opened(served) as client:
        for words in ("jumps over the dog", "over the lazy dog " * 5, "fox"):
            body = asked | {"messages": messages}
            _, answer = client.ask("/v1/chat/completions", body)
            text = answer["choices"][0]["message"]["content"]
            _, counted = client.ask("/tokenize", {"messages": messages})
            assert text == by_generate(served, counted["tokens"], 12)
            usage = answer["usage"]
            assert usage["prompt_tokens"] == counted["count"]
            assert "prompt_tokens_details" not in usage  # it would tell of other clients' prompts
            line = client.wait_for(f"{answer['id']}: ", " kept, ")
            kept = int(line.split(": ")[1].split()[0])
            read.append(counted["count"] - kept)
            assert f" {read[-1]} read, " in line
            messages = [*messages, {"role": "assistant", "content": text}]
            messages.append({"role": "user", "content": words})
    assert counted["count"] > 64
    assert read[1] < 60
    assert sum(read) < 1.4 * counted["count"]
    # Another conversation starts from nothing, and replaces the first one.
    with opened(served) as client:
        for content in ("dog", "a fox", "dog"):
            body = asked | {"messages": [{"role": "user", "content": content}]}
            answer = client.ask("/v1/chat/completions", body)[1]
            ids = client.ask("/tokenize", body)[1]["tokens"]
            assert answer["choices"][0]["message"]["content"] == by_generate(served, ids, 12)


def test_chat_uses_the_template_and_streams_the_whole_answer(client, loaded):
    served = loaded["self-extend"]
    asked = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 15, "temperature": 0}
    status, whole = client.ask("/v1/chat/completions", asked)
    assert status == 200
    prompt = f"<user>{LONG}\n<assistant>"
    ids = served.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    message = whole["choices"][0]["message"]
    assert message == {"role": "assistant", "content": by_generate(served, ids, 15)}
    assert whole["object"] == "chat.completion"
    events = client.events(
        "/v1/chat/completions", asked | {"stream_options": {"include_usage": True}}
    )
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    deltas = [event["choices"][0]["delta"].get("content", "") for event in events[:-1]]
    assert "".join(deltas) == message["content"]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 15


def test_an_answer_ends_before_a_stop_word(client, loaded):
    served = loaded["self-extend"]
    ids = served.tokenizer(LONG)["input_ids"]
    text = by_generate(served, ids, 40)
    stop = text[11:14]  # out of the middle, over the borders of tokens
    asked = {"prompt": LONG, "max_tokens": 40, "temperature": 0, "stop": ["never there", stop]}
    before = text[: text.index(stop)]
    whole = client.ask("/v1/completions", asked)[1]
    choice = whole["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (before, "stop")
    assert whole["usage"]["completion_tokens"] < 40
    pieces = client.events("/v1/completions", asked)
    assert "".join(event["choices"][0]["text"] for event in pieces) == before
    # What only begins a stop word is given after all.
    asked["stop"] = text[-2:] + "never there"
    assert client.ask("/v1/completions", asked)[1]["choices"][0]["text"] == text


def test_a_seed_repeats_a_sample_and_another_one_does_not(client):
    asked = {"prompt": "the fox", "max_tokens": 20, "temperature": 1.0, "seed": 5}
    texts = [
        client.ask("/v1/completions", asked | {"seed": seed})[1]["choices"][0]["text"]
        for seed in (5, 6, 5)
    ]
    assert texts[0] == texts[2] != texts[1]


def test_requests_of_transformers_chat_are_answered(client, loaded):
    """It asks whether the model is loaded, then sends a GenerationConfig as JSON in a string."""
    connection, answer = client.open("/load_model", {"model": "tiny"})
    assert '"status": "ready"' in answer.read().decode()
    connection.close()
    settings = '{"do_sample": false, "max_new_tokens": 7, "num_beams": 3, "temperature": 0.3}'
    body = {"model": "tiny", "messages": MESSAGES, "generation_config": settings}
    events = client.events("/v1/chat/completions", body)
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    ids = client.ask("/tokenize", {"messages": MESSAGES})[1]["tokens"]
    assert text == by_generate(loaded["self-extend"], ids, 7)
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_openais_client_is_served(client):
    openai = pytest.importorskip("openai")
    asked = openai.OpenAI(base_url=f"http://127.0.0.1:{client.port}/v1", api_key="none")
    how = {"model": "tiny", "messages": MESSAGES, "max_tokens": 5, "temperature": 0}
    whole = asked.chat.completions.create(**how)
    stream = asked.chat.completions.create(**how, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == whole.choices[0].message.content
    assert asked.models.retrieve("tiny").max_model_len == TARGET
    with pytest.raises(openai.BadRequestError, match="maximum context length is 256 tokens"):
        asked.completions.create(model="tiny", prompt=LONG * 9)
