"""A run directory: manifest, per-document arrays, items and results, each file written whole.

    manifest.json                          what exactly was run, with its run_key
    documents.json                         names, token hashes by length
    documents/HASH.npy                     bytes of text per token
    variants/LABEL/pass-LENGTH/HASH.npy    NLL of every token, one pass of that length
    variants/LABEL/short/HASH.npy          NLL through the short window
    variants/LABEL/stride-LENGTH/HASH.npy  weighted sum and weight of the strided loop
    variants/LABEL/items/UNIT.json         retrieval scores
    items.jsonl, results.json, report.md, report.html, plots/*.png

A unit of work is one file under variants/; it is written beside its name and renamed, so a file
that is there is complete. Nothing here holds a time.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ropext.errors import InputError, OutputExists
from ropext.results.comparison import Contender
from ropext.results.perplexity import Frame
from ropext.results.readings import Documents, Reading
from ropext.results.retrieval import ItemScore
from ropext.results.values import Bootstrap

SCHEMA = 1
_HALF_WRITTEN = re.compile(r"\..+\.[0-9]+\.tmp")


def run_key(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of the part of a manifest that decides the numbers."""
    return hashlib.sha256(_canonical(manifest["run"])).hexdigest()


def _canonical(data: Any) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def write_whole(path: Path, write: Callable[[Any], object]) -> None:
    """Write beside the name, flush to the disk, rename: a file is there whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as stream:
                write(stream)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(
            f"{path} cannot be written: {error.strerror or type(error).__name__}; what is finished "
            "is kept, and the same command goes on from there"
        ) from error


def write_json(path: Path, data: Any) -> None:
    """Indented JSON in the order given, newline at the end; not-a-number is refused."""
    text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """A whole binary file."""
    write_whole(path, lambda stream: stream.write(data))


def write_text(path: Path, text: str) -> None:
    """A whole text file."""
    write_bytes(path, text.encode())


def write_array(path: Path, array: npt.NDArray[Any]) -> None:
    """One .npy file (unlike .npz it holds no date)."""
    write_whole(path, lambda stream: np.save(stream, array, allow_pickle=False))


def check_run(path: Path, manifest: Mapping[str, Any], force: bool) -> bool:
    """Whether a directory has this very run, begun or finished; one that may not be taken for it is
    refused. Changes nothing."""
    known = path / "manifest.json"
    found = read_json(known) if known.exists() else None
    if isinstance(found, dict) and "run_key" in found:
        if found["run_key"] == manifest["run_key"]:
            return True
        if not force:
            raise OutputExists(
                f"{path} holds another run (other model, data or settings); give another -o, or "
                "--force to replace it"
            )
    elif not is_empty(path):
        raise OutputExists(f"{path} exists and is no run directory; give another -o")
    return False


def open_run(path: Path, manifest: Mapping[str, Any], force: bool) -> None:
    """Claim a directory for this run: a new one, or one that was begun with the same run key."""
    if check_run(path, manifest, force):
        return
    if (path / "manifest.json").exists():
        _discard(path)
    write_json(path / "manifest.json", manifest)


def _discard(path: Path) -> None:
    """Remove the files that a run directory may hold, and nothing else."""
    for pattern in (
        "manifest.json",
        "documents.json",
        "results.json",
        "items.jsonl",
        "report.*",
        "documents/*.npy",
        "plots/*.png",
        "variants/*/*/*",
    ):
        for file in path.glob(pattern):
            if file.is_file() or file.is_symlink():
                file.unlink()


def is_empty(path: Path) -> bool:
    """Whether a directory holds nothing but what killed writers left half-written, or is absent."""
    if not path.exists():
        return True
    return path.is_dir() and all(_HALF_WRITTEN.fullmatch(own.name) for own in path.iterdir())


def sweep(path: Path) -> None:
    """Delete what killed writers left half-written; for when nobody writes any more."""
    for stale in path.rglob(".*.tmp"):
        stale.unlink(missing_ok=True)


def write_documents(path: Path, documents: Documents, longest: int) -> None:
    """documents.json, and the bytes per token of each."""
    rows = []
    for name, hashes, counts in zip(
        documents.names, documents.prefix_hashes, documents.token_bytes, strict=True
    ):
        rows.append({"name": name, "hashes": {str(length): h for length, h in hashes.items()}})
        write_array(path / "documents" / f"{hashes[longest][:32]}.npy", counts.astype(np.int32))
    write_json(path / "documents.json", rows)


def unit_path(path: Path, label: str, regime: str, document_hash: str) -> Path:
    """Where the array of one unit (document, regime) lies."""
    return path / "variants" / label / regime / f"{document_hash[:32]}.npy"


@dataclass(frozen=True)
class Run:
    """A finished run, read back."""

    path: Path
    manifest: Mapping[str, Any]
    results: Mapping[str, Any]
    contenders: Mapping[str, Contender]


def read_run(path: Path) -> Run:
    """Read a run directory; what is missing or torn is said by name."""
    if not (path / "manifest.json").exists():
        raise InputError(f"{path} is no run directory of ropext eval (no manifest.json)")
    if not (path / "results.json").exists():
        raise InputError(f"{path} is not finished; run the same ropext eval again to complete it")
    manifest, results = read_json(path / "manifest.json"), read_json(path / "results.json")
    if results.get("schema") != SCHEMA:
        raise InputError(
            f"{path}/results.json has schema {results.get('schema')!r}; this ropext reads {SCHEMA}"
        )
    try:
        return Run(path, manifest, results, _contenders(path, results))
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise InputError(f"{path} is damaged: {error!r}; evaluate again") from error


def _contenders(path: Path, results: Mapping[str, Any]) -> dict[str, Contender]:
    frame = Frame(
        int(results["context"]),
        tuple(int(length) for length in results["lengths"]) or (2,),
        int(results["tail_tokens"]),
        Bootstrap(int(results["seed"])),
    )
    documents = _read_documents(path, frame) if (path / "documents.json").exists() else None
    items: dict[str, list[ItemScore]] = {}
    if (path / "items.jsonl").exists():
        for line in (path / "items.jsonl").read_text(encoding="utf-8").splitlines():
            data = json.loads(line)
            items.setdefault(data.pop("variant"), []).append(ItemScore.from_json(data))
    return {
        label: Contender(
            label,
            frame,
            documents,
            read_reading(path, label, documents, variant["passes"], frame.longest)
            if documents is not None
            else None,
            tuple(items.get(label, ())),
        )
        for label, variant in results["variants"].items()
    }


def _read_documents(path: Path, frame: Frame) -> Documents:
    rows = read_json(path / "documents.json")
    hashes = [{int(length): h for length, h in row["hashes"].items()} for row in rows]
    return Documents(
        tuple(row["name"] for row in rows),
        tuple(hashes),
        tuple(
            np.load(path / "documents" / f"{own[frame.longest][:32]}.npy").astype(np.int64)
            for own in hashes
        ),
    )


def read_reading(
    path: Path, label: str, documents: Documents, passes: Mapping[str, int], longest: int
) -> Reading:
    """The arrays of one variant; `passes` maps a regime's directory to its pass length."""
    return Reading(
        label,
        {
            length: [
                np.load(unit_path(path, label, regime, hashes[longest]), mmap_mode="r")
                for hashes in documents.prefix_hashes
            ]
            for regime, length in passes.items()
        },
    )


def read_json(path: Path) -> Any:
    """A JSON file of a run directory."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
