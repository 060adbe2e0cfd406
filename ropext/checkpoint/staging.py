"""One directory, written as a whole or not at all.

The output OUT is prepared in `.OUT.ropext-TOKEN/new` beside it, flushed, and renamed in one step.
While it is written, the lock of OUT is held. With force, what then has the name becomes `old` in
that folder first, and is looked at there, where nobody reaches it by name: what ropext did not
write goes back, and the new one stays beside it as OUT.new. The old one is renamed to `deleted`
before it is deleted, so that half of it is never taken for a whole. A later run that finds `old`
beside `new` brings it back, as OUT did not get its name; what else a killed run left it deletes.
Nothing is touched before all that can be refused is refused.

What goes beside an output of one file (`.OUT.ropext-TOKEN/beside`) gets its name right after it; a
later run does that where a kill came between the two.
"""

import errno
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ropext import guard
from ropext.atomic import os_errors, replace_whole
from ropext.errors import InputError, OutputExists, UsageError
from ropext.locks import lock_of, locked
from ropext.narration import in_bytes
from ropext.systems import move, sync

NEW = "new"
OLD = "old"
DELETED = "deleted"
BESIDE = "beside"


@dataclass
class Staged:
    """The temporary directory to write into; notes are for the user once it has its name."""

    directory: Path
    notes: list[str] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)  # of files that were read as they came

    def write_beside(self, name: str, text: str) -> None:
        """Write a signed text that will lie beside an output of one file. It is written last."""
        folder = self.directory.parent / BESIDE
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(text.encode())

    def names(self) -> tuple[str, ...]:
        """Return the files that were written, then those that will lie beside the output."""
        names = list[str]()
        for folder in (self.directory, self.directory.parent / BESIDE):
            for path in sorted(folder.rglob("*")):
                if path.is_file():
                    names.append(path.relative_to(folder).as_posix())
        return tuple(names)


@dataclass(frozen=True)
class Output:
    """A directory, or one file, that is to be written, and what may be replaced there."""

    path: Path  # as the user named it
    force: bool = False  # one of which ropext wrote every file is replaced
    reads: Sequence[Path | str] = ()  # it may not be, hold or lie inside one of these
    is_file: bool = False
    written: guard.Written = guard.recorded  # which files of a directory ropext wrote

    def part_named(self, work: Path) -> Path:
        """Find in a folder at work what gets the name of the output."""
        if self.is_file:
            return work / NEW / self.path.name
        return work / NEW

    def check_taken(self, at: Path) -> None:
        """Refuse what was taken from the output's name, unless ropext wrote all of it."""
        guard.check_replaceable(
            self.path, force=True, file=self.is_file, written=self.written, at=at
        )


def check_output(output: Output) -> None:
    """Refuse an output that may not be written; change nothing on the disk."""
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
    """The path of an output with the links above it followed."""
    return Path(os.path.realpath(output.parent)) / output.name


def check_place(output: Path) -> None:
    """Refuse an output whose name or directory cannot be written."""
    if output.name in ("", ".", ".."):
        raise UsageError(f"{output} (--output) names no directory of its own; give -o OUT a name")
    if output.parts[0] == "ropext:":  # ropext://demo, as a path
        raise UsageError(f"{output} (--output) is bundled and only read; name another place")
    parent = existing_parent(output)
    if not parent.is_dir():
        raise InputError(f"{output} (--output) cannot be written: {parent} is no directory")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"{output} (--output) cannot be written: Permission denied in {parent}")
    try:
        os.lstat(guard.work_of(parent / output.name, "0" * 16))
    except OSError as error:  # as a rule it does not exist
        if error.errno == errno.ENAMETOOLONG:
            raise InputError(
                f"{output} (--output) cannot be written: name too long, because ropext adds 25 "
                "letters to it while it writes; give a shorter one"
            ) from None


