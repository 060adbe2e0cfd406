"""One guard over all that a command reads and writes, and the marks of what ropext wrote.

Two names are one place where the file system says so, by (st_dev, st_ino) with links followed: a
volume that is mounted twice and names that differ in case are seen. What is written neither is,
holds nor lies inside what is read. Only what bears a mark is replaced or deleted:

    OUT/ropext.json       lists under "files" what was written into OUT, and its content
    RUN/run.json          bears its own digest (no random token: the same run gives the same bytes)
    OUT.run/recipe.yaml   ends with a digest of its lines
    .OUT.ropext-TOKEN/    a folder at work: it is empty, or holds a file of that name
    .OUT.ropext-lock      begins as every lock does
    *.png, *.parquet      hold their own digest (`Sign`)
"""

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
from typing import Any

from ropext.base.errors import InputError, OutputExists, UsageError, listed
from ropext.base.inputs import open_regular, read_text
from ropext.base.jsontext import read_object
from ropext.base.systems import keeps_times

Identity = tuple[int, int]
# A flag, and what was given for it: a path, several, or None.
Named = Mapping[str, Any]
Written = Callable[[Path], Collection[str] | None]
State = str | int | None  # of a file, as a record lists it
_SHA256 = re.compile("[0-9a-f]{64}")

RECORD = "ropext.json"
USED = "used.log"  # what first steps took: the one file that differs from run to run
LOG = "log"  # the state of a log that ends with its own digest
FILES = "files"
MARK = "ropext"
SIGNATURE = "# as ropext wrote it: SHA-256 "  # the last line of a recipe that is kept
LINKED = 64 << 20  # bytes of a hard link that is hashed; of a larger one its other names answer
# ns. The first write through a mapping sets the times, and further ones do not until the page was
# written back, which Linux does after 30 seconds.
SETTLED = 60 * 10**9
END = 1 << 16  # bytes at the end of a file in which its sign is looked for
PIECE = 4 << 20  # bytes read at once
MOVE = "move or rename it, or name another place"


@dataclass(frozen=True)
class Sign:
    """What a file of ropext's holds near its end: some bytes, and behind them the SHA-256 of the
    file in which that digest is zeros, and so many bytes more."""

    begin: bytes
    more: int = 0

    @property
    def blank(self) -> bytes:
        """What stands behind `begin` while the digest is taken."""
        return b"0" * (64 + self.more)


PICTURE = Sign(b"tEXtropext\0SHA-256 ", 4)  # a chunk of a PNG, which ends with a checksum
LOSSES = Sign(b"losses by ropext, SHA-256 ")  # in the footer of a parquet file


def check(reads: Named, writes: Named) -> None:
    """Refuse where something that is written is, holds or lies inside something that is read, or
    is a link. What is read and is not here (a hub id) is passed over."""
    sources = list[tuple[str, list[Identity | None]]]()
    for flag, path in _each(reads):
        for place in _behind(path):
            chain = _chain(place)
            if chain[0] is not None:  # a link may lead nowhere
                sources.append((f"{place} ({flag})", chain))
    for flag, path in _each(writes):
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


def _each(named: Named) -> Iterator[tuple[str, Path]]:
    for flag, value in named.items():
        for path in value if isinstance(value, list | tuple) else (value,):
            if path:
                yield flag, Path(path)


def _behind(path: Path) -> Iterator[Path]:
    """A path, and where the links below it lead; nothing where it is not here."""
    if identity(path) is None:
        return
    yield path
    for folder, folders, names in os.walk(path):
        for name in (*folders, *names):
            if os.path.islink(os.path.join(folder, name)):
                yield Path(os.path.realpath(os.path.join(folder, name)))


def _chain(path: Path) -> list[Identity | None]:
    """The identity of a path, then those of the directories above it; None of what is not there."""
    real = Path(os.path.realpath(path))
    return [identity(place) for place in (real, *real.parents)]


def identity(path: Path | str) -> Identity | None:
    """What a name leads to; None where it leads nowhere."""
    with suppress(OSError, ValueError):
        status = os.stat(path)
        return status.st_dev, status.st_ino
    return None


def files_in(directory: Path) -> dict[str, Any] | None:
    """The files of a directory that its record names, each with its `state`; None without one."""
    with suppress(InputError):
        files = read_object(directory / RECORD).get(FILES)
        return {**files, RECORD: None} if isinstance(files, dict) else None
    return None


def recorded(directory: Path) -> set[str] | None:
    """The files of a directory that are as ropext wrote them; None without a record."""
    files = files_in(directory)
    if files is None:
        return None
    return {RECORD, *unchanged(directory, files)}


def is_as_written(directory: Path) -> bool:
    """Whether a directory has all files that its record names, each as ropext wrote it."""
    files = files_in(directory)
    return files is not None and files.keys() <= {RECORD, *unchanged(directory, files)}


def unchanged(directory: Path, files: Mapping[str, Any]) -> set[str]:
    """The files below a directory that are in the state that is listed of them."""
    return {name for name in listing(directory) if is_in_state(directory / name, files.get(name))}


def states(directory: Path, known: Mapping[str, str] = {}) -> dict[str, State]:
    """Return the `state` of every file below a directory but its record. What is `known` is not
    read, except ropext's log: its digest would differ from run to run."""
    found = dict[str, State]()
    for name in listing(directory):
        if name == RECORD:
            continue
        is_known = name in known and Path(name).name != USED
        found[name] = known[name] if is_known else state(directory / name)
    return found


