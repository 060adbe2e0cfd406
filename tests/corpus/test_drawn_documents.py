"""Which documents of the bundled texts each command reads: digests of their ids, taken when every
command still had a loop of its own that drew them."""

import hashlib

import numpy as np
import pytest

from ropext.evaluation.corpus import DocumentEncoder, Wanted
from ropext.evaluation.dividing import divide
from ropext.evaluation.documents import read_corpus
from ropext.files.checkpoint import open_snapshot
from ropext.models.tokenizer import load_tokenizer
from ropext.options.evaluate import Evaluate
from ropext.options.training import Finetune, Fit
from ropext.training import data

TUNING = "ropext://tuning"
HELD_OUT = "ropext://held-out"
ENOUGH = 40 * 8192


def encoder(seed=0):
    return DocumentEncoder(load_tokenizer(open_snapshot("ropext://demo"), False), seed=seed)


def digest(documents):
    """Return how many documents there are, and a hash of their lengths and ids."""
    content = hashlib.sha256()
    for document in documents:
        content.update(str(len(document)).encode())
        content.update(document.ids.astype("<i4").tobytes())
    return len(documents), content.hexdigest()[:16]


@pytest.mark.parametrize(
    ("options", "wanted", "seed", "expected"),
    [
        ({"max_docs": 5}, Wanted((256, 512), True, 5), 0, (5, "eb606bcf65a9bf23")),
        ({}, Wanted((64, 256, 1024, 4096), False, 16), 3, (16, "e1e4bd062b210b06")),
        (
            {"split_documents": "windows"},
            Wanted((300,), True, 9),
            0,
            (9, "bdc7250643e372e2"),
        ),
    ],
)
def test_the_documents_of_an_evaluation_are_the_recorded_ones(options, wanted, seed, expected):
    asked = Evaluate(data=HELD_OUT, **options)
    assert digest(read_corpus(asked, encoder(seed), wanted).documents) == expected


def test_the_documents_of_a_fit_are_the_recorded_ones():
    found = data.read_fit_data(TUNING, Fit(factor=4, held_out=8), encoder(), 1024, ENOUGH)
    assert digest(found.documents) == (63, "9709d88c281f0c82")
    assert digest(found.held_out) == (8, "b8c88ffd85244587")
    assert found.digest()[:16] == "fbe838e41df31159"


def test_the_documents_of_a_fit_with_glued_packing_are_the_recorded_ones():
    options = Fit(factor=4, held_out=8, packing="glued")
    found = data.read_fit_data(TUNING, options, encoder(seed=1), 1024, ENOUGH)
    assert digest(found.documents) == (1, "a8d2f9a800f8477a")
    assert digest(found.held_out) == (8, "2ea2e63480d46d8c")
    assert np.all(found.documents[0].mask())


def test_the_documents_of_a_finetuning_are_the_recorded_ones():
    division = data.Division(wanted_tokens=100_000, row=1024, target=1024, judging=8)
    found = data.read_training_data(TUNING, Finetune(), encoder(), division)
    assert digest(found.documents) == (63, "9709d88c281f0c82")
    assert digest(found.held_out) == (8, "4694ac163bd18c0f")


def test_the_documents_of_method_auto_are_the_recorded_ones():
    found = divide(Evaluate(data=HELD_OUT, lengths=(512,)), encoder(), 512, has_judges=False)
    assert digest(found.chosen) == (46, "4034824647c7eb91")
    assert digest(found.judged) == (22, "40f66270c1d212e6")
    assert found.short == []
    assert all(document.content for document in found.judged)