def existing_parent(output: Path) -> Path:
    """The innermost directory above an output that is there already."""
    place = Path(os.path.realpath(output.parent))
    while not os.path.lexists(place):
        place = place.parent
    return place


def check_space(output: Path, needed: int) -> None:
    """Raise unless the output's disk has `needed` bytes free."""
    place = existing_parent(output)
    free = shutil.disk_usage(place).free
    if needed > free:
        raise InputError(
            f"{output} (--output) needs {in_bytes(needed)}, but {place} has "
            f"{in_bytes(free)} free; --link hard or symlink copies no weights"
        )


def settle_output(output: Output) -> None:
    """`check_output`, and what a killed run left there cleared away."""
    try:
        check_output(output)
    except OutputExists:
        recover(output.path, refused=True)
        raise
    recover(output.path)
    check_output(output)


@contextmanager
def staged(output: Output) -> Iterator[Staged]:
    """Yield a directory to write into; it becomes the output when the block ends without an error.
    Where the output is one file, the one of that name in it does.

    After an error, or an interrupt, nothing is left behind.
    """
    settle_output(output)
    real = real_place(output.path)
    with os_errors(output.path):
        made = [place for place in real.parents if not place.exists()]  # innermost first
        real.parent.mkdir(parents=True, exist_ok=True)
    finished = False
    try:
        with locked(real, output.path):
            check_output(output)  # again: now nobody else writes it
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
    """Delete a step's output, one that ropext wrote alone; an edited one is made again."""
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
    """Delete a directory tree, or whatever else has its name, without following links."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path, ignore_errors=True)


def replace_file(path: Path, content: bytes) -> None:
    """Give one file of a finished directory a new content in one step. Where the name is a link, or
    one of several hard links, the other names keep the old content. Owner and mode stay."""
    with os_errors(path):
        replace_whole(path, lambda stream: stream.write(content), keep=True)
        sync(path.parent)


def recover(output: Path, *, refused: bool = False) -> None:
    """Finish or undo what a killed run of the same output left, if one did. Where the output is
    `refused`, only what holds no old copy is deleted."""
    check_place(output)
    real = real_place(output)
    with os_errors(output):
        is_left = real.parent.is_dir() and (guard.works(real) or os.path.lexists(lock_of(real)))
    if is_left:
        with suppress(OutputExists) if refused else nullcontext(), locked(real, output):
            _recover(real, output, refused)


def _recover(real: Path, output: Path, refused: bool = False) -> None:
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
                # Of one file an empty directory is left; else OUT is neither of them.
                elif (work / NEW).is_dir() and os.listdir(work / NEW):
                    raise OutputExists(
                        f"a killed run left the earlier {output} (--output) in {work / OLD}, and"
                        " something else has its name now; move one of the two away"
                    )
            _discard(work)


def _discard(work: Path) -> None:
    """Delete a folder at work, its mark last."""
    with suppress(OSError):
        if os.path.lexists(work / OLD):
            move(os.rename, work / OLD, work / DELETED)
        for name in (DELETED, NEW, BESIDE, work.name):
            _remove(work / name)
            if os.path.lexists(work / name):
                return
        work.rmdir()


def _commit(work: Path, output: Output) -> None:
    """Give what is finished its name; with force, in steps that recovery knows."""
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
    """Give what was taken from the output's name that name again, or one beside it where somebody
    has taken it."""
    if not os.path.lexists(work / OLD):
        return
    if os.path.lexists(real):
        _set_aside(work, OLD, real)
    else:
        move(os.rename, work / OLD, real)


def _set_aside(work: Path, part: str, real: Path) -> Path:
    """Keep a part of the folder at work beside the output, under a free name that says what it is:
    OUT.new or OUT.old."""
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
    """Give what goes beside an output its name, but not over what somebody else wrote; that is
    noted."""
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
    """`sync` everything in a directory, from the files up; links are not followed. safetensors
    writes files that only their owner can read: each gets the mode that a plain `open` gives, but
    for a hard link, which shares its mode with the base."""
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
