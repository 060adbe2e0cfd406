"""Whole digests of files, remembered by facts that no copy and no archive can set."""

import hashlib
import json
import mmap
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sample_checkpoint import make_model, safetensors

from ropext.base import guard, systems
from ropext.base.errors import InputError
from ropext.files.checkpoint import digests, open_snapshot, weights
from ropext.files.checkpoint.digests import Digests

HOUR = 3600 * 10**9


@pytest.fixture
def reads(monkeypatch, tmp_path):
    """Return the names of the files that are read, in order.

    Small files are remembered too, on any file system, as if they had changed long ago.
    """
    read = []

    def noting(path, show):
        read.append(path.name)
        return hashlib.sha256(path.read_bytes()).hexdigest()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "content_digest", noting)
    monkeypatch.setattr(digests, "LARGE", 0)
    monkeypatch.setattr(guard, "keeps_times", lambda file: True)
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + HOUR)
    return read


def sha256(file):
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_a_file_is_read_once_and_remembered_for_other_commands(reads, tmp_path):
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    assert [Digests().of(file) for _ in range(3)] == [sha256(file)] * 3
    assert reads == ["weights"]
    kept = tmp_path / "cache" / "ropext" / "digests.json"
    assert [entry[3] for entry in json.loads(kept.read_text()).values()] == [sha256(file)]
    (tmp_path / "other").write_bytes(b"three")
    one, other = Digests(), Digests()  # each keeps the other's digests
    one.of(tmp_path / "other")
    os.link(file, tmp_path / "second name")
    assert other.of(tmp_path / "second name") == sha256(file)
    assert len(json.loads(kept.read_text())) == 2


@pytest.mark.parametrize("kind", ["in place", "cp -p", "anew"])
def test_other_content_of_the_same_size_and_time_is_read(reads, tmp_path, kind):
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    os.utime(file, ns=(HOUR, HOUR))
    before = Digests().of(file)
    other = tmp_path / "other"
    other.write_bytes(b"two")
    os.utime(other, ns=(HOUR, HOUR))
    if kind == "anew":
        file.unlink()
    if kind == "in place":
        file.write_bytes(b"two")
        os.utime(file, ns=(HOUR, HOUR))
    else:
        shutil.copy2(other, file)
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (3, HOUR)
    assert Digests().of(file) == sha256(file) != before


@pytest.mark.parametrize("seconds", [-3600, 0, 60])
def test_files_of_the_last_minute_or_the_future_are_read_again(
    reads, tmp_path, monkeypatch, seconds
):
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    changed = file.stat().st_ctime_ns
    monkeypatch.setattr(time, "time_ns", lambda: changed + seconds * 10**9)
    one = Digests()
    assert [one.of(file), one.of(file)] == [sha256(file)] * 2
    assert reads == ["weights"] * 2


def written_twice_through_a_mapping(file, monkeypatch):
    """Return the digests before and after a second write, while the clock is an hour ahead."""
    file.write_bytes(b"x" * 4096)
    now = time.time_ns
    monkeypatch.setattr(digests, "LARGE", 0)
    monkeypatch.setattr(time, "time_ns", lambda: now() + HOUR)
    found = []
    with open(file, "r+b") as stream, mmap.mmap(stream.fileno(), 0) as pages:
        for letter in (b"a", b"b"):
            pages[:1] = letter
            found.append((Digests().of(file), guard.state(file), sha256(file)))
    return found


@pytest.mark.needs("/dev/shm")
def test_two_writes_through_one_mapping_are_seen_in_shared_memory(tmp_path, monkeypatch):
    """tmpfs sets the times at the first write alone, for it never writes a page back."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = Path("/dev/shm") / f"ropext-test-{os.getpid()}"
    try:
        before, after = written_twice_through_a_mapping(place, monkeypatch)
    finally:
        place.unlink()
    assert before == (before[2],) * 3
    assert after == (after[2],) * 3
    assert before != after


def test_two_writes_through_one_mapping_are_seen_after_a_jump_of_the_clock(tmp_path, monkeypatch):
    """On a disk, too, the first write alone sets the times until the page was written back."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before, after = written_twice_through_a_mapping(tmp_path / "weights", monkeypatch)
    assert (before[0], after[0]) == (before[2], after[2])
    assert before != after


