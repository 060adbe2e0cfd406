"""Write one output as a whole or not at all: prepare it in a folder next to it, flush, rename.

ropext prepares the output OUT in `.OUT.ropext-TOKEN/new` in the same directory, flushes it, and
renames it in one step. It holds the lock of OUT meanwhile. It changes nothing before every possible
refusal has been checked.

With `force`, ropext first renames the old output to `old` in that folder, and checks it there,
because nobody reaches it by name. If it holds files that ropext did not write, it gets its name
back and the new output becomes OUT.new. Otherwise ropext renames `old` to `deleted` before it
deletes it, so that nobody takes half of it for the whole.

If a later run finds `old` next to `new`, OUT did not get its name: that run restores `old`. It
deletes all else that a killed run left.

Files that belong next to an output of one file (`.OUT.ropext-TOKEN/beside`) get their names right
after it. If a kill came between the two, a later run names them.
"""

import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ropext.base import guard
from ropext.base.atomic import os_errors, replace_whole
from ropext.base.errors import InputError, OutputExists, UsageError
from ropext.base.locks import lock_of, locked
from ropext.base.narration import in_bytes
from ropext.base.systems import move, sync

NEW = "new"
OLD = "old"
DELETED = "deleted"
BESIDE = "beside"


@dataclass
class Staged:
    """The temporary directory to write into. The user sees the notes once it has its name."""

    directory: Path
    notes: list[str] = field(default_factory=list)
    # SHA-256 of the files copied, or linked with a known digest
    digests: dict[str, str] = field(default_factory=dict)

    def write_beside(self, name: str, text: str) -> None:
        """Write a signed text that belongs next to an output of one file. It gets its name after
        the output."""
        folder = self.directory.parent / BESIDE
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(text.encode())

    def names(self) -> tuple[str, ...]:
        """Return the files of the staged output, then the files that will be next to it."""
        names = list[str]()
        for folder in (self.directory, self.directory.parent / BESIDE):
            for path in sorted(folder.rglob("*")):
                if path.is_file():
                    names.append(path.relative_to(folder).as_posix())
        return tuple(names)


@dataclass(frozen=True)
class Output:
    """The directory or file to write, and the conditions for replacing an old one."""

    path: Path  # as given by the user
    force: bool = False  # replace an old one if ropext wrote every file of it
    reads: Sequence[Path | str] = ()  # it may not be, contain or be inside one of these
    is_file: bool = False
    written: guard.Written = guard.recorded  # returns the files of a directory that ropext wrote

    def part_named(self, work: Path) -> Path:
        """Return the path in an output's work folder that gets the name of the output."""
        if self.is_file:
            return work / NEW / self.path.name
        return work / NEW

    def check_taken(self, at: Path) -> None:
        """Raise if the old output, moved to `at` in the work folder, holds a file that ropext did
        not write."""
        guard.check_replaceable(
            self.path, force=True, file=self.is_file, written=self.written, at=at
        )


def check_output(output: Output) -> None:
    """Raise if a command may not write its output to this path. Change nothing on the disk."""
    path = output.path
    if not output.is_file and path.suffix.lower() == ".gguf":
        raise UsageError(
            f"{path} (--output) has the name of a GGUF file, but the output is a directory; name"
            " a directory (llama.cpp's convert_hf_to_gguf.py makes a GGUF of it)"
        )
    check_place(path)
    guard.check({"read": list(output.reads)}, {"--output": path})
    guard.check_replaceable(path, force=output.force, file=output.is_file, written=output.written)


def real_place(output: Path) -> Path:
    """Return the path of an output directory or file, with the links above it followed."""
    return Path(os.path.realpath(output.parent)) / output.name


def check_place(output: Path) -> None:
    """Raise if no command could write its output to this path. The reason is its name or the
    directory above it."""
    if output.name in ("", ".", ".."):
        raise UsageError(f"{output} (--output) names no directory of its own; give -o OUT a name")
    if output.parts[0] == "ropext:":  # ropext://demo, as a path
        raise UsageError(f"{output} (--output) is bundled and only read; name another place")
    guard.check_parent(output, "--output")


