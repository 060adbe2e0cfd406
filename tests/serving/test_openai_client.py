"""What OpenAI's own client sends, and what it reads."""

import pytest

LONG = "the quick brown fox jumps over the lazy dog "
GREEDY = {"model": "tiny", "temperature": 0}


@pytest.fixture
def openai(client):
    """OpenAI's client of the server."""
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
