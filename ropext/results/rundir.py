"""What an evaluation keeps in its folder (`workdir` owns that): arrays, items and results.

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

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ropext import workdir
from ropext.checkpoint.provenance import digest
from ropext.errors import InputError
from ropext.files import read_json, write_json, write_whole
from ropext.results.comparison import Contender
from ropext.results.overlap import mark_of
from ropext.results.perplexity import Frame
from ropext.results.readings import Documents, Reading
from ropext.results.retrieval import ItemScore
from ropext.results.values import Bootstrap

SCHEMA = 1
OWNS = ("documents*", "results.json", "items.jsonl", "report.*", "plots", "variants")


def write_array(path: Path, array: npt.NDArray[Any]) -> None:
    """One .npy file (unlike .npz it holds no date)."""
    write_whole(path, lambda stream: np.save(stream, array, allow_pickle=False))


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

    @property
    def key(self) -> str:
        """SHA-256 of what decides the numbers."""
        return digest(self.manifest["decides"])


def read_run(path: Path) -> Run:
    """Read a run directory; what is missing or torn is said by name."""
    manifest = workdir.read(path)
    if manifest is None or manifest["command"] != "eval":
        raise InputError(f"{path} holds no run of ropext eval")
    if not (path / "results.json").exists():
        raise InputError(f"{path} is not finished; run the same ropext eval again to complete it")
    results = read_json(path / "results.json")
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
            mark_of(variant),
            mark_of(variant, questions=True),
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
