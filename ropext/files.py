"""Files, read strictly, each written whole, and one writer per output: the lock, also a dead one's.

JSON from strangers is read strictly and within limits, and written as transformers writes it. A
file is written beside its name and renamed, so that one that is there is complete. An output has
one writer: `.OUT.ropext-lock` beside it, locked by its holder, whom it names. The system drops the
lock with the process that held it, so a lock file without one is stale whoever wrote it. On file
systems without locks the holder that the file names is looked at instead.
"""

import errno
import json
import math
import os
import re
import secrets
import socket
import stat
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from ropext.errors import InputError, OutputExists

HALF_WRITTEN = re.compile(r"(.*/)?\.[^/]+\.[0-9a-f]{16}\.ropext-tmp")
_LOCK = b'{"ropext": "lock", "pid": '  # as every lock begins; one that is shorter was cut by a kill
NO_FLOCK = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL}


@contextmanager
def os_errors(output: Path) -> Iterator[None]:
    """Turn an error of the file system into one sentence."""
    try:
        yield
    except OSError as error:
        where = f" ({os.fsdecode(error.filename)})" if error.filename else ""
        reason = error.strerror or type(error).__name__
        raise InputError(f"{output} cannot be written: {reason}{where}") from error


def replace_whole(path: Path, write: Callable[[Any], object], *, keep: bool = False) -> None:
    """Write beside the name, flush to the disk, rename: a file is there whole or not at all. `keep`
    gives it the owner and the mode of the file that it replaces."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.ropext-tmp")
    try:
        with temporary.open("xb") as stream:
            if keep and path.exists():
                _keep_owner(path, temporary)
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        move(temporary.replace, path)
    finally:
        temporary.unlink(missing_ok=True)


def move(rename: Callable[..., object], *names: Path) -> None:
    """Rename; on Windows try for five seconds, while a virus scanner or OneDrive has it open."""
    for _ in range(50 * (sys.platform == "win32")):
        with suppress(PermissionError):
            rename(*names)
            return
        time.sleep(0.1)
    rename(*names)


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


def bytes_on_disk(path: Path) -> int:
    """What a file takes: a sparse one less than its size, where the system tells."""
    status = os.stat(path)
    return min(status.st_size, 512 * getattr(status, "st_blocks", status.st_size))


def _keep_owner(path: Path, temporary: Path) -> None:
    """Before there is any content. A change of owner would clear bits of the mode."""
    old = path.stat()
    new = temporary.stat()
    if sys.platform != "win32" and (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
        os.chown(temporary, old.st_uid, old.st_gid)
    temporary.chmod(stat.S_IMODE(old.st_mode))


def write_whole(path: Path, write: Callable[[Any], object]) -> None:
    """Write a file of a run, and its folder where that is missing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_whole(path, write)
    except OSError as error:
        raise InputError(
            f"{path} cannot be written: {error.strerror or type(error).__name__}; what is finished "
            "is kept; run the same command to resume"
        ) from error


def write_json(path: Path, data: Any) -> None:
    """Write indented JSON in the order given, newline at the end; not-a-number is refused."""
    text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write a whole binary file."""
    write_whole(path, lambda stream: stream.write(data))


def write_text(path: Path, text: str) -> None:
    """Write a whole text file."""
    write_bytes(path, text.encode())


def read_json(path: Path) -> Any:
    """Read a JSON file of a run directory."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error


def lock_of(real: Path) -> Path:
    """The lock of an output."""
    return real.parent / f".{real.name}.ropext-lock"


# Not by filelock: it cannot say who holds a lock, takes a user's file of that name for one, and
# without flock its lock outlives the process; only `_lock` and `_has_name` would go.
@contextmanager
def locked(real: Path, output: Path) -> Iterator[None]:
    """Hold the lock of the output whose real path is `real`; refuse while another run has it."""
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
    while True:
        descriptor = open_raw(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
        try:
            start = read_at(descriptor, len(_LOCK), 0)
            if start != _LOCK[: len(start)]:
                raise OutputExists(f"{path} has the name of ropext's lock and is none; rename it")
            _take(descriptor, path, output)
            if sys.platform == "win32" or _has_name(descriptor, path):  # kept there while open
                _sign(descriptor, path)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _sign(descriptor: int, path: Path) -> None:
    """Write into a lock who holds it; without room for that there is no lock."""
    pid = os.getpid()
    holder = {"ropext": "lock", "pid": pid, "host": socket.gethostname(), "start": _start(pid)}
    try:
        os.ftruncate(descriptor, 0)
        write_at(descriptor, json.dumps(holder).encode(), 0)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def _lock(descriptor: int) -> None:
    """Lock a file, or say at once that somebody else has."""
    if sys.platform == "win32":
        import msvcrt

        os.lseek(descriptor, 1 << 30, os.SEEK_SET)  # nobody can read a byte that is locked
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _take(descriptor: int, path: Path, output: Path) -> None:
    holder = _read(descriptor)
    try:
        _lock(descriptor)
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


def _has_name(descriptor: int, path: Path) -> bool:
    try:
        named = os.stat(path, follow_symlinks=False)
        opened = os.fstat(descriptor)
    except FileNotFoundError:
        return False
    return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)


