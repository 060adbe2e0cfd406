"""Are these the base's weights? Each kind of difference is found, and how far was looked said."""

import hashlib
import os
from pathlib import Path

import pytest
from sample_checkpoint import make_model, safetensors

from ropext.files.checkpoint import open_snapshot, weights
from ropext.files.checkpoint.weights import compare_weights, first_difference

SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture
def pair(tmp_path: Path):
    one, two = make_model(tmp_path / "one"), make_model(tmp_path / "two")
    return open_snapshot(str(one)), two


def record_of(snapshot, content: bool = False):
    return {
        name: weights.identify_weights(snapshot.path(name), content=content)
        for name in snapshot.weight_files
    }


def verdicts(findings) -> dict[str, tuple[bool | None, str]]:
    return {finding.file: (finding.same, finding.how) for finding in findings}


@pytest.mark.parametrize("deep", [False, True])
def test_compare_weights_accepts_equal_files(pair, deep: bool):
    base, other = pair
    how = "bytes" if deep else "header and size"
    assert set(verdicts(compare_weights(base.weight_paths, other, deep=deep)).values()) == {
        (True, how)
    }
    found = compare_weights(record_of(base, content=True), other, deep=deep)
    assert {f.how for f in found} == {"sha256" if deep else "header and size"}
    assert all(f.same for f in found)


def test_compare_weights_finds_one_changed_byte_only_if_deep(pair):
    base, other = pair
    path = other / SHARD
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    assert verdicts(compare_weights(base.weight_paths, other))[SHARD] == (True, "header and size")
    (found,) = [f for f in compare_weights(base.weight_paths, other, deep=True) if not f.same]
    assert (found.file, found.how) == (SHARD, "bytes")
    assert f"at byte {len(data) - 3}" in found.sentence
    recorded = compare_weights(record_of(base, content=True), other, deep=True)
    assert verdicts(recorded)[SHARD] == (False, "sha256")
    unhashed = compare_weights(record_of(base), other, deep=True)
    assert set(verdicts(unhashed).values()) == {(None, "header and size")}
    assert "never recorded" in unhashed[1].sentence


def test_the_name_that_the_hub_cache_gave_a_file_is_a_record_of_its_bytes(pair, tmp_path: Path):
    base, other = pair
    data = (other / SHARD).read_bytes()
    blob = tmp_path / "blobs" / hashlib.sha256(data).hexdigest()
    blob.parent.mkdir()
    (other / SHARD).rename(blob)
    (other / SHARD).symlink_to(blob)
    found = compare_weights(record_of(base), other, deep=True)
    assert verdicts(found)[SHARD] == (True, "sha256")
    blob.write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
    found = compare_weights(record_of(base), other, deep=True)
    assert verdicts(found)[SHARD] == (False, "sha256")


CHANGES = {
    "size": {"layer.1.weight": ("F32", [17], bytes(68))},
    "shape": {"layer.1.weight": ("F32", [4, 4], bytes(64))},
    "dtype": {"layer.1.weight": ("I32", [16], bytes(64))},
    "name": {"layer.2.weight": ("F32", [16], bytes(64))},
}


@pytest.mark.parametrize("change", CHANGES)
def test_compare_weights_finds_another_header_or_size(pair, change: str):
    base, other = pair
    (other / SHARD).write_bytes(safetensors(CHANGES[change], {"format": "pt"}))
    for against in (base.weight_paths, record_of(base)):
        found = verdicts(compare_weights(against, other))
        assert found[SHARD] == (False, "header and size")
        assert [same for same, _ in found.values()].count(False) == 1


def test_compare_weights_names_missing_and_extra_files(pair):
    base, other = pair
    (other / SHARD).rename(other / "more.safetensors")
    for against in (base.weight_paths, record_of(base)):
        sentences = [f.sentence for f in compare_weights(against, other) if not f.same]
        assert sentences == [
            f"{SHARD} is missing",
            "more.safetensors is not one of the base's weight files",
        ]


def test_one_file_under_two_names_is_not_read(pair, monkeypatch):
    base, other = pair
    for number, name in enumerate(base.weight_files):
        (other / name).unlink()
        if number:
            (other / name).symlink_to(base.path(name))
        else:
            os.link(base.path(name), other / name)
    monkeypatch.setattr(weights, "open_regular", None)  # opening either would be a TypeError
    monkeypatch.setattr(weights, "read_header", None)
    found = verdicts(compare_weights(base.weight_paths, other, deep=True))
    assert set(found.values()) == {(True, "same file")}


def test_the_place_of_the_first_difference_beyond_one_chunk(tmp_path: Path):
    data = bytearray(9 << 20)
    (tmp_path / "a").write_bytes(data)
    data[(8 << 20) + 5] = 1
    (tmp_path / "b").write_bytes(data)
    assert first_difference(tmp_path / "a", tmp_path / "b") == (8 << 20) + 5
    assert first_difference(tmp_path / "a", tmp_path / "a") is None


def test_a_recorded_hash_is_sha256(pair):
    base, _ = pair
    expected = hashlib.sha256(base.path(SHARD).read_bytes()).hexdigest()
    assert record_of(base, content=True)[SHARD].sha256 == expected
