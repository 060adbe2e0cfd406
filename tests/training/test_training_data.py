"""The documents that train, the held-out documents, and the tokens of a conversation that the loss
counts."""

import json

import numpy as np
import pytest
from transformers import AutoTokenizer

from ropext.base.errors import InputError
from ropext.evaluation import corpus
from ropext.options.evaluate import DocumentOptions
from ropext.options.training import Finetune
from ropext.training import data

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}. {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant. {% endif %}"
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
    options = {"wanted_tokens": 1000, "row": 10, "target": 50, "judging": 8}
    return data.divide_training_data(raw, encoder, data.Division(**options | changes))


def ids(document):
    return tuple(document.ids.tolist())


def held_out(raw, encoder, **changes):
    return {own.name for own in read(raw, encoder, **changes).held_out}


def test_a_tenth_is_held_out_and_all_others_are_trained_on(encoder):
    found = read(texts(600), encoder)
    # 600 draws of 1 in 10: 60 expected, 7.3 the standard deviation.
    assert 40 <= len(found.held_out) <= 80
    assert len(found.documents) + len(found.held_out) == 600
    held = {ids(document) for document in found.held_out}
    assert not held & {ids(document) for document in found.documents}


@pytest.mark.parametrize(
    ("count", "held"), [(1, 0), (3, 0), (4, 1), (10, 2), (20, 5), (32, 8), (40, 8), (50, 8)]
)
def test_held_out_documents_are_at_least_eight_and_at_most_a_quarter(encoder, count, held):
    for seed in range(3):
        seeded = corpus.DocumentEncoder(encoder.tokenizer, seed=seed)
        found = read(texts(count), seeded)
        drawn = max(held, sum(own.key < data.DRAWN for own in found.held_out))
        assert held <= len(found.held_out) <= max(drawn, count // 4)
        assert len(found.held_out) <= count // 4
        assert len(found.documents) + len(found.held_out) == count


@pytest.mark.parametrize("count", [10, 200])
def test_the_division_follows_neither_steps_nor_order_nor_names(encoder, count):
    raw = texts(count)
    first = held_out(raw, encoder)
    assert first == held_out(raw[::-1], encoder)
    for changes in ({"wanted_tokens": 1}, {"wanted_tokens": 10**6}, {"judging": 1}, {"row": 30}):
        assert first == held_out(raw, encoder, **changes), changes
    renamed = [corpus.RawDocument(f"b/{own.name}", own.content) for own in raw]
    assert {f"b/{name}" for name in first} == held_out(renamed, encoder)
    assert first != held_out(raw, corpus.DocumentEncoder(encoder.tokenizer, seed=1))


def test_more_documents_remove_none_from_the_held_out_part(encoder):
    raw = texts(600)
    assert held_out(raw[:300], encoder) < held_out(raw, encoder)


def test_documents_that_do_not_reach_the_target_train_and_judge_nothing(encoder):
    short = [corpus.RawDocument(f"s{own.name}", own.content[:30]) for own in texts(300)]
    found = read([*short, *texts(100)], encoder)
    assert 8 <= len(found.held_out) <= 20
    assert len(found.documents) == 400 - len(found.held_out)
    assert {len(own) for own in found.held_out} == {50}
    joined = read(short, encoder, joined=True)
    assert 15 <= len(joined.held_out) <= 50


def test_none_is_held_out_if_other_documents_judge(encoder):
    found = read(texts(40), encoder, judging=0)
    assert (len(found.documents), found.held_out) == (40, ())


def test_the_order_of_a_large_file_does_not_change_the_kept_documents(encoder, monkeypatch):
    monkeypatch.setattr(corpus, "MOST_TOKENS", 1000)
    raw = texts(400)
    found, again = read(raw, encoder), read(raw[::-1], encoder)
    assert len(found.documents) == 20  # of 50 tokens each
    assert {ids(own) for own in found.documents} == {ids(own) for own in again.documents}
    assert [own.name for own in found.held_out] == [own.name for own in again.held_out]
    held = {ids(document) for document in found.held_out}
    assert not held & {ids(document) for document in found.documents}


def test_a_stream_is_read_until_there_is_enough_for_both_parts(encoder):
    def read_from(raw, **changes):
        taken = []
        stream = (taken.append(own) or own for own in raw)
        return read(stream, encoder, streamed=True, **changes), len(taken)

    few, least = read_from(texts(600), wanted_tokens=500)
    many, most = read_from(texts(600), wanted_tokens=10_000)
    assert len(few.held_out) == 8
    assert [own.name for own in many.held_out] == [own.name for own in few.held_out]
    assert sum(len(d) for d in few.documents) >= 500
    assert least < most < 400
    held = {ids(document) for document in many.held_out}
    assert not held & {ids(document) for document in many.documents}


def test_the_same_text_twice_is_read_once(encoder):
    raw = texts(3)
    spaced = [corpus.RawDocument("s", f" {own.content[:20]}\r\n{own.content[20:]}") for own in raw]
    assert len(read([*raw, *raw, *spaced], encoder, judging=0).documents) == 3


def test_the_loss_of_a_conversation_is_on_the_assistants_turns(base, encoder):
    encoder.tokenizer.chat_template = TEMPLATE
    messages = [
        {"role": "user", "content": "hello there"},
        {"role": "assistant", "content": "good day"},
        {"role": "user", "content": "and now"},
        {"role": "assistant", "content": "farewell"},
    ]
    found = read([corpus.RawDocument("chat", messages)], encoder, judging=0, row=1)
    (document,) = found.documents
    scored = encoder.tokenizer.decode(document.ids[document.mask()])
    assert scored == "good day</s>farewell</s>"
    whole = encoder.tokenizer.decode(document.ids)
    assert whole.startswith("<s>user. hello there</s>assistant. good day</s>user.")


def test_the_digest_covers_ids_and_scored_tokens(encoder):
    one = data.TrainingData((corpus.Document(np.arange(9)),), (), 1)
    two = data.TrainingData((corpus.Document(np.arange(9), np.arange(9) > 0),), (), 1)
    three = data.TrainingData((corpus.Document(np.arange(1, 10)),), (), 1)
    assert len({one.digest(), two.digest(), three.digest()}) == 3


def test_documents_of_eval_are_read_with_all_options_that_say_how_those_of_data_are(
    encoder, tmp_path
):
    shared = set(DocumentOptions.model_fields) & set(Finetune.model_fields)
    # `split` is of DATA alone: documents of --eval come from a test split, as `ropext eval` reads.
    assert shared - {"split"} >= {"column", "split_documents", "max_document_mib", "seed"}
    file = tmp_path / "judging.jsonl"
    texts = "\n\n".join(f"{letter} " * 60 for letter in "abc")
    file.write_text(json.dumps({"text": "short", "body": texts}) + "\n", encoding="utf-8")
    nothing = data.TrainingData((), (), 0)
    options = Finetune(evaluate=str(file), column="body", split_documents="blank-lines")
    assert len(data.judging_documents(nothing, options, encoder, 32)) == 3
    whole = Finetune(evaluate=str(file), column="body")
    assert len(data.judging_documents(nothing, whole, encoder, 32)) == 1
    large = tmp_path / "large.txt"
    large.write_text("word " * (1 << 18), encoding="utf-8")  # more than a MiB
    narrow = Finetune(evaluate=str(large), max_document_mib=1)
    with pytest.raises(InputError, match="--max-document-mib"):
        data.judging_documents(nothing, narrow, encoder, 32)
