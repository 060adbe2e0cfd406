"""Files of every room: each written whole, and one writer per output.

A file is written beside its name and renamed, so that one that is there is complete. An output has
one writer: `.OUT.lock` beside it, held by flock and naming its holder. The kernel drops an flock
with the process that held it, so a lock file without one is stale whoever wrote it. On file systems
without flock the holder that the file names is looked at instead.
"""

import errno
import fcntl
import json
import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ropext.errors import InputError, OutputExists

_HALF_WRITTEN = re.compile(r"\..+\.[0-9]+\.tmp")
NO_FLOCK = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL}


@contextmanager
def os_errors(output: Path) -> Iterator[None]:
    """Tell an error of the file system in one sentence."""
    try:
        yield
    except OSError as error:
        where = f" ({os.fsdecode(error.filename)})" if error.filename else ""
        reason = error.strerror or type(error).__name__
        raise InputError(f"{output} cannot be written: {reason}{where}") from error


def write_whole(path: Path, write: Callable[[Any], object]) -> None:
    """Write beside the name, flush to the disk, rename: a file is there whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as stream:
                write(stream)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(
            f"{path} cannot be written: {error.strerror or type(error).__name__}; what is finished "
            "is kept, and the same command goes on from there"
        ) from error


def write_json(path: Path, data: Any) -> None:
    """Indented JSON in the order given, newline at the end; not-a-number is refused."""
    text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """A whole binary file."""
    write_whole(path, lambda stream: stream.write(data))


def write_text(path: Path, text: str) -> None:
    """A whole text file."""
    write_bytes(path, text.encode())


def read_json(path: Path) -> Any:
    """A JSON file of a run directory."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error


def is_empty(path: Path) -> bool:
    """Whether a directory holds nothing but what killed writers left half-written, or is absent."""
    if not path.exists():
        return True
    return path.is_dir() and all(_HALF_WRITTEN.fullmatch(own.name) for own in path.iterdir())


def sweep(path: Path) -> None:
    """Delete what killed writers left half-written; for when nobody writes any more."""
    for stale in path.rglob(".*.tmp"):
        stale.unlink(missing_ok=True)


@contextmanager
def locked(real: Path, output: Path) -> Iterator[None]:
    """Hold the lock of the output whose real path is `real`; refuse while another run has it."""
    path = real.parent / f".{real.name}.lock"
    with os_errors(output):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _acquire(path, output)
    try:
        yield
    finally:
        # Deleted while held: who opened it meanwhile sees that the name is gone and tries again.
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _acquire(path: Path, output: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            _take(descriptor, path, output)
            if _is(descriptor, path):
                _sign(descriptor, path)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _sign(descriptor: int, path: Path) -> None:
    """Write into a lock who holds it; without room for that there is no lock."""
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(_self()).encode(), 0)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def _take(descriptor: int, path: Path, output: Path) -> None:
    holder = _read(descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in NO_FLOCK:
            held = _alive(holder)
        elif error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            held = True
        else:
            raise
        if held:
            raise OutputExists(
                f"{output} (--output) is being written by process {holder.get('pid', '?')} on "
                f"{holder.get('host', '?')}; wait for it, or stop it ({path} is its lock)"
            ) from None


def _is(descriptor: int, path: Path) -> bool:
    try:
        named, opened = os.stat(path, follow_symlinks=False), os.fstat(descriptor)
    except FileNotFoundError:
        return False
    return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)


def _self() -> dict[str, Any]:
    pid = os.getpid()
    return {"pid": pid, "host": socket.gethostname(), "start": _start(pid)}


def _start(pid: int) -> str:
    """When a process started, in clock ticks since the boot (proc(5), field 22); "" if unknown.

    Tells a process from a later one that was given the same number.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[19]


def _read(descriptor: int) -> dict[str, Any]:
    try:
        found = json.loads(os.pread(descriptor, 4096, 0))
    except (ValueError, RecursionError):
        return {}  # empty: killed, or seen, between creating it and writing into it
    return found if isinstance(found, dict) else {}


def _alive(holder: dict[str, Any]) -> bool:
    """Whether the process that a lock names still runs. On another host nobody can tell: yes."""
    pid = holder.get("pid")
    if type(pid) is not int or pid <= 0:
        return False
    if holder.get("host") != socket.gethostname():
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return holder.get("start") in ("", _start(pid))
