"""The assistant's turns in conversations to train on, in templates of many kinds.

In each expected text, brackets enclose what the loss counts; they were set by hand.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizer import make_tokenizer

from ropext.base.errors import InputError
from ropext.evaluation import corpus
from ropext.training import data
from ropext.training.turns import assistant_turns

# The last turn begins with a think block; older turns lose theirs.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% set parts = m.content.split('</think>') %}"
    "{% set thought = parts[0].replace('<think>', '').strip() if parts[1:] else '' %}"
    "{% if loop.last %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}"
    "{{ parts[-1].strip() }}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HEADERS = (
    "<B>{% for m in messages %}<H>{{ m.role }}</H>{{ '\n\n' + m.content | trim }}<E>{% endfor %}"
    "{% if add_generation_prompt %}<H>assistant</H>{{ '\n\n' }}{% endif %}"
)
# No header, and the system's words in the last user turn.
INST = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] "
    "{% if loop.revindex0 < 2 and messages[0].role == 'system' %}"
    "{{ messages[0].content + '\n\n' }}{% endif %}{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[RESULT]{{ m.content }}[/RESULT]"
    "{% elif m.tool_calls %}[CALLS] {{ m.tool_calls | tojson }}</s>"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
# The system's words in the first user turn.
FOLDED = (
    "{% for m in messages if m.role != 'system' %}<turn>{{ 'model' if m.role == 'assistant' else"
    " m.role }}{{ '\n' }}{% if loop.first and messages[0].role == 'system' %}"
    "{{ messages[0].content + '\n' }}{% endif %}{{ m.content | trim }}</turn>{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<turn>model{{ '\n' }}{% endif %}"
)
# Its last turn ends with another mark, and the model writes the channel itself.
CHANNELS = (
    "{% for m in messages %}<start>{{ m.role }}{% if m.role == 'assistant' %}<channel>final"
    "{% endif %}<message>{{ m.content }}{% if loop.last and m.role == 'assistant' and not"
    " add_generation_prompt %}<return>{% else %}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant{% endif %}"
)
# A prompt ends with a thought's beginning, which no rendered turn has.
PROMPTING = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] if m.content }}"
    "{% for call in m.tool_calls %}<call>{{ call.function.name }}({{ call.function.arguments |"
    " tojson }})</call>{% endfor %}{{ '<end>' if m.role == 'assistant' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>{{ '\n' }}{% endif %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '\n' }}{% endfor %}"
PARTS = PLAIN.replace("m.content", "m.content[0].text")
CAPITALS = PLAIN.replace("m.content", "m.content | upper")

CALL = {"type": "function", "function": {"name": "sum", "arguments": {"a": "1", "b": "2"}}}


def talk(*words, first="user"):
    """Return the messages of a conversation in which a user and an assistant take turns."""
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return [
        {"role": role, "content": content}
        for role, content in zip(roles * len(words), words, strict=False)
    ]


SYSTEM = [{"role": "system", "content": "Say yes."}]
YES = talk("Answer yes or no: yes", "yes", "yes?", "yes yes")
CALLING = [
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "It is 3"},
]
CASES = {
    "thinking": (
        THINKING,
        YES,
        "<|im_start|>user\nAnswer yes or no: yes<|im_end|>\n<|im_start|>assistant\n"
        "«yes<|im_end|>\n»<|im_start|>user\nyes?<|im_end|>\n<|im_start|>assistant\n"
        "«<think>\n\n</think>\n\nyes yes<|im_end|>\n»",
    ),
    "thoughts": (
        THINKING,
        talk("so", "<think>so</think>so", "so so", "<think>so so</think>so so"),
        "<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\n«so<|im_end|>\n»"
        "<|im_start|>user\nso so<|im_end|>\n<|im_start|>assistant\n"
        "«<think>\nso so\n</think>\n\nso so<|im_end|>\n»",
    ),
    "ends with a question": (
        THINKING,
        YES[:3],
        "<|im_start|>user\nAnswer yes or no: yes<|im_end|>\n<|im_start|>assistant\n"
        "«yes<|im_end|>\n»<|im_start|>user\nyes?<|im_end|>\n",
    ),
    "marks in the words": (
        THINKING,
        talk("a<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n", "b", "b", "c"),
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_end|>\n"
        "<|im_start|>assistant\n«b<|im_end|>\n»<|im_start|>user\nb<|im_end|>\n"
        "<|im_start|>assistant\n«<think>\n\n</think>\n\nc<|im_end|>\n»",
    ),
    "empty words": (
        THINKING,
        talk("a", "", "", "<think>b</think>"),
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n«<|im_end|>\n»"
        "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"
        "«<think>\nb\n</think>\n\n<|im_end|>\n»",
    ),
    "headers": (
        HEADERS,
        SYSTEM + talk("yes", " yes ", "bye yes", "yes"),
        "<B><H>system</H>\n\nSay yes.<E><H>user</H>\n\nyes<E><H>assistant</H>\n\n«yes<E>»"
        "<H>user</H>\n\nbye yes<E><H>assistant</H>\n\n«yes<E>»",
    ),
    "answers first": (
        HEADERS,
        talk("hello", "hello", "hello", first="assistant"),
        "<B><H>assistant</H>\n\n«hello<E>»<H>user</H>\n\nhello<E><H>assistant</H>\n\n«hello<E>»",
    ),
    "two answers in a row": (
        HEADERS,
        [*YES[:2], *YES[1:2]],
        "<B><H>user</H>\n\nAnswer yes or no: yes<E><H>assistant</H>\n\n«yes<E>»"
        "<H>assistant</H>\n\n«yes<E>»",
    ),
    "no header": (
        INST,
        SYSTEM + YES,
        "<s>[INST] Answer yes or no: yes[/INST] «yes</s>»"
        "[INST] Say yes.\n\nyes?[/INST] «yes yes</s>»",
    ),
    "no header, tools": (
        INST,
        CALLING,
        '<s>[INST] 1 + 2?[/INST]«[CALLS] [{"type": "function", "function": {"name": "sum", '
        '"arguments": {"a": "1", "b": "2"}}}]</s>»[RESULT]3[/RESULT] «It is 3</s>»',
    ),
    "system in the first turn": (
        FOLDED,
        SYSTEM + YES,
        "<turn>user\nSay yes.\nAnswer yes or no: yes</turn>\n<turn>model\n«yes</turn>\n»"
        "<turn>user\nyes?</turn>\n<turn>model\n«yes yes</turn>\n»",
    ),
    "another end of the last turn": (
        CHANNELS,
        YES,
        "<start>user<message>Answer yes or no: yes<end><start>assistant"
        "«<channel>final<message>yes<end>»<start>user<message>yes?<end><start>assistant"
        "«<channel>final<message>yes yes<return>»",
    ),
    "a prompt with more": (
        PROMPTING,
        talk("yes", "<think>no</think>yes", "no", "yes"),
        "<user>yes<assistant>«yes<end>»<user>no<assistant>«yes<end>»",
    ),
    "a prompt with more, tools": (
        PROMPTING,
        CALLING,
        '<user>1 + 2?<assistant><«call>sum({"a": "1", "b": "2"})</call><end>»<tool>3<assistant>'
        "«It is 3<end>»",
    ),
    "no prompt": (
        PLAIN,
        YES,
        "user: Answer yes or no: yes\nassistant: «yes\n»user: yes?\nassistant: «yes yes\n»",
    ),
    "capitals": (
        CAPITALS,
        YES,
        "user: ANSWER YES OR NO: YES\nassistant: «YES\n»user: YES?\nassistant: «YES YES\n»",
    ),
    "parts": (
        PARTS,
        [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in YES[:2]],
        "user: Answer yes or no: yes\nassistant: «yes\n»",
    ),
}


@pytest.fixture(scope="module")
def encoder():
    return corpus.DocumentEncoder(make_tokenizer())


def bracketed(encoder, template, messages):
    """Return the rendered text of a conversation with brackets around the assistant's turns."""
    encoder.tokenizer.chat_template = template
    raw = corpus.RawDocument("chat:1", messages)
    text = encoder.text_of(raw)
    parts, done = [], 0
    for begin, end in assistant_turns(raw, text, encoder):
        parts += [text[done:begin], "«", text[begin:end], "»"]
        done = end
    return "".join([*parts, text[done:]])


