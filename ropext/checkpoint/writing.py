"""Write an extended checkpoint: the base's weights, the new config, the record and the card. A
file's bytes are copied (reflinked where the file system can), hard-linked or symlinked."""

import errno
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ropext import guard
from ropext.atomic import os_errors
from ropext.checkpoint import provenance, tokenizer
from ropext.checkpoint.card import README, Card, read_readme, render
from ropext.checkpoint.provenance import Record
from ropext.checkpoint.snapshot import Snapshot
from ropext.checkpoint.source import Weights, WriteManner
from ropext.checkpoint.staging import Staged, check_space, existing_parent
from ropext.checkpoint.tokenizer import TOKENIZER
from ropext.checkpoint.weights import WeightFile, compare_weights, known_digest, weigh
from ropext.errors import InputError, ProofFailed
from ropext.inputs import open_regular
from ropext.jsontext import JsonObject, dump
from ropext.narration import Show, unseen
from ropext.options.fields import Link
from ropext.rope import Edit
from ropext.systems import bytes_on_disk, copy_in_kernel, data_parts, open_raw, read_at, write_at

# Bytes beyond the copied files: the record, the card, the edited texts.
TEXT_ROOM = 64 << 20


@dataclass(frozen=True)
class DirectorySource:
    """A checkpoint in a directory, to be written with another config."""

    snapshot: Snapshot
    config: JsonObject
    # Given the finished but unnamed directory; raises to keep it from its name.
    prover: Callable[[Path], JsonObject]
    card: Callable[[JsonObject | None], Card] | None = None  # by what was proved
    add: Callable[[Path], None] | None = None  # called when all else is there

    @property
    def inputs(self) -> Sequence[Path | str]:
        return [self.snapshot.directory]

    @property
    def left(self) -> Mapping[str, str]:
        return self.snapshot.left

    @property
    def anew(self) -> Sequence[str]:
        """The files that are not carried, for `write_anew` writes them."""
        return ()

    def write_anew(self, directory: Path, show: Show) -> Sequence[str]:
        """Write files otherwise than they are in the base; return notes."""
        return ()

    def is_file(self, output: Path) -> bool:
        return False

    def written_in(self, place: Path) -> set[str] | None:
        return guard.recorded(place)

    def check(self, output: Path, link: Link) -> None:
        self.snapshot.require_weights()
        for sentence in self.snapshot.misplaced():
            raise InputError(
                f"{self.snapshot.name}: {sentence}: engines disagree on which tensor they load. "
                "Fetch the weights again, or save them again with transformers"
            )
        check_space(output, _bytes_to_copy(self.snapshot, link, output))

    def weigh(self, manner: WriteManner) -> Weights:
        weights = dict[str, WeightFile]()
        for name in self.snapshot.weight_files:
            path = self.snapshot.path(name)
            file = weigh(path, content=manner.hash_weights, show=manner.show)
            if manner.link == "symlink":  # what it leads to may be replaced
                file = replace(file, sha256=file.sha256 or known_digest(path))
            weights[name] = file
        return weights

    def put(self, stage: Staged, record: Record, output: Path, manner: WriteManner) -> Record:
        """The base is only read, and each of its weight files that is linked for its header alone
        (with `hash_weights`: whole)."""
        snapshot = self.snapshot
        edits, limits = tokenizer.length_edits(snapshot, record.context, record.target)
        _, readme_note = read_readme(snapshot.path(README))
        weights = dict(record.weights)
        with os_errors(output):
            stage.notes += limits
            if readme_note:
                stage.notes.append(readme_note)
            stage.digests |= _carry(snapshot, stage, edits, manner, self.anew)
            write_texts(snapshot, stage.directory, self.config, edits)
            if self.anew:
                stage.notes += self.write_anew(stage.directory, manner.show)
                for name in set(self.anew) & weights.keys():
                    path = stage.directory / name
                    weights[name] = weigh(path, content=manner.hash_weights, show=manner.show)
            for finding in compare_weights(weights, stage.directory):
                if not finding.same:
                    raise InputError(f"the base changed while it was read: {finding.sentence}")
        return replace(record, weights=weights, edits=(*record.edits, *edits))

    def prove(self, directory: Path) -> JsonObject:
        return self.prover(directory)

    def finish(
        self, stage: Staged, record: Record, output: Path, proof: JsonObject | None
    ) -> Record:
        full = replace(record, proof=proof)
        if self.card is not None:
            readme, _ = read_readme(self.snapshot.path(README))
            text = render(self.card(proof), readme)
            (stage.directory / README).write_bytes(text.encode(errors="replace"))
        provenance.write(full, stage.directory, stage.digests)
        if self.add is not None:
            self.add(stage.directory)
        return full


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
    manner: WriteManner,
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
            placed = place(source, target, manner.link, manner.show)
            if placed.note:
                stage.notes.append(f"{name}: {placed.note}")
            if placed.sha256:
                digests[name] = placed.sha256
        else:
            digests[name] = copy_file(source, target)
    return digests


def write_texts(
    snapshot: Snapshot, directory: Path, config: JsonObject, edits: Iterable[Edit]
) -> None:
    """Write the config, and the edited texts beside it but for the tokenizer."""
    texts: dict[str, JsonObject] = {"config.json": config}
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


@dataclass(frozen=True)
class Placed:
    """What became of a file: a note where it could not be linked as asked, and its SHA-256, of a
    link where it is known."""

    note: str | None
    sha256: str | None


# How a file is linked, by what was asked for: a symlink that is refused becomes a hard link.
LINKED_BY: dict[Link, tuple[Link, ...]] = {
    "copy": (),
    "hard": ("hard",),
    "symlink": ("symlink", "hard"),
}
LINKED = {"hard": "hard linked", "symlink": "symlinked"}


def place(source: Path, target: Path, link: Link, show: Show = unseen) -> Placed:
    """Put a weight file into the output.

    A symlink gets the absolute path of the real file (not of a link in between), so that the output
    may be moved, and the base may not. A hard link is made to the real file too: os.link on a link
    would make a second link.
    """
    real = os.path.realpath(source)
    refused = ""
    for way in LINKED_BY[link]:
        try:
            if way == "symlink":
                target.symlink_to(real)
            else:
                target.hardlink_to(real)
        except OSError as error:
            if error.errno not in NO_LINK:
                raise
            refused = refused or f"{LINKED[way]} ({error.strerror})"
            continue
        note = None
        if refused:
            note = f"hard linked instead of {refused}"
        digest = None
        if way == "hard":
            digest = known_digest(source)
        return Placed(note, digest)
    note = None
    if refused:
        note = f"copied instead of {refused}"
    return Placed(note, copy_file(source, target, show))


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
        for first, last in data_parts(self.source, start, end):
            self._pass_hole(first - position)
            position = first
            for done in _copy_range(self.source, self.target, first, last, shift, self.path):
                self._pass(position, done)
                position = done
                self.show(done, end, f"copying {self.path.name}")
        self._pass_hole(end - position)
        pages = -(-(end - start) // PAGE)
        compared = set[int]()
        if pages:
            compared = {i * pages // PAGES for i in range(PAGES - 1)}
            compared.add(pages - 1)
        for page in compared:
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
        raise ProofFailed(
            f"verification: the copy of {path} differs from byte {at:,} on; check the disk"
        )


def _copy_range(
    source: int, target: int, start: int, end: int, shift: int, name: Path
) -> Iterator[int]:
    """Copy a part of a file in pieces; yield where each begins."""
    while start < end:
        length = min(CHUNK, end - start)
        done = copy_in_kernel(source, target, start, length, shift)
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
