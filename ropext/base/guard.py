"""Check everything that a command reads and writes, and know the files that ropext wrote.

Two names are one place if the file system gives them the same (st_dev, st_ino), links followed. So
a volume that is mounted twice is recognised, and so are names that differ in case. An output may
not equal, contain or be inside an input. ropext replaces and deletes only files with a mark:

    OUT/ropext.json       lists under "files" the files of OUT and their content
    RUN/run.json          holds its own digest (no random token: the same run gives the same bytes)
    OUT.run/recipe.yaml   ends with a digest of its lines
    .OUT.ropext-TOKEN/    a work folder: it is empty, or holds a file of that name
    .OUT.ropext-lock      begins as every lock does
    *.png, *.parquet      hold their own digest (`Sign`)
    pieces of a run       hold theirs and that of their name (`sign_of_piece`)
"""

import errno
import hashlib
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ropext.base.atomic import temporary_of
from ropext.base.errors import InputError, OutputExists, UsageError, listed
from ropext.base.inputs import LONGEST_NAME, open_regular, read_text
from ropext.base.jsontext import read_object
from ropext.base.systems import keeps_times

Identity = tuple[int, int]
# A flag and its value: a path, several, or None.
Named = Mapping[str, Any]
Written = Callable[[Path], Collection[str] | None]
State = str | int | None  # a file's state, as a record lists it
_SHA256 = re.compile("[0-9a-f]{64}")

RECORD = "ropext.json"
USED = "used.log"  # what first steps took: the one file that differs from run to run
LOG = "log"  # the state of a log that ends with its own digest
FILES = "files"
SIGNATURE = "# as ropext wrote it: SHA-256 "  # the last line of a recipe that is kept
# bytes of the largest hard link that is hashed; a larger one is known by its other names
LINKED = 64 << 20
# ns. The first write through a mapping sets the times, and further ones do not until the page was
# written back, which Linux does after 30 seconds.
SETTLED = 60 * 10**9
END = 1 << 16  # bytes at the end of a file in which its sign is looked for
PIECE = 4 << 20  # bytes read at once
MOVE = "move or rename it, or name another place"


@dataclass(frozen=True)
class Sign:
    """The form of a digest near the end of a file: some bytes, then the SHA-256 of the file with
    zeros in the digest's place, then a number of further bytes."""

    begin: bytes
    more: int = 0

    @property
    def blank(self) -> bytes:
        """Return the bytes that replace the digest inside a PNG or parquet file while ropext
        computes it."""
        return b"0" * (64 + self.more)


PICTURE = Sign(b"tEXtropext\0SHA-256 ", 4)  # a chunk of a PNG, which ends with a checksum
LOSSES = Sign(b"losses by ropext, SHA-256 ")  # in the footer of a parquet file


def check(reads: Named, writes: Named) -> None:
    """Refuse an output path that equals, contains or is inside an input path, that is a link, or
    that is too long. Ignore an input that is not on this machine (a hub id)."""
    sources = list[tuple[str, list[Identity | None]]]()
    for flag, path in _each(reads):
        for place in _behind(path):
            chain = _chain(place)
            if chain[0] is not None:  # a link may lead nowhere
                sources.append((f"{place} ({flag})", chain))
    for flag, path in _each(writes):
        _check_length(path, flag)
        if path.is_symlink():
            raise OutputExists(
                f"{path} ({flag}) is a link, and links are not written through; {MOVE}"
            )
        here = _chain(path)
        name = f"{path} ({flag})"
        # Another file system may be mounted at a directory below.
        inner = set[Identity | None]()
        if sources:
            inner = {identity(folder) for folder, _, _ in os.walk(path)}
            inner.add(here[0])
        for source, there in sources:
            if here[0] == there[0]:
                raise UsageError(f"{name} is the input itself, {source}; name another place")
            if there[0] in here[1:]:
                raise UsageError(
                    f"{name} is inside the input {source}, which ropext only reads; name another "
                    "place"
                )
            if (inner - {None}) & set(there):
                raise UsageError(
                    f"the input {source} is inside {name}, which ropext writes; copy it to another "
                    "place first and name the copy, or write elsewhere"
                )


def _check_length(path: Path, flag: str) -> None:
    """Refuse an output path that is too long for the file system, with all that ropext adds to its
    name."""
    longest = temporary_of(path)
    is_long = len(os.fsencode(longest.name)) > LONGEST_NAME
    try:
        os.lstat(longest)
    except OSError as error:  # usually because it does not exist
        is_long = is_long or error.errno == errno.ENAMETOOLONG
    if is_long:
        added = len(longest.name) - len(path.name)
        raise InputError(
            f"{str(path)[:80]!r}... ({flag}) cannot be written: name too long, because ropext adds "
            f"up to {added} letters to it while it writes; give a shorter one"
        )


