"""How a file's bytes get to the output: copied (reflinked where the file system can), hard-linked
or symlinked."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from ropext.errors import InputError
from ropext.files import open_regular
from ropext.narration import Show, unseen
from ropext.options.fields import Link

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


def place(source: Path, target: Path, link: Link, show: Show = unseen) -> str | None:
    """Put a weight file into the output; a note where it had to be copied after all.

    A symlink gets the absolute path of the real file (not of a link in between), so that the output
    may be moved, and the base may not. A hard link is made to the real file too: os.link on a link
    would make a second link.
    """
    real = os.path.realpath(source)
    if link == "symlink":
        os.symlink(real, target)
        return None
    reason = None
    if link == "hard":
        try:
            os.link(real, target)
            return None
        except OSError as error:
            if error.errno not in NO_HARD_LINK:
                raise
            reason = error.strerror
    copy_file(source, target, show)
    return f"copied instead of hard linked ({reason})" if reason else None


def copy_file(source: Path, target: Path, show: Show = unseen) -> None:
    """Copy a regular file's content, inside the kernel where possible, keeping its holes."""
    descriptor = open_regular(source)
    try:
        size = os.fstat(descriptor).st_size
        out = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            show(0, size, f"copying {source.name}")
            copy_part(descriptor, out, 0, size, 0, source, show)
            os.ftruncate(out, size)  # a hole at the end
        finally:
            os.close(out)
    finally:
        os.close(descriptor)


def copy_part(
    source: int, target: int, start: int, end: int, shift: int, path: Path, show: Show = unseen
) -> None:
    """Copy a part of a file to where it begins `shift` bytes later, its holes left out."""
    for first, last in _data(source, start, end):
        for done in _copy_range(source, target, first, last, shift, path):
            show(done, end, f"copying {path.name}")


def _data(descriptor: int, position: int, size: int) -> Iterator[tuple[int, int]]:
    """The parts of a part of a file that are not holes."""
    if not hasattr(os, "SEEK_DATA"):
        yield position, size
        return
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
        if start >= size:
            return
        position = os.lseek(descriptor, start, os.SEEK_HOLE)
        yield start, min(position, size)


def _copy_range(
    source: int, target: int, start: int, end: int, shift: int, name: Path
) -> Iterator[int]:
    """Copy a part of a file in pieces; yield where each begins."""
    while start < end:
        length = min(CHUNK, end - start)
        done = _copy_in_kernel(source, target, start, length, shift)
        if not done:
            data = os.pread(source, min(length, 1 << 20), start)
            done = os.pwrite(target, data, start + shift) if data else 0
        if not done:
            raise InputError(f"{name} shrank while it was copied")
        start += done
        yield start


def _copy_in_kernel(source: int, target: int, start: int, length: int, shift: int) -> int:
    """Bytes copied without passing through this process, sharing blocks where the file system can
    (btrfs, XFS); 0 where it has to be done by hand."""
    if not hasattr(os, "copy_file_range"):  # macOS
        return 0
    try:
        return os.copy_file_range(source, target, length, start, start + shift)
    except OSError as error:
        if error.errno not in NO_RANGE_COPY:
            raise
        return 0
