"""Write an output, whatever it is made of: a directory, a GGUF file, a model in memory.

All that can be refused is refused first. Then ropext writes everything into a staged folder, proves
it there, and gives it its name. `DirectorySource` writes an extended checkpoint: the base's
weights, the new config, the record and the card. It copies a file's bytes (reflinked if the file
system can), or makes a hard link or a symlink.
"""

import errno
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from ropext.atomic import os_errors
from ropext.checkpoint import provenance, tokenizer
from ropext.checkpoint.card import README, Card, read_readme, render
from ropext.checkpoint.provenance import Record
from ropext.checkpoint.snapshot import Snapshot
from ropext.checkpoint.staging import Output, Staged, check_space, existing_parent, staged
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
class WriteManner:
    """How an output is written; nothing of it decides a number there."""

    link: Link = "copy"
    force: bool = False
    hash_weights: bool = False
    no_verify: bool = False
    show: Show = unseen


@dataclass(frozen=True)
class Written:
    """What `write` wrote, and what the user should know of it."""

    output: Path
    record: Record
    notes: tuple[str, ...]
    left: Mapping[str, str]  # files of the base that were not carried over: reason
    proof: JsonObject | None
    files: tuple[str, ...]  # the names of all that was written


class OutputSource(Protocol):
    """What an output is made of, with all that is to become of it."""

    @property
    def left(self) -> Mapping[str, str]:
        """The files that are not carried over, each with its reason."""

    def check(self, output: Path, manner: WriteManner) -> Output:
        """Refuse what can be refused before anything is written; return what is to be written."""

    def put(self, stage: Staged, record: Record, output: Path, manner: WriteManner) -> Record:
        """Write all that is proved; return the record with its weights and what became of it."""

    def prove(self, directory: Path, /) -> JsonObject:
        """Compare what was written with the plan; raise ProofFailed if they differ."""

    def finish(
        self, stage: Staged, record: Record, output: Path, proof: JsonObject | None
    ) -> Record:
        """Write what tells of the whole, and of its proof; return the record as it is kept."""


def write(source: OutputSource, output: Path, record: Record, manner: WriteManner) -> Written:
    """Write `output` as a whole or not at all. `record` says what was done; its weights and its
    proof are filled in here."""
    with staged(source.check(output, manner)) as stage:
        full = source.put(stage, record, output, manner)
        proof: JsonObject | None = None
        if not manner.no_verify:
            proof = source.prove(stage.directory)
        with os_errors(output):
            full = source.finish(stage, full, output, proof)
            files = stage.names()
    return Written(output, full, tuple(stage.notes), source.left, proof, files)


