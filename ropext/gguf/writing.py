"""Write an extended GGUF: new keys and divisors, and every other tensor's bytes as they are."""

import hashlib
import json
import os
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from ropext import guard
from ropext.atomic import os_errors
from ropext.checkpoint import provenance
from ropext.checkpoint.provenance import Record
from ropext.checkpoint.staging import check_output, check_space, staged
from ropext.checkpoint.weights import WeightFile
from ropext.checkpoint.writing import TEXT_ROOM, Copying, Written, place
from ropext.errors import InputError, ProofFailed, RopextError, UsageError
from ropext.gguf.file import DIVISORS, RECORD, WHOLE, GgufFile, open_gguf, rope_of, sizes
from ropext.gguf.header import F32, FORMATS, STRING, UINT32, GgufHeader, read_gguf
from ropext.gguf.keys import Values, changes
from ropext.gguf.modelfile import modelfile as modelfile_of
from ropext.inputs import open_regular
from ropext.jsontext import tagged
from ropext.loaders.gguf import STORED, architecture, farthest
from ropext.loaders.gguf import read as ggml_read
from ropext.narration import Show, unseen
from ropext.options.fields import Link
from ropext.planning import ExtensionPlan
from ropext.rope import Spectrum
from ropext.systems import bytes_on_disk

FILLER = "ropext.filler"
PARTS = "split.tensors.count"
PAGE = 4096  # bytes; tensors moved by whole pages keep their holes, and share blocks on btrfs, XFS
PIECE = 4 << 20  # bytes read at once
UNKNOWN = b"0" * 64  # in the place of the file's digest while that is taken


def _is_one(output: Path) -> bool:
    return output.suffix.lower() == ".gguf"


def check_writable(model: GgufFile, output: Path, *, link: Link, force: bool) -> None:
    """All that is refused before anything is written; changes nothing. (`staged` clears away what a
    killed run left before it looks at the output.)"""
    _check_source(model, output, link)
    paths = [part.path for part in model.parts]
    check_output(output, force=force, inputs=paths, file=_is_one(output), written=written)


def _check_source(model: GgufFile, output: Path, link: Link) -> None:
    if _is_one(output) and len(model.parts) > 1:
        raise UsageError(
            f"{model.name} is split into {len(model.parts)} files, whose names belong together; "
            "give a directory: -o DIR"
        )
    if link == "symlink" and len(model.parts) == 1:
        raise UsageError("--link symlink: a GGUF of one file is written anew; use --link copy")
    paths = [part.path for part in model.parts]
    copied = paths[:1]  # the first is written anew in any case
    if link == "copy":
        copied = paths
    check_space(output, TEXT_ROOM + sum(map(bytes_on_disk, copied)))


def write_gguf(
    model: GgufFile,
    output: Path,
    *,
    plan: ExtensionPlan,
    record: Record,
    link: Link = "copy",
    force: bool = False,
    hash_weights: bool = False,
    prove: bool = True,
    show: Show = unseen,
) -> Written:
    """Write `output`, one file or a directory, as a whole or not at all."""
    _check_source(model, output, link)
    keys, tensors = changes(model, plan)
    one = _is_one(output)
    weights = weigh_parts(model, content=hash_weights, show=show)
    full = replace(record, weights=weights)
    notes: list[str] = []
    paths = [part.path for part in model.parts]
    with staged(output, force=force, inputs=paths, file=one, written=written) as stage:
        target = stage.directory / model.file_name
        if one:
            target = stage.directory / output.name
        modelfile, left_out = modelfile_of(model.name, target.name, plan.target)
        notes += left_out
        beside_name = f"{target.name}.Modelfile"
        with os_errors(output):
            digests = dict[str, str]()
            for path in paths[1:]:
                placed = place(path, stage.directory / path.name, link, show)
                if placed.note:
                    notes.append(f"{path.name}: {placed.note}")
                if placed.sha256:
                    digests[path.name] = placed.sha256
            if not one:
                (stage.directory / beside_name).write_bytes(modelfile.encode())
            beside = guard.states(stage.directory, digests)
            keys = dict(keys) | _provenance(full, beside)
            _write(model.head, target, keys, tensors, show)
        proof = None
        if prove:
            proof = _prove(target, model, plan.main.wanted, plan.target, keys)
        if one:
            with os_errors(output):
                stage.write_beside(beside_name, modelfile)
    return Written(output, full, (*stage.notes, *notes), {}, proof)


def written(place: Path) -> set[str] | None:
    """The files of a GGUF that are as ropext wrote them, by the digest in the first one and its
    list of the others; else what a directory's own record says."""
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
    """SHA-256 of a file of ropext's, the digest that stands in it taken as zeros: so it covers the
    keys, too."""
    entry = read_gguf(path).entries[WHOLE]
    return guard.blanked_digest(path, entry.end - len(UNKNOWN), len(UNKNOWN))


def _provenance(record: Record, beside: Mapping[str, Any]) -> dict[str, tuple[int, Any]]:
    """The keys that say what was done; `beside` are the states of the files that belong to it."""
    site = next(site for site in record.sites if site.scaled)
    kept = provenance.to_json(record)
    if beside:
        kept[guard.FILES] = dict(beside)
    return {
        "ropext.method": (STRING, record.method),
        "ropext.context": (UINT32, record.context),
        "ropext.target": (UINT32, record.target),
        "ropext.spectrum_sha256": (STRING, site.wanted.digest()),
        RECORD: (STRING, json.dumps(tagged(kept), separators=(",", ":"))),
        WHOLE: (STRING, UNKNOWN.decode()),
    }


