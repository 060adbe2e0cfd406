"""OpenAI's own client sends its requests and reads the answers."""

from dataclasses import replace

import pytest
from serving.conftest import opened

LONG = "the quick brown fox jumps over the lazy dog "
GREEDY = {"model": "tiny", "temperature": 0}
ASK = GREEDY | {"prompt": "the fox", "max_tokens": 3}


@pytest.fixture
def openai(client):
    """Return OpenAI's client of the server."""
    return client_of(client)


def client_of(client, key="none"):
    package = pytest.importorskip("openai")
    url = f"http://127.0.0.1:{client.port}/v1"
    return package.OpenAI(base_url=url, api_key=key, max_retries=0)


@pytest.mark.parametrize("as_ids", [False, True])
def test_a_list_of_prompts_gets_an_answer_to_each(openai, loaded, as_ids):
    tokenizer = loaded["self-extend"].tokenizer
    prompts = [LONG, "fox", LONG * 3]
    given = [tokenizer(prompt)["input_ids"] for prompt in prompts] if as_ids else prompts
    how = GREEDY | {"max_tokens": 9}
    alone = [openai.completions.create(prompt=prompt, **how) for prompt in prompts]
    wanted = [answer.choices[0].text for answer in alone]
    assert len(set(wanted)) == 3
    whole = openai.completions.create(prompt=given, **how)
    assert [(choice.index, choice.text) for choice in whole.choices] == list(enumerate(wanted))
    assert whole.usage.prompt_tokens == sum(answer.usage.prompt_tokens for answer in alone)
    assert whole.usage.completion_tokens == 27
    texts, reasons = ["", "", ""], {}
    for event in openai.completions.create(prompt=given, stream=True, **how):
        (choice,) = event.choices
        texts[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason
    assert texts == wanted
    assert reasons == dict.fromkeys(range(3), "length")


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
TOOLS_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }};{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({% for key, value in "
    "c.function.arguments.items() %}{{ key }}={{ value }}{% endfor %}){% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def templated(loaded, monkeypatch):
    """Give the model another chat template."""
    tokenizer = loaded["self-extend"].tokenizer
    return lambda template: monkeypatch.setattr(tokenizer, "chat_template", template)


@pytest.fixture
def same(openai, loaded):
    """Check that messages are read as a text: its tokens are counted, and its answer is given."""
    tokenizer = loaded["self-extend"].tokenizer

    def check(messages, text, **more):
        answer = openai.chat.completions.create(messages=messages, max_tokens=5, **GREEDY, **more)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        wanted = openai.completions.create(prompt=ids, max_tokens=5, **GREEDY)
        assert answer.usage.prompt_tokens == len(ids)
        assert answer.choices[0].message.content == wanted.choices[0].text

    return check


def refused(openai, messages, **more):
    """Return the sentence of a refusal."""
    package = pytest.importorskip("openai")
    with pytest.raises(package.BadRequestError) as caught:
        openai.chat.completions.create(messages=messages, max_tokens=3, **GREEDY, **more)
    return caught.value.body["message"]


def test_an_answer_can_be_sent_back_with_its_nulls(openai, same):
    messages = [{"role": "user", "content": "the fox"}]
    answer = openai.chat.completions.create(messages=messages, max_tokens=4, **GREEDY)
    sent = answer.choices[0].message.model_dump()
    assert sent["tool_calls"] is sent["audio"] is sent["refusal"] is None
    text = f"<user>the fox\n<assistant>{sent['content']}\n<user>dog\n<assistant>"
    same([*messages, sent, {"role": "user", "content": "dog"}], text)


@pytest.mark.parametrize("arguments", ["", "{}"])
def test_a_tool_call_without_arguments_is_one_with_none(templated, same, arguments):
    templated(TOOLS_TEMPLATE)
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "fox"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "dog"},
    ]
    same(messages, "<user>fox;<assistant>look();<tool>dog;<assistant>")


def test_the_text_next_to_a_tool_call_and_thoughts_reach_the_template(templated, same):
    templated(TOOLS_TEMPLATE.replace("{{ m.content }}", "{{ m.reasoning_content }}{{ m.content }}"))
    call = {"id": "1", "function": {"name": "look", "arguments": '{"at": "dog"}'}}
    message = {"role": "assistant", "content": "the ", "reasoning_content": "fox "}
    messages = [{"role": "user", "content": "fox"}, message | {"tool_calls": [call]}]
    same(messages, "<user>fox;<assistant>fox the look(at=dog);<assistant>")


def test_tools_reach_the_template_and_are_left_out_on_request(templated, same):
    templated(TOOLS_TEMPLATE)
    messages = [{"role": "user", "content": "fox"}]
    listed = (
        '[{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]'
    )
    same(messages, f"{listed};<user>fox;<assistant>", tools=[TOOL])
    same(messages, "<user>fox;<assistant>", tools=[TOOL], tool_choice="none")


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_developer_is_a_system_to_a_template_that_does_not_know_the_role(same, role):
    messages = [{"role": role, "content": "dog"}, {"role": "user", "content": "fox"}]
    same(messages, "<system>dog\n<user>fox\n<assistant>")


def test_a_template_that_knows_developers_gets_them(templated, same):
    templated("{% for m in messages %}{{ m.role == 'developer' }}{{ m.content }}\n{% endfor %}")
    messages = [{"role": "developer", "content": "dog"}, {"role": "user", "content": "fox"}]
    same(messages, "Truedog\nFalsefox\n")


def test_parts_of_text_are_joined(same):
    parts = [{"type": "text", "text": "the"}, {"type": "text", "text": "fox"}]
    same([{"role": "user", "content": parts}], "<user>the fox\n<assistant>")


USER = {"role": "user", "content": "fox"}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
SOUND = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (
            USER | {"content": [{"type": "text", "text": "see"}, IMAGE]},
            "messages[1].content has a part of type image_url; ropext serve reads only text",
        ),
        (
            USER | {"content": [SOUND]},
            "messages[1].content has a part of type input_audio; ropext serve reads only text",
        ),
        (
            {"role": "assistant", "audio": {"id": "a"}},
            "messages[1] has the key audio: ropext serve reads only text",
        ),
        (
            {"role": "assistant", "function_call": {"name": "look", "arguments": ""}},
            "messages[1] has the key function_call: send tool_calls",
        ),
        (USER | {"content": 7}, "messages[1].content must be a text, or parts of type text"),
        (
            CALLING | {"tool_calls": [{"id": "1", "custom": {"name": "look", "input": "x"}}]},
            "messages[1].tool_calls[0] must be of type function, with a function that has a name",
        ),
        (CALLING, "the chat template of tiny drops the tool calls of messages[1]"),
    ],
)
def test_a_body_that_the_server_cannot_read_is_refused_in_a_sentence(openai, message, sentence):
    assert refused(openai, [USER, message]) == sentence


