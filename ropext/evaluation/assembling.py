"""From the files of finished units to results.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ropext.evaluation.preparing import Prepared
from ropext.evaluation.variants import Lineup, Variant
from ropext.files import write_json, write_text
from ropext.options.evaluate import Evaluate
from ropext.results import rundir
from ropext.results.overlap import marked
from ropext.results.perplexity import by_position, strided_values, text_values, verdicts
from ropext.results.protocols import PROTOCOLS
from ropext.results.readings import Reading
from ropext.results.retrieval import ItemScore, heat_map, retrieval_values
from ropext.results.values import Value


def read_items(path: Path, label: str) -> list[ItemScore]:
    """All scored questions of a variant, in a fixed order."""
    folder = path / "variants" / label / "items"
    rows = [
        ItemScore.from_json(row)
        for file in sorted(folder.glob("*.json"))
        for row in json.loads(file.read_text(encoding="utf-8"))
    ]
    return sorted(rows, key=lambda own: (own.task, own.length, own.index, own.depth))


def assemble(
    path: Path,
    lineup: Lineup,
    options: Evaluate,
    prepared: Prepared,
    passes: Mapping[str, Mapping[str, int]],
    more: Mapping[str, Any],
) -> dict[str, Any]:
    """Write items.jsonl and results.json; the numbers depend on the units' files alone."""
    frame = prepared.frame
    readings = dict[str, Reading]()
    if prepared.documents is not None:
        readings = {
            own.label: rundir.read_reading(
                path, own.label, prepared.documents, passes[own.label], frame.longest
            )
            for own in lineup.variants
        }
    items = {own.label: read_items(path, own.label) for own in lineup.variants}
    if any(items.values()):
        _write_items(path, items)
    base = readings.get("base")
    results = {
        "schema": rundir.SCHEMA,
        "protocol": options.protocol,
        "protocol_text": PROTOCOLS[options.protocol].text,
        "headline": PROTOCOLS[options.protocol].headline,
        "context": frame.context,
        "lengths": list(frame.lengths),
        "tail_tokens": frame.tail,
        "seed": options.seed,
        "resamples": frame.bootstrap.resamples,
        "documents": prepared.corpus.to_json() if prepared.corpus else None,
        "warnings": list(prepared.warnings),
        "variants": {
            own.label: _variant(
                path, own, options, prepared, readings.get(own.label), base, passes, items
            )
            for own in lineup.variants
        },
        **more,
    }
    write_json(path / "results.json", results)
    return results


def _write_items(path: Path, items: Mapping[str, list[ItemScore]]) -> None:
    lines = [
        json.dumps({"variant": label} | score.to_json(), ensure_ascii=True)
        for label, scores in items.items()
        for score in scores
    ]
    write_text(path / "items.jsonl", "\n".join(lines) + "\n")


def _variant(
    path: Path,
    own: Variant,
    options: Evaluate,
    prepared: Prepared,
    reading: Reading | None,
    base: Reading | None,
    passes: Mapping[str, Mapping[str, int]],
    items: Mapping[str, list[ItemScore]],
) -> dict[str, Any]:
    frame, values = prepared.frame, dict[str, Value]()
    positions: list[dict[str, Any]] = []
    if reading is not None and prepared.documents is not None:
        against = None if own.is_base else base
        values = text_values(frame, prepared.documents, reading, against)
        positions = by_position(frame, reading, against)
        if options.protocol == "hf-stride" and not own.is_base:
            values |= strided_values(frame, _strides(path, own, prepared))
    overlap, in_text = prepared.overlaps.get(own.label), options.haystack == "text"
    name = marked(own.label, overlap.mark if overlap else "")
    scores = items[own.label]
    values |= retrieval_values(scores, frame.context, frame.bootstrap) if scores else {}
    return {
        "kind": own.kind,
        "model": own.snapshot.name,
        "target": own.target,
        "adapter": own.adapter,
        **{key: value for key, value in own.info.items() if key not in ("target", "adapter")},
        "passes": dict(passes[own.label]),
        "metrics": {name: value.to_json() for name, value in values.items()},
        "positions": [_plain(row) for row in positions],
        "retrieval": {
            task: [_plain(cell) for cell in cells] for task, cells in heat_map(scores).items()
        },
        "overlap": None if overlap is None else overlap.to_json() | {"questions": in_text},
        "verdicts": [] if own.is_base else verdicts(frame, values, name),
    }


def _strides(
    path: Path, own: Variant, prepared: Prepared
) -> dict[int, tuple[list[float], list[float]]]:
    frame, documents = prepared.frame, prepared.documents
    found: dict[int, tuple[list[float], list[float]]] = {}
    for length in frame.lengths:
        sums, weights = list[float](), list[float]()
        for hashes in documents.prefix_hashes if documents else ():
            regime, name = f"stride-{length}", hashes[frame.longest]
            total, weight = np.load(rundir.unit_path(path, own.label, regime, name))
            sums.append(float(total))
            weights.append(float(weight))
        found[length] = sums, weights
    return found


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: v.to_json() if isinstance(v, Value) else v for key, v in row.items()}
