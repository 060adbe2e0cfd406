"""What another run read is taken over where model, tokens and settings are the same; else not."""

import json

import pytest
from marked import manifest

from ropext.evaluation.work import borrow
from ropext.files import write_text


def decides(**changes):
    return {
        "settings": {"lengths": (128, 512), "tasks": ()},
        "tokens_sha256": ["aa"],
        "versions": {"torch": "2"},
        "variants": {
            "base": {"kind": "base", "content_sha256": "b"},
            "tuned": {"kind": "extended", "content_sha256": "t"},
        },
    } | changes


@pytest.fixture
def other(tmp_path):
    manifest(tmp_path / "other", "eval", json.loads(json.dumps(decides())))
    for label, regime in (("base", "short"), ("tuned", "pass-512"), ("tuned", "items")):
        write_text(tmp_path / "other/variants" / label / regime / "unit", label)
    write_text(tmp_path / "other/variants/base/short/.torn.0123456789abcdef.ropext-tmp", "half")
    return tmp_path / "other"


def units(path):
    return sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())


def test_all_of_the_same_run_is_linked(other, tmp_path):
    mine = tmp_path / "mine"
    borrow(mine, decides(), other)
    assert units(mine) == [
        "variants/base/short/unit",
        "variants/tuned/items/unit",
        "variants/tuned/pass-512/unit",
    ]
    assert (mine / "variants/base/short/unit").samefile(other / "variants/base/short/unit")
    borrow(mine, decides(), other)  # what is there stays


def test_weights_that_were_trained_again_are_read_again(other, tmp_path):
    variants = decides()["variants"]
    changed = variants | {"tuned": {"kind": "extended", "content_sha256": "u"}}
    borrow(tmp_path / "mine", decides(variants=changed), other)
    assert units(tmp_path / "mine") == ["variants/base/short/unit"]


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens_sha256": ["bb"]},
        {"versions": {"torch": "3"}},
        {"settings": {"lengths": (128,), "tasks": ()}},
    ],
)
def test_other_tokens_settings_or_versions_give_nothing(other, tmp_path, changes):
    borrow(tmp_path / "mine", decides(**changes), other)
    assert not (tmp_path / "mine").exists()


def test_a_directory_without_a_run_gives_nothing(tmp_path):
    borrow(tmp_path / "mine", decides(), tmp_path / "nowhere")
    assert not (tmp_path / "mine").exists()
