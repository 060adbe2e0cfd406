"""An extended checkpoint on the disk: its content, byte by byte, and its state after a fault."""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import sample_checkpoint
from marked import checkpoint
from sample_checkpoint import CONFIG, card, make_model, record, safetensors, tree, write_json

from ropext.base.errors import InputError, OutputExists, ProofFailed, UsageError
from ropext.files.checkpoint import open_snapshot, writing
from ropext.files.checkpoint.provenance import read_record
from ropext.files.checkpoint.weights import compare_weights
from ropext.files.checkpoint.writing import DirectorySource, WriteOptions, write

NEW = CONFIG | {"max_position_embeddings": 8192}


def extend(model: Path, output: Path, config=NEW, prove=None, card=card, **manner):
    snapshot = open_snapshot(str(model), weights=True)
    source = DirectorySource(snapshot, config, prove or dict, card)
    manner = WriteOptions(no_verify=prove is None, **manner)
    return write(source, output, record(), manner)


def siblings(tmp_path: Path) -> set[str]:
    return set(os.listdir(tmp_path))


@pytest.mark.parametrize("link", ["copy", "hard", "symlink"])
def test_extend_writes_edited_configs_and_copies_all_other_files_unchanged(
    model: Path, tmp_path: Path, link: str
):
    before = tree(model)
    written = extend(model, tmp_path / "out", link=link)
    after = tree(tmp_path / "out")
    untouched = {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "modeling_custom.py",
        "1_Pooling/config.json",
    }
    edited = {"config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"}
    assert set(after) == untouched | edited | {"README.md", "ropext.json"}
    assert {name: after[name] for name in untouched} == {name: before[name] for name in untouched}
    assert after["config.json"].decode() == json.dumps(NEW, indent=2, ensure_ascii=False) + "\n"
    assert json.loads(after["generation_config.json"]) == {"max_length": 8192, "do_sample": True}
    assert after["tokenizer_config.json"].decode() == (
        '{\n  "model_max_length": 8192,\n  "added": {\n    "0": "<s>"\n  },\n  "name": "é"\n}\n'
    )
    stored = b'{"max_length": 2048, "stride": 0}'
    assert after["tokenizer.json"] == before["tokenizer.json"].replace(stored, b"null")
    assert tree(model) == before
    assert siblings(tmp_path) == {"base", "out"}
    assert set(written.left) == {"README.md", "model.Q4.gguf", "original/"}
    assert written.notes == ()


@pytest.mark.parametrize("link", ["copy", "hard"])
def test_extend_shows_progress_for_each_weight_file(model: Path, tmp_path: Path, link: str):
    shown = []
    extend(
        model, tmp_path / "out", link=link, hash_weights=True, show=lambda *own: shown.append(own)
    )
    sizes = {path.name: path.stat().st_size for path in model.glob("*.safetensors")}
    verbs = ["hashing", "copying"] if link == "copy" else ["hashing"]
    wanted = {(size, size, f"{verb} {name}") for name, size in sizes.items() for verb in verbs}
    assert {own for own in shown if own[0]} == wanted


def test_extend_links_only_weight_files(model: Path, tmp_path: Path):
    for link in ("copy", "hard", "symlink"):
        extend(model, tmp_path / link, link=link)
        for name in tree(tmp_path / link):
            path, base = tmp_path / link / name, model / name
            shared = base.exists() and os.path.samefile(path, base)
            assert shared is (link != "copy" and name.endswith(".safetensors")), (link, name)
            assert path.is_symlink() is (link == "symlink" and name.endswith(".safetensors"))
    assert os.readlink(tmp_path / "symlink" / "model-00001-of-00002.safetensors") == str(
        model / "model-00001-of-00002.safetensors"
    )


def test_a_cache_of_links_is_read_through(model: Path, tmp_path: Path):
    cache = tmp_path / "models--o--m" / "snapshots" / ("ab" * 20)
    blobs = tmp_path / "models--o--m" / "blobs"
    cache.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(p for p in model.iterdir() if p.is_file())):
        (blobs / f"{number:064x}").write_bytes(path.read_bytes())
        (cache / path.name).symlink_to(f"../../blobs/{number:064x}")
    before = tree(tmp_path / "models--o--m")
    for link in ("hard", "symlink", "copy"):
        written = extend(cache, tmp_path / link, link=link)
        shard = tmp_path / link / "model-00001-of-00002.safetensors"
        assert shard.read_bytes() == (model / shard.name).read_bytes()
        if link != "copy":
            assert Path(os.path.realpath(shard)).stat().st_ino == os.stat(cache / shard.name).st_ino
        assert shard.is_symlink() is (link == "symlink")
        assert len(written.record.weights[shard.name].sha256) == 64  # the blob's name
    assert tree(tmp_path / "models--o--m") == before