def check_space(output: Path, needed: int) -> None:
    """Raise unless the disk of a command's output path (--output) has `needed` bytes free."""
    place = guard.existing_parent(output)
    free = shutil.disk_usage(place).free
    if needed > free:
        raise InputError(
            f"{output} (--output) needs {in_bytes(needed)}, but {place} has "
            f"{in_bytes(free)} free; --link hard or symlink copies no weights"
        )


def settle_output(output: Output) -> None:
    """Check the output of a write as `check_output` does, and clear the remains of a killed run."""
    try:
        check_output(output)
    except OutputExists:
        recover(output.path, refused=True)
        raise
    recover(output.path)
    check_output(output)


@contextmanager
def staged(output: Output) -> Iterator[Staged]:
    """Yield a staged directory to write a checkpoint or a GGUF file into. It becomes the output if
    the block ends without an error; if the output is one file, the file of that name in it does.

    After an error or an interrupt, nothing is left behind.
    """
    settle_output(output)
    real = real_place(output.path)
    with os_errors(output.path):
        made = [place for place in real.parents if not place.exists()]  # innermost first
        real.parent.mkdir(parents=True, exist_ok=True)
    finished = False
    try:
        with locked(real, output.path):
            check_output(output)  # again: under the lock nobody else writes it
            with os_errors(output.path):
                work = guard.make_work(real)
            stage = Staged(work / NEW)
            try:
                with os_errors(output.path):
                    stage.directory.mkdir()
                yield stage
                with os_errors(output.path):
                    for part in (stage.directory, work / BESIDE):
                        if part.is_dir():
                            finish_tree(part)
                    _commit(work, output)
                    finished = True
                    stage.notes += _name_beside(work, real)
            finally:
                if finished or not os.path.lexists(work / OLD):
                    _discard(work)
                if finished and work.exists():
                    said = "the replaced directory could not be deleted wholly"
                    stage.notes.append(f"{said}: {work}")
    finally:
        if not finished:
            with suppress(OSError):  # somebody else put something there
                for place in made:
                    place.rmdir()


def remove_output(path: Path) -> None:
    """Delete the output directory of a run's stage, also if a user edited a file of it; the stage
    makes it again. Raise OutputExists if it holds a file that ropext did not write."""
    if path.exists():
        output = Output(path, force=True, written=guard.files_in)
        check_output(output)
        real = real_place(path)
        work = guard.make_work(real)
        try:
            move(os.rename, real, work / OLD)
            output.check_taken(work / OLD)
        except BaseException:
            _bring_back(work, real)
            raise
        finally:
            _discard(work)


def _remove(path: Path) -> None:
    """Delete a folder or file in an output's work folder, without following links."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path, ignore_errors=True)


def replace_file(path: Path, content: bytes) -> None:
    """Replace the content of one file of a finished output in one step; owner and mode stay.

    If the file is a link or one of several hard links, the other names keep the old content.
    """
    with os_errors(path):
        replace_whole(path, lambda stream: stream.write(content), keep=True)
        sync(path.parent)


def recover(output: Path, *, refused: bool = False) -> None:
    """Finish or undo the work of a killed write of the same output. If the output is `refused`,
    delete only folders that hold no old copy."""
    check_place(output)
    real = real_place(output)
    with os_errors(output):
        is_left = real.parent.is_dir() and (guard.works(real) or os.path.lexists(lock_of(real)))
    if is_left:
        with suppress(OutputExists) if refused else nullcontext(), locked(real, output):
            _recover(real, output, refused)


def _recover(real: Path, output: Path, refused: bool = False) -> None:
    """Name the files next to an output, or restore its old copy, after a killed write; delete its
    work folders. With `refused`, keep a folder that holds an old copy. Raise OutputExists if
    something else has the name of an old copy."""
    with os_errors(output):
        for work in guard.works(real):
            if (work / NEW).is_dir() and not os.listdir(work / NEW):  # the one file has its name
                _name_beside(work, real)
            if os.path.lexists(work / OLD):
                if refused:
                    continue
                if not os.path.lexists(real):
                    move(os.rename, work / OLD, real)
                    sync(real.parent)
                # After an output of one file `new` is empty; if it is not, OUT is neither the old
                # nor the new.
                elif (work / NEW).is_dir() and os.listdir(work / NEW):
                    raise OutputExists(
                        f"a killed run left the earlier {output} (--output) in {work / OLD}, and"
                        " something else has its name now; move one of the two away"
                    )
            _discard(work)


def _discard(work: Path) -> None:
    """Delete an output's work folder, `.OUT.ropext-TOKEN`; its mark goes last."""
    with suppress(OSError):
        if os.path.lexists(work / OLD):
            move(os.rename, work / OLD, work / DELETED)
        for name in (DELETED, NEW, BESIDE, work.name):
            _remove(work / name)
            if os.path.lexists(work / name):
                return
        work.rmdir()