def _text(value: str) -> bytes:
    raw = value.encode(errors="replace")
    return struct.pack("<Q", len(raw)) + raw


def _key(key: str, kind: int, value: Any) -> bytes:
    if kind == STRING:
        body = _text(value)
    else:
        body = struct.pack(f"<{FORMATS[kind]}", value)
    return _text(key) + struct.pack("<I", kind) + body


def _padded(length: int, alignment: int) -> int:
    return -(-length // alignment) * alignment


def _write(
    head: GgufHeader,
    target: Path,
    keys: Values,
    tensors: Mapping[str, Sequence[float]],
    show: Show,
) -> None:
    """One file: the keys in their order, new ones last, a new tensor behind the others."""
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
    """Copy the section of the tensors behind the new header, in its order, with other bytes at some
    places; the digest is given what is written."""
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
    """Where the 64 zeros stand: behind the key, its type and the text's length."""
    before = _key(WHOLE, STRING, UNKNOWN.decode()).removesuffix(UNKNOWN)
    return header.rindex(before) + len(before)


def weigh_parts(
    model: GgufFile, *, content: bool = False, show: Show = unseen
) -> dict[str, WeightFile]:
    """What identifies the tensors of each part, rope factors aside."""
    weights = dict[str, WeightFile]()
    for number, part in enumerate(model.parts, 1):
        size = 0
        for tensor in part.tensors:
            if tensor.name not in DIVISORS:
                size += tensor.size
        digest = None
        if content:
            digest = _content(part, show)
        weights[f"tensors-{number:05}"] = WeightFile(size, part.digest(DIVISORS), digest)
    return weights


def _content(part: GgufHeader, show: Show) -> str:
    """SHA-256 over the tensors' bytes."""
    digest = hashlib.sha256()
    done = 0
    with open(open_regular(part.path), "rb") as file:
        for tensor in part.tensors:
            if tensor.name in DIVISORS:
                continue
            file.seek(part.data + tensor.offset)
            left = tensor.size
            while left:
                piece = file.read(min(left, PIECE))
                if not piece:
                    break
                digest.update(piece)
                left = left - len(piece)
                done = done + len(piece)
                show(done, part.size, f"hashing {part.path.name}")
    return digest.hexdigest()


@dataclass(frozen=True)
class ReadBack:
    """What the keys of a file give, beside what was wanted."""

    error: float  # the largest relative difference
    pairs: int
    tensors: int
    bytes: int


def spectra_in(model: GgufFile) -> list[Spectrum]:
    """What ggml computes from the file, by its formula: as the file stands, and in Ollama, which
    adds keys to some and alone knows other names; a file for Ollama alone is read there alone."""
    row = architecture(model.container)
    context = model.config["max_position_embeddings"]
    dim, _ = sizes(model.head, row)
    spectra = list[Spectrum]()
    if not row.only:
        as_it_stands = rope_of(model.parts, row, dim, context, ollama=False)
        spectra.append(ggml_read(as_it_stands, dim))
    in_ollama = rope_of(model.parts, row, dim, context, ollama=True)
    spectra.append(ggml_read(in_ollama, dim))
    return spectra


def compare(model: GgufFile, wanted: Spectrum, target: int) -> ReadBack:
    """Hold a file against a spectrum and a length; ProofFailed says what differs."""
    spectra = spectra_in(model)
    stated = model.config["max_position_embeddings"]
    if stated != target:
        raise ProofFailed(f"proof: context_length is {stated}, the target is {target}")
    errors = list[float]()
    for spectrum in spectra:
        # No key says what the softmax is scaled by.
        comparable = replace(spectrum, softmax_factor=wanted.softmax_factor)
        errors.append(farthest(comparable, wanted))
    error = max(errors)
    if not error <= STORED:
        raise ProofFailed(
            f"proof: ggml's formula on the keys of {model.name} is off the planned spectrum by "
            f"{error:.1e} (bound {STORED:.0e})"
        )
    tensors = 0
    size = 0
    for part in model.parts:
        tensors += len(part.tensors)
        size += sum(tensor.size for tensor in part.tensors)
    return ReadBack(error, len(wanted.inv_freq), tensors, size)


def _prove(
    target: Path, base: GgufFile, wanted: Spectrum, length: int, changed: Collection[str]
) -> dict[str, Any]:
    """Read the written file back, with the reader that knows nothing of the plan."""
    try:
        written = open_gguf(str(target))
    except InputError as error:
        raise ProofFailed(f"proof: what was written cannot be read back: {error}") from None
    done = compare(written, wanted, length)
    if weigh_parts(written) != weigh_parts(base):
        raise ProofFailed(f"proof: {target} has other tensors than {base.name}")
    for name in base.head.entries:
        if name in changed or name in (FILLER, PARTS):
            continue
        if _entry(base.head, name) != _entry(written.head, name):
            raise ProofFailed(f"proof: {target} has another {name} than {base.name}")
    return {"ggml": architecture(base.container).name} | asdict(done)


def _entry(head: GgufHeader, name: str) -> bytes | None:
    """Return a key and its value as they stand in the file."""
    row = head.entries.get(name)
    if row is None:
        return None
    return head.read(row.start, row.end - row.start)
