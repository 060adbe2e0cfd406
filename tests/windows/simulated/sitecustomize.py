"""Windows, as far as Linux can play it, for every interpreter with this folder in PYTHONPATH.

Functions that only POSIX has are gone for ropext's own files, which see `os`, `sys` and `signal`
through a mask; libraries, which support both systems, keep them. The rules of Windows for files
hold for everybody: an open or mapped file is neither deleted nor renamed, a rename replaces
nothing, links need a privilege. ROPEXT_SEES names a file that records forbidden events.
"""

import builtins
import errno
import os
import signal
import sys
import types

# By its whole path: a clone may be in a folder of this name.
PACKAGE = os.path.join(os.path.abspath(__file__).rsplit(os.sep, 4)[0], "ropext", "")
ABSENT = {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "posix"}
GONE = {
    "os": """pread preadv pwrite pwritev O_CLOEXEC O_NOFOLLOW O_NONBLOCK O_DIRECTORY O_SYNC O_NOCTTY
        copy_file_range sendfile splice SEEK_DATA SEEK_HOLE statvfs fstatvfs sysconf uname fchmod
        chown getuid geteuid fork killpg setsid sched_getaffinity posix_fadvise mkfifo""",
    "signal": "SIGKILL SIGHUP SIGQUIT SIGUSR1 SIGUSR2 SIGALRM",
    "sys": "",
}
BINARY = 1 << 30
real = types.SimpleNamespace(**{name: getattr(os, name) for name in dir(os)})
text_mode = set()  # descriptors that were opened without O_BINARY


class Mask(types.ModuleType):
    """A module as ropext sees it."""

    def __init__(self, module, **other):
        gone = set(GONE[module.__name__].split())
        object.__setattr__(self, "held", (module, gone, other))

    def __getattribute__(self, name):
        module, gone, other = object.__getattribute__(self, "held")
        if name in gone:
            raise AttributeError(f"Windows has no {module.__name__}.{name}")
        return other[name] if name in other else getattr(module, name)

    def __setattr__(self, name, value):
        setattr(object.__getattribute__(self, "held")[0], name, value)


class Status:
    """No st_blocks."""

    def __init__(self, status):
        names = "st_mode st_ino st_dev st_nlink st_uid st_gid st_size "
        names += "st_mtime st_mtime_ns st_ctime_ns"
        for name in names.split():
            setattr(self, name, getattr(status, name))


def never(what):
    """Record a forbidden event, and raise; the record stays if somebody catches the error."""
    with open(os.environ["ROPEXT_SEES"], "a", encoding="utf-8") as seen:
        seen.write(what + "\n")
    raise AssertionError(what)


def open_(path, flags, mode=0o777, **how):
    if os.path.isdir(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))
    descriptor = real.open(path, flags & ~BINARY, mode, **how)
    (text_mode.discard if flags & BINARY else text_mode.add)(descriptor)
    return descriptor


def raw(call):
    def masked(descriptor, *rest):
        if descriptor in text_mode:
            never(f"{call.__name__} of a descriptor that was opened without O_BINARY")
        return call(descriptor, *rest)

    return masked


def kill(process, number):
    if number == 0:
        never("os.kill(..., 0), which sends Ctrl-C")
    return real.kill(process, number)


def locking(descriptor, mode, length):
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise PermissionError(errno.EACCES, "Permission denied") from None


def is_open(path):
    """Return whether this process, or a child of it, holds a file, or one below a folder."""
    place, found = os.path.realpath(path), []
    for number in os.listdir("/proc/self/fd"):
        try:
            held = real.readlink(f"/proc/self/fd/{number}")
            found += [held] * (not os.path.isdir(held))
        except OSError:
            continue
    with open("/proc/self/maps", encoding="utf-8") as maps:
        found += [line.split(None, 5)[-1].strip() for line in maps]
    return any(held == place or held.startswith(f"{place}/") for held in found)


def held_back(call, replaces=True):
    def masked(path, *rest, dir_fd=None, **how):
        where = path if dir_fd is None else f"{real.readlink(f'/proc/self/fd/{dir_fd}')}/{path}"
        if is_open(where) or (rest and os.path.isfile(rest[0]) and is_open(rest[0])):
            raise PermissionError(errno.EACCES, "[WinError 32] it is used", str(where))
        if rest and os.path.lexists(rest[0]) and not (replaces and os.path.isfile(rest[0])):
            raise FileExistsError(errno.EEXIST, "[WinError 183] it is there", str(rest[0]))
        return call(path, *rest, **({} if dir_fd is None else {"dir_fd": dir_fd}), **how)

    return masked


class Processes:
    """psutil, which names the peak of a process on Windows alone."""

    def virtual_memory(self):
        import psutil

        return psutil.virtual_memory()

    def Process(self):
        peak = types.SimpleNamespace(peak_wset=1 << 30)
        return types.SimpleNamespace(memory_info=lambda: peak)


def symlink(*names, **how):
    raise OSError(errno.EINVAL, "[WinError 1314] a required privilege is not held", *names[:1])


def fsync(descriptor):
    import fcntl

    number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
    if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, "Bad file descriptor")
    real.fsync(descriptor)


os.unlink, os.remove = held_back(real.unlink), held_back(real.remove)
os.rename, os.replace = held_back(real.rename, replaces=False), held_back(real.replace)
os.symlink, os.fsync = symlink, fsync
os.supports_dir_fd |= {os.unlink, os.open}

MASKS = {
    "os": Mask(
        os,
        name="nt",
        O_BINARY=BINARY,
        open=open_,
        read=raw(real.read),
        write=raw(real.write),
        kill=kill,
        stat=lambda *at, **how: Status(real.stat(*at, **how)),
        lstat=lambda *at, **how: Status(real.lstat(*at, **how)),
        fstat=lambda descriptor: Status(real.fstat(descriptor)),
    ),
    "sys": Mask(sys, platform="win32"),
    "signal": Mask(signal),
    "psutil": Processes(),
    "msvcrt": types.SimpleNamespace(LK_NBLCK=2, locking=locking),
}  # fmt: skip


def imported(name, globals=None, locals=None, fromlist=(), level=0, first=builtins.__import__):
    if level == 0 and PACKAGE in str((globals or {}).get("__file__", "")):
        if name in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if name in MASKS:
            return MASKS[name]
    return first(name, globals, locals, fromlist, level)


builtins.__import__ = imported
