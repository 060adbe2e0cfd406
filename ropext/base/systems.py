"""Handle the differences between systems: descriptors, renames, locks, owners, memory, the cache's
folder.

No other package calls functions that only Linux, macOS or Windows has. The proof's child process is
the exception, because it imports nothing of ropext.
"""

import errno
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# Errors of copy_file_range if it cannot copy (old kernels, some network file systems).
NO_RANGE_COPY = {
    errno.EXDEV,
    errno.EPERM,
    errno.EINVAL,
    errno.ENOTSUP,
    errno.ENOSYS,
    errno.ETXTBSY,
}
# Linux's local file systems on which each write sets the times of a file, and nothing else can.
KEEP_TIMES = (b"ext4", b"xfs", b"btrfs", b"zfs", b"f2fs", b"overlay")
RENAME_TRIES = 50  # on Windows, a tenth of a second apart


def open_raw(path: Path, flags: int, mode: int = 0o666) -> int:
    r"""Open a file descriptor. Without O_BINARY Windows would write "\n" as "\r\n" and end at
    0x1A."""
    return os.open(path, flags | getattr(os, "O_BINARY", 0), mode)


def read_at(descriptor: int, length: int, at: int) -> bytes:
    """Read up to so many bytes of an open file descriptor at an offset, on any system."""
    os.lseek(descriptor, at, os.SEEK_SET)
    return os.read(descriptor, length)


def write_at(descriptor: int, data: bytes, at: int) -> None:
    """Write all of some bytes to an open file descriptor at an offset, on any system."""
    os.lseek(descriptor, at, os.SEEK_SET)
    while data:
        data = data[os.write(descriptor, data) :]


def data_parts(descriptor: int, position: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a range of a file descriptor that are not holes of a sparse file."""
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
    """Copy bytes between two file descriptors inside the kernel; share blocks if the file system
    can (btrfs, XFS).

    Return how many bytes were copied; 0 if the caller has to copy them itself.
    """
    if sys.platform != "linux":
        return 0
    try:
        return os.copy_file_range(source, target, length, start, start + shift)
    except OSError as error:
        if error.errno not in NO_RANGE_COPY:
            raise
        return 0


def bytes_on_disk(path: Path) -> int:
    """Return the bytes that a file occupies on the disk. A sparse file occupies less than its size,
    if the system reports it."""
    status = os.stat(path)
    return min(status.st_size, 512 * getattr(status, "st_blocks", status.st_size))


def move(rename: Callable[..., object], *names: Path) -> None:
    """Call a function that renames a file; on Windows try for five seconds, while a virus scanner
    or OneDrive has the file open."""
    if sys.platform == "win32":
        for _ in range(RENAME_TRIES):
            with suppress(PermissionError):
                rename(*names)
                return
            time.sleep(0.1)
    rename(*names)


def sync(path: Path) -> None:
    """Flush a file's content or a directory's entries to the disk (fsync). Windows opens no
    directory, and flushes only files opened for writing."""
    windows = sys.platform == "win32"
    with suppress(*[PermissionError] * windows):
        descriptor = open_raw(path, os.O_RDWR if windows else os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def copy_owner(source: Path, target: Path) -> None:
    """Give a file that is still empty the owner and the mode of another file."""
    old = source.stat()
    new = target.stat()
    # First the owner: changing it clears bits of the mode.
    if sys.platform != "win32" and (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
        os.chown(target, old.st_uid, old.st_gid)
    target.chmod(stat.S_IMODE(old.st_mode))


def lock_descriptor(descriptor: int) -> None:
    """Lock an open file descriptor for this process alone; raise OSError at once if another process
    has it."""
    if sys.platform == "win32":
        import msvcrt

        os.lseek(descriptor, 1 << 30, os.SEEK_SET)  # nobody can read a byte that is locked
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def limit_memory(most: int) -> None:
    """Limit this process's address space to a number of bytes, if the operating system can."""
    if sys.platform != "win32":
        import resource

        with suppress(OSError, ValueError):
            _, hard = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def free_descriptors() -> int | None:
    """Return how many more file descriptors this process may open. Return None if the operating
    system does not report it."""
    if sys.platform == "win32":
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    return soft - len(os.listdir("/dev/fd"))


def peak_memory() -> int:
    """Return the bytes of memory that this process held at its highest, as the operating system
    counts them."""
    if sys.platform == "win32":
        import psutil  # accelerate needs it

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def keeps_times(path: Path) -> bool:
    """Return whether the times of a file tell that it was written: on a local file system that is
    known for it and mounted read-write. A read-only image can bring any times. False if this is not
    known."""
    with suppress(OSError, ValueError, ImportError):
        if sys.platform == "linux":
            mountinfo = Path("/proc/self/mountinfo").read_bytes()
            mount = mount_of(os.fsencode(os.path.realpath(path)), mountinfo)
            return mount is not None and mount.kind in KEEP_TIMES and mount.is_writable
        return _is_local_drive(os.stat(path).st_dev)
    return False


@dataclass(frozen=True)
class Mount:
    """A line of /proc/self/mountinfo."""

    number: bytes
    parent: bytes
    point: bytes
    kind: bytes  # of its file system
    is_writable: bool

    def holds(self, path: bytes) -> bool:
        """Return whether a path is the mount point of this file system or is below it."""
        return path == self.point or path.startswith(self.point.rstrip(b"/") + b"/")


def mount_of(path: bytes, mountinfo: bytes) -> Mount | None:
    """Return the mount, as /proc/self/mountinfo lists it, that an absolute path without links leads
    to. As the kernel does, follow the mounts from the root: a later mount hides those below its
    mount point."""
    mounts = [_mount(line) for line in mountinfo.split(b"\n") if line]
    numbers = {mount.number for mount in mounts}
    found = None
    inner = [mount for mount in mounts if mount.parent not in numbers]
    while inner := [mount for mount in inner if mount.holds(path)]:
        found = min(inner, key=lambda mount: len(mount.point))  # the path reaches it first
        inner = [mount for mount in mounts if mount.parent == found.number]
    return found


def _mount(line: bytes) -> Mount:
    """Read one line of /proc/self/mountinfo."""
    fields = line.split(b" ")
    number, parent, _, _, point, options = fields[:6]
    kind, _, more = fields[fields.index(b"-", 6) + 1 :][:3]
    names = {*options.split(b","), *more.split(b",")}
    plain = re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8)]), point)
    return Mount(number, parent, plain, kind, b"ro" not in names)


def _is_local_drive(device: int) -> bool:
    """Return whether macOS or Windows lists a device as a local drive that is not read-only."""
    import psutil  # accelerate needs it

    for drive in psutil.disk_partitions(all=True):
        options = drive.opts.split(",")
        is_local = "local" in options or "fixed" in options
        if is_local and "rw" in options and os.stat(drive.mountpoint).st_dev == device:
            return True
    return False


def user_cache() -> Path | None:
    """Return the user's cache folder for ropext, by the custom of the operating system. Return None
    if the user has no home."""
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
