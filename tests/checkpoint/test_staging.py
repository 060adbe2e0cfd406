"""One directory as a whole or not at all: names, locks, recovery, and faults of the file system."""

import errno
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from marked import at_work, checkpoint, mark

from ropext.base import guard, locks, staging
from ropext.base.errors import InputError, OutputExists, UsageError
from ropext.base.staging import Output, check_output, check_space, replace_file, staged


def write(output: Path, text: str = "new", **kwargs) -> None:
    with staged(Output(output, **kwargs)) as stage:
        (stage.directory / "config.json").write_text(text)
        (stage.directory / "sub").mkdir()
        (stage.directory / "sub" / "x").write_text(text)
        mark(stage.directory)


def names(directory: Path) -> set[str]:
    return set(os.listdir(directory))


def test_a_staged_output_gets_its_name_last(tmp_path: Path):
    with staged(Output(tmp_path / "out")) as stage:
        (stage.directory / "config.json").write_text("{}")
        assert names(tmp_path) == {stage.directory.parent.name, ".out.ropext-lock"}
    assert names(tmp_path) == {"out"}
    assert names(tmp_path / "out") == {"config.json"}


@pytest.mark.parametrize("error", [ValueError("bug"), KeyboardInterrupt(), InputError("no")])
def test_an_error_while_staging_leaves_no_files(tmp_path: Path, error: BaseException):
    def fail() -> None:
        with staged(Output(tmp_path / "a" / "b" / "out")) as stage:
            (stage.directory / "config.json").write_text("{}")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert names(tmp_path) == set()


def test_parents_are_made_and_odd_names_work(tmp_path: Path):
    write(tmp_path / "ein Ordner" / "模型 (neu) [1]")
    assert names(tmp_path / "ein Ordner") == {"模型 (neu) [1]"}


def test_files_are_as_readable_as_plain_ones(tmp_path: Path):
    """safetensors creates files with mode 0600; a hard link shares its mode with the base."""
    base = tmp_path / "base"
    base.write_text("weights")
    base.chmod(0o440)
    plain = tmp_path / "plain"
    plain.write_text("")
    with staged(Output(tmp_path / "out")) as stage:
        os.close(os.open(stage.directory / "model.safetensors", os.O_CREAT | os.O_WRONLY, 0o600))
        os.link(base, stage.directory / "linked")
    modes = {p.name: p.stat().st_mode & 0o777 for p in (tmp_path / "out").iterdir()}
    assert modes == {"model.safetensors": plain.stat().st_mode & 0o777, "linked": 0o440}


def test_a_bundled_name_is_no_output(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="bundled"):
        write(Path("ropext://demo"))
    assert names(tmp_path) == set()


def test_everything_is_flushed_before_the_rename(tmp_path: Path, monkeypatch):
    calls: list[str] = []
    fsync, rename = os.fsync, os.rename

    def note_fsync(descriptor: int) -> None:
        calls.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def note_rename(source: Path, target: Path) -> None:
        calls.append("rename")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    write(tmp_path / "out")
    inside = {re.sub(r".*\.ropext-[0-9a-f]{16}/new", "", call) for call in calls[:5]}
    assert inside == {"/config.json", "/sub/x", "/sub", "/ropext.json", ""}
    assert calls[5:] == ["rename", str(tmp_path)]


def test_only_force_replaces_an_existing_output(tmp_path: Path):
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(OutputExists, match="--force"):
        write(out)
    write(out, force=True)
    write(out, "newer", force=True)
    assert (out / "sub" / "x").read_text() == "newer"
    assert names(tmp_path) == {"out"}


