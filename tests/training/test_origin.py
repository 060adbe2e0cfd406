"""The start of a training: a record, or the config if the record is lost."""

import json
import shutil

import pytest

import ropext
from ropext.base.errors import InputError
from ropext.training.origin import open_origin


@pytest.fixture
def lost(extended, tmp_path):
    """Copy the extended checkpoint without its record, as another program saves it."""
    shutil.copytree(extended, tmp_path / "lost")
    (tmp_path / "lost" / "ropext.json").unlink()
    return tmp_path / "lost"


def test_the_edits_taken_back_give_the_config_of_the_base(base, extended):
    assert open_origin(str(extended)).record.base["config"] == json.loads(
        (base / "config.json").read_text()
    )


def test_a_scaled_config_replaces_a_lost_record(base, extended, lost):
    recorded, read = open_origin(str(extended)), open_origin(str(lost))
    kept, made = recorded.record, read.record
    assert (made.context, made.target) == (kept.context, kept.target) == (64, 256)
    assert [site.base for site in read.record.sites] == [s.base for s in recorded.record.sites]
    spectra = [site.wanted for site in recorded.record.sites]
    assert [site.wanted for site in read.record.sites] == spectra
    assert read.history == "scaled 4x from 64 by its config; no record"
    before = json.loads((base / "config.json").read_text())
    taken_back = read.record.base["config"]
    for key in ("rope_parameters", "max_position_embeddings"):
        assert taken_back[key] == before[key]
    assert not taken_back.get("rope_scaling")


def test_the_advice_of_a_training_never_extends_twice(base, tmp_path):
    out = tmp_path / "linear"
    ropext.extend(str(base), out, method="pi", factor=4, no_verify=True)
    (out / "ropext.json").unlink()
    with pytest.raises(InputError, match="is scaled without stating the original length") as said:
        open_origin(str(out))
    assert "--factor" not in str(said.value)
    with pytest.raises(InputError, match="--factor 4 -o EXTENDED"):
        open_origin(str(base))