def _commit(work: Path, output: Output) -> None:
    """Rename the finished output from its work folder to its name; with `force`, in steps that
    `recover` can undo."""
    real = work.parent / output.path.name
    try:
        if output.force and os.path.lexists(real):
            move(os.rename, real, work / OLD)
            output.check_taken(work / OLD)
        if os.path.lexists(real):  # rename would replace an empty directory without a word
            raise OutputExists(f"{output.path} (--output) appeared while it was being written")
        move(os.rename, output.part_named(work), real)
    except OutputExists as refusal:
        _bring_back(work, real)
        kept = _set_aside(work, NEW, real)
        raise OutputExists(f"{refusal}. What this command made is in {kept}") from None
    except BaseException:
        _bring_back(work, real)
        raise
    sync(real.parent)


def _bring_back(work: Path, real: Path) -> None:
    """Rename the old output from the work folder to its name again, or to OUT.old if somebody has
    taken the name."""
    if not os.path.lexists(work / OLD):
        return
    if os.path.lexists(real):
        _set_aside(work, OLD, real)
    else:
        move(os.rename, work / OLD, real)


def _set_aside(work: Path, part: str, real: Path) -> Path:
    """Keep a part of the work folder next to the output, under a free name: OUT.new or OUT.old.
    Return that path."""
    if part == NEW and (work / BESIDE).is_dir():
        for path in (work / BESIDE).iterdir():
            move(os.rename, path, work / NEW / path.name)
    place = real.with_name(f"{real.name}.{part}")
    number = 1
    while os.path.lexists(place):
        number += 1
        place = real.with_name(f"{real.name}.{part}-{number}")
    move(os.rename, work / part, place)
    sync(real.parent)
    return place


def _name_beside(work: Path, real: Path) -> list[str]:
    """Rename the files that belong next to a written output, and return notes. A file that ropext
    did not write is not overwritten; a note names it."""
    if not (work / BESIDE).is_dir():
        return []
    notes = []
    for path in sorted((work / BESIDE).iterdir()):
        place = real.with_name(path.name)
        if os.path.lexists(place) and not guard.is_signed(place):
            said = "was not overwritten: ropext did not write it, or it was edited"
            notes.append(f"{place} {said}")
        else:
            move(path.replace, place)
    sync(real.parent)
    return notes


def finish_tree(directory: Path) -> None:
    """Flush everything in a written output directory with `sync`, files first; links are not
    followed.

    safetensors writes files that only their owner can read. So each file gets the mode that a plain
    `open` gives, except a hard link, which shares its mode with the base.
    """
    mask = os.umask(0)
    os.umask(mask)
    for folder, _, files in os.walk(directory, topdown=False):
        for path in (Path(folder, name) for name in files):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
                path.chmod(0o666 & ~mask)
            if not path.is_symlink():
                sync(path)
        sync(Path(folder))