def _start(pid: int) -> str:
    """When a process started, in clock ticks since the boot (proc(5), field 22); "" if unknown.

    Tells a process from a later one that was given the same number.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text("ascii", errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[19]


def _read(descriptor: int) -> dict[str, Any]:
    try:
        holder = json.loads(read_at(descriptor, 4096, 0))
    except (ValueError, RecursionError):
        return {}  # empty: killed, or seen, between creating it and writing into it
    return holder if isinstance(holder, dict) else {}


def _alive(holder: dict[str, Any]) -> bool:
    """Whether the process that a lock names still runs. On another host nobody can tell: yes."""
    pid = holder.get("pid")
    if type(pid) is not int or pid <= 0:
        return False
    if holder.get("host") != socket.gethostname() or sys.platform == "win32":
        return True  # there os.kill would stop it
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return holder.get("start") in ("", _start(pid))


# Bytes. Refused before parsing: parsed JSON takes up to thirty times the memory of its text.
CONFIG_LIMIT = 16 * 10**6
INDEX_LIMIT = 128 * 10**6

# Objects and arrays in one file. The largest real configs (added tokens, quantiser groups) hold
# some ten thousand; 16 MB of "{}" would be five million Python objects.
CONTAINER_LIMIT = 500_000

# Real configs nest five deep. Anything near Python's recursion limit would fail in later steps.
DEPTH_LIMIT = 64


# A file of the hub's cache, which is named after its content's hash.
_BLOB = re.compile(r"(models|datasets)--[^/\\]+[/\\]blobs[/\\][0-9a-f]{40,64}\Z")
LINKED = (".safetensors", ".gguf")  # weights, which are read as nothing else


def check_link(path: Path, home: Path) -> None:
    """Refuse a link in the directory `home` of a model, an adapter, documents or a run that leads
    out of it: git and tar keep links, so a stranger's may name any file of this machine."""
    if not path.is_symlink() or not path.exists():
        return
    real = Path(os.path.realpath(path))
    weights = path.name.endswith(LINKED) and real.is_file()
    if not (weights or real.is_relative_to(os.path.realpath(home)) or _BLOB.search(str(real))):
        raise InputError(
            f"{path} is a link to {real}, outside of {home}; put the file itself there if you "
            "want it read"
        )


def check_links(directory: Path) -> None:
    """Refuse every link in a directory that leads out of it."""
    for folder, folders, files in os.walk(directory):
        for name in (*folders, *files):
            check_link(Path(folder, name), directory)