# /proc/self/mountinfo of Linux 6.18 after five mounts: over another, hiding another, a bind mount
# of a folder and of a file, and mount points with a blank, a line break and a backslash.
MOUNTINFO = rb"""22 27 0:21 / /proc rw,relatime - proc proc rw
24 27 0:6 / /dev rw,relatime - devtmpfs devtmpfs rw,size=12334460k,mode=755
25 24 0:23 / /dev/shm rw,relatime - tmpfs tmpfs rw,size=24684084k
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard,resuid=65534,resgid=65534
63 27 0:39 / /r/a\040b rw,relatime - tmpfs t1 rw
64 63 0:40 / /r/a\040b/in ro,relatime - tmpfs t2 ro
65 27 0:41 / /r/c/d rw,relatime shared:7 master:2 - tmpfs t3 rw
66 27 254:0 /r/e /r/c rw,relatime - ext4 /dev/vda rw,discard,resuid=65534,resgid=65534
67 27 0:42 / /r/e rw,relatime - ramfs t4 rw
68 67 0:43 / /r/e rw,relatime - tmpfs t5 rw
69 66 254:0 /r/e/f /r/c/f ro,relatime - ext4 /dev/vda rw,discard,resuid=65534,resgid=65534
70 27 0:44 / /r/back\134slash rw,relatime - tmpfs t6 rw
71 27 0:45 / /r/nl\012x rw,relatime - tmpfs t7 rw
72 27 254:0 /r/file /r/file rw,relatime - ext4 /dev/vda rw,discard
73 27 0:46 / /r/i rw,relatime - tmpfs t8 rw
74 73 254:0 /mm /r/i/d rw,relatime - ext4 /dev/vda rw,discard
75 27 7:0 / /r/image rw,relatime - ext4 /dev/loop0 ro
"""


@pytest.mark.parametrize(
    ("path", "kind", "is_writable"),  # as `stat -f` and `mount` said there
    [
        ("/", "ext4", True),
        ("/tmp/model", "ext4", True),
        ("/proc/self", "proc", True),
        ("/dev/shm/model", "tmpfs", True),
        ("/dev/shmodel", "devtmpfs", True),
        ("/r/a b/model", "tmpfs", True),
        ("/r/a b/in", "tmpfs", False),
        ("/r/a", "ext4", True),
        ("/r/c/x", "ext4", True),
        ("/r/c/d/x", "ext4", True),  # the mount on /r/c hides the tmpfs
        ("/r/c/f/x", "ext4", False),
        ("/r/e/x", "tmpfs", True),  # over ramfs
        ("/r/back\\slash/x", "tmpfs", True),
        ("/r/nl\nx/y", "tmpfs", True),
        ("/r/file", "ext4", True),
        ("/r/i/x", "tmpfs", True),
        ("/r/i/d/x", "ext4", True),
        ("/r/image/x", "ext4", False),
    ],
)
def test_mount_of_finds_the_file_system_of_a_path(path, kind, is_writable):
    found = systems.mount_of(path.encode(), MOUNTINFO)
    assert (found.kind.decode(), found.is_writable) == (kind, is_writable)


def test_mount_of_returns_none_outside_of_every_mount():
    """As in a chroot, which shows no mount on its root."""
    assert systems.mount_of(b"/home/model", b"22 27 0:21 / /proc rw - proc proc rw\n") is None


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel is asked by coreutils' stat -f")
def test_the_kernel_agrees_on_the_file_systems_of_this_machine(tmp_path):
    names = {"ext2/ext3": "ext4", "ext2": "ext4", "overlayfs": "overlay"}
    for place in ("/", "/proc/self/", "/dev/shm", "/sys", str(tmp_path)):
        done = subprocess.run(["stat", "-f", "-c", "%T", place], capture_output=True, check=True)
        kind = done.stdout.decode().strip()
        mountinfo = Path("/proc/self/mountinfo").read_bytes()
        found = systems.mount_of(os.path.realpath(place).encode(), mountinfo)
        assert found.kind.decode() in (kind, names.get(kind)), place
    assert not systems.keeps_times(Path("/proc/self/status"))


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b'{"1:2": 3}', b'{"1:2": [1, 2, 3, "x"]}', b'{"1:2": [null]}']
)
def test_a_damaged_file_of_digests_is_ignored(reads, tmp_path, content):
    file, place = tmp_path / "weights", tmp_path / "memory"
    file.write_bytes(b"one")
    place.write_bytes(content)
    assert Digests(place=place).of(file) == sha256(file)
    assert Digests(place=place).of(file) == sha256(file)
    assert reads == ["weights"]


def test_the_oldest_are_forgotten_and_a_home_need_not_be_writable(reads, tmp_path, monkeypatch):
    monkeypatch.setattr(digests, "MOST", 2)
    known = Digests()
    for name in "abc":
        (tmp_path / name).write_text(name)
        known.of(tmp_path / name)
    assert [entry[3] for entry in known.known.values()] == [sha256(tmp_path / n) for n in "bc"]
    (tmp_path / "file").write_text("no folder")
    assert Digests(place=tmp_path / "file" / "x").of(tmp_path / "a") == sha256(tmp_path / "a")


