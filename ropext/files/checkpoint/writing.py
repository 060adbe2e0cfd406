"""Write an output from any source: a directory, a GGUF file, a model in memory.

Every possible refusal comes first. Then ropext writes everything into a staged folder, proves it
there, and gives it its name. `DirectorySource` writes an extended checkpoint: the base's weights,
the new config, the record and the card. It copies a file's bytes (reflinked if the file system
can), or makes a hard link or a symlink.
"""

import errno
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from ropext.base import guard
from ropext.base.atomic import os_errors
from ropext.base.errors import InputError, ProofFailed
from ropext.base.inputs import open_regular
from ropext.base.jsontext import JsonObject, dump
from ropext.base.narration import Show, no_progress
from ropext.base.staging import Output, Staged, check_space, staged
from ropext.base.systems import (
    bytes_on_disk,
    copy_in_kernel,
    data_parts,
    open_raw,
    read_at,
    write_at,
)
from ropext.files.checkpoint import provenance, tokenizer
from ropext.files.checkpoint.card import Card, write_card
from ropext.files.checkpoint.provenance import Record
from ropext.files.checkpoint.snapshot import Snapshot
from ropext.files.checkpoint.tokenizer import TOKENIZER
from ropext.files.checkpoint.weights import (
    WeightFile,
    compare_weights,
    identify_weights,
    known_digest,
)
from ropext.options.fields import Link
from ropext.scaling.rope import Edit

# Bytes in addition to the copied files: the record, the card, the edited texts.
TEXT_ROOM = 64 << 20


@dataclass(frozen=True)
class WriteOptions:
    """The options of a write; none of them changes a number in the output."""

    link: Link = "copy"
    force: bool = False
    hash_weights: bool = False
    no_verify: bool = False
    show: Show = no_progress


@dataclass(frozen=True)
class Written:
    """The result of `write`: the output, its record, and notes for the user."""

    output: Path
    record: Record
    notes: tuple[str, ...]
    left: Mapping[str, str]  # files of the base that were left behind: reason
    proof: JsonObject | None
    files: tuple[str, ...]  # the names of all written files


class OutputSource(Protocol):
    """The material of an output, with the steps that write and prove it."""

    @property
    def left(self) -> Mapping[str, str]:
        """Return the files of the base checkpoint that its written copy leaves behind, each with
        its reason."""

    def check(self, output: Path, manner: WriteOptions) -> Output:
        """Raise on every condition that can be checked before a checkpoint or GGUF file is written.
        Return the output to write."""

    def put(self, stage: Staged, record: Record, output: Path, manner: WriteOptions) -> Record:
        """Write all files of a checkpoint or GGUF that `prove` checks. Return the record with
        weights and edits."""

    def prove(self, directory: Path, /) -> JsonObject:
        """Read back the files of a written checkpoint or GGUF. Raise ProofFailed if they differ
        from the plan."""

    def finish(self, stage: Staged, record: Record, output: Path) -> Record:
        """Write the last files into an extended checkpoint: README.md, and ropext.json with the
        proof. Return the final record, which a GGUF file already holds."""


def write(source: OutputSource, output: Path, record: Record, manner: WriteOptions) -> Written:
    """Write an extended checkpoint or GGUF file as a whole or not at all. `record` describes the
    extension. Its weights and its proof are added here."""
    with staged(source.check(output, manner)) as stage:
        full = source.put(stage, record, output, manner)
        proof: JsonObject | None = None
        if not manner.no_verify:
            proof = source.prove(stage.directory)
        with os_errors(output):
            full = source.finish(stage, replace(full, proof=proof), output)
            files = stage.names()
    return Written(output, full, tuple(stage.notes), source.left, proof, files)


@dataclass(frozen=True)
class DirectorySource:
    """A checkpoint in a directory, and the config that its extended copy gets."""

    snapshot: Snapshot
    config: JsonObject
    # Checks the finished directory before it has its name; raises ProofFailed to discard it.
    prove: Callable[[Path], JsonObject]
    # Called with the record, its proof included, and the title of the card.
    card: Callable[[Record, str], Card] | None = None
    add: Callable[[Path], None] | None = None  # called after all other files are written
    # The files that `write_anew` writes with new content; it returns notes.
    anew: Sequence[str] = ()
    write_anew: Callable[[Path, Show], Sequence[str]] | None = None

    @property
    def left(self) -> Mapping[str, str]:
        """Return the files in the base's directory that its extended copy leaves out, each with its
        reason."""
        return self.snapshot.left

    def check(self, output: Path, manner: WriteOptions) -> Output:
        """Raise if the base's safetensors files are missing or ambiguous. Raise if the disk has no
        room for their copies."""
        snapshot = self.snapshot
        snapshot.require_weights()
        for sentence in snapshot.misplaced():
            raise InputError(
                f"{snapshot.name}: {sentence}: engines disagree on which tensor they load. "
                "Fetch the weights again, or save them again with transformers"
            )
        device = os.stat(guard.existing_parent(output)).st_dev
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

    def put(self, stage: Staged, record: Record, output: Path, manner: WriteOptions) -> Record:
        """Write the files of the extended checkpoint, and check that the base's weights did not
        change meanwhile.

        The base is only read. A linked weight file is read for its header only, or whole with
        `hash_weights`.
        """
        snapshot = self.snapshot
        weights = dict[str, WeightFile]()
        for name in snapshot.weight_files:
            path = snapshot.path(name)
            file = identify_weights(path, content=manner.hash_weights, show=manner.show)
            if manner.link == "symlink":  # the target of the link may be replaced
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
                    weights[name] = identify_weights(
                        path, content=manner.hash_weights, show=manner.show
                    )
            for finding in compare_weights(weights, stage.directory):
                if not finding.same:
                    raise InputError(f"the base changed while it was read: {finding.sentence}")
        return replace(record, weights=weights, edits=(*record.edits, *edits))

    def finish(self, stage: Staged, record: Record, output: Path) -> Record:
        """Write the model card, then ropext.json, which lists all other files."""
        if self.card is not None:
            note = write_card(
                stage.directory, self.card(record, output.name), self.snapshot.directory
            )
            stage.notes += [note] if note else []
        provenance.write(record, stage.directory, stage.digests)
        if self.add is not None:
            self.add(stage.directory)
        return record


