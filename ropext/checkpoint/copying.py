"""How a file's bytes get to the output: copied (reflinked where the file system can), hard-linked
or symlinked."""

import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from ropext.errors import InputError, ProofFailed
from ropext.files import open_raw, open_regular, read_at, write_at
from ropext.narration import Show, unseen
from ropext.options.fields import Link

CHUNK = 128 << 20  # bytes per system call, so that Ctrl-C is answered in between

PAGES, PAGE = 64, 4096  # of what the kernel copied, compared with the source

# Another device, a file system or a policy without such links (exFAT and Windows say EINVAL), an
# inode with too many of them.
NO_LINK = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}
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
    """Put a weight file into the output; a note where it could not be linked as asked.

    A symlink gets the absolute path of the real file (not of a link in between), so that the output
    may be moved, and the base may not. A hard link is made to the real file too: os.link on a link
    would make a second link.
    """
    real, refused = os.path.realpath(source), ""
    for way in {"symlink": ("symlink_to", "hardlink_to"), "hard": ("hardlink_to",)}.get(link, ()):
        try:
            getattr(target, way)(real)
            return f"hard linked instead of {refused}" if refused else None
        except OSError as error:
            if error.errno not in NO_LINK:
                raise
            refused = refused or f"{link.replace('hard', 'hard link')}ed ({error.strerror})"
    copy_file(source, target, show)
    return f"copied instead of {refused}" if refused else None


def copy_file(source: Path, target: Path, show: Show = unseen) -> None:
    """Copy a regular file's content, inside the kernel where possible, keeping its holes."""
    descriptor = open_regular(source)
    try:
        size = os.fstat(descriptor).st_size
        out = open_raw(target, os.O_RDWR | os.O_CREAT | os.O_EXCL)
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
    """Copy a part of a file to `shift` bytes later, its holes left out; compare pages of it."""
    for first, last in _data(source, start, end):
        for done in _copy_range(source, target, first, last, shift, path):
            show(done, end, f"copying {path.name}")
    pages = -(-(end - start) // PAGE)
    for page in {*(i * pages // PAGES for i in range(PAGES - 1)), pages - 1} if pages else ():
        at = start + page * PAGE
        _same(target, read_at(source, min(PAGE, end - at), at), at, shift, path)


def _same(target: int, data: bytes, at: int, shift: int, path: Path) -> None:
    """Refuse a copy with other bytes; a hole at its end is not there yet."""
    if read_at(target, len(data), at + shift).rstrip(b"\0") != data.rstrip(b"\0"):
        raise ProofFailed(f"proof: the copy of {path} has other bytes at {at:,} and after")


def _data(descriptor: int, position: int, size: int) -> Iterator[tuple[int, int]]:
    """The parts of a part of a file that are not holes."""
    if sys.platform != "linux":  # macOS has it for APFS alone
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
            data = read_at(source, min(length, 1 << 20), start)
            write_at(target, data, start + shift)
            _same(target, data, start, shift, name)
            done = len(data)
        if not done:
            raise InputError(f"{name} shrank while it was copied")
        start += done
        yield start


def _copy_in_kernel(source: int, target: int, start: int, length: int, shift: int) -> int:
    """Bytes copied without passing through this process, sharing blocks where the file system can
    (btrfs, XFS); 0 where it has to be done by hand."""
    if sys.platform != "linux":
        return 0
    try:
        return os.copy_file_range(source, target, length, start, start + shift)
    except OSError as error:
        if error.errno not in NO_RANGE_COPY:
            raise
        return 0