def test_force_keeps_files_that_ropext_did_not_write(tmp_path: Path):
    """A config.json and GGUF files make no output of ropext's; a user's additions stay."""
    for name, file in (("model", "config.json"), ("ggufs", "a.gguf"), ("record", "ropext.json")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
        with pytest.raises(OutputExists, match=r"not marked as written by ropext.*rename it"):
            write(tmp_path / name, force=True)
    write(tmp_path / "ours")
    (tmp_path / "ours" / "sub" / "notes.txt").write_text("mine")
    (tmp_path / "ours" / "more").symlink_to(tmp_path / "model")
    with pytest.raises(OutputExists, match=r"since ropext wrote it: more and sub/notes\.txt; move"):
        write(tmp_path / "ours", force=True)
    assert (tmp_path / "ours" / "sub" / "notes.txt").read_text() == "mine"


LARGE = (64 << 20) + 1  # bytes


def write_at(file: Path, place: int, content: bytes) -> None:
    with file.open("r+b") as stream:
        stream.seek(place)
        stream.write(content)


def open_new(file: Path) -> Path:
    file.touch()
    return file


EDITS = {
    "config.json": lambda file: file.write_text("mew"),
    "weights": lambda file: write_at(file, 50 << 20, b"trained"),  # has the same size
    "linked": lambda file: (file.unlink(), os.truncate(open_new(file), LARGE)),
    "link": lambda file: (file.unlink(), file.write_text("mine")),
    "another link": lambda file: (file.unlink(), file.symlink_to("mine")),
    "sub/x": lambda file: (file.unlink(), os.mkfifo(file)),
}


@pytest.mark.needs("mkfifo")
@pytest.mark.parametrize("name", EDITS)
def test_force_keeps_files_that_a_user_edited(tmp_path: Path, name: str):
    """By its whole content; a large hard link is known as another name of its base's bytes."""
    open_new(tmp_path / "base")
    os.truncate(tmp_path / "base", LARGE)
    with staged(Output(out := tmp_path / "out")) as stage:
        for small in ("config.json", "sub/x"):
            (stage.directory / small).parent.mkdir(exist_ok=True)
            (stage.directory / small).write_text("new")
        for link in ("link", "another link"):
            (stage.directory / link).symlink_to(tmp_path / "base")
        os.truncate(open_new(stage.directory / "weights"), LARGE)
        (stage.directory / "linked").hardlink_to(tmp_path / "base")
        files = guard.states(stage.directory)
        (stage.directory / "ropext.json").write_text(json.dumps({"files": files}))
    assert files["weights"] == hashlib.sha256(bytes(LARGE)).hexdigest()
    assert files["linked"] == LARGE
    assert files["config.json"] == hashlib.sha256(b"new").hexdigest()
    EDITS[name](out / name)
    before = os.lstat(out / name)[:7]  # without its times: it is read
    with pytest.raises(OutputExists, match=f"edited since ropext wrote it: {name}; move them"):
        write(out, force=True)
    assert os.lstat(out / name)[:7] == before
    os.rename(out / name, tmp_path / "elsewhere")
    write(out, force=True)
    assert names(out) == {"config.json", "sub", "ropext.json"}


MEANWHILE = {
    "files are added": lambda out: (out / "NOTES.md").write_text("mine"),
    "another folder": lambda out: (out.rename(out.with_name("kept")), out.mkdir(), add(out)),
    "a link": lambda out: (out.rename(out.with_name("kept")), out.symlink_to("kept")),
    "a file": lambda out: (out.rename(out.with_name("kept")), out.write_text("mine")),
}


def add(out: Path) -> None:
    (out / "work.txt").write_text("mine")


def content(place: Path) -> dict[str, str]:
    """Return everything below a place, by its names: texts, and the targets of links."""
    rows = {}
    for path in (place, *sorted(place.rglob("*"))):
        if path.is_symlink():
            rows[str(path)] = f"-> {os.readlink(path)}"
        elif path.is_file():
            rows[str(path)] = path.read_text()
    return rows


@pytest.mark.parametrize("change", MEANWHILE.values(), ids=MEANWHILE)
def test_force_replaces_only_checked_files(tmp_path: Path, change):
    """A folder that somebody put at the name during the work goes back there; the result gets
    another name."""
    out = tmp_path / "out"
    checkpoint(out, "old")

    def disturbed() -> None:
        with staged(Output(out, force=True)) as stage:
            (stage.directory / "config.json").write_text("new")
            change(out)
            before.update(content(out))

    before = dict[str, str]()
    with pytest.raises(OutputExists, match=r"What this command made is in .*out\.new$"):
        disturbed()
    assert content(out) == before
    assert (tmp_path / "out.new/config.json").read_text() == "new"
    assert names(tmp_path) - {"kept"} == {"out", "out.new"}


def test_a_file_that_takes_the_name_between_the_renames_is_kept_and_so_is_the_old_one(
    tmp_path: Path, monkeypatch
):
    out = tmp_path / "out"
    checkpoint(out, "old")
    (tmp_path / "out.new").mkdir()  # a name that is taken
    check = guard.check_replaceable

    def checked(output: Path, *, at: Path | None = None, **how) -> None:
        check(output, at=at, **how)
        if at is not None and not out.exists():
            out.mkdir()
            add(out)

    monkeypatch.setattr(guard, "check_replaceable", checked)
    with pytest.raises(OutputExists, match=r"appeared while .* is in .*out\.new-2$"):
        write(out, force=True)
    assert names(tmp_path) == {"out", "out.new", "out.new-2", "out.old"}
    assert (out / "work.txt").read_text() == "mine"
    assert (tmp_path / "out.old/config.json").read_text() == "old"
    write(tmp_path / "out.old", force=True)


def test_a_hashed_file_is_read_again_once_it_changed(tmp_path: Path):
    """Its times may be set back, the time of its last change may not."""
    file = tmp_path / "weights"
    read = list[Path]()

    def digest(path: Path) -> str:
        read.append(path)
        return path.read_text(encoding="utf-8")

    file.write_text("old")
    assert [guard.remembered(file, digest) for _ in range(2)] == ["old", "old"]
    assert len(read) == 2  # written just now: an edit might bear the same time stamp
    times = file.stat()
    file.write_text("new")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert guard.remembered(file, digest) == "new"


def test_force_keeps_a_place_that_is_no_directory(tmp_path: Path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("x")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "home")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    before = names(tmp_path)
    for name in ("home", "file", "link", "dangling"):
        with pytest.raises(OutputExists):
            write(tmp_path / name, force=True)
        with pytest.raises(OutputExists):
            write(tmp_path / name)
    assert names(tmp_path) == before
    assert (tmp_path / "home" / "thesis.tex").exists()


def test_an_output_inside_or_around_the_input_is_refused(tmp_path: Path):
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    (base / "w.safetensors").write_text("x")
    (tmp_path / "link").symlink_to(base)
    for output, words in (
        (base, "the input itself"),
        (base / "out", "inside the input"),
        (tmp_path / "link" / "out", "inside the input"),
        (base / "a" / ".." / "out", "inside the input"),
    ):
        with pytest.raises(UsageError, match=words):
            write(output, force=True, reads=[base])
    with pytest.raises(UsageError, match="is inside"):
        write(base, force=True, reads=[base / "w.safetensors"])
    with pytest.raises(UsageError, match="is inside"):
        write(tmp_path, force=True, reads=[base])
    assert names(base) == {"config.json", "w.safetensors"}
    write(tmp_path / "base-2", reads=[base])  # a name that only begins alike


@pytest.mark.parametrize("name", ["", ".", "..", "x/..", "/"])
def test_an_output_without_a_name_is_refused(name: str):
    with pytest.raises(UsageError, match="--output"):
        check_output(Output(Path(name), force=True))


def test_a_directory_is_not_named_as_a_gguf_file(tmp_path: Path):
    with pytest.raises(
        UsageError, match="has the name of a GGUF file, but the output is a directory"
    ):
        check_output(Output(tmp_path / "model.GGUF", force=True))
    check_output(Output(tmp_path / "model.GGUF", force=True, is_file=True))


# --- recovery ------------------------------------------------------------------------------------


def test_an_interrupted_force_is_undone(tmp_path: Path):
    work = at_work(tmp_path / "out")
    checkpoint(work / "old", "old")
    checkpoint(work / "new", "whole")
    with pytest.raises(OutputExists):
        write(tmp_path / "out")
    assert names(tmp_path) == {"out"}
    assert (tmp_path / "out" / "config.json").read_text() == "old"


def test_an_interrupted_force_is_finished(tmp_path: Path):
    checkpoint(tmp_path / "out", "new")
    checkpoint(at_work(tmp_path / "out") / "old", "old")
    write(tmp_path / "out", "newer", force=True)
    assert names(tmp_path) == {"out"}
    assert (tmp_path / "out" / "config.json").read_text() == "newer"


def test_a_refused_run_deletes_no_old_copy(tmp_path: Path):
    """What was prepared, and a lock, may go."""
    checkpoint(tmp_path / "out", "new")
    kept, work = at_work(tmp_path / "out"), at_work(tmp_path / "out", "f" * 16)
    checkpoint(kept / "old", "old")
    checkpoint(work / "new", "half")
    (tmp_path / ".out.ropext-lock").write_text("")
    with pytest.raises(OutputExists):
        write(tmp_path / "out")
    assert names(tmp_path) == {"out", kept.name}
    assert (tmp_path / "out" / "config.json").read_text() == "new"
    assert (kept / "old" / "config.json").read_text() == "old"


def test_the_old_copy_of_a_killed_run_survives_if_its_name_was_taken(tmp_path: Path):
    """Killed between the two renames; then another checkpoint was put at the output's name."""
    work = at_work(tmp_path / "out")
    checkpoint(work / "old", "old")
    checkpoint(work / "new", "whole")
    checkpoint(tmp_path / "out", "other")
    with pytest.raises(
        OutputExists, match=r"killed run left the earlier .*out \(--output\) in .*/old"
    ):
        write(tmp_path / "out", force=True)
    assert (work / "old" / "config.json").read_text() == "old"
    (tmp_path / "out").rename(tmp_path / "elsewhere")
    with pytest.raises(OutputExists, match="exists"):
        write(tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_text() == "old"
    assert names(tmp_path) == {"out", "elsewhere"}


def test_a_half_deleted_old_copy_is_never_brought_back(tmp_path: Path, monkeypatch):
    checkpoint(tmp_path / "out", "old")
    monkeypatch.setattr(staging, "_remove", lambda path: None)  # killed as it begins to delete
    write(tmp_path / "out", force=True)
    monkeypatch.undo()
    left = names(tmp_path) - {"out"}
    assert len(left) == 1
    (tmp_path / "out").rename(tmp_path / "moved")
    write(tmp_path / "out", "newer")
    assert (tmp_path / "out" / "config.json").read_text() == "newer"
    assert names(tmp_path) == {"out", "moved"}


def test_staging_deletes_only_folders_that_it_marked(tmp_path: Path):
    keep = {
        ".out.tmp-2024",
        ".out.tmp-5",
        ".out.old",
        ".out.ropext-notes",
        f".out.ropext-{'a' * 16}",
    }
    for name in keep:
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text("x")
    (tmp_path / ".out.lock").write_text("mine")
    (tmp_path / f".out.ropext-{'b' * 16}").symlink_to(tmp_path / ".out.old")
    (tmp_path / f".out.ropext-{'c' * 16}").mkdir()  # killed before it was marked
    at_work(tmp_path / "out")
    write(tmp_path / "out")
    write(tmp_path / "out", force=True)
    assert names(tmp_path) == keep | {"out", ".out.lock", f".out.ropext-{'b' * 16}"}
    assert all(names(tmp_path / name) == {"x"} for name in keep)
    assert (tmp_path / ".out.lock").read_text() == "mine"


# --- locks ---------------------------------------------------------------------------------------

HOLD = """
import sys
from pathlib import Path
from ropext.base.staging import Output, staged
with staged(Output(Path(sys.argv[1]))) as stage:
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_the_second_run_learns_who_holds_the_output(tmp_path: Path):
    out = tmp_path / "out"
    command = [sys.executable, "-c", HOLD, str(out)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as first:
        assert first.stdout.readline() == "ready\n"
        with pytest.raises(OutputExists) as error:
            write(out, force=True)
        assert str(first.pid) in str(error.value)
        assert socket.gethostname() in str(error.value)
        (temporary,) = tmp_path.glob(".out.ropext-*/new")
        assert temporary.is_dir()  # and its files stay
        first.kill()
        first.wait()
    assert names(tmp_path) == {".out.ropext-lock", temporary.parent.name}
    write(out)  # the lock of a dead process is stale, and its files are removed
    assert names(tmp_path) == {"out"}


@pytest.mark.parametrize(
    "content", ["", '{"ropext', '{"ropext": "lock", "pid": 1, "host": "elsewhere", "start": "1"}']
)
def test_a_lock_file_without_a_holder_is_ignored(tmp_path: Path, content: str):
    (tmp_path / ".out.ropext-lock").write_text(content)
    write(tmp_path / "out")
    assert names(tmp_path) == {"out"}


def test_a_foreign_lock_file_is_not_touched(tmp_path: Path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / ".out.ropext-lock").symlink_to(tmp_path / "precious")
    with pytest.raises(InputError, match=r"\.out\.ropext-lock"):
        write(tmp_path / "out")
    (tmp_path / ".out.ropext-lock").unlink()
    (tmp_path / "precious").rename(tmp_path / ".out.ropext-lock")
    with pytest.raises(OutputExists, match="has the name of ropext's lock"):
        write(tmp_path / "out")
    assert (tmp_path / ".out.ropext-lock").read_text() == "precious"


def without_flock(monkeypatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuse)


@pytest.mark.needs("fork")
def test_without_flock_the_named_holder_decides(tmp_path: Path, monkeypatch):
    without_flock(monkeypatch)
    me = {
        "ropext": "lock",
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "start": locks._start(os.getpid()),
    }
    dead = subprocess.Popen(["true"])
    dead.wait()
    for holder, held in (
        (me, True),
        (me | {"host": "elsewhere"}, True),
        (me | {"start": "1"}, False),  # the number was given to another process
        (me | {"pid": dead.pid}, False),
        (me | {"pid": "x"}, False),
        (me | {"pid": 10**30}, True),
    ):
        (tmp_path / ".out.ropext-lock").write_text(json.dumps(holder))
        if held:
            with pytest.raises(OutputExists, match=str(holder["pid"])):
                write(tmp_path / "out", force=True)
        else:
            write(tmp_path / "out", force=True)


# --- faults --------------------------------------------------------------------------------------


def fail_rename(monkeypatch, target: Path, code: int) -> None:
    rename = os.rename

    def failing(source: Path, destination: Path) -> None:
        if Path(destination) == target:
            raise OSError(code, os.strerror(code), str(source), None, str(destination))
        rename(source, destination)

    monkeypatch.setattr(os, "rename", failing)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EACCES, errno.EXDEV])
def test_a_rename_that_fails_changes_nothing(tmp_path: Path, monkeypatch, code: int):
    fail_rename(monkeypatch, tmp_path / "out", code)
    with pytest.raises(InputError, match=os.strerror(code)):
        write(tmp_path / "out")
    assert names(tmp_path) == set()


@pytest.mark.parametrize("step", ["out", "old"])
def test_a_forced_rename_that_fails_brings_the_old_output_back(
    tmp_path: Path, monkeypatch, step: str
):
    checkpoint(tmp_path / "out", "old")
    rename, failed = os.rename, []

    def failing_once(source: Path, destination: Path) -> None:
        if Path(destination).name == step and not failed:
            failed.append(1)
            raise OSError(errno.EIO, "Input/output error")
        rename(source, destination)

    monkeypatch.setattr(os, "rename", failing_once)
    with pytest.raises(InputError, match="Input/output error"):
        write(tmp_path / "out", force=True)
    assert failed
    assert names(tmp_path) == {"out"}
    assert (tmp_path / "out" / "config.json").read_text() == "old"


def test_an_fsync_that_fails_changes_nothing(tmp_path: Path, monkeypatch):
    def failing(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(InputError, match="Input/output error"):
        write(tmp_path / "out")
    assert names(tmp_path) == set()


def test_an_output_that_appears_meanwhile_is_kept(tmp_path: Path):
    def disturb() -> None:
        with staged(Output(tmp_path / "out")):
            (tmp_path / "out").mkdir()

    with pytest.raises(OutputExists, match="appeared"):
        disturb()
    assert names(tmp_path) == {"out", "out.new"}
    assert names(tmp_path / "out") == set()


@pytest.fixture
def nobody() -> Iterator[None]:
    """Drop the rights of root, which may write everywhere, so that the test means something in a
    container too."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    yield
    if is_root:
        os.seteuid(0)


@pytest.mark.needs("geteuid")
@pytest.mark.usefixtures("nobody")
def test_an_output_in_a_read_only_folder_gives_one_sentence():
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to nobody
        closed = Path(folder) / "closed"
        closed.mkdir(mode=0o555)
        with pytest.raises(InputError, match="Permission denied"):
            write(closed / "out")
        assert names(closed) == set()


def test_an_output_below_a_regular_file_gives_one_sentence(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="cannot be written"):
        write(tmp_path / "file" / "out")


def test_an_output_with_a_name_that_is_too_long_gives_one_sentence(tmp_path: Path):
    with pytest.raises(InputError, match="name too long"):
        write(tmp_path / ("x" * 250))
    assert names(tmp_path) == set()


def test_space_is_checked_on_the_outputs_disk(tmp_path: Path, monkeypatch):
    check_space(tmp_path / "not" / "yet" / "out", 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=3 * 10**9))
    check_space(tmp_path / "out", 3 * 10**9)
    with pytest.raises(InputError, match=r"needs 3\.50 GB, but .* 3\.00 GB free"):
        check_space(tmp_path / "out", 35 * 10**8)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=1_500_000))
    with pytest.raises(InputError, match=r"needs 4\.00 MB, but .* 1\.50 MB free"):
        check_space(tmp_path / "out", 4 * 10**6)


def test_replacing_one_file_leaves_its_other_names_alone(tmp_path: Path):
    (tmp_path / "base.json").write_text("base")
    (tmp_path / "hard.json").hardlink_to(tmp_path / "base.json")
    (tmp_path / "soft.json").symlink_to(tmp_path / "base.json")
    for name in ("hard.json", "soft.json", "new.json"):
        replace_file(tmp_path / name, b"fixed")
        assert (tmp_path / name).read_text() == "fixed"
    assert (tmp_path / "base.json").read_text() == "base"
    assert len(names(tmp_path)) == 4
