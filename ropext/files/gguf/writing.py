"""Write an extended GGUF: new keys and divisors; the bytes of every other tensor stay."""

import hashlib
import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, ClassVar

from ropext.base import guard
from ropext.base.atomic import os_errors
from ropext.base.errors import RopextError, UsageError
from ropext.base.inputs import open_regular
from ropext.base.jsontext import Json, JsonObject, tagged
from ropext.base.narration import Show
from ropext.base.staging import Output, Staged, check_space
from ropext.base.systems import bytes_on_disk
from ropext.files.checkpoint import provenance
from ropext.files.checkpoint.provenance import Record
from ropext.files.checkpoint.writing import TEXT_ROOM, Copying, WriteOptions, place
from ropext.files.gguf.file import FILLER, PARTS, RECORD, WHOLE, GgufFile
from ropext.files.gguf.header import F32, FORMATS, STRING, UINT32, GgufHeader, read_gguf
from ropext.files.gguf.keys import Values, changes
from ropext.files.gguf.modelfile import modelfile as modelfile_of
from ropext.files.gguf.opening import open_gguf
from ropext.files.gguf.proving import identify_parts, prove_file
from ropext.scaling.rope import RopeSite

METHOD = "ropext.method"
CONTEXT = "ropext.context"
TARGET = "ropext.target"
SPECTRUM = "ropext.spectrum_sha256"
# bytes; tensors moved by whole pages keep their holes, and share blocks on btrfs and XFS
PAGE = 4096
OF_ROPEXT = (METHOD, CONTEXT, TARGET, SPECTRUM, RECORD, WHOLE)  # keys that record the extension
UNKNOWN = b"0" * 64  # in place of the file's digest while it is computed


@dataclass(frozen=True)
class FileSource:
    """A GGUF to write with other keys and divisors: one file, or a directory of its parts."""

    model: GgufFile
    site: RopeSite  # the planned site
    target: int

    left: ClassVar[Mapping[str, str]] = {}

    @cached_property
    def changed(self) -> tuple[Values, Mapping[str, tuple[float, ...]]]:
        """The keys and the tensors that change."""
        return changes(self.model, self.site, self.target)

    def check(self, output: Path, manner: WriteOptions) -> Output:
        """Raise if the output does not suit the number of GGUF files, or if the disk has no room
        for them."""
        parts = self.model.parts
        if _is_file(output) and len(parts) > 1:
            raise UsageError(
                f"{self.model.name} is split into {len(parts)} files, whose names belong together; "
                "give a directory: -o DIR"
            )
        if manner.link == "symlink" and len(parts) == 1:
            raise UsageError("--link symlink: ropext rewrites a GGUF of one file; use --link copy")
        copied = parts[:1]  # the first part is rewritten in any case
        if manner.link == "copy":
            copied = parts
        check_space(output, TEXT_ROOM + sum(bytes_on_disk(part.path) for part in copied))
        reads = [part.path for part in parts]
        return Output(output, manner.force, reads, _is_file(output), written)

    def put(self, stage: Staged, record: Record, output: Path, manner: WriteOptions) -> Record:
        """Write the extended GGUF file, with the record as one of its keys."""
        weights = identify_parts(self.model, content=manner.hash_weights, show=manner.show)
        record = replace(record, weights=weights)
        keys, tensors = self.changed
        target = self._file_in(stage.directory, output)
        with os_errors(output):
            digests = dict[str, str]()
            for part in self.model.parts[1:]:
                name = part.path.name
                placed = place(part.path, stage.directory / name, manner.link, manner.show)
                if placed.note:
                    stage.notes.append(f"{name}: {placed.note}")
                if placed.sha256:
                    digests[name] = placed.sha256
            if len(self.model.parts) == 1:  # Ollama imports no split file
                self._put_modelfile(stage, target.name, output)
            beside = guard.states(stage.directory, digests)
            all_keys = dict(keys) | _provenance(record, beside)
            _write(self.model.head, target, all_keys, tensors, manner.show)
        return record

    def _put_modelfile(self, stage: Staged, file: str, output: Path) -> None:
        """Write Ollama's Modelfile next to the extended GGUF file, or into its folder."""
        text, left_out = modelfile_of(self.model.name, file, self.target)
        stage.notes += left_out
        name = f"{file}.Modelfile"
        if _is_file(output):
            stage.write_beside(name, text)
        else:
            (stage.directory / name).write_bytes(text.encode())

    def _file_in(self, directory: Path, output: Path) -> Path:
        """Return the path at which the extended GGUF file is written in a folder."""
        if _is_file(output):
            return directory / output.name
        return directory / self.model.file_name

    def prove(self, directory: Path) -> JsonObject:
        """Open the GGUF file that was just written, and read it back, with the reader that knows
        nothing of the plan."""
        keys, _ = self.changed
        target = min(directory.glob("*.[gG][gG][uU][fF]"))
        changed = {*keys, *OF_ROPEXT}
        return prove_file(target, self.model, self.site.wanted, self.target, changed)

    def finish(self, stage: Staged, record: Record, output: Path) -> Record:
        """Return the record as the extended GGUF file holds it since `put`: without the proof."""
        return replace(record, proof=None)


def _is_file(output: Path) -> bool:
    """Return True if a GGUF output of this name is written as one file, not as a directory."""
    return output.suffix.lower() == ".gguf"


