"""Which documents train, which are held out, what the loss of a conversation is taken on."""

import numpy as np
import pytest
from transformers import AutoTokenizer

from ropext import corpus
from ropext.errors import InputError
from ropext.training import data

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}. {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant. {% endif %}"
)
# Shows the last turn only, so that a shorter conversation is no beginning of the whole one.
FORGETFUL = (
    "{% for m in messages %}{% if loop.last %}NOW {% endif %}{{ m['content'] }} {% endfor %}"
)


@pytest.fixture(scope="module")
def encoder(base):
    return corpus.DocumentEncoder(AutoTokenizer.from_pretrained(base))


def texts(count, length=50):
    letters = "abcdefghijklmnopqrstuvwxyz"
    return [
        corpus.RawDocument(f"d{i}", letters[i // 26 % 26] + letters[i % 26] * (length - 2))
        for i in range(count)
    ]


def read(raw, encoder, **changes):
    options = {"wanted_tokens": 10**9, "least": 10, "hold_out": 50, "count_held": 8}
    return data.read(raw, encoder, **options | changes)


def ids(document):
    return tuple(document.ids.tolist())


def test_a_tenth_is_held_out_and_never_trained_on(encoder):
    raw = texts(200)
    found = read(raw, encoder, count_held=100)
    # 200 draws of 1 in 10: 20 expected, 4.2 the standard deviation.
    assert 8 <= len(found.held_out) <= 32
    assert len(found.documents) + len(found.held_out) == 200
    held = {ids(encoder.document(d.name, d.content, 99)) for d in found.held_out}
    assert not held & {ids(document) for document in found.documents}


def test_reading_ends_when_there_is_enough_to_train_and_to_evaluate_on(encoder):
    taken = []

    def stream():
        for own in texts(600):
            taken.append(own)
            yield own

    found = read(stream(), encoder, wanted_tokens=1000, count_held=8)
    assert sum(len(d) for d in found.documents) >= 1000
    assert len(found.held_out) == 8
    assert len(taken) < 60


def test_only_whole_rows_count_as_enough(encoder):
    # Each has 51 tokens with its start: one row of 40. Six rows take six of them, not five.
    assert len(read(texts(30), encoder, wanted_tokens=240, least=40, count_held=0).documents) == 6


def test_where_none_is_drawn_the_last_long_document_is_held_out(encoder):
    raw = [d for d in texts(200) if int(encoder.key(d.content)[:8], 16) % 10][:3]
    found = read([*raw, corpus.RawDocument("short", "abcabcabcabc")], encoder)
    assert [d.name for d in found.held_out] == [raw[2].name]
    assert len(found.documents) == 3
    assert not read(raw[:1], encoder).held_out


def test_the_same_text_twice_is_read_once(encoder):
    raw = texts(3)
    assert len(read([*raw, *raw], encoder, count_held=0).documents) == 3


def test_the_loss_of_a_conversation_is_on_the_assistants_turns(base, encoder):
    encoder.tokenizer.chat_template = TEMPLATE
    messages = [
        {"role": "user", "content": "hello there"},
        {"role": "assistant", "content": "good day"},
        {"role": "user", "content": "and now"},
        {"role": "assistant", "content": "farewell"},
    ]
    found = read([corpus.RawDocument("chat", messages)], encoder, count_held=0, least=1)
    (document,) = found.documents
    scored = encoder.tokenizer.decode(document.ids[document.mask()])
    assert scored == "good day</s>farewell</s>"
    whole = encoder.tokenizer.decode(document.ids)
    assert whole.startswith("<s>user. hello there</s>assistant. good day</s>user.")


def test_a_template_that_renders_beginnings_otherwise_is_searched_for_the_turns(encoder):
    encoder.tokenizer.chat_template = FORGETFUL
    messages = [
        {"role": "assistant", "content": "good day"},
        {"role": "user", "content": "good day too"},
        {"role": "assistant", "content": "good day again"},
    ]
    raw = corpus.RawDocument("chat", messages)
    text = encoder.text_of(raw)
    turns = [text[a:b] for a, b in data.assistant_turns(raw, text, encoder.tokenizer)]
    assert turns == ["good day", "good day again"]
    encoder.tokenizer.chat_template = "{{ messages[0]['content'] }}"
    text = encoder.text_of(raw)
    with pytest.raises(InputError, match="turn 3 so that it cannot be found"):
        list(data.assistant_turns(raw, text, encoder.tokenizer))


def test_the_digest_tells_ids_and_what_is_scored(encoder):
    one = data.Data((data.Document(np.arange(9)),), (), 1)
    two = data.Data((data.Document(np.arange(9), np.arange(9) > 0),), (), 1)
    three = data.Data((data.Document(np.arange(1, 10)),), (), 1)
    assert len({one.digest(), two.digest(), three.digest()}) == 3
