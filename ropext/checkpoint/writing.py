"""Write an extended checkpoint: the base's weights, the new config, the record and the card. A
file's bytes are copied (reflinked where the file system can), hard-linked or symlinked."""

import errno
import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from ropext.atomic import os_errors
from ropext.checkpoint import provenance, tokenizer
from ropext.checkpoint.card import README, Card, read_readme, render
from ropext.checkpoint.provenance import Record
from ropext.checkpoint.snapshot import Snapshot, require_weights
from ropext.checkpoint.staging import (
    Staged,
    check_output,
    check_space,
    existing_parent,
    staged,
)
from ropext.checkpoint.tokenizer import TOKENIZER
from ropext.checkpoint.weights import compare_weights, known_digest, weigh
from ropext.errors import InputError, ProofFailed, UsageError
from ropext.inputs import open_regular
from ropext.jsontext import dump
from ropext.narration import Show, unseen
from ropext.options.fields import Link
from ropext.rope import Edit
from ropext.systems import bytes_on_disk, open_raw, read_at, write_at

# Bytes beyond the copied files: the record, the card, the edited texts.
TEXT_ROOM = 64 << 20


@dataclass(frozen=True)
class Written:
    """What `write_checkpoint` wrote, and what the user should know of it."""

    output: Path
    record: Record
    notes: tuple[str, ...]
    left: Mapping[str, str]  # files of the base that were not carried over: reason
    proof: Mapping[str, Any] | None


def write_checkpoint(
    snapshot: Snapshot,
    output: Path,
    *,
    config: Mapping[str, Any],
    record: Record,
    card: Callable[[Mapping[str, Any] | None], Card] | None = None,
    link: Link = "copy",
    force: bool = False,
    hash_weights: bool = False,
    show: Show = unseen,
    prove: Callable[[Path], Mapping[str, Any]] | None = None,
    anew: Sequence[str] = (),
    write_anew: Callable[[Path], Iterable[str]] | None = None,
    finish: Callable[[Path], None] | None = None,
) -> Written:
    """Write `output` as a whole or not at all.

    `record` says what was done; its weights, length edits and proof are filled in here. `prove`
    gets the finished but unnamed directory and raises to keep it from its name; `card` gets what
    `prove` returned. Files named in `anew` are not carried: `write_anew` writes them into the
    directory and gives notes. `finish` adds to the directory when all else is there. The base is
    only read, and each of its other weight files that is linked for its header alone (with
    `hash_weights`: whole).
    """
    _check_source(snapshot, output, link)
    edits, limits = tokenizer.length_edits(snapshot, record.context, record.target)
    weights = {
        name: weigh(snapshot.path(name), content=hash_weights, show=show)
        for name in snapshot.weight_files
    }
    if link == "symlink":  # what it leads to may be replaced
        for name, file in weights.items():
            known = file.sha256 or known_digest(snapshot.path(name))
            weights[name] = replace(file, sha256=known)
    readme, readme_note = read_readme(snapshot.path(README))
    with staged(output, force=force, inputs=[snapshot.directory]) as stage:
        with os_errors(output):
            stage.notes += limits
            stage.notes += [readme_note] if readme_note else []
            digests = _carry(snapshot, stage, edits, link, show, anew)
            _write_texts(snapshot, stage.directory, config, edits)
            if write_anew is not None:
                stage.notes += write_anew(stage.directory)
                weights |= {
                    name: weigh(stage.directory / name, content=hash_weights, show=show)
                    for name in set(anew) & weights.keys()
                }
            for finding in compare_weights(weights, stage.directory):
                if not finding.same:
                    raise InputError(f"the base changed while it was read: {finding.sentence}")
        proof = prove(stage.directory) if prove else None
        full = replace(
            record,
            weights=weights,
            edits=(*record.edits, *edits),
            proof=proof,
        )
        with os_errors(output):
            if card is not None:
                text = render(card(proof), readme)
                (stage.directory / README).write_bytes(text.encode(errors="replace"))
            provenance.write(full, stage.directory, digests)
        if finish is not None:
            finish(stage.directory)
    return Written(output, full, tuple(stage.notes), snapshot.left, proof)


def check_writable(snapshot: Snapshot, output: Path, *, link: Link, force: bool) -> None:
    """All that is refused before anything is written; changes nothing. (`staged` clears away what a
    killed run left before it looks at the output.)"""
    _check_source(snapshot, output, link)
    check_output(output, force=force, inputs=[snapshot.directory])


def _check_source(snapshot: Snapshot, output: Path, link: Link) -> None:
    if link not in get_args(Link):
        raise UsageError(f"--link {link} is none of {', '.join(get_args(Link))}")
    require_weights(snapshot)
    check_space(output, _bytes_to_copy(snapshot, link, output))


def _bytes_to_copy(snapshot: Snapshot, link: Link, output: Path) -> int:
    weights = set(snapshot.weight_files)
    device = os.stat(existing_parent(output)).st_dev
    total = TEXT_ROOM
    for name in snapshot.files:
        status = os.stat(snapshot.path(name))
        linked = link == "symlink" or (link == "hard" and status.st_dev == device)
        if not (linked and name in weights):
            total += bytes_on_disk(snapshot.path(name))
    return total