def test_an_output_with_linked_weights_can_be_extended_again(model: Path, tmp_path: Path):
    extend(model, tmp_path / "one", link="symlink")
    extend(tmp_path / "one", tmp_path / "two", link="symlink")
    extend(tmp_path / "two", tmp_path / "three", link="hard")
    shard = "model-00002-of-00002.safetensors"
    assert os.readlink(tmp_path / "two" / shard) == str(model / shard)  # no chain of links
    assert os.path.samefile(tmp_path / "three" / shard, model / shard)
    text = (tmp_path / "three" / "README.md").read_text()
    assert text.count("## Context extension") == 1
    with pytest.raises(UsageError, match="is inside"):  # its weights are the base's
        extend(tmp_path / "one", model, force=True)
    assert (model / shard).exists()


def test_extend_writes_the_same_bytes_for_the_same_inputs(model: Path, tmp_path: Path):
    extend(model, tmp_path / "one", prove=lambda directory: {"pairs": 2})
    extend(model, tmp_path / "two", prove=lambda directory: {"pairs": 2})
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    assert str(tmp_path).encode() not in tree(tmp_path / "one")["ropext.json"]


def test_the_proof_sees_all_that_a_loader_reads(model: Path, tmp_path: Path):
    seen = {}

    def prove(directory: Path) -> dict[str, int]:
        assert siblings(tmp_path) == {"base", directory.parent.name, ".out.ropext-lock"}
        seen.update(tree(directory))
        return {"pairs": 2}

    cards = []

    def card_of_proof(record, title):
        cards.append((record.proof, title))
        return card()

    written = extend(model, tmp_path / "out", prove=prove, card=card_of_proof)
    after = tree(tmp_path / "out")
    assert {name: after[name] for name in seen} == seen
    assert set(after) - set(seen) == {"README.md", "ropext.json"}
    assert read_record(tmp_path / "out") == written.record
    assert written.record.proof == {"pairs": 2}
    assert cards == [({"pairs": 2}, "out")]


@pytest.mark.parametrize("error", [ProofFailed("worst pair 3"), RuntimeError("a bug")])
def test_a_failed_proof_leaves_nothing(model: Path, tmp_path: Path, error: Exception):
    def prove(directory: Path) -> dict[str, int]:
        raise error

    before = tree(checkpoint(tmp_path / "old", "old"))
    for output in ("out", "old"):
        with pytest.raises(type(error)):
            extend(model, tmp_path / output, prove=prove, force=True)
    assert siblings(tmp_path) == {"base", "old"}
    assert tree(tmp_path / "old") == before


def test_extend_records_the_sha256_of_weights_on_request(model: Path, tmp_path: Path):
    import hashlib

    assert (
        extend(model, tmp_path / "a").record.weights["model-00001-of-00002.safetensors"].sha256
        is None
    )
    written = extend(model, tmp_path / "b", hash_weights=True)
    for name, weight in written.record.weights.items():
        content = (model / name).read_bytes()
        assert weight.sha256 == hashlib.sha256(content).hexdigest()
        assert weight.size == len(content)


def test_bad_weights_are_named_before_anything_is_written(model: Path, tmp_path: Path):
    shard = model / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-5])
    with pytest.raises(InputError, match="cut short"):
        extend(model, tmp_path / "out")
    assert siblings(tmp_path) == {"base"}


def test_extend_refuses_a_disk_with_too_little_space(model: Path, tmp_path: Path, monkeypatch):
    shard = model / "model-00001-of-00002.safetensors"
    shard.write_bytes(safetensors({"a": ("U8", [10**6], bytes(10**6))}))
    free = writing.TEXT_ROOM + 500_000

    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=free))
    with pytest.raises(InputError, match="MB free"):
        extend(model, tmp_path / "out")
    extend(model, tmp_path / "out", link="hard")


def test_extend_refuses_an_existing_output_and_one_inside_the_input(model: Path, tmp_path: Path):
    extend(model, tmp_path / "out")
    with pytest.raises(OutputExists):
        extend(model, tmp_path / "out")
    with pytest.raises(UsageError):
        extend(model, model / "out")
    assert siblings(tmp_path) == {"base", "out"}