def test_tools_are_refused_if_the_template_has_no_place_for_them(openai):
    sentence = "the chat template of tiny has no place for tools; leave them out"
    assert refused(openai, [USER], tools=[TOOL]) == sentence


def test_content_that_a_template_drops_is_refused(openai, templated):
    """As Llama 3.1's drops the text next to a tool call, and DeepSeek's a system message."""
    written = "<{{ m.role }}>{{ m.tool_calls[0].function.name if m.tool_calls else m.content }}\n"
    templated(
        "{% for m in messages %}{% if m.role != 'system' %}" + written + "{% endif %}{% endfor %}"
    )
    assert refused(openai, [USER, CALLING | {"content": "I look"}]) == (
        "the chat template of tiny drops the content of messages[1] "
        "(role assistant, next to its tool calls); leave it out"
    )
    assert refused(openai, [{"role": "system", "content": "dog"}, USER]) == (
        "the chat template of tiny drops the content of messages[0] (role system); leave it out"
    )
    blank = CALLING | {"content": " \n"}
    openai.chat.completions.create(messages=[USER, blank], max_tokens=3, **GREEDY)


def test_a_model_answers_to_each_of_its_names_and_to_no_other(loaded):
    package = pytest.importorskip("openai")
    served = replace(loaded["yarn"], names=("gpt-3.5-turbo", "other/name"))
    with opened(served) as client:
        openai = client_of(client)
        assert [model.id for model in openai.models.list()] == ["gpt-3.5-turbo", "other/name"]
        for name in served.names:
            assert openai.models.retrieve(name).id == name
            answer = openai.chat.completions.create(model=name, messages=[USER], max_tokens=3)
            assert answer.model == "gpt-3.5-turbo"
        with pytest.raises(package.NotFoundError) as caught:
            openai.completions.create(model="tiny", prompt="x")
        assert caught.value.code == "model_not_found"
        assert "this server has 'gpt-3.5-turbo' and 'other/name'" in caught.value.body["message"]


def test_unknown_paths_give_404_in_openais_form(openai):
    package = pytest.importorskip("openai")
    for ask, path in (
        (lambda: openai.responses.create(model="tiny", input="x"), "responses"),
        (lambda: openai.embeddings.create(model="tiny", input="x"), "embeddings"),
        (lambda: openai.post("/completions/", body=ASK, cast_to=object), "completions/"),
    ):
        with pytest.raises(package.NotFoundError) as caught:
            ask()
        assert caught.value.type == "invalid_request_error"
        assert f"/v1/{path}" in caught.value.body["message"]
        assert "/v1/chat/completions and /v1/completions" in caught.value.body["message"]
    with pytest.raises(package.APIStatusError) as caught:
        openai.get("/chat/completions", cast_to=object)
    assert (caught.value.status_code, caught.value.response.headers["allow"]) == (405, "POST")
    assert "GET /v1/chat/completions" in caught.value.body["message"]