def _each(named: Named) -> Iterator[tuple[str, Path]]:
    """Yield every path of a command's inputs or outputs with its flag, to compare inputs with
    outputs."""
    for flag, value in named.items():
        for path in value if isinstance(value, list | tuple) else (value,):
            if path:
                yield flag, Path(path)


def _behind(path: Path) -> Iterator[Path]:
    """Yield a path of a command and the targets of the symbolic links below it; nothing if it does
    not exist."""
    if identity(path) is None:
        return
    yield path
    for folder, folders, names in os.walk(path):
        for name in (*folders, *names):
            if os.path.islink(os.path.join(folder, name)):
                yield Path(os.path.realpath(os.path.join(folder, name)))


def _chain(path: Path) -> list[Identity | None]:
    """Return the device and inode of a command's path and of the directories above it. Return None
    for each that does not exist."""
    real = Path(os.path.realpath(path))
    return [identity(place) for place in (real, *real.parents)]


def identity(path: Path | str) -> Identity | None:
    """Return the device and inode of the file that a path leads to. Return None if there is
    none."""
    with suppress(OSError, ValueError):
        status = os.stat(path)
        return status.st_dev, status.st_ino
    return None


def files_in(directory: Path) -> dict[str, Any] | None:
    """Return the files of any output directory that bear ropext's mark. Each has its digest or
    other `state`. ropext.json lists them. Return None if it cannot be read."""
    with suppress(InputError):
        files = read_object(directory / RECORD).get(FILES)
        return {**files, RECORD: None} if isinstance(files, dict) else None
    return None


def recorded(directory: Path) -> set[str] | None:
    """Return the files of an old output that --force may replace. They are still in the states of
    ropext.json. Return None if it cannot be read."""
    files = files_in(directory)
    if files is None:
        return None
    return {RECORD, *unchanged(directory, files)}


def is_as_written(directory: Path) -> bool:
    """Return whether an output directory still has all files that a command wrote. Each must have
    the `state` that ropext.json lists."""
    files = files_in(directory)
    return files is not None and files.keys() <= {RECORD, *unchanged(directory, files)}


def unchanged(directory: Path, files: Mapping[str, Any]) -> set[str]:
    """Return the files of an output that nobody edited since ropext wrote them. Each is still in
    its listed `state`."""
    return {name for name in listing(directory) if is_in_state(directory / name, files.get(name))}


def states(directory: Path, known: Mapping[str, str] = {}) -> dict[str, State]:
    """Return the marks by which any command later notices edits in an output: the digest, or other
    `state`, of each file below it except ropext.json. Do not read a file in `known`, unless it is
    ropext's log: the log's digest differs from run to run."""
    found = dict[str, State]()
    for name in listing(directory):
        if name == RECORD:
            continue
        is_known = name in known and Path(name).name != USED
        found[name] = known[name] if is_known else state(directory / name)
    return found


def state(path: Path) -> State:
    """Return a value that changes if a file is edited: its SHA-256, or the target of a symbolic
    link.

    A large hard link is known by its size and not read, because its bytes have another name.
    ropext's log is known by the digest at its end. A file that cannot be read is not known.
    """
    if path.name == USED and is_signed_log(path):
        return LOG
    if not path.is_symlink():
        with suppress(OSError):
            status = os.lstat(path)
            if status.st_nlink > 1 and status.st_size > LINKED:
                return status.st_size
    return _content(path)


def is_in_state(path: Path, listed: Any) -> bool:
    """Return whether a file is still in its listed `state`. If a hard link is known by its size,
    its bytes must still have another name."""
    if listed == LOG:
        return is_signed_log(path)
    if isinstance(listed, int):
        with suppress(OSError):
            status = os.lstat(path)
            is_plain = stat.S_ISREG(status.st_mode)
            return is_plain and status.st_nlink > 1 and status.st_size == listed
        return False
    return listed is not None and _content(path) == listed


def _content(path: Path) -> str | None:
    """Return the SHA-256 of a file, or the digest of a symbolic link's target, to notice edits.
    Return None if the file cannot be read."""
    if path.is_symlink():
        leads = hashlib.sha256(os.fsencode(os.readlink(path)))
        return f"link to {leads.hexdigest()}"
    with suppress(InputError, OSError):
        return remembered(path, _sha256)
    return None