def _carry(
    snapshot: Snapshot,
    stage: Staged,
    edits: Iterable[Edit],
    manner: WriteOptions,
    anew: Sequence[str],
) -> dict[str, str]:
    """Copy or link the base's files into the staged checkpoint. Return the SHA-256 of each file if
    it is known.

    Only weights are linked: an editor that writes into a linked text file in place would change the
    base too.
    """
    digests = dict[str, str]()
    edited = {edit.file for edit in edits}
    weights = set(snapshot.weight_files)
    for name in snapshot.files:
        source = snapshot.path(name)
        target = stage.directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if name in ("config.json", *anew) or (name in edited and name != TOKENIZER):
            continue  # `write_texts` or `write_anew` writes it
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
    """Write the new config.json and the edited texts next to it, except tokenizer.json."""
    texts: dict[str, JsonObject] = {"config.json": config}
    for edit in edits:
        if edit.file != TOKENIZER:
            texts[edit.file] = snapshot.length_files[edit.file] | {edit.key: edit.after}
    for name, text in texts.items():
        (directory / name).write_bytes(dump(text))


CHUNK = 128 << 20  # bytes per system call, so that Ctrl-C works in between

PIECE = 4 << 20  # bytes per read of the copied data

PAGES = 64
PAGE = 4096  # bytes; PAGES pages of each kernel copy are compared with the source

# Another device, a file system or a policy without such links (exFAT and Windows return EINVAL),
# or an inode with too many links.
NO_LINK = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}


@dataclass(frozen=True)
class Placed:
    """The result of `place`: a note if the file could not be linked as requested, and its SHA-256.
    The SHA-256 of a linked file may be unknown."""

    note: str | None
    sha256: str | None


# The ways to try for each request: if a symlink is not possible, ropext makes a hard link.
LINKED_BY: dict[Link, tuple[Link, ...]] = {
    "copy": (),
    "hard": ("hard",),
    "symlink": ("symlink", "hard"),
}
LINKED = {"hard": "hard linked", "symlink": "symlinked"}


def place(source: Path, target: Path, link: Link, show: Show = no_progress) -> Placed:
    """Copy or link a weight file into the output.

    A symlink gets the absolute path of the real file (not of a link in between), so the output may
    move and the base may not. A hard link is made to the real file too: os.link on a link would
    make a second link.
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


def copy_file(source: Path, target: Path, show: Show = no_progress) -> str:
    """Copy a checkpoint's file into the output and return its SHA-256. The kernel copies if
    possible, and holes stay holes."""
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
    """The copy of one open file into another. `path` names the source; `passed` receives the bytes
    in their order."""

    source: int
    target: int
    path: Path
    show: Show = no_progress
    passed: Callable[[bytes], object] | None = None

    def part(self, start: int, end: int, shift: int) -> None:
        """Copy a part of the base's file to `shift` bytes later, without its holes. Compare some
        pages of the copy."""
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
        """Copy some bytes of the base's file, in the kernel if possible. Return their number, which
        is not 0."""
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
        """Pass the bytes of the base's file that were just copied to `passed`, from the system's
        cache. A hole gives zeros."""
        while self.passed is not None and position < end:
            data = read_at(self.source, min(PIECE, end - position), position)
            if not data:
                raise _shrank(self.path)
            self.passed(data)
            position += len(data)

    def _compare(self, data: bytes, at: int, shift: int) -> None:
        """Read back bytes of the base file's copy, and raise ProofFailed if they differ. A hole at
        its end does not exist yet."""
        if read_at(self.target, len(data), at + shift).rstrip(b"\0") != data.rstrip(b"\0"):
            raise ProofFailed(
                f"verification: the copy of {self.path} differs from byte {at:,} on; check the disk"
            )


def _shrank(path: Path) -> InputError:
    """Return the error for a checkpoint's file that shrank while it was copied into the output."""
    return InputError(
        f"{path} shrank while it was copied: let whoever writes it finish, then try again"
    )