def test_a_read_only_input_and_odd_names(tmp_path: Path):
    model = make_model(tmp_path / "mein Modell ü")
    for path in model.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    model.chmod(0o555)
    try:
        extend(model, tmp_path / "das Ergebnis 模型", link="hard")
        extend(model, tmp_path / "kopiert")
    finally:
        model.chmod(0o755)
        (model / "original").chmod(0o755)
        (model / "1_Pooling").chmod(0o755)
    assert os.access(tmp_path / "kopiert" / "config.json", os.W_OK)
    (tmp_path / "kopiert" / "modeling_custom.py").write_text("writable")


# --- faults --------------------------------------------------------------------------------------


def failing(code: int):
    def fail(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize("code", sorted(writing.NO_LINK))
def test_hard_links_fall_back_to_copies(model: Path, tmp_path: Path, monkeypatch, code: int):
    monkeypatch.setattr(os, "link", failing(code))
    written = extend(model, tmp_path / "out", link="hard")
    assert len(written.notes) == 2
    assert os.strerror(code) in written.notes[0]
    name = "model-00001-of-00002.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes()
    assert not os.path.samefile(tmp_path / "out" / name, model / name)


@pytest.mark.needs("copy_file_range")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EDQUOT])
@pytest.mark.parametrize("call", ["copy_file_range", "link", "ftruncate", "fsync", "mkdir"])
def test_a_failing_system_call_leaves_no_output(
    model: Path, tmp_path: Path, monkeypatch, call: str, code: int
):
    before = tree(model)
    monkeypatch.setattr(os, call, failing(code))
    with pytest.raises(InputError) as error:
        extend(model, tmp_path / "out", link="hard" if call == "link" else "copy")
    assert os.strerror(code) in str(error.value)
    assert siblings(tmp_path) == {"base"}
    assert tree(model) == before


