"""The names of bundled things open what is bundled, from any directory."""

import json

import pytest

from ropext import bundled
from ropext.checkpoint import open_snapshot
from ropext.corpus import Source, read_documents
from ropext.errors import InputError, UsageError


def test_the_demo_opens_from_any_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    snapshot = open_snapshot("ropext://demo", weights=True)
    assert snapshot.weight_files == ("model.safetensors",)
    # What a record and a card say of it holds no path.
    assert (snapshot.name, snapshot.short_name, snapshot.hub_id) == (
        *["ropext://demo"] * 2,
        None,
    )


def test_bundled_documents_are_the_lines_of_their_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("held-out", "tuning"):
        lines = bundled.DATA[f"ropext://{name}"].read_text("utf-8").splitlines()
        found = list(read_documents(Source(f"ropext://{name}")))
        assert [own.content for own in found] == [json.loads(line)["text"] for line in lines]
        assert found[0].name == f"{name}.jsonl:1"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ropext://dmo", "did you mean ropext://demo"),
        ("ropext://held-out", "names bundled data, no model; bundled model: ropext://demo"),
        ("ropext://", "names nothing that comes with ropext as model"),
    ],
)
def test_a_wrong_name_of_a_model_is_told_with_the_right_ones(name, words):
    with pytest.raises(InputError) as caught:
        open_snapshot(name)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ropext://heldout", "did you mean ropext://held-out"),
        ("ropext://demo", "names bundled model, no data"),
    ],
)
def test_a_wrong_name_of_data_is_told_with_the_right_ones(name, words):
    with pytest.raises(InputError) as caught:
        list(read_documents(Source(name)))
    assert words in str(caught.value)


def test_a_bundled_model_has_no_revisions():
    with pytest.raises(UsageError, match="ropext://demo is a local directory"):
        open_snapshot("ropext://demo", revision="main")