def _carry(
    snapshot: Snapshot,
    stage: Staged,
    edits: Iterable[Edit],
    link: Link,
    show: Show,
    anew: Sequence[str],
) -> dict[str, str]:
    """The base's files; the SHA-256 of those where it is known. Only weights are linked: an editor
    that writes into a linked text file in place would change the base too."""
    digests = dict[str, str]()
    edited = {edit.file for edit in edits}
    weights = set(snapshot.weight_files)
    for name in snapshot.files:
        source = snapshot.path(name)
        target = stage.directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if name in ("config.json", *anew) or (name in edited and name != TOKENIZER):
            continue  # written anew
        if name in edited:
            span = tokenizer.find_truncation(source)
            if span is None:
                raise InputError(f"{source} changed while it was read")
            tokenizer.clear_truncation(source, target, span)
        elif name in weights:
            placed = place(source, target, link, show)
            if placed.note:
                stage.notes.append(f"{name}: {placed.note}")
            if placed.sha256:
                digests[name] = placed.sha256
        else:
            digests[name] = copy_file(source, target)
    return digests


def _write_texts(
    snapshot: Snapshot, directory: Path, config: Mapping[str, Any], edits: Iterable[Edit]
) -> None:
    texts: dict[str, Mapping[str, Any]] = {"config.json": config}
    for edit in edits:
        if edit.file != TOKENIZER:
            content = getattr(snapshot, edit.file.removesuffix(".json"))
            texts[edit.file] = content | {edit.key: edit.after}
    for name, text in texts.items():
        (directory / name).write_bytes(dump(text))


CHUNK = 128 << 20  # bytes per system call, so that Ctrl-C is answered in between

PIECE = 4 << 20  # bytes read at once of what was copied
ZEROS = bytes(1 << 20)  # of a hole

PAGES = 64
PAGE = 4096  # of what the kernel copied, compared with the source

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


@dataclass(frozen=True)
class Placed:
    """What became of a file: a note where it could not be linked as asked, and its SHA-256, of a
    link where it is known."""

    note: str | None
    sha256: str | None


def place(source: Path, target: Path, link: Link, show: Show = unseen) -> Placed:
    """Put a weight file into the output.

    A symlink gets the absolute path of the real file (not of a link in between), so that the output
    may be moved, and the base may not. A hard link is made to the real file too: os.link on a link
    would make a second link.
    """
    real = os.path.realpath(source)
    refused = ""
    for way in {"symlink": ("symlink_to", "hardlink_to"), "hard": ("hardlink_to",)}.get(link, ()):
        try:
            getattr(target, way)(real)
            note = f"hard linked instead of {refused}" if refused else None
            return Placed(note, known_digest(source) if way == "hardlink_to" else None)
        except OSError as error:
            if error.errno not in NO_LINK:
                raise
            refused = refused or f"{link.replace('hard', 'hard link')}ed ({error.strerror})"
    return Placed(
        f"copied instead of {refused}" if refused else None, copy_file(source, target, show)
    )


def copy_file(source: Path, target: Path, show: Show = unseen) -> str:
    """Copy a regular file's content, inside the kernel where possible, keeping its holes; the
    SHA-256 of what was copied."""
    digest = hashlib.sha256()
    descriptor = open_regular(source)
    try:
        size = os.fstat(descriptor).st_size
        out = open_raw(target, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            show(0, size, f"copying {source.name}")
            copying = Copying(descriptor, out, source, show, digest.update)
            copying.part(0, size, 0)
            os.ftruncate(out, size)  # a hole at the end
        finally:
            os.close(out)
    finally:
        os.close(descriptor)
    return digest.hexdigest()


@dataclass(frozen=True)
class Copying:
    """One open file that is copied into another; `path` is the first one's. `passed` is given the
    bytes, in their order."""

    source: int
    target: int
    path: Path
    show: Show = unseen
    passed: Callable[[bytes], object] | None = None

    def part(self, start: int, end: int, shift: int) -> None:
        """Copy a part of the file to `shift` bytes later, its holes left out; compare pages of
        it."""
        position = start
        for first, last in _data(self.source, start, end):
            self._pass_hole(first - position)
            position = first
            for done in _copy_range(self.source, self.target, first, last, shift, self.path):
                self._pass(position, done)
                position = done
                self.show(done, end, f"copying {self.path.name}")
        self._pass_hole(end - position)
        pages = -(-(end - start) // PAGE)
        for page in {*(i * pages // PAGES for i in range(PAGES - 1)), pages - 1} if pages else ():
            at = start + page * PAGE
            data = read_at(self.source, min(PAGE, end - at), at)
            _same(self.target, data, at, shift, self.path)

    def _pass(self, position: int, end: int) -> None:
        """Read what the kernel has just copied, from its cache."""
        while self.passed is not None and position < end:
            data = read_at(self.source, min(PIECE, end - position), position)
            if not data:
                raise _shrank(self.path)
            self.passed(data)
            position += len(data)

    def _pass_hole(self, length: int) -> None:
        while self.passed is not None and length > 0:
            self.passed(ZEROS[:length])
            length -= len(ZEROS)


def _same(target: int, data: bytes, at: int, shift: int, path: Path) -> None:
    """Refuse a copy with other bytes; a hole at its end is not there yet."""
    if read_at(target, len(data), at + shift).rstrip(b"\0") != data.rstrip(b"\0"):
        raise ProofFailed(f"proof: the copy of {path} differs from byte {at:,} on; check the disk")


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
            raise _shrank(name)
        start += done
        yield start


def _shrank(path: Path) -> InputError:
    return InputError(
        f"{path} shrank while it was copied: let whoever writes it finish, then try again"
    )


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