def test_a_file_that_changes_while_it_is_read_is_reported(tmp_path, monkeypatch):
    file = tmp_path / "weights"
    file.write_bytes(b"one")

    def changing(path, show):
        path.write_bytes(b"longer")
        return "0" * 64

    monkeypatch.setattr(digests, "content_digest", changing)
    with pytest.raises(InputError, match="changed while it was read"):
        Digests().of(file)


def test_one_changed_byte_changes_the_digest_of_a_model(tmp_path):
    """Also between the blocks that a sample would take of a large file."""
    model = make_model(tmp_path / "base", shards=1)
    (model / "model.safetensors.index.json").unlink()
    (file,) = model.glob("*.safetensors")
    file.write_bytes(safetensors({"a": ("U8", [8 << 20], bytes(8 << 20))}))
    snapshot = open_snapshot(str(model))
    known = Digests().of_checkpoint(snapshot)
    with open(file, "r+b") as stream:
        stream.seek(100_000)
        stream.write(b"x")
    changed = Digests().of_checkpoint(open_snapshot(str(model)))
    assert changed["weights_sha256"] != known["weights_sha256"]
    assert changed["config_sha256"] == known["config_sha256"]


def test_code_that_is_run_is_part_of_a_model(tmp_path):
    model = make_model(tmp_path / "base")
    (model / "modeling_mine.py").write_text("SCALE = 1.0")
    snapshot = open_snapshot(str(model))
    before, plain = (Digests().of_checkpoint(snapshot, trusted) for trusted in (True, False))
    (model / "modeling_mine.py").write_text("SCALE = 0.1")
    with pytest.raises(InputError, match=r"base was changed while it was read \(modeling_mine.py"):
        Digests().of_checkpoint(snapshot, True)
    again = open_snapshot(str(model))
    assert Digests().of_checkpoint(again, True) != before
    assert Digests().of_checkpoint(again) == plain


@pytest.mark.parametrize("names", ["other/repo--modeling.Net", ["own.Net", "other/repo--more.Net"]])
def test_code_of_another_repository_keeps_no_result(tmp_path, names):
    """It is fetched by its name when it runs, and may be another the next time."""
    import ropext

    model = make_model(tmp_path / "base")
    config = json.loads((model / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": names}
    (model / "config.json").write_text(json.dumps(config))
    snapshot = open_snapshot(str(model))
    assert "code_sha256" not in Digests().of_checkpoint(snapshot)  # none of it runs
    sentence = r"base runs code of another repository \('other/repo'\)"
    with pytest.raises(InputError, match=sentence):
        Digests().of_checkpoint(snapshot, True)
    recipe = {"model": str(model), "extend": {"factor": 2}}
    with pytest.raises(InputError, match=sentence):
        ropext.run(recipe, tmp_path / "out", trust_remote_code=True)


def test_an_extension_hashes_nothing_that_it_does_not_copy(tmp_path, monkeypatch):
    import ropext

    read = []
    monkeypatch.setattr(weights, "content_digest", lambda *a, **k: read.append(a) or "0" * 64)
    monkeypatch.setattr(digests, "content_digest", lambda *a, **k: read.append(a) or "0" * 64)
    model = make_model(tmp_path / "base")
    config = json.loads((model / "config.json").read_text())
    config |= {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    (model / "config.json").write_text(json.dumps(config))
    ropext.extend(model, tmp_path / "out", factor=2.0, no_verify=True, link="symlink")
    assert not read


def test_another_name_for_a_file_that_is_being_read_changes_nothing(reads, tmp_path, monkeypatch):
    """A hard link, or other rights, set the time of change alone."""
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    os.utime(file, ns=(HOUR, HOUR))
    before = file.stat().st_ctime_ns

    def linking(path, show):
        while path.stat().st_ctime_ns == before:
            (tmp_path / "second name").unlink(missing_ok=True)
            os.link(path, tmp_path / "second name")
        return sha256(path)

    monkeypatch.setattr(digests, "content_digest", linking)
    known = Digests()
    assert known.of(file) == sha256(file)
    assert known.known == {}  # a write that set the time of modification back looks the same


def test_a_file_that_is_replaced_while_it_is_read_is_reported(tmp_path, monkeypatch):
    file = tmp_path / "weights"
    other = tmp_path / "other"
    for place in (file, other):
        place.write_bytes(b"one")
        os.utime(place, ns=(HOUR, HOUR))

    def replacing(path, show):
        digest = sha256(path)
        other.replace(path)
        return digest

    monkeypatch.setattr(digests, "content_digest", replacing)
    with pytest.raises(InputError, match="changed while it was read"):
        Digests().of(file)
