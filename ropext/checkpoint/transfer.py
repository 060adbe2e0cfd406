"""One file from the base to the output: copied (shared blocks where the file system can), hard
linked or symlinked; and made to last (fsync)."""

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args

from ropext.checkpoint.jsontext import open_regular
from ropext.errors import InputError

Link = Literal["copy", "hard", "symlink"]
LINKS: tuple[str, ...] = get_args(Link)

CHUNK = 128 << 20  # bytes per system call, so that Ctrl-C is answered in between

# Another device, a file system or a policy without hard links, an inode with too many of them.
NO_HARD_LINK = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS}
# What copy_file_range says where it cannot do it (old kernels, some network file systems).
NO_RANGE_COPY = {
    errno.EXDEV,
    errno.EPERM,
    errno.EINVAL,
    errno.ENOTSUP,
    errno.ENOSYS,
    errno.ETXTBSY,
}


def place(source: Path, target: Path, link: Link) -> str | None:
    """Put a weight file into the output; a note where it had to be copied after all.

    A symlink gets the absolute path of the real file (not of a link in between), so that the output
    may be moved, and the base may not. A hard link is made to the real file too: os.link on a link
    would make a second link.
    """
    real = os.path.realpath(source)
    if link == "symlink":
        os.symlink(real, target)
        return None
    if link == "hard":
        try:
            os.link(real, target)
            return None
        except OSError as error:
            if error.errno not in NO_HARD_LINK:
                raise
            reason = error.strerror
        copy_file(source, target)
        return f"copied instead of hard linked ({reason})"
    copy_file(source, target)
    return None


def copy_file(source: Path, target: Path) -> None:
    """Copy a regular file's content, inside the kernel where possible, keeping its holes."""
    descriptor = open_regular(source)
    try:
        size = os.fstat(descriptor).st_size
        out = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            for start, end in _data(descriptor, size):
                _copy_range(descriptor, out, start, end, source)
            os.ftruncate(out, size)  # a hole at the end
        finally:
            os.close(out)
    finally:
        os.close(descriptor)


def _data(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """The parts of a file that are not holes."""
    if not hasattr(os, "SEEK_DATA"):
        yield 0, size
        return
    position = 0
    while position < size:
        try:
            start = os.lseek(descriptor, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                return
            if error.errno != errno.EINVAL:
                raise
            yield position, size  # the file system does not know its holes
            return
        position = os.lseek(descriptor, start, os.SEEK_HOLE)
        yield start, min(position, size)


def _copy_range(source: int, target: int, start: int, end: int, name: Path) -> None:
    while start < end:
        length = min(CHUNK, end - start)
        done = _copy_in_kernel(source, target, start, length)
        if not done:
            data = os.pread(source, min(length, 1 << 20), start)
            done = os.pwrite(target, data, start) if data else 0
        if not done:
            raise InputError(f"{name} shrank while it was copied")
        start += done


def _copy_in_kernel(source: int, target: int, start: int, length: int) -> int:
    """Bytes copied without passing through this process, sharing blocks where the file system can
    (btrfs, XFS); 0 where it has to be done by hand."""
    if not hasattr(os, "copy_file_range"):  # macOS
        return 0
    try:
        return os.copy_file_range(source, target, length, start, start)
    except OSError as error:
        if error.errno not in NO_RANGE_COPY:
            raise
        return 0


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
