"""What differs between systems: descriptors, renames, locks, owners, memory, the cache's folder.

No other room calls what Linux, macOS or Windows alone has, but the proof's child, which imports
nothing of ropext.
"""

import errno
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

# What copy_file_range says where it cannot do it (old kernels, some network file systems).
NO_RANGE_COPY = {
    errno.EXDEV,
    errno.EPERM,
    errno.EINVAL,
    errno.ENOTSUP,
    errno.ENOSYS,
    errno.ETXTBSY,
}
RENAME_TRIES = 50  # on Windows, a tenth of a second apart


def open_raw(path: Path, flags: int, mode: int = 0o666) -> int:
    """Open a descriptor. Without O_BINARY Windows would write "\\n" as "\\r\\n" and end at 0x1A."""
    return os.open(path, flags | getattr(os, "O_BINARY", 0), mode)


def read_at(descriptor: int, length: int, at: int) -> bytes:
    """Read up to so many bytes at an offset."""
    os.lseek(descriptor, at, os.SEEK_SET)
    return os.read(descriptor, length)


def write_at(descriptor: int, data: bytes, at: int) -> None:
    """Write all of some bytes at an offset."""
    os.lseek(descriptor, at, os.SEEK_SET)
    while data:
        data = data[os.write(descriptor, data) :]


def data_parts(descriptor: int, position: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a part of a file that are not holes."""
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


def copy_in_kernel(source: int, target: int, start: int, length: int, shift: int) -> int:
    """Copy without the bytes passing through this process, sharing blocks where the file system can
    (btrfs, XFS). Return how many were copied; 0 where it has to be done by hand."""
    if sys.platform != "linux":
        return 0
    try:
        return os.copy_file_range(source, target, length, start, start + shift)
    except OSError as error:
        if error.errno not in NO_RANGE_COPY:
            raise
        return 0


def bytes_on_disk(path: Path) -> int:
    """Return what a file takes: a sparse one less than its size, where the system tells."""
    status = os.stat(path)
    return min(status.st_size, 512 * getattr(status, "st_blocks", status.st_size))


def move(rename: Callable[..., object], *names: Path) -> None:
    """Rename; on Windows try for five seconds, while a virus scanner or OneDrive has it open."""
    if sys.platform == "win32":
        for _ in range(RENAME_TRIES):
            with suppress(PermissionError):
                rename(*names)
                return
            time.sleep(0.1)
    rename(*names)


def sync(path: Path) -> None:
    """Wait until a file's content or a directory's entries are on the disk. Windows opens no
    directory, and only what may be written is flushed there."""
    windows = sys.platform == "win32"
    with suppress(*[PermissionError] * windows):
        descriptor = open_raw(path, os.O_RDWR if windows else os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def copy_owner(source: Path, target: Path) -> None:
    """Give a file, which is still empty, the owner and the mode of another."""
    old = source.stat()
    new = target.stat()
    # First the owner: changing it clears bits of the mode.
    if sys.platform != "win32" and (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
        os.chown(target, old.st_uid, old.st_gid)
    target.chmod(stat.S_IMODE(old.st_mode))


def lock_descriptor(descriptor: int) -> None:
    """Lock an open file for this process alone, or raise OSError at once where another has it."""
    if sys.platform == "win32":
        import msvcrt

        os.lseek(descriptor, 1 << 30, os.SEEK_SET)  # nobody can read a byte that is locked
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def limit_memory(most: int) -> None:
    """Let this process have at most so many bytes of address space, where the system can."""
    if sys.platform != "win32":
        import resource

        with suppress(OSError, ValueError):
            _, hard = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def peak_memory() -> int:
    """Return the bytes that this process held at its highest."""
    if sys.platform == "win32":
        import psutil  # accelerate needs it

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def user_cache() -> Path | None:
    """Return the folder for what can be found out again, by the custom of the system; None where
    the user has no home."""
    named = os.environ.get("XDG_CACHE_HOME")
    if named:
        return Path(named) / "ropext"
    try:
        home = Path.home()
    except RuntimeError:
        return None
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "ropext"
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "ropext"
    return home / ".cache" / "ropext"
