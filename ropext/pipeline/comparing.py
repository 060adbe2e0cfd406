"""The end of a grid: its finished cells side by side, as `ropext compare` shows them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ropext.pipeline.steps import READ_ALWAYS, Work
from ropext.report import evaluated, measured
from ropext.results import comparison, rundir
from ropext.results.comparison import Contender


def compare(works: Sequence[Work], folder: Path, again: bool) -> dict[str, Any]:
    """comparison.json, report.md and report.html of the grid; the base is the reference. What is
    there of these very evaluations is read back, unless it is to be made again."""
    runs = {work.cell.name: rundir.read_run(work.evaluation) for work in works}
    keys = {
        work.cell.name: [work.final, runs[work.cell.name].manifest["run_key"]] for work in works
    }
    kept = folder / "comparison.json"
    if not again and kept.is_file() and (folder / "report.html").is_file():
        found: dict[str, Any] = rundir.read_json(kept)
        if found.get("cells") == keys:
            return found
    first = next(iter(runs.values()))
    everyone = {label: own for label, own in first.contenders.items() if label in READ_ALWAYS}
    for work in works:
        own = runs[work.cell.name].contenders[work.final]
        everyone[work.cell.name] = replace(own, label=work.cell.name)
    readers = [own for own in everyone.values() if own.reading is not None]
    compared = comparison.compare_text(readers) if len(readers) > 1 else None
    tables = measured.comparison_tables(compared) if compared else []
    items = _items(list(everyone.values()))
    retrieval = measured.item_table(items)
    tables += [retrieval] if retrieval else []
    spectra = {
        name: inv_freq
        for name, run in runs.items()
        for own in run.results["variants"].values()
        if (inv_freq := own.get("inv_freq"))
    }
    details = "\n".join(f"{name}: run key {run.manifest['run_key']}" for name, run in runs.items())
    evaluated.write_comparison(folder, compared, tables, everyone, spectra, details)
    data = {
        "cells": keys,
        "text": comparison.to_json(compared) if compared else None,
        "retrieval": {
            label: {name: value.to_json() for name, value in own.items()}
            for label, own in items.items()
        },
    }
    rundir.write_json(kept, data)
    return data


def _items(everyone: list[Contender]) -> dict[str, Any]:
    """Retrieval against the untouched base, which is the first that was asked."""
    asked = [own for own in everyone if own.items]
    if len(asked) < 2:
        return {}
    boot = asked[0].frame.bootstrap
    return {
        own.label: comparison.item_differences(own.items, asked[0].items, boot) for own in asked[1:]
    }