def written(place: Path) -> set[str] | None:
    """Return the files of a GGUF output that are as ropext wrote them, or None if the first file is
    not. The digest in the first file checks that file, and its list checks the others. If it is no
    valid GGUF, use the directory's own record."""
    first = place
    if place.is_dir():
        first = min(place.glob("*.gguf"), default=place)
    try:
        model = open_gguf(str(first))
        stated = model.head.text(WHOLE)
        if stated is None or guard.remembered(first, whole_digest) != stated:
            return None
    except RopextError:
        return guard.recorded(place)
    names = {first.name}
    files = (model.kept_record or {}).get(guard.FILES)
    if isinstance(files, dict) and place.is_dir():
        names |= guard.unchanged(place, files)
    return names


def whole_digest(path: Path) -> str:
    """Return the SHA-256 of a GGUF that ropext wrote, with the digest inside taken as zeros: so it
    covers the keys too."""
    entry = read_gguf(path).entries[WHOLE]
    return guard.blanked_digest(path, entry.end - len(UNKNOWN), len(UNKNOWN))


def _provenance(record: Record, beside: JsonObject) -> dict[str, tuple[int, Json]]:
    """Return the keys that record the extension in the header of the written GGUF. `beside` has the
    states of the files next to it."""
    site = next(site for site in record.sites if site.scaled)
    kept = provenance.to_json(record)
    if beside:
        kept[guard.FILES] = dict(beside)
    return {
        METHOD: (STRING, record.method),
        CONTEXT: (UINT32, record.context),
        TARGET: (UINT32, record.target),
        SPECTRUM: (STRING, site.wanted.digest()),
        RECORD: (STRING, json.dumps(tagged(kept), separators=(",", ":"))),
        WHOLE: (STRING, UNKNOWN.decode()),
    }


def _text(value: str) -> bytes:
    """Return a text as GGUF stores it: its length and its bytes."""
    raw = value.encode(errors="replace")
    return struct.pack("<Q", len(raw)) + raw


def _key(key: str, kind: int, value: Json) -> bytes:
    """Return a key with its value as a GGUF's header stores it."""
    if kind == STRING:
        body = _text(value)
    else:
        body = struct.pack(f"<{FORMATS[kind]}", value)
    return _text(key) + struct.pack("<I", kind) + body


def _padded(length: int, alignment: int) -> int:
    """Return a length in a GGUF, rounded up to its alignment."""
    return -(-length // alignment) * alignment


def _write(
    head: GgufHeader,
    target: Path,
    keys: Values,
    tensors: Mapping[str, Sequence[float]],
    show: Show,
) -> None:
    """Write one GGUF file. Its keys keep their order, new ones last. New tensors come after the
    others."""
    new = {name: values for name, values in tensors.items() if head.tensor(name) is None}
    if new and (count := head.entries.get(PARTS)):
        keys = {**keys, PARTS: (count.kind, count.value + len(new))}
    raw = head.read(0, head.described[1])
    carried = {k: raw[entry.start : entry.end] for k, entry in head.entries.items() if k != FILLER}
    rows = carried | {key: _key(key, *item) for key, item in keys.items()}
    size = _padded(head.end - head.data, head.alignment)
    table = raw[slice(*head.described)]
    place = size
    bodies = list[bytes]()
    for name, values in new.items():
        table += _text(name) + struct.pack("<IQIQ", 1, len(values), F32, place)
        bodies.append(struct.pack(f"<{len(values)}f", *values).ljust(head.alignment, b"\0"))
        bodies[-1] = bodies[-1].ljust(_padded(len(bodies[-1]), head.alignment), b"\0")
        place += len(bodies[-1])

    def header(filler: int) -> bytes:
        """Return the new header of the GGUF with so many filler bytes."""
        entries = rows | {FILLER: _key(FILLER, STRING, "." * filler)}
        counts = struct.pack("<IQQ", head.version, len(head.tensors) + len(new), len(entries))
        out = raw[:4] + counts + b"".join(entries.values()) + table
        return out.ljust(_padded(len(out), head.alignment), b"\0")

    begin = header(0)
    filler = 0
    if head.alignment <= PAGE:
        filler = (head.data - len(begin)) % PAGE
    begin = header(filler)
    rewritten = {}
    for name in tensors.keys() - new.keys():
        tensor = head.tensor(name)
        assert tensor is not None
        row = struct.pack(f"<{len(tensors[name])}f", *tensors[name])
        rewritten[head.data + tensor.offset] = row
    source = open_regular(head.path)
    try:
        with target.open("x+b") as out:
            out.write(begin)
            digest = hashlib.sha256(begin)
            _copy_tensors(source, head, rewritten, out, digest, show)
            padding = bytes(len(begin) + size - out.seek(0, os.SEEK_END))
            for piece in (padding, *bodies):
                out.write(piece)
                digest.update(piece)
            out.seek(_place_of_digest(begin))
            out.write(digest.hexdigest().encode())
    finally:
        os.close(source)


def _copy_tensors(
    source: int,
    head: GgufHeader,
    rewritten: Mapping[int, bytes],
    out: BinaryIO,
    digest: "hashlib._Hash",
    show: Show,
) -> None:
    """Copy the GGUF tensors' section after the new header, with other bytes at some places.
    `digest` receives every written byte."""
    copying = Copying(source, out.fileno(), head.path, show, digest.update)
    shift = out.tell() - head.data
    position = head.data
    for start, row in sorted(rewritten.items()):
        out.flush()
        copying.part(position, start, shift)
        out.seek(start + shift)
        out.write(row)
        digest.update(row)
        position = start + len(row)
    out.flush()
    copying.part(position, head.end, shift)
    out.truncate(head.end + shift)  # a hole at the end


def _place_of_digest(header: bytes) -> int:
    """Return the position of the 64 zeros in a GGUF's header. They come after the key, its type and
    the text's length."""
    before = _key(WHOLE, STRING, UNKNOWN.decode()).removesuffix(UNKNOWN)
    return header.rindex(before) + len(before)
