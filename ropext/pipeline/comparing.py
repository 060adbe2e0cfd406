"""The end of a grid: its finished cells side by side, as `ropext compare` shows them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ropext.files import read_json, write_json
from ropext.pipeline.steps import READ_ALWAYS, Work
from ropext.report import compared as side_by_side
from ropext.results import rundir


def compare(works: Sequence[Work], folder: Path, again: bool) -> dict[str, Any]:
    """comparison.json, report.md and report.html of the grid; the base is the reference. What is
    there of these very evaluations is read back, unless it is to be made again."""
    runs = {work.cell.name: rundir.read_run(work.evaluation) for work in works}
    keys = {work.cell.name: [work.final, runs[work.cell.name].key] for work in works}
    kept = folder / "comparison.json"
    if not again and kept.is_file() and (folder / "report.html").is_file():
        found: dict[str, Any] = read_json(kept)
        if found.get("cells") == keys:
            return found
    first, spectra = next(iter(runs.values())), dict[str, Sequence[float]]()
    everyone = {label: own for label, own in first.contenders.items() if label in READ_ALWAYS}
    for work in works:
        name, run = work.cell.name, runs[work.cell.name]
        everyone[name] = replace(run.contenders[work.final], label=name)
        if inv_freq := run.results["variants"][work.final].get("inv_freq"):
            spectra[name] = inv_freq
    compared = side_by_side.compare(everyone)
    compared.write(folder, runs, spectra)
    data = {"cells": keys} | compared.to_json()
    write_json(kept, data)
    return data
