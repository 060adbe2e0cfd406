"""Repeated texts are found: in another file, form or piece, and from a record of bounded size."""

import json
import random

import numpy as np
import pytest

from ropext.evaluation.corpus import encoding
from ropext.evaluation.corpus.encoding import PASSAGE, fingerprint, normalised
from ropext.results import overlap


def story(number, words=900):
    rng = random.Random(number)
    return " ".join("".join(rng.choices("abcdefghij", k=5)) for _ in range(words))


def known(*texts):
    prints = [fingerprint(text, text) for text in texts]
    return overlap.training_documents((own.contents, own.passages) for own in prints)


def holds(trained, text, read=None):
    own = fingerprint(text, text if read is None else read)
    return trained.holds(own.contents, own.passages)


TOLD = [story(number) for number in range(8)]


def test_the_hashes_of_passages_equal_a_slow_computation():
    """The hash of each passage alone, a polynomial in arbitrary precision."""
    plain = normalised(story(1, 300) + "ﬁn É\U0001f600")
    expected = []
    for at in range(len(plain) - PASSAGE + 1):
        powers = enumerate(plain[at : at + PASSAGE])
        total = sum(ord(own) * pow(encoding.FACTOR, k, 2**64) for k, own in powers) % 2**64
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            total = (total ^ (total >> shift)) * factor % 2**64
        total ^= total >> 31
        if total < 2**64 // encoding.EVERY:
            expected.append((at, total))
    found = fingerprint(plain, plain)
    assert len(expected) > 10
    assert found.passages.tolist() == [own for _, own in expected]
    assert (found.places * len(plain)).tolist() == pytest.approx([at for at, _ in expected])


def test_blocks_of_a_long_text_leave_no_passage_out(monkeypatch):
    whole = fingerprint(TOLD[0], TOLD[0]).passages
    monkeypatch.setattr(encoding, "BLOCK", 500)
    assert fingerprint(TOLD[0], TOLD[0]).passages.tolist() == whole.tolist()


@pytest.mark.parametrize(
    "changed",
    [
        TOLD[3].replace(" ", "\r\n") + "\n\n",
        "\ufeff" + "\n".join(f"    {word}" for word in TOLD[3].split()),
        TOLD[3][:1500],
        TOLD[3][2000:3500],
        "\n\n".join(TOLD),
        story(90, 600) + TOLD[3][:1200],
    ],
    ids=["line ends", "indents", "its beginning", "a window", "all in one", "a quarter"],
)
def test_a_repeated_text_is_recognised(changed):
    assert holds(known(*TOLD), changed)


def test_a_short_text_is_recognised_only_as_a_whole():
    assert holds(known("the cat sat"), " the  cat\nsat ")
    assert not holds(known("the cat sat"), "the cat sat down")


def test_other_texts_and_a_licence_that_many_bear_are_not_taken_for_them():
    licence = story(77, 40)
    trained = known(*(f"{licence}\n{text}" for text in TOLD))
    assert not any(holds(trained, f"{licence}\n{story(number)}") for number in range(100, 200))
    assert holds(trained, licence + TOLD[1])


def test_read_tokens_count_and_later_ones_do_not():
    """A long text of which a passage far behind was trained on, read up to there."""
    own = fingerprint(*(story(50) + TOLD[0],) * 2)
    trained = known(TOLD[0])
    assert trained.holds(own.contents, own.passages)
    first = own.cut(0.5)
    assert not trained.holds(first.contents, first.passages)
    assert 0.9 < first.places.max() < 1
    whole = known(story(50) + TOLD[0])
    assert whole.holds(first.contents, first.passages)


def test_a_record_of_very_many_documents_is_bounded_and_states_it(monkeypatch):
    monkeypatch.setattr(overlap, "MOST_DOCUMENTS", 40)
    monkeypatch.setattr(overlap, "MOST_PASSAGES", 400)
    many = [story(number) for number in range(60)]
    trained = known(*many[:30]).with_more(known(*many[20:]))
    assert (len(trained.documents), len(trained.passages)) == (40, 400)
    assert trained.count == 60
    assert not trained.is_complete
    # 4,500 characters have 70 passages, of which a tenth is kept: enough to tell nearly all.
    found = sum(holds(trained, text) for text in many)
    assert found >= 57
    assert not any(holds(trained, story(number)) for number in range(100, 160))
    read = [(f"d{n}", own.contents, own.passages) for n, own in enumerate(map(both, many))]
    said = overlap.overlap_of_documents(trained, read)
    assert said.mark == f"at least {found} of 60 trained on"
    assert len(said.to_json()["names"]) == 3
    others = [("new", own.contents, own.passages) for own in [both(story(200))]]
    assert overlap.overlap_of_documents(trained, others).mark == "training data not recorded"
    assert len(json.dumps(trained.to_json())) < 6000


def both(text):
    return fingerprint(text, text)


def test_two_trainings_are_one_record_and_an_unknown_one_is_not_forgotten():
    first, second = known(*TOLD[:5]), known(*TOLD[3:])
    together = first.with_more(second)
    assert together.count == 8
    assert together.is_complete
    again = overlap.read_training_documents(json.loads(json.dumps(together.to_json())))
    assert np.array_equal(again.documents, together.documents)
    assert np.array_equal(again.passages, together.passages)
    assert all(holds(again, text) for text in TOLD)
    partly = together.with_more(overlap.unrecorded_training("fit"))
    assert not partly.is_complete
    assert partly.to_json()["not_recorded"] == ["fit"]


def test_sentences_about_an_overlap():
    read = [("a", *known_by(TOLD[0])), ("b", *known_by(story(99)))]
    none, one = (
        overlap.overlap_of_documents(known(story(98)), read),
        overlap.overlap_of_documents(known(*TOLD), read),
    )
    assert (none.mark, none.sentence) == ("", "")
    assert none.of_documents == "documents that were not trained on"
    assert one.mark == "1 of 2 trained on"
    assert one.of_documents == "documents of which 1 of 2 were trained on"
    assert "1 of 2 documents were trained on, whole or in part (a)" in one.sentence
    unknown = overlap.overlap_of_documents(overlap.unrecorded_training("fit"), read)
    assert unknown.mark == "training data not recorded"
    assert unknown.of_documents == "documents (whether they were trained on is not recorded)"
    assert overlap.overlap_of_documents(None, read) is None
    for own in (none, one, unknown):
        assert overlap.read_overlap(json.loads(json.dumps(own.to_json())), "a record") == own


def known_by(text):
    own = both(text)
    return own.contents, own.passages


@pytest.mark.parametrize(
    "hostile",
    [3, [], {"document_hashes": 3}, {"passage_hashes": "!"}, {"passage_hashes": "AAAA"},
     {"documents": "many"}, {"not_recorded": 3}],
)  # fmt: skip
def test_a_damaged_section_is_an_error_in_a_sentence(hostile):
    from ropext.base.errors import InputError

    with pytest.raises(InputError, match="trained_on holds no hashes"):
        overlap.read_training_documents(hostile)