def _sha256(path: Path) -> str:
    """Return the SHA-256 of a regular file, to notice edits of files that ropext wrote."""
    with open(open_regular(path), "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


_DIGESTS: dict[tuple[str | int, ...], str] = {}  # of this process: a command looks several times


def remembered(path: Path, digest: Callable[[Path], str]) -> str:
    """Return the digest of a file, computed once in this process while the file's times tell that
    it is the same."""
    status = os.stat(path)
    if not is_settled(path, status):
        return digest(path)
    times = (status.st_mtime_ns, status.st_ctime_ns)
    key = (digest.__qualname__, status.st_dev, status.st_ino, status.st_size, *times)
    if key not in _DIGESTS:
        _DIGESTS[key] = digest(path)
    return _DIGESTS[key]


def is_settled(path: Path, status: os.stat_result) -> bool:
    """Return whether a later write to a file changes its times for certain."""
    age = time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns)
    return age > SETTLED and keeps_times(path)


def listed_digest(path: Path) -> str | None:
    """Return the SHA-256 by which ropext knows the file at a path as its own. The ropext.json in
    its folder lists it. Symbolic links are followed."""
    real = Path(os.path.realpath(path))
    listed = (files_in(real.parent) or {}).get(real.name)
    return listed if isinstance(listed, str) and _SHA256.fullmatch(listed) else None


def listing(directory: Path) -> list[str]:
    """Return the relative paths of all files below a directory, and of symbolic links to
    directories."""
    files = set[str]()
    for folder, folders, names in os.walk(directory):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        files |= {Path(folder, name).relative_to(directory).as_posix() for name in (*links, *names)}
    return sorted(files)


def check_replaceable(
    output: Path,
    *,
    force: bool,
    file: bool = False,
    written: Written = recorded,
    at: Path | None = None,
) -> None:
    """Refuse an output path that exists. With `force`, allow one if ropext wrote every file of it.
    `at` is its place if another name led to it."""
    place = output if at is None else at
    if not os.path.lexists(place):
        return
    name = f"{output} (--output)"
    if not force:
        raise OutputExists(f"{name} exists; --force replaces it, if ropext wrote all of it")
    if place.is_symlink() or not (place.is_file() if file else place.is_dir()):
        what = "regular file" if file else "directory"
        raise OutputExists(f"{name} is no {what}, so --force does not replace it; {MOVE}")
    if not file and not os.listdir(place):
        return
    names = written(place)
    if names is None:
        edited = ", or was edited since" if file else ""
        raise OutputExists(
            f"{name} is not marked as written by ropext{edited}, so --force does not replace it; "
            f"{MOVE}"
        )
    if file:
        return
    others = [name for name in listing(place) if name not in names]
    if others:
        raise OutputExists(
            f"{name} holds files that were added or edited since ropext wrote it: {shown(others)}; "
            "move them away first, then --force replaces the rest"
        )


def shown(names: list[str]) -> str:
    """Return at most three names of files, for an error's sentence."""
    return listed(names[:3]) if len(names) <= 3 else f"{', '.join(names[:3])} and more"


def signed(text: str) -> str:
    """Return a text that ropext writes with a comment as its last line, which holds the SHA-256 of
    the lines before it."""
    # Only at line feeds: other separators can be part of a quoted text.
    given = text.removesuffix("\n").split("\n")
    lines = [line for line in given if not line.startswith(SIGNATURE)]
    whole = "".join(f"{line}\n" for line in lines)
    return f"{whole}{SIGNATURE}{hashlib.sha256(whole.encode()).hexdigest()}\n"


def is_signed(path: Path) -> bool:
    """Return whether a small text file is as ropext wrote it: its last line holds the SHA-256 of
    the lines before it."""
    if path.is_symlink() or not path.is_file():
        return False
    text = read_text(str(path))
    return signed(text) == text


def signed_log(lines: bytes) -> bytes:
    """Return the lines of used.log, a file of an output that differs from run to run. Add a line
    with their SHA-256, by which ropext knows the file as its own."""
    last = json.dumps({"sha256": hashlib.sha256(lines).hexdigest()})
    return lines + last.encode() + b"\n"


def is_signed_log(path: Path) -> bool:
    """Return whether an output's used.log is as ropext wrote it: its last line holds the SHA-256 of
    the lines before it."""
    if path.is_symlink():
        return False
    with suppress(InputError, OSError), open(open_regular(path), "rb") as stream:
        content = stream.read()
        return signed_log(b"".join(content.splitlines(keepends=True)[:-1])) == content
    return False