@pytest.mark.parametrize("case", CASES)
def test_the_turns_are_where_they_were_marked_by_hand(encoder, case):
    template, messages, expected = CASES[case]
    found = bracketed(encoder, template, messages)
    assert found == expected


PIECES = st.sampled_from(
    [
        "yes",
        "no",
        " ",
        "<|im_end|>\n",
        "<|im_start|>assistant\n",
        "<|im_start|>user\n",
        "1000000000",
    ]
)
WORDS = st.lists(PIECES, max_size=4).map("".join)


@settings(max_examples=40, deadline=None)
@given(words=st.lists(WORDS, min_size=1, max_size=5))
def test_no_word_of_a_user_counts_whatever_the_words_are(encoder, words):
    messages = talk(*words)
    text, scored = "", []
    for number, message in enumerate(messages):
        text += f"<|im_start|>{message['role']}\n"
        begin = len(text)
        if message["role"] == "user":
            text += message["content"] + "<|im_end|>\n"
            continue
        if number == len(messages) - 1:
            text += "<think>\n\n</think>\n\n"
        text += message["content"].strip() + "<|im_end|>\n"
        scored.append((begin, len(text)))
    encoder.tokenizer.chat_template = THINKING
    raw = corpus.RawDocument("chat:1", messages)
    assert encoder.text_of(raw) == text
    assert list(assistant_turns(raw, text, encoder)) == scored


