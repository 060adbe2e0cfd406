"""Every call of a process that changes a file, counted; one may be killed or made to fail.

Armed in a forked child, so nothing of it is left in the parent. Counted are the calls of `os`,
files that Python opens for writing, and the two writers that go past both: safetensors (Rust) and
torch.save (C++). "In the middle" of a write means that a part of it has reached the file.
"""

import builtins
import errno
import io
import mmap
import os
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KINDS = ("make", "write", "sync", "name", "remove")
LOG = 1 << 16  # bytes of shared memory: two counters, then one byte for each step
Part = Callable[[int], int]
HEAD = struct.Struct("<II")  # steps done; whether a write is going on


@dataclass(frozen=True)
class Wish:
    """What happens at which step: "before", "middle" (SIGKILL), or an errno (the call fails)."""

    step: int
    how: str | int
    share: float = 0.5  # the share of a write that is done when it is cut

    def part(self, size: int) -> int:
        """Return how many of so many bytes or letters reach the file."""
        return max(int(size * self.share), 1)


class Shared:
    """Steps done, seen by the parent also after a SIGKILL."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, LOG)

    def done(self, kind: str, count: int) -> None:
        if HEAD.size + count < LOG:
            self.memory[HEAD.size + count] = KINDS.index(kind)
        HEAD.pack_into(self.memory, 0, count + 1, 0)

    def writing(self, count: int) -> None:
        HEAD.pack_into(self.memory, 0, count, 1)

    def read(self) -> tuple[list[str], bool]:
        """Return (kinds of the finished steps, whether a write was in progress)."""
        count, writing = HEAD.unpack_from(self.memory, 0)
        return [KINDS[k] for k in self.memory[HEAD.size : HEAD.size + count]], bool(writing)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Layer:
    """The wrapped calls; only what happens below `room` counts."""

    def __init__(self, room: Path, shared: Shared, wish: Wish | None) -> None:
        self.room, self.shared, self.wish = str(room.resolve()) + os.sep, shared, wish
        self.count, self.inside = 0, False

    def step(
        self,
        kind: str,
        path: Any,
        do: Callable[[], Any],
        half: Callable[[Part], Any] | None = None,
        failure: Callable[[int], Exception] | None = None,
    ) -> Any:
        """Do one call and count it; calls that it makes itself (shutil over os) count by
        themselves."""
        if self.inside or not self._ours(path):
            return do()
        here = self.wish is not None and self.wish.step == self.count
        how = self.wish.how if here and self.wish else None
        if how == "before":
            die()
        if how == "middle" and half is not None and self.wish:
            self.shared.writing(self.count)
            half(self.wish.part)
            die()
        if isinstance(how, int):
            self.wish = None
            raise failure(how) if failure else OSError(how, os.strerror(how), str(path))
        if kind == "write":
            self.shared.writing(self.count)
        self.inside = True
        try:
            return do()
        finally:
            self.inside = False
            self.shared.done(kind, self.count)
            self.count += 1

    def _ours(self, path: Any) -> bool:
        try:
            if isinstance(path, int):
                path = os.readlink(f"/proc/self/fd/{path}")
            # The folder's own links resolved, not the last name's, which may be a link to be made.
            folder, name = os.path.split(os.path.abspath(os.fsdecode(path)))
            return os.path.join(os.path.realpath(folder), name).startswith(self.room)
        except (OSError, TypeError, ValueError):
            return False


class File:
    """A file open for writing whose every write reaches the disk as a step of its own."""

    def __init__(self, layer: Layer, real: Any, path: Any) -> None:
        self._layer, self._real, self._path = layer, real, path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __enter__(self) -> "File":
        self._real.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._real.__exit__(*error)

    def __iter__(self) -> Any:
        return iter(self._real)

    def write(self, data: Any) -> Any:
        def whole() -> Any:
            count = self._real.write(data)
            self._real.flush()
            return count

        def half(part: Part) -> None:
            self._real.write(data[: part(len(data))])
            self._real.flush()

        return self._layer.step("write", self._path, whole, half)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)


def _at(path: Any, folder: int | None) -> Any:
    return path if folder is None else os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)


def _wrap_os(layer: Layer) -> None:
    def over(name: str, kind: str, which: int = 0) -> None:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            path = _at(args[which], kwargs.get("dir_fd")) if which < len(args) else None
            return layer.step(kind, path, lambda: real(*args, **kwargs))

        setattr(os, name, call)

    for name in ("mkdir", "symlink", "link", "rename", "replace", "unlink", "remove", "rmdir"):
        kind = {"mkdir": "make", "rename": "name", "replace": "name"}.get(name, "remove")
        target = name in ("symlink", "link", "rename", "replace")
        over(name, "make" if name in ("symlink", "link") else kind, 1 if target else 0)
    over("fsync", "sync")
    over("ftruncate", "sync")
    _wrap_copies(layer)
    opened = os.open

    def open_(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        make = flags & os.O_CREAT and not os.path.lexists(path)
        do = lambda: opened(path, flags, *args, **kwargs)  # noqa: E731
        return layer.step("make", _at(path, kwargs.get("dir_fd")), do) if make else do()

    os.open = open_  # type: ignore[assignment]


def _wrap_copies(layer: Layer) -> None:
    write, pwrite = os.write, os.pwrite
    copy, send = os.copy_file_range, os.sendfile

    def write_(to: int, data: Any) -> int:
        half = lambda part: write(to, bytes(data)[: part(len(data))])  # noqa: E731
        return layer.step("write", to, lambda: write(to, data), half)

    def pwrite_(to: int, data: Any, at: int) -> int:
        half = lambda part: pwrite(to, data[: part(len(data))], at)  # noqa: E731
        return layer.step("write", to, lambda: pwrite(to, data, at), half)

    def copy_(source: int, to: int, length: int, *at: Any) -> int:
        half = lambda part: copy(source, to, part(length), *at)  # noqa: E731
        return layer.step("write", to, lambda: copy(source, to, length, *at), half)

    def send_(to: int, source: int, at: Any, length: int) -> int:
        # shutil asks for more than the file has.
        size = os.fstat(source).st_size
        half = lambda part: send(to, source, at, part(size))  # noqa: E731
        return layer.step("write", to, lambda: send(to, source, at, length), half)

    os.write, os.pwrite = write_, pwrite_
    os.copy_file_range, os.sendfile = copy_, send_  # type: ignore[assignment]


def _wrap_open(layer: Layer) -> None:
    real = io.open

    def open_(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if isinstance(path, int) or not set(mode) & set("wax+") or not layer._ours(path):
            return real(path, mode, *args, **kwargs)
        kind = "write" if os.path.lexists(path) else "make"  # emptied, or made
        return File(layer, layer.step(kind, path, lambda: real(path, mode, *args, **kwargs)), path)

    io.open = builtins.open = open_  # type: ignore[assignment]


def _halved(path: Any, do: Callable[[], Any]) -> Callable[[Part], None]:
    def half(part: Part) -> None:
        do()
        with open(path, "r+b") as file:
            file.truncate(part(os.path.getsize(path)))

    return half


def _wrap_foreign(layer: Layer) -> None:
    """Wrap the writers in Rust and C++, with the errors that they raise themselves."""
    import safetensors.torch
    import torch

    def rust(code: int) -> Exception:
        said = f"Error while serializing: I/O error: {os.strerror(code)} (os error {code})"
        return safetensors.SafetensorError(said)

    def cpp(code: int) -> Exception:
        return RuntimeError(
            "[enforce fail at inline_container.cc:672] . PytorchStreamWriter failed writing file "
            "data/0: file write failed"
        )

    serialize, save = safetensors.torch.serialize_file, torch.save

    def serialize_(tensors: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        do = lambda: serialize(tensors, path, *args, **kwargs)  # noqa: E731
        return layer.step("write", path, do, _halved(path, do), rust)

    def save_(what: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        do = lambda: save(what, path, *args, **kwargs)  # noqa: E731
        if not isinstance(path, str | os.PathLike):
            return do()
        return layer.step("write", path, do, _halved(path, do), cpp)

    safetensors.torch.serialize_file = serialize_
    torch.save = save_


def arm(room: Path, shared: Shared, wish: Wish | None) -> None:
    """Wrap every call of this process."""
    layer = Layer(room, shared, wish)
    _wrap_os(layer)
    _wrap_open(layer)
    if "torch" in sys.modules:  # the parent imports it for calls that will need it
        _wrap_foreign(layer)


@dataclass
class Ended:
    """How a child ended."""

    code: int | None  # None = killed
    said: str
    steps: list[str]
    writing: bool


def forked(
    call: Callable[[], int | None],
    room: Path,
    wish: Wish | None = None,
    kill_after: float | None = None,
) -> Ended:
    """Make a call in a forked child, in its room, with its file layer counted. `kill_after` so many
    seconds it is killed."""
    shared = Shared()
    log = room.parent / f"{room.name}.log"
    log.touch()  # the child may be killed before it opens it
    child = os.fork()
    if child == 0:
        _child(call, room, shared, wish, log)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    code = None if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)
    said = log.read_text(errors="replace")
    log.unlink()
    steps, writing = shared.read()
    return Ended(code, said, steps, writing)


def _child(
    call: Callable[[], int | None], room: Path, shared: Shared, wish: Wish | None, log: Path
) -> None:
    """Run the call in the child; never return."""
    code = 70
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout = os.fdopen(1, "w", buffering=1)
        sys.stderr = os.fdopen(2, "w", buffering=1)
        os.chdir(room)
        arm(room, shared, wish)
        code = call() or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


FAULTS = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EDQUOT, errno.EROFS)