@pytest.mark.needs("copy_file_range")
@pytest.mark.parametrize("mode", ["in the kernel", "short", "stops half way", "not supported"])
def test_copies_are_whole_whatever_the_kernel_does(tmp_path: Path, monkeypatch, mode: str):
    content = os.urandom(300_000)
    (tmp_path / "a").write_bytes(content)
    real = os.copy_file_range
    calls = []

    def odd(source, target, length, at, to):
        calls.append(length)
        if mode == "not supported":
            raise OSError(errno.ENOSYS, "Function not implemented")
        if mode == "stops half way" and len(calls) > 1:
            return 0
        return real(source, target, min(length, 70_001), at, to)

    if mode != "in the kernel":
        monkeypatch.setattr(os, "copy_file_range", odd)
    writing.copy_file(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == content
    assert mode == "in the kernel" or calls


@pytest.mark.needs("copy_file_range")
@pytest.mark.parametrize("way", ["kernel", "hand"])
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_a_copy_with_one_other_byte_is_no_copy(tmp_path: Path, monkeypatch, way: str, place: str):
    size = 5 << 20  # 1,280 pages, of which the kernel's 64 are looked at
    (tmp_path / "a").write_bytes(os.urandom(size))
    where = {"first": 0, "middle": size // 2, "last": size - 1}[place]
    copy, write = os.copy_file_range, os.write

    def damage(target):
        byte = os.pread(target, 1, where)
        if byte:
            os.pwrite(target, bytes([byte[0] ^ 1]), where)

    def in_kernel(source, target, length, at, to):
        if way == "hand":
            raise OSError(errno.ENOSYS, "Function not implemented")
        done = copy(source, target, length, at, to)
        damage(target)
        return done

    def by_hand(target, data):
        at = os.lseek(target, 0, os.SEEK_CUR)
        done = write(target, data)
        if at <= where < at + done:
            damage(target)
        return done

    monkeypatch.setattr(os, "copy_file_range", in_kernel)
    monkeypatch.setattr(os, "write", by_hand)
    with pytest.raises(ProofFailed, match=r"the copy of .*a differs from byte"):
        writing.copy_file(tmp_path / "a", tmp_path / "b")


def test_a_file_that_shrinks_is_noticed(tmp_path: Path, monkeypatch):
    (tmp_path / "a").write_bytes(bytes(1000))
    monkeypatch.setattr(writing, "data_parts", lambda descriptor, start, size: iter([(0, 2000)]))
    with pytest.raises(InputError, match="shrank"):
        writing.copy_file(tmp_path / "a", tmp_path / "b")


def test_a_base_that_changes_meanwhile_is_noticed(model: Path, tmp_path: Path, monkeypatch):
    shard = model / "model-00002-of-00002.safetensors"
    copy = writing.place

    def change(source: Path, target: Path, *how):
        shard.write_bytes(safetensors({"other": ("U8", [3], b"abc")}))
        return copy(source, target, *how)

    monkeypatch.setattr(writing, "place", change)
    with pytest.raises(InputError, match="changed while it was read"):
        extend(model, tmp_path / "out")
    assert siblings(tmp_path) == {"base"}


def test_copy_file_keeps_the_holes_of_a_sparse_file(tmp_path: Path):
    with open(tmp_path / "a", "wb") as file:
        file.write(b"begin" * 1000)
        file.seek(200 << 20)
        file.write(b"middle" * 1000)
        file.truncate(500 << 20)
    writing.copy_file(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").stat().st_size == 500 << 20
    if (tmp_path / "a").stat().st_blocks * 512 < 1 << 20:  # the file system knows holes at all
        assert (tmp_path / "b").stat().st_blocks * 512 < 1 << 20
    with open(tmp_path / "b", "rb") as file:
        assert file.read(6000) == b"begin" * 1000 + bytes(1000)
        file.seek(200 << 20)
        assert file.read(6001) == b"middle" * 1000 + b"\0"


SPARSE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from sample_checkpoint import card, record
from ropext.files.checkpoint import open_snapshot
from ropext.files.checkpoint.writing import DirectorySource, WriteOptions, write
snapshot = open_snapshot(sys.argv[1], weights=True)
source = DirectorySource(snapshot, snapshot.config, dict, card)
write(source, Path(sys.argv[2]), record(), WriteOptions(link="hard", no_verify=True))
heavy = {"torch", "transformers", "huggingface_hub", "numpy", "safetensors"} & set(sys.modules)
peak = Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]
print(int(peak) // 1024, sorted(heavy))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_hundred_gigabytes_are_linked_and_never_read(tmp_path: Path):
    model = make_model(tmp_path / "base", shards=1)
    (model / "model-00001-of-00001.safetensors").unlink()
    size, weight_map = 500 << 20, {}
    for n in range(200):
        name = f"model-{n + 1:05}-of-00200.safetensors"
        head = {f"layer.{n}.{i}": ["BF16", [size // 200], i * size // 100] for i in range(100)}
        table = {
            tensor: {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size // 100]}
            for tensor, (dtype, shape, at) in head.items()
        }
        text = json.dumps(table).encode()
        with open(model / name, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + size)
        weight_map |= dict.fromkeys(table, name)
    write_json(model / "model.safetensors.index.json", {"weight_map": weight_map})
    command = [
        sys.executable,
        "-c",
        SPARSE,
        str(model),
        str(tmp_path / "out"),
        os.path.dirname(sample_checkpoint.__file__),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    megabytes, heavy = done.stdout.split(" ", 1)
    print(f"{megabytes} MB")
    assert int(megabytes) < 100
    assert heavy == "[]\n"
    written = [path.stat() for path in (tmp_path / "out").glob("*.safetensors")]
    assert len(written) == 200
    assert sum(s.st_size for s in written) > 100 * 10**9
    assert all(s.st_nlink == 2 for s in written)


def other_weights(model: Path, place: Path) -> Path:
    """Copy the model, and change its weights but not their names and shapes."""
    shutil.copytree(model, place)
    for file in place.glob("*.safetensors"):
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    return place


def test_compare_weights_reports_a_link_whose_target_was_replaced(model: Path, tmp_path: Path):
    """The record at the link's target lists the digest, so no weights are read."""
    b, c = tmp_path / "b", tmp_path / "c"
    extend(model, b)
    extend(b, c, link="symlink")
    digests = {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in model.glob("*.safetensors")
    }
    weights = json.loads((c / "ropext.json").read_text())["weights"]
    assert {name: file["sha256"] for name, file in weights.items()} == digests
    assert all(finding.same for finding in compare_weights(read_record(c).weights, c))
    other = other_weights(model, tmp_path / "other")
    extend(other, b, force=True)
    found = compare_weights(read_record(c).weights, c)
    assert [finding.same for finding in found] == [False] * len(weights)
    assert "leads to a file with other bytes than when the record was written" in found[0].sentence


@pytest.mark.parametrize("link", ["copy", "hard"])
def test_the_digest_of_a_copied_file_is_that_of_its_bytes(model: Path, tmp_path: Path, link):
    """It is taken while the bytes pass; for a hard link the base's record gives it."""
    extend(model, tmp_path / "b")
    extend(tmp_path / "b", tmp_path / "c", link=link)
    for place in (tmp_path / "b", tmp_path / "c"):
        listed = json.loads((place / "ropext.json").read_text())["files"]
        assert listed == {
            file.relative_to(place).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
            for file in place.rglob("*")
            if file.is_file() and file.name != "ropext.json"
        }