@pytest.mark.parametrize(
    ("template", "turn"),
    [
        ("{{ messages[0].content }}", 2),  # shows no answer
        (PLAIN + PLAIN, 2),  # repeats the whole conversation
        ("{{ messages[1].content }} answers {{ messages[0].content }}", 2),
        (PLAIN + "assistant: ", 2),  # opens an answer after every conversation
    ],
)
def test_a_template_that_hides_repeats_or_moves_a_turn_is_refused(encoder, template, turn):
    with pytest.raises(InputError, match=rf"chat:1: the chat template renders turn {turn} so"):
        bracketed(encoder, template, YES)


MARKED = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}END{% endgeneration %}{% else %}{{ m.content }}{% endif %}END{% endfor %}"
)
# The marks divide tokens, and leave out a turn.
PARTLY = (
    "{% for m in messages %}{{ m.role }}: {% if loop.last %}{{ m.content[:2] }}{%- generation -%}"
    "{{ m.content[2:-2] }}{% endgeneration %}{{ m.content[-2:] }}{% else %}{{ m.content }}"
    "{% endif %}END{% endfor %}"
)


@pytest.mark.parametrize("template", [MARKED, PARTLY])
def test_a_template_that_marks_its_turns_scores_the_tokens_that_transformers_scores(
    encoder, template
):
    encoder.tokenizer.chat_template = template
    words = "quick 漢字 étude brown"
    messages = talk(f"say {words}", words, words, words)
    raw = corpus.RawDocument("chat:1", messages)
    division = data.Division(wanted_tokens=1000, row=1, target=50, judging=0)
    (document,) = data.divide_training_data([raw], encoder, division).documents
    stock = encoder.tokenizer.apply_chat_template(
        messages, return_assistant_tokens_mask=True, return_dict=True
    )
    assert document.ids.tolist() == [encoder.bos, *stock["input_ids"]]
    assert document.mask().astype(int).tolist() == [0, *stock["assistant_masks"]]
    scored = encoder.tokenizer.decode(document.ids[document.mask()])
    assert scored == (f" {words}END" * 2 if template == MARKED else f" {words}")
