"""Allow one writer per output: its holder locks `.OUT.ropext-lock` next to it and writes its own
name into it. The folder of its run, OUT.run, has a lock of its own.

The system drops the lock when the holder's process ends, so a lock file that nobody locks is stale.
On file systems without locks ropext checks the holder that the file names.
"""

import errno
import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ropext.base.atomic import os_errors
from ropext.base.errors import OutputExists, OutputLocked
from ropext.base.jsontext import JsonObject
from ropext.base.systems import lock_descriptor, open_raw, read_at, write_at

_LOCK = b'{"ropext": "lock", "pid": '  # the first bytes of every lock; a kill left a shorter one
NO_FLOCK = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)


def run_folder(output: Path) -> Path:
    """Return OUT.run, the path of the run's folder next to an output."""
    return output.parent / f"{output.name}.run"


def lock_of(real: Path) -> Path:
    """Return the path of an output's lock file, `.OUT.ropext-lock`."""
    return real.parent / f".{real.name}.ropext-lock"


# Not by filelock: it cannot say who holds a lock, takes a user's file of that name for one, and
# without flock its lock outlives the process; only `lock_descriptor` would go.
@contextmanager
def locked(real: Path, output: Path) -> Iterator[None]:
    """Hold the lock file of the output whose real path is `real`; raise OutputLocked if another
    process has it."""
    path = lock_of(real)
    with os_errors(output):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _acquire(path, output)
    try:
        yield
    finally:
        if sys.platform != "win32":
            # Deleted while held: who opened it meanwhile sees that the name is gone, tries again.
            path.unlink(missing_ok=True)
        os.close(descriptor)
        if sys.platform == "win32":
            with suppress(PermissionError):  # somebody has opened it
                path.unlink(missing_ok=True)


def _acquire(path: Path, output: Path) -> int:
    """Open a lock file, lock its descriptor and write this process into it; raise OutputLocked if
    another process holds it."""
    while True:
        descriptor = open_raw(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
        try:
            start = read_at(descriptor, len(_LOCK), 0)
            if start != _LOCK[: len(start)]:
                raise OutputExists(f"{path} has the name of ropext's lock and is none; rename it")
            try:
                lock_descriptor(descriptor)
            except OSError as error:
                _check_holder(error, descriptor, path, output)
            has_name = sys.platform == "win32"  # which keeps the name while the file is open
            with suppress(FileNotFoundError):
                has_name = has_name or os.path.samestat(os.lstat(path), os.fstat(descriptor))
            if has_name:
                _sign(descriptor, path)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _sign(descriptor: int, path: Path) -> None:
    """Write into a lock file which process holds it; if that fails, delete the file and raise the
    OSError."""
    pid = os.getpid()
    holder = {"ropext": "lock", "pid": pid, "host": socket.gethostname(), "start": _start(pid)}
    try:
        os.ftruncate(descriptor, 0)
        write_at(descriptor, json.dumps(holder).encode(), 0)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def _check_holder(error: OSError, descriptor: int, path: Path, output: Path) -> None:
    """Raise OutputLocked if another process holds the lock file, and name the process. On a file
    system without locks, return if the process that the file names is gone."""
    holder = _read(descriptor)
    if error.errno in NO_FLOCK:
        is_held = _alive(holder)
    elif error.errno in (errno.EWOULDBLOCK, errno.EACCES):
        is_held = True
    else:
        raise error
    if is_held:
        raise OutputLocked(
            f"{output} (--output) is being written by process {holder.get('pid', '?')} on "
            f"{holder.get('host', '?')}; wait for it, or stop it ({path} is its lock)"
        ) from None


def _start(pid: int) -> str:
    """Return when a process started, in clock ticks since the boot (proc(5), field 22). Return ""
    if unknown.

    This tells a process from a later one with the same number.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text("ascii", errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[19]


def _read(descriptor: int) -> JsonObject:
    """Read from a lock file which process holds it; return {} if that process was killed, or is
    read, before it wrote its name."""
    try:
        holder = json.loads(read_at(descriptor, 4096, 0))
    except (ValueError, RecursionError):
        return {}
    if not isinstance(holder, dict):
        return {}
    return holder


def _alive(holder: JsonObject) -> bool:
    """Return whether the process that a lock file names still runs. If it runs on another host,
    nobody can know: return true."""
    pid = holder.get("pid")
    if type(pid) is not int or pid <= 0:
        return False
    if holder.get("host") != socket.gethostname() or sys.platform == "win32":
        return True  # on Windows os.kill would stop it
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return holder.get("start") in ("", _start(pid))


def release(folder: Path, output: Path) -> None:
    """Delete the lock file that a killed command left; raise OutputLocked if a process still holds
    it."""
    real = folder.resolve()
    if os.path.exists(lock_of(real)):  # false, too, if no lock can have so long a name
        with locked(real, output):
            pass


def check_unlocked(output: Path | None) -> None:
    """Raise OutputLocked if another command holds the lock file of the output or of its OUT.run.

    Called before anything is opened, fetched or hashed. The processes of one command share its
    lock, so only the first of them asks.
    """
    if output is not None and os.environ.get("RANK", "0") == "0":
        release(output, output)
        release(run_folder(output), output)
