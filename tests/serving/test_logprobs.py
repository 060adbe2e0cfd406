"""`echo` and `logprobs` of /v1/completions, asked by OpenAI's client, next to whole logits."""

from dataclasses import replace

import pytest
import torch
from serving.conftest import CONTEXT, TARGET, opened
from serving.test_openai_client import client_of
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from ropext.options.evaluate import DocumentOptions
from ropext.serving import logprobs
from ropext.serving.questions import completion_requests
from ropext.serving.served import ServeOptions, load_served_model

LONG = "the quick brown fox jumps over the lazy dog " * 12
WORDS = "caf\u00e9 \u4e16\u754c \U0001f642 the fox"  # characters of one to four bytes
MANY = torch.randint(2, 300, (200,), generator=torch.Generator().manual_seed(5)).tolist()
GREEDY = {"model": "tiny", "temperature": 0}
ECHO = GREEDY | {"echo": True, "max_tokens": 0, "logprobs": 5}


@pytest.fixture(params=["self-extend", "yarn"])
def served(request, loaded):
    return loaded[request.param]


@pytest.fixture
def openai(served):
    with opened(served) as client:
        yield client_of(client)


def rows_of(model, ids):
    """Return the log-probabilities after each token, from one literal forward pass."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)


def assert_right(told, rows, ids):
    """Compare the field `logprobs` of token ids with the rows of a whole forward pass."""
    assert told.token_logprobs[0] is None
    assert told.top_logprobs[0] is None
    wanted = rows[torch.arange(len(ids) - 1), ids[1:]]
    assert told.token_logprobs[1:] == pytest.approx(wanted.tolist(), abs=2e-5)
    for top, row, token in zip(told.top_logprobs[1:], rows[:-1], ids[1:], strict=True):
        best = row.topk(5)
        expected = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        expected[token] = row[token].item()
        found = {int(name.removeprefix("token_id:")): value for name, value in top.items()}
        assert found == pytest.approx(expected, abs=2e-5)


AS_IDS = {"extra_body": {"return_tokens_as_token_ids": True}}


@pytest.mark.parametrize("prompt", [LONG, MANY, [7]], ids=["text", "ids", "one"])
def test_echo_has_the_numbers_of_one_forward_pass(openai, served, prompt):
    ids = served.tokenizer(prompt)["input_ids"] if prompt is LONG else prompt
    assert len(ids) == 1 or CONTEXT < len(ids) < TARGET
    (choice,) = openai.completions.create(prompt=prompt, **ECHO, **AS_IDS).choices
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in ids]
    assert choice.finish_reason == "length"
    assert_right(choice.logprobs, rows_of(served.model, ids), ids)


def test_a_long_prompt_is_read_in_pieces_of_few_logits(served, monkeypatch):
    monkeypatch.setattr(logprobs, "SLICE_BYTES", 1)
    heights = []
    with opened(replace(served, piece=48)) as client:
        head = served.model.get_output_embeddings()
        hook = head.register_forward_hook(lambda *call: heights.append(call[2].shape[1]))
        try:
            answer = client_of(client).completions.create(prompt=MANY, **ECHO, **AS_IDS)
        finally:
            hook.remove()
    assert_right(answer.choices[0].logprobs, rows_of(served.model, MANY), MANY)
    assert heights.count(16) >= len(MANY) // 16
    assert max(heights) == 48  # the check of the model, on a text of 48 tokens


def test_the_answer_has_the_numbers_that_its_echo_has(openai, served):
    asked = GREEDY | {"logprobs": 2}
    (choice,) = openai.completions.create(prompt=MANY, max_tokens=7, **asked, **AS_IDS).choices
    told = choice.logprobs
    ids = MANY + [int(token.removeprefix("token_id:")) for token in told.tokens]
    rows = rows_of(served.model, ids)[len(MANY) - 1 : -1]
    best = [row.topk(2).values.tolist() for row in rows]
    assert told.token_logprobs == pytest.approx([values[0] for values in best], abs=2e-5)
    assert [sorted(top.values(), reverse=True) for top in told.top_logprobs] == [
        pytest.approx(values, abs=2e-5) for values in best
    ]
    assert told.text_offset[0] == 0
    (echoed,) = openai.completions.create(prompt=ids, **ECHO).choices
    assert echoed.logprobs.token_logprobs[-7:] == pytest.approx(told.token_logprobs, abs=2e-5)
    # The likeliest token is the greedy one by an exact comparison, as lm-eval makes it.
    assert [max(top.values()) for top in told.top_logprobs] == told.token_logprobs


def test_echo_of_one_more_token(openai):
    asked = ECHO | {"max_tokens": 1, "logprobs": 1}
    answer = openai.completions.create(prompt=MANY, **asked)
    told = answer.choices[0].logprobs
    assert len(told.tokens) == len(told.token_logprobs) == len(MANY) + 1
    assert answer.usage.completion_tokens == 1
    assert told.token_logprobs[-1] == max(told.top_logprobs[-1].values())
    bare = openai.completions.create(prompt=MANY, max_tokens=1, **GREEDY).choices[0].text
    plain = openai.completions.create(prompt=MANY, echo=True, max_tokens=1, **GREEDY).choices[0]
    assert plain.text == answer.choices[0].text
    assert plain.text.endswith(bare)
    assert plain.logprobs is None


@pytest.mark.parametrize("prompt", [LONG, WORDS])
def test_text_offsets_are_positions_in_the_text(openai, prompt):
    (choice,) = openai.completions.create(prompt=prompt, **ECHO).choices
    told = choice.logprobs
    assert choice.text == prompt
    assert told.tokens[0] == "<s>"  # a special token is no text
    ends = [*told.text_offset[1:], len(prompt)]
    pieces = [prompt[a:b] for a, b in zip(told.text_offset, ends, strict=True)]
    assert "".join(pieces) == prompt
    whole = [(piece, token) for piece, token in zip(pieces, told.tokens, strict=True)]
    assert all(piece == token for piece, token in whole[1:] if "\ufffd" not in token)
    assert ("\U0001f642", "\ufffd") in whole or prompt == LONG


def test_tokens_that_are_no_text_are_counted_too(openai):
    """Bytes that begin no character, and special tokens: 100 of each."""
    tokens = [MANY[0], *[200] * 100, *[0] * 100, 100]
    (choice,) = openai.completions.create(prompt=tokens, **ECHO).choices
    assert len(choice.logprobs.text_offset) == len(tokens)
    assert choice.logprobs.text_offset == sorted(choice.logprobs.text_offset)


def test_logprobs_of_several_prompts_and_of_a_stream_equal_single_ones(openai):
    asked = ECHO | {"max_tokens": 3}
    alone = [openai.completions.create(prompt=p, **asked).choices[0] for p in (MANY, [5, 6])]
    both = openai.completions.create(prompt=[MANY, [5, 6]], **asked)
    assert [c.text for c in both.choices] == [c.text for c in alone]
    for told, single in zip(both.choices, alone, strict=True):
        assert told.logprobs.tokens == single.logprobs.tokens
        expected = single.logprobs.token_logprobs[1:]
        assert told.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=2e-5)
    events = list(openai.completions.create(prompt=MANY, stream=True, **asked))
    assert "".join(event.choices[0].text for event in events) == alone[0].text
    told = [event.choices[0].logprobs for event in events]
    assert told[:-1] == [None] * (len(told) - 1)
    assert told[-1].tokens == alone[0].logprobs.tokens


def test_zero_candidates_list_the_token_alone(openai):
    asked = ECHO | {"logprobs": 0}
    told = openai.completions.create(prompt=[5, 6, 7], **asked).choices[0].logprobs
    assert [list(top.values()) for top in told.top_logprobs[1:]] == [
        [value] for value in told.token_logprobs[1:]
    ]


def test_a_prompt_may_fill_the_context_if_nothing_is_written(openai):
    (choice,) = openai.completions.create(prompt=[5] * TARGET, **ECHO).choices
    assert len(choice.logprobs.tokens) == TARGET
    package = pytest.importorskip("openai")
    for more in ({"max_tokens": 1}, {"prompt": [5] * (TARGET + 1)}):
        with pytest.raises(package.BadRequestError, match="maximum context length is 256 tokens"):
            openai.completions.create(**(ECHO | {"prompt": [5] * TARGET} | more))


@pytest.mark.parametrize("nothing", [0, 0.0, False, None])
def test_a_chat_has_no_logprobs_whichever_nothing_it_sends(served, nothing):
    body = {"messages": [{"role": "user", "content": "hi"}], "logprobs": nothing, "echo": False}
    (question,) = completion_requests(served, body, "chat", is_chat=True)
    assert (question.candidates, question.echo, question.scored) == (None, None, 0)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"logprobs": 6}, "logprobs must be a whole number from 0 to 5"),
        ({"logprobs": True}, "logprobs must be a whole number from 0 to 5"),
        (
            {"prompt": [[5] * 255] * 515, "logprobs": 1, "echo": True, "max_tokens": 1},
            "logprobs of 131,840 tokens, more than 131,072; send fewer prompts",
        ),
        ({"max_tokens": 0}, "max_tokens must be a whole number from 1 to"),
    ],
)
def test_a_request_for_wrong_logprobs_is_refused(openai, body, words):
    package = pytest.importorskip("openai")
    with pytest.raises(package.BadRequestError, match=words):
        openai.completions.create(**({"model": "tiny", "prompt": "x"} | body))


def test_frequencies_that_follow_the_length_are_those_of_the_prompt(directory, tmp_path):
    """A model whose cache cannot be read on: long prompts have other frequencies."""
    model = LlamaForCausalLM.from_pretrained(directory)
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0]}
    model.config.rope_parameters = rope | {"original_max_position_embeddings": CONTEXT}
    model.config.max_position_embeddings = TARGET
    model.save_pretrained(tmp_path / "longrope")
    for file in directory.glob("tokenizer*"):
        (tmp_path / "longrope" / file.name).write_bytes(file.read_bytes())
    served = load_served_model(
        ServeOptions(str(tmp_path / "longrope"), "tiny"), DocumentOptions(device="cpu")
    )
    assert not served.continues
    with opened(served) as client:
        openai = client_of(client)
        for prompt in (MANY, MANY[:60]):
            told = openai.completions.create(prompt=prompt, **ECHO, **AS_IDS).choices[0].logprobs
            stock = AutoModelForCausalLM.from_pretrained(tmp_path / "longrope").eval()
            assert_right(told, rows_of(stock, prompt), prompt)
