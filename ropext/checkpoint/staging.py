"""One directory, written as a whole or not at all.

The output OUT is prepared in `.OUT.tmp-PID` beside it, flushed, and renamed in one step. While it
is written, `.OUT.lock` is held. With force, the old OUT becomes `.OUT.old` first and is deleted
last; a run that finds `.OUT.old` finishes that (OUT is there: the old one goes) or undoes it (OUT
is not: the old one comes back) before anything else.
"""

import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ropext.errors import InputError, OutputExists, UsageError
from ropext.files import locked, os_errors, replace_whole

# What --force may replace: a directory that holds one of these (the last one: of `conformance`), or
# nothing.
CHECKPOINT_FILES = ("config.json", "ropext.json", "expected.json")


@dataclass
class Staged:
    """The temporary directory to write into; notes are for the user once it has its name."""

    directory: Path
    notes: list[str] = field(default_factory=list)


def check_output(
    output: Path, *, force: bool, inputs: Iterable[Path] = (), file: bool = False
) -> Path:
    """The real path of an output, a directory or one `file`, that may be written; changes nothing
    on the disk.

    `inputs` are directories and files that are read: none may lie in the output, nor the output in
    one of the directories.
    """
    if not file and output.suffix.lower() == ".gguf":
        raise UsageError(
            f"{output} (--output) is named as a GGUF file, and a directory would be written; name"
            " a directory (llama.cpp's convert_hf_to_gguf.py makes a GGUF of it)"
        )
    real = check_apart(output, inputs)
    if not os.path.lexists(real):
        return real
    if not force:
        raise OutputExists(f"{output} (--output) exists; --force replaces it as a whole")
    if real.is_symlink() or not (real.is_file() if file else real.is_dir()):
        what = "regular file" if file else "directory"
        raise OutputExists(f"{output} (--output) is no {what}, so --force does not replace it")
    names = set() if file else set(os.listdir(real))
    known = names.intersection(CHECKPOINT_FILES) or any(n.endswith(".gguf") for n in names)
    if names and not known:
        raise OutputExists(
            f"{output} (--output) holds something that is not a checkpoint, so --force does not "
            "replace it"
        )
    return real


def recover(output: Path) -> None:
    """Finish or undo what a killed run of the same output left, if one did."""
    _clean_up(check_apart(output), output)


def check_apart(output: Path, inputs: Iterable[Path] = ()) -> Path:
    """The real path of an output that neither is, holds nor lies in something that is read."""
    if output.name in ("", ".", ".."):
        raise UsageError(f"{output} (--output) does not name a directory of its own")
    if output.parts[0] == "ropext:":  # ropext://demo, as a path
        raise UsageError(f"{output} (--output) names something bundled, which is not written to")
    real = Path(os.path.realpath(output.parent)) / output.name
    places = {real, Path(os.path.realpath(real))}  # the output itself may be a link into the input
    for source in (Path(os.path.realpath(path)) for path in inputs):
        for place in places:
            if place == source:
                raise UsageError(f"{output} (--output) is the input itself; name another directory")
            if source in place.parents:
                raise UsageError(f"{output} (--output) lies inside the input {source}")
            if place in source.parents:
                raise UsageError(f"the input {source} lies inside {output} (--output)")
    parent = existing_parent(output)
    if not parent.is_dir():
        raise InputError(f"{output} (--output) cannot be written: {parent} is no directory")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"{output} (--output) cannot be written: Permission denied in {parent}")
    return real


def existing_parent(output: Path) -> Path:
    """The innermost directory above an output that is there already."""
    place = Path(os.path.realpath(output.parent))
    while not os.path.lexists(place):
        place = place.parent
    return place


def check_space(output: Path, needed: int) -> None:
    """Raise unless the output's disk has `needed` bytes free."""
    place = existing_parent(output)
    status = os.statvfs(place)
    free = status.f_bavail * status.f_frsize
    if needed > free:
        raise InputError(
            f"{output} (--output) needs {needed / 1e9:.2f} GB, but {place} has "
            f"{free / 1e9:.2f} GB free; --link hard or symlink copies no weights"
        )


