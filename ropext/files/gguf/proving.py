"""Verify a GGUF file: the frequencies that ggml computes from it, and its tensors."""

import hashlib
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ropext.base.errors import InputError, ProofFailed
from ropext.base.jsontext import JsonObject
from ropext.base.narration import Show, no_progress
from ropext.families.loaders.gguf import STORED, architecture, farthest
from ropext.families.loaders.gguf import read as ggml_read
from ropext.files.checkpoint.weights import WeightFile, content_digest
from ropext.files.gguf.file import DIVISORS, FILLER, PARTS, GgufFile
from ropext.files.gguf.geometry import rope_of
from ropext.files.gguf.header import GgufHeader
from ropext.files.gguf.opening import open_gguf
from ropext.scaling.rope import Spectrum


def identify_parts(
    model: GgufFile, *, content: bool = False, show: Show = no_progress
) -> dict[str, WeightFile]:
    """Return the identity of the tensors in each part of an opened GGUF file, without rope
    factors."""
    weights = dict[str, WeightFile]()
    for number, part in enumerate(model.parts, 1):
        tensors = [tensor for tensor in part.tensors if tensor.name not in DIVISORS]
        rows = [(t.name, t.kind, t.shape, t.size) for t in tensors]
        digest = None
        if content:
            starts = [(part.data + tensor.offset, tensor.size) for tensor in tensors]
            digest = content_digest(part.path, show, [(at, at + size) for at, size in starts])
        weights[f"tensors-{number:05}"] = WeightFile(
            size=sum(tensor.size for tensor in tensors),
            header_sha256=hashlib.sha256(repr(rows).encode()).hexdigest(),
            sha256=digest,
        )
    return weights


@dataclass(frozen=True)
class ReadBack:
    """The comparison of a file's spectra with the planned one."""

    error: float  # the largest relative difference
    pairs: int
    tensors: int
    bytes: int


def spectra_in(model: GgufFile) -> list[Spectrum]:
    """Return the spectra that ggml's formula gives for an opened GGUF file: one in llama.cpp, and
    one in Ollama.

    Ollama adds keys to some files, and only Ollama knows certain older names. An architecture that
    only Ollama supports has only the second.
    """
    row = architecture(model.architecture)
    context = model.config["max_position_embeddings"]
    dim = model.dim
    spectra = list[Spectrum]()
    if not row.only:
        in_llama_cpp = rope_of(model.parts, row, dim, context, ollama=False)
        spectra.append(ggml_read(in_llama_cpp, dim))
    in_ollama = rope_of(model.parts, row, dim, context, ollama=True)
    spectra.append(ggml_read(in_ollama, dim))
    return spectra


def compare(model: GgufFile, wanted: Spectrum, target: int) -> ReadBack:
    """Read spectra and length back from a GGUF file. Raise ProofFailed if they are not the given
    ones."""
    spectra = spectra_in(model)
    stated = model.config["max_position_embeddings"]
    if stated != target:
        raise ProofFailed(f"verification: context_length is {stated}, the target is {target}")
    errors = list[float]()
    for spectrum in spectra:
        # No key stores the factor of the softmax.
        comparable = replace(spectrum, softmax_factor=wanted.softmax_factor)
        errors.append(farthest(comparable, wanted))
    error = max(errors)
    if not error <= STORED:
        raise ProofFailed(
            f"verification: ggml's formula on the keys of {model.name} is off the planned spectrum "
            f"by {error:.1e} (bound {STORED:.0e})"
        )
    tensors = 0
    size = 0
    for part in model.parts:
        tensors += len(part.tensors)
        size += sum(tensor.size for tensor in part.tensors)
    return ReadBack(error, len(wanted.inv_freq), tensors, size)


def prove_file(
    target: Path, base: GgufFile, wanted: Spectrum, length: int, changed: Collection[str]
) -> JsonObject:
    """Open a GGUF file right after it was written, and read it back. Raise ProofFailed if its
    spectrum, its length or its tensors differ. A key of the base may differ only if it is in
    `changed`."""
    try:
        written = open_gguf(str(target))
    except InputError as error:
        raise ProofFailed(
            f"verification: ropext cannot read back the written file: {error}"
        ) from None
    done = compare(written, wanted, length)
    if identify_parts(written) != identify_parts(base):
        raise ProofFailed(f"verification: {target} has other tensors than {base.name}")
    for name in base.head.entries:
        if name in changed or name in (FILLER, PARTS):
            continue
        if _entry(base.head, name) != _entry(written.head, name):
            raise ProofFailed(f"verification: {target} has another {name} than {base.name}")
    return {"ggml": architecture(base.architecture).name} | asdict(done)


def _entry(head: GgufHeader, name: str) -> bytes | None:
    """Return the bytes of a key and its value in the header of a GGUF file, or None."""
    row = head.entries.get(name)
    if row is None:
        return None
    return head.read(row.start, row.end - row.start)