def state(path: Path) -> State:
    """Return what an edit of a file changes: its SHA-256; of a link where it leads. A large hard
    link is not read, because its bytes have another name: it is known by its size. ropext's log is
    known by the digest at its end. What cannot be read is not known."""
    if path.name == USED and is_signed_log(path):
        return LOG
    if not path.is_symlink():
        with suppress(OSError):
            status = os.lstat(path)
            if status.st_nlink > 1 and status.st_size > LINKED:
                return status.st_size
    return _content(path)


def is_in_state(path: Path, listed: Any) -> bool:
    """Whether a file is in a state that was listed. Of a hard link that is known by its size the
    bytes must have another name still."""
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
    if path.is_symlink():
        leads = hashlib.sha256(os.fsencode(os.readlink(path)))
        return f"link to {leads.hexdigest()}"
    with suppress(InputError, OSError):
        return remembered(path, _sha256)
    return None


def _sha256(path: Path) -> str:
    with open(open_regular(path), "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


_DIGESTS: dict[tuple[str | int, ...], str] = {}  # of this process: a command looks several times


def remembered(path: Path, digest: Callable[[Path], str]) -> str:
    """Return the digest of a file, taken once while the file's times tell that it is the same."""
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
    """The SHA-256 that the ropext.json beside a file lists for it, links followed."""
    real = Path(os.path.realpath(path))
    listed = (files_in(real.parent) or {}).get(real.name)
    return listed if isinstance(listed, str) and _SHA256.fullmatch(listed) else None


def listing(directory: Path) -> list[str]:
    """The names of all files below a directory, and of links to directories."""
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
    """Refuse an output that is there, but with `force` one of which ropext wrote every file. It
    lies `at` another place where it was taken from its name."""
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
    """Some names for a message."""
    return listed(names[:3]) if len(names) <= 3 else f"{', '.join(names[:3])} and more"


def seal(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest with the mark that it is ropext's."""
    text = json.dumps(manifest, sort_keys=True)
    mark = hashlib.sha256(f"written by ropext {text}".encode()).hexdigest()
    return {MARK: mark, **manifest}


def is_sealed(manifest: Any) -> bool:
    """Whether ropext wrote a manifest, and nobody changed it."""
    if not isinstance(manifest, dict):
        return False
    bare = {key: value for key, value in manifest.items() if key != MARK}
    return bool(manifest.get(MARK) == seal(bare)[MARK])


def signed(text: str) -> str:
    """A text with the line that says that it is as ropext wrote it."""
    # At line feeds alone: other separators belong to what is quoted in a line.
    given = text.removesuffix("\n").split("\n")
    lines = [line for line in given if not line.startswith(SIGNATURE)]
    whole = "".join(f"{line}\n" for line in lines)
    return f"{whole}{SIGNATURE}{hashlib.sha256(whole.encode()).hexdigest()}\n"


def is_signed(path: Path) -> bool:
    """Whether a small text file is as ropext wrote it."""
    if path.is_symlink() or not path.is_file():
        return False
    text = read_text(str(path))
    return signed(text) == text


def signed_log(lines: bytes) -> bytes:
    """Return the lines of a log, and a last one with their digest."""
    last = json.dumps({"sha256": hashlib.sha256(lines).hexdigest()})
    return lines + last.encode() + b"\n"


def is_signed_log(path: Path) -> bool:
    """Return whether a log is as ropext wrote it."""
    if path.is_symlink():
        return False
    with suppress(InputError, OSError), open(open_regular(path), "rb") as stream:
        content = stream.read()
        return signed_log(b"".join(content.splitlines(keepends=True)[:-1])) == content
    return False


def work_of(real: Path, token: str) -> Path:
    """Name a folder at work beside an output, which has the longest name of all."""
    return real.parent / f".{real.name}.ropext-{token}"


def make_work(real: Path) -> Path:
    """A new folder at work beside an output, marked."""
    work = work_of(real, secrets.token_hex(8))
    work.mkdir()
    (work / work.name).touch()
    return work


def works(real: Path) -> list[Path]:
    """The folders at work that killed runs of an output left."""
    ours = re.compile(re.escape(f".{real.name}.ropext-") + r"[0-9a-f]{16}")
    places = [place for place in real.parent.iterdir() if ours.fullmatch(place.name)]
    return [
        place
        for place in places
        if place.is_dir()
        and not place.is_symlink()
        and ((place / place.name).is_file() or not os.listdir(place))
    ]


def check_file(path: Path | None, flag: str, sign: Sign) -> None:
    """Refuse to replace a file that is not as ropext wrote it."""
    if path is None or not os.path.lexists(path):
        return
    if path.is_file() and not path.is_symlink():
        start = place_of_sign(path, sign)
        if start is not None:
            with path.open("rb") as stream:
                stream.seek(start)
                stated = stream.read(64)
            if blanked_digest(path, start, len(sign.blank)).encode() == stated:
                return
            raise OutputExists(
                f"{path} ({flag}) exists, and was edited since ropext wrote it; {MOVE}"
            )
    raise OutputExists(f"{path} ({flag}) exists, and ropext did not write it; {MOVE}")


def place_of_sign(path: Path, sign: Sign) -> int | None:
    """Where the digest of a file begins, behind the last sign in its end."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        stream.seek(max(0, size - END))
        end = stream.read()
    at = end.rfind(sign.begin)
    return None if at < 0 else size - len(end) + at + len(sign.begin)


def blanked_digest(path: Path, start: int, length: int) -> str:
    """SHA-256 of a file in which some bytes, those of its own digest, are taken as the digit 0."""
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