@contextmanager
def staged(
    output: Path, *, force: bool = False, inputs: Iterable[Path] = (), file: bool = False
) -> Iterator[Staged]:
    """Yield a directory to write into; it becomes `output` when the block ends without an error.
    Of a `file`, the one of that name in it does.

    After an error, or an interrupt, nothing is left behind.
    """
    inputs = tuple(inputs)
    real = check_apart(output, inputs)
    _clean_up(real, output)
    check_output(output, force=force, inputs=inputs, file=file)
    with os_errors(output):
        made = _make_parents(real.parent)
    finished = False
    try:
        with locked(real, output):
            check_output(
                output, force=force, inputs=inputs, file=file
            )  # again: now nobody else writes it
            stage = Staged(real.parent / f".{real.name}.tmp-{os.getpid()}")
            try:
                with os_errors(output):
                    stage.directory.mkdir()
                yield stage
                with os_errors(output):
                    open_to_readers(stage.directory)
                    sync_tree(stage.directory)
                    whole = stage.directory / output.name if file else stage.directory
                    _commit(stage, whole, real, output, force)
                finished = True
            finally:
                _remove(stage.directory)
    finally:
        if not finished:
            _unmake_parents(made)


def _make_parents(parent: Path) -> list[Path]:
    """Create what is missing; the new directories, innermost first."""
    missing = [place for place in (parent, *parent.parents) if not place.exists()]
    parent.mkdir(parents=True, exist_ok=True)
    return missing


def _unmake_parents(made: list[Path]) -> None:
    with suppress(OSError):  # somebody else put something there
        for place in made:
            place.rmdir()


def _remove(path: Path) -> None:
    """Delete a directory tree, or whatever else has its name, without following links."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path, ignore_errors=True)


def replace_file(path: Path, content: bytes) -> None:
    """Give one file of a finished directory a new content in one step. Where the name is a link, or
    one of several hard links, the other names keep the old content."""
    with os_errors(path.parent):
        replace_whole(path, lambda stream: stream.write(content))
        sync(path.parent)


def _old(real: Path) -> Path:
    return real.parent / f".{real.name}.old"


def _clean_up(real: Path, output: Path) -> None:
    with os_errors(output):
        if not real.parent.is_dir():
            return
        ours = re.compile(re.escape(f".{real.name}.") + r"(tmp-[0-9]+|old|lock)")
        if not any(ours.fullmatch(name) for name in os.listdir(real.parent)):
            return
    with locked(real, output), os_errors(output):
        for name in os.listdir(real.parent):
            if name.startswith(f".{real.name}.tmp-") and ours.fullmatch(name):
                _remove(real.parent / name)
        old = _old(real)
        if os.path.lexists(old) and os.path.lexists(real):
            _remove(old)
        elif os.path.lexists(old):
            os.rename(old, real)
            sync(real.parent)


def _commit(stage: Staged, whole: Path, real: Path, output: Path, force: bool) -> None:
    """Give what is finished its name; with force, in three steps that recovery knows."""
    replacing = force and os.path.lexists(real)
    old = _old(real)
    if replacing:
        os.rename(real, old)
    try:
        if os.path.lexists(real):  # rename would replace an empty directory without a word
            raise OutputExists(f"{output} (--output) appeared while it was being written")
        os.rename(whole, real)
    except BaseException:
        if replacing and not os.path.lexists(real):
            os.rename(old, real)
        raise
    sync(real.parent)
    if replacing:
        _remove(old)
        if old.exists():
            stage.notes.append(f"the replaced directory could not be deleted wholly: {old}")


def sync(path: Path) -> None:
    """Wait until a file's content or a directory's entries are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_to_readers(directory: Path) -> None:
    """Give every file of its own in a directory the mode that a plain `open` would have given it.

    safetensors writes files that only their owner can read. A hard link shares its mode with the
    base, so it is left alone.
    """
    mask = os.umask(0)
    os.umask(mask)
    for folder, _, files in os.walk(directory):
        for name in files:
            path = Path(folder, name)
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
                path.chmod(0o666 & ~mask)


def sync_tree(directory: Path) -> None:
    """`sync` for everything in a directory, from the files up. Links are not followed."""
    for folder, _, files in os.walk(directory, topdown=False):
        for name in files:
            path = Path(folder, name)
            if not path.is_symlink():
                sync(path)
        sync(Path(folder))