def make_work(real: Path) -> Path:
    """Make the temporary folder `.OUT.ropext-TOKEN` next to an output, with the empty file that
    marks it as ropext's."""
    work = real.parent / f".{real.name}.ropext-{secrets.token_hex(8)}"
    work.mkdir()
    (work / work.name).touch()
    return work


def works(real: Path) -> list[Path]:
    """Return the temporary folders `.OUT.ropext-TOKEN` that killed commands left next to an
    output."""
    ours = re.compile(re.escape(f".{real.name}.ropext-") + r"[0-9a-f]{16}")
    places = [place for place in real.parent.iterdir() if ours.fullmatch(place.name)]
    return [
        place
        for place in places
        if place.is_dir()
        and not place.is_symlink()
        and ((place / place.name).is_file() or not os.listdir(place))
    ]


def check_parent(output: Path, flag: str) -> None:
    """Raise if the innermost existing directory above the path of an output is not writable."""
    parent = existing_parent(output)
    if not parent.is_dir():
        raise InputError(f"{output} ({flag}) cannot be written: {parent} is no directory")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"{output} ({flag}) cannot be written: Permission denied in {parent}")


def existing_parent(output: Path) -> Path:
    """Return the innermost existing directory above the path of an output."""
    place = Path(os.path.realpath(output.parent))
    while not os.path.lexists(place):
        place = place.parent
    return place


def check_file(path: Path | None, flag: str, sign: Sign) -> None:
    """Refuse to write a PNG or parquet file into a folder that is not writable, or to replace one
    that does not hold its own SHA-256, by which ropext knows the files that it wrote."""
    if path is None:
        return
    check_parent(path, flag)
    if not os.path.lexists(path) or holds_its_digest(path, sign):
        return
    if _place_of_sign(path, sign) is not None:
        raise OutputExists(f"{path} ({flag}) exists, and was edited since ropext wrote it; {MOVE}")
    raise OutputExists(f"{path} ({flag}) exists, and ropext did not write it; {MOVE}")


def sign_of_piece(path: Path) -> Sign:
    """Return the sign of a finished piece of a run, such as the losses of one document. It depends
    on the piece's name, so a copy of another piece does not have it."""
    name = "/".join(path.parts[-3:])
    return Sign(f"piece {hashlib.sha256(name.encode()).hexdigest()[:16]}, SHA-256 ".encode())


def is_piece(path: Path) -> bool:
    """Return whether a finished piece of a run is as ropext wrote it under this name."""
    with suppress(InputError, OSError):
        return holds_its_digest(path, sign_of_piece(path))
    return False


def put_digest(stream: BinaryIO, sign: Sign) -> None:
    """Write the SHA-256 of a file into it, after its last sign, before the file gets its name."""
    stream.flush()
    path = Path(stream.name)
    start = _place_of_sign(path, sign)
    assert start is not None
    digest = blanked_digest(path, start, len(sign.blank))
    stream.seek(start)
    stream.write(digest.encode())


def holds_its_digest(path: Path, sign: Sign) -> bool:
    """Return whether a file holds a sign, and after it the SHA-256 of the file as it is now."""
    start = _place_of_sign(path, sign)
    if start is None:
        return False
    with path.open("rb") as stream:
        stream.seek(start)
        stated = stream.read(64)
    return blanked_digest(path, start, len(sign.blank)).encode() == stated


def _place_of_sign(path: Path, sign: Sign) -> int | None:
    """Return the position of the SHA-256 that a file holds of itself, after the last sign near its
    end. Return None for a file without one, or for anything but a regular file."""
    if path.is_symlink() or not path.is_file():
        return None
    size = path.stat().st_size
    with path.open("rb") as stream:
        stream.seek(max(0, size - END))
        end = stream.read()
    at = end.rfind(sign.begin)
    return None if at < 0 else size - len(end) + at + len(sign.begin)


def blanked_digest(path: Path, start: int, length: int) -> str:
    """Return the SHA-256 of a PNG or parquet file in which the bytes of its own digest count as the
    digit 0."""
    digest = hashlib.sha256()
    with open(open_regular(path), "rb") as stream:
        left = start
        while left and (piece := stream.read(min(left, PIECE))):
            digest.update(piece)
            left -= len(piece)
        digest.update(b"0" * length)
        stream.seek(start + length)
        while piece := stream.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()