@dataclass(frozen=True)
class DirectorySource:
    """A checkpoint in a directory, to be written with another config."""

    snapshot: Snapshot
    config: JsonObject
    # Given the finished but unnamed directory; raises to keep it from its name.
    prove: Callable[[Path], JsonObject]
    card: Callable[[JsonObject | None], Card] | None = None  # by what was proved
    add: Callable[[Path], None] | None = None  # called when all else is there
    # The files that `write_anew` writes otherwise than they are in the base; it returns notes.
    anew: Sequence[str] = ()
    write_anew: Callable[[Path, Show], Sequence[str]] | None = None

    @property
    def left(self) -> Mapping[str, str]:
        return self.snapshot.left

    def check(self, output: Path, manner: WriteManner) -> Output:
        """Refuse weights that are missing or ambiguous, and a disk without room for the copies."""
        snapshot = self.snapshot
        snapshot.require_weights()
        for sentence in snapshot.misplaced():
            raise InputError(
                f"{snapshot.name}: {sentence}: engines disagree on which tensor they load. "
                "Fetch the weights again, or save them again with transformers"
            )
        device = os.stat(existing_parent(output)).st_dev
        weights = set(snapshot.weight_files)
        needed = TEXT_ROOM
        for name in snapshot.files:
            path = snapshot.path(name)
            is_near = os.stat(path).st_dev == device
            is_linked = manner.link == "symlink" or (manner.link == "hard" and is_near)
            if not is_linked or name not in weights:
                needed += bytes_on_disk(path)
        check_space(output, needed)
        return Output(output, manner.force, [snapshot.directory])

    def put(self, stage: Staged, record: Record, output: Path, manner: WriteManner) -> Record:
        """Write the files, and check that the base's weights were not changed meanwhile. The base
        is only read, and each of its weight files that is linked for its header alone (with
        `hash_weights`: whole)."""
        snapshot = self.snapshot
        weights = dict[str, WeightFile]()
        for name in snapshot.weight_files:
            path = snapshot.path(name)
            file = weigh(path, content=manner.hash_weights, show=manner.show)
            if manner.link == "symlink":  # what it leads to may be replaced
                file = replace(file, sha256=file.sha256 or known_digest(path))
            weights[name] = file
        edits, limits = tokenizer.length_edits(snapshot, record.context, record.target)
        with os_errors(output):
            stage.notes += limits
            stage.digests |= _carry(snapshot, stage, edits, manner, self.anew)
            write_texts(snapshot, stage.directory, self.config, edits)
            if self.write_anew is not None:
                stage.notes += self.write_anew(stage.directory, manner.show)
                for name in set(self.anew) & weights.keys():
                    path = stage.directory / name
                    weights[name] = weigh(path, content=manner.hash_weights, show=manner.show)
            for finding in compare_weights(weights, stage.directory):
                if not finding.same:
                    raise InputError(f"the base changed while it was read: {finding.sentence}")
        return replace(record, weights=weights, edits=(*record.edits, *edits))

    def finish(
        self, stage: Staged, record: Record, output: Path, proof: JsonObject | None
    ) -> Record:
        """Write the card, then the record, which lists all other files."""
        full = replace(record, proof=proof)
        if self.card is not None:
            readme, note = read_readme(self.snapshot.path(README))
            if note:
                stage.notes.append(note)
            text = render(self.card(proof), readme)
            (stage.directory / README).write_bytes(text.encode(errors="replace"))
        provenance.write(full, stage.directory, stage.digests)
        if self.add is not None:
            self.add(stage.directory)
        return full


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
            done = first
            while done < last:
                done += self._piece(done, min(CHUNK, last - done), shift)
                self._pass(position, done)
                position = done
                self.show(done, end, f"copying {self.path.name}")
        self._pass(position, end)
        pages = -(-(end - start) // PAGE)
        compared = set[int]()
        if pages:
            compared = {i * pages // PAGES for i in range(PAGES - 1)}
            compared.add(pages - 1)
        for page in compared:
            at = start + page * PAGE
            data = read_at(self.source, min(PAGE, end - at), at)
            self._compare(data, at, shift)

    def _piece(self, start: int, length: int, shift: int) -> int:
        """Copy some bytes, in the kernel if it can; return how many, which is not 0."""
        done = copy_in_kernel(self.source, self.target, start, length, shift)
        if not done:
            data = read_at(self.source, min(length, 1 << 20), start)
            write_at(self.target, data, start + shift)
            self._compare(data, start, shift)
            done = len(data)
        if not done:
            raise _shrank(self.path)
        return done

    def _pass(self, position: int, end: int) -> None:
        """Read what was just copied, from the system's cache; a hole is read as zeros."""
        while self.passed is not None and position < end:
            data = read_at(self.source, min(PIECE, end - position), position)
            if not data:
                raise _shrank(self.path)
            self.passed(data)
            position += len(data)

    def _compare(self, data: bytes, at: int, shift: int) -> None:
        """Refuse a copy with other bytes; a hole at its end is not there yet."""
        if read_at(self.target, len(data), at + shift).rstrip(b"\0") != data.rstrip(b"\0"):
            raise ProofFailed(
                f"verification: the copy of {self.path} differs from byte {at:,} on; check the disk"
            )


def _shrank(path: Path) -> InputError:
    return InputError(
        f"{path} shrank while it was copied: let whoever writes it finish, then try again"
    )