def open_regular(path: Path) -> int:
    """A file descriptor of a regular file, reached through links or not; anything else is refused.

    O_NONBLOCK: opening a FIFO without a writer would otherwise hang before it can be looked at.
    """
    try:
        descriptor = open_raw(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InputError(f"{path} is not a regular file (nor a link to one), so it is not read")
    return descriptor


def read_bytes(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes."""
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(limit + 1) if size <= limit else b""
    if size > limit or len(data) > limit:
        raise InputError(
            f"{path} has {max(size, len(data)):,} bytes, more than the {limit // 10**6} MB that a "
            "file of its kind may have"
        )
    return data


PAIR_FACTORS_LIMIT = 16 << 20  # bytes


def read_text(path: str) -> str:
    """A small text file that an option names."""
    return as_text(read_bytes(Path(path), PAIR_FACTORS_LIMIT))


def as_text(data: bytes) -> str:
    """Decode what a user made: PowerShell 5.1's > writes UTF-16, other programs a mark."""
    return data.decode(json.detect_encoding(data), errors="replace")


def from_home(path: str | os.PathLike[str]) -> Path:
    """A path in which `~` is the user's home folder, as it is in MODEL."""
    return Path(os.path.expanduser(path))


def is_path(text: str) -> bool:
    """Whether a text can be nothing but a path; in ID:CONFIG no slash follows the colon."""
    return bool(re.match(r"[./~\\]|[A-Za-z]:[/\\]", text))


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; everything else about it is an InputError of one sentence."""
    return parse_object(read_bytes(path, CONFIG_LIMIT), str(path))


def parse_object(data: bytes, name: str, containers: int = CONTAINER_LIMIT) -> dict[str, Any]:
    """The JSON object in `data`. Duplicate keys, NaN, Infinity and depth bombs are refused.

    transformers' {"__float__": "Infinity"} is an object like any other and stays one.
    """
    if data.count(b"{") + data.count(b"[") > containers:
        raise InputError(f"{name} holds more than {containers:,} objects and arrays")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8 text (byte {error.start + 1})") from None
    try:
        value = json.loads(
            text,
            parse_constant=lambda token: _refuse(f"{token} is not a JSON number"),
            parse_float=_finite,
            object_pairs_hook=_unique,
        )
    except json.JSONDecodeError as error:
        raise InputError(_describe(error, text, name)) from None
    except RecursionError:
        raise InputError(f"{name} is nested too deeply to be a config") from None
    except ValueError as error:  # our own refusals, and an integer of more than 4300 digits
        raise InputError(f"{name} is not valid: {error}") from None
    if not isinstance(value, dict):
        kind = {list: "array", type(None): "null"}.get(type(value), type(value).__name__)
        raise InputError(f"{name} holds a JSON {kind}, where an object is expected")
    _check_depth(value, name)
    return value


def _refuse(reason: str) -> Any:
    raise ValueError(reason)


def _finite(token: str) -> float:
    value = float(token)
    if math.isinf(value):
        raise ValueError(f"{token[:40]} is too large for a number")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice[:80]!r} stands twice in one object")
    return entries


def _describe(error: json.JSONDecodeError, text: str, name: str) -> str:
    if not text.strip():
        return f"{name} is empty, where a JSON object is expected"
    where = f"line {error.lineno}, column {error.colno}"
    if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated"):
        return f"{name} is cut short: the JSON ends inside a value ({where})"
    return f"{name} is not valid JSON: {error.msg} ({where})"


def _check_depth(value: Mapping[str, Any], name: str) -> None:
    level: list[Any] = [value]
    for _ in range(DEPTH_LIMIT):
        inner = [item.values() if isinstance(item, dict) else item for item in level]
        level = [child for items in inner for child in items if isinstance(child, dict | list)]
        if not level:
            return
    raise InputError(f"{name} is nested more than {DEPTH_LIMIT} levels deep")


def values_json(data: Any) -> Any:
    """Write dataclasses, mappings and sequences as JSON. A number that is not finite becomes null;
    a field whose default is None is left out where it holds None, and so is one whose metadata say
    `"json": None`."""
    if hasattr(data, "to_json"):
        data = data.to_json()
    elif is_dataclass(data):
        written = [one for one in fields(data) if one.metadata.get("json", data) is not None]
        pairs = ((one, getattr(data, one.name)) for one in written)
        data = {one.name: v for one, v in pairs if v is not None or one.default is not None}
    if isinstance(data, Mapping):
        return {key: values_json(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [values_json(item) for item in data]
    if isinstance(data, float):
        return float(data) if math.isfinite(data) else None
    return str(data) if isinstance(data, Path) else data


def dump(value: Mapping[str, Any]) -> bytes:
    """JSON as transformers writes it, but in the order of the keys: indent 2, a final newline."""
    value = tagged(value)
    try:
        return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
    except UnicodeEncodeError:  # a lone surrogate, legal in JSON only as an escape
        return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()


def tagged(value: Any) -> Any:
    """Infinity, which JSON lacks, as transformers spells it. A channel that never turns is a
    longrope factor of infinity."""
    if isinstance(value, Mapping):
        return {key: tagged(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [tagged(item) for item in value]
    return {"__float__": "Infinity"} if value == math.inf else value


def limit_memory(most: int) -> None:
    """Let this process have at most so many bytes of address space, where the system can."""
    if sys.platform != "win32":
        import resource

        with suppress(OSError, ValueError):
            _, hard = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def user_cache() -> Path | None:
    """Where what can be found out again may be kept, by the custom of the system; None where the
    user has no home."""
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


def peak_memory() -> int:
    """Bytes that this process held at its highest."""
    if sys.platform == "win32":
        import psutil  # accelerate needs it

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def is_plain_name(name: str) -> bool:
    """Whether a shard name stays in its directory and is what it looks like."""
    return (
        name not in ("", ".", "..")
        and len(name) < 256
        and name.isprintable()
        and not set(name) & {"/", "\\"}
    )
