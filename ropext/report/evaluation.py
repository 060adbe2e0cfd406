"""The reports of an evaluation and of a comparison: Markdown, PNG files, one HTML file."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ropext import guard
from ropext.atomic import write_bytes
from ropext.report import html, plots, tables
from ropext.report.gates import failures, gate_table
from ropext.report.plots import Curve, Style
from ropext.results import BASE, rundir
from ropext.results.gates import Gate, split_spec
from ropext.results.measurement import (
    Discordance,
    Measurement,
    check_alike,
    discordances,
    item_differences,
)
from ropext.results.perplexity import Frame, Reading, Span
from ropext.results.retrieval import heat_map
from ropext.results.rules import Comparison, compare_text
from ropext.results.values import Value
from ropext.table import Table, with_rows
from ropext.tasks import find_task
from ropext.workdir import Workdir

Pictures = dict[str, tuple[str, bytes]]  # file name -> caption, PNG
PARTS = 4  # steps of an octave in the pictures
# Under a picture's title. Below eight documents the band is from the smallest to the largest.
READS = (
    "base: the model before extension, which sees its trained window and no more; bands: 95 % "
    "over documents"
)
PAIRED = "difference on the same tokens; bands: 95 % over documents"
WAVELENGTHS = "Wavelength of each rotary pair"


def write_report(run: Measurement, gates: Sequence[Gate] = ()) -> None:
    """Write report.md, report.html and plots/*.png of a finished run into its folder."""
    results = run.results
    assert run.path is not None  # it was kept
    outcomes = rundir.judge(run, gates)
    title = f"ropext eval: {', '.join(dict.fromkeys(run.manifest['names']['models'].values()))}"
    html.write(
        run.path,
        title,
        _subtitle(results),
        [*failures(outcomes), *tables.verdict_lines(results)],
        results["warnings"],
        with_rows([gate_table(outcomes), *tables.evaluation_tables(results)]),
        write_pictures(run.path, draw(run)),
        json.dumps(run.manifest, indent=1, ensure_ascii=False),
    )


def _subtitle(results: Mapping[str, Any]) -> str:
    documents = results["documents"]
    read = f"{documents['used']} documents; " if documents else ""
    return (
        f"protocol {results['protocol']}: {results['protocol_text']}. {read}trained context "
        f"{results['context']} tokens; 95 % intervals from {results['resamples']} resamples of "
        "whole documents"
    )


def write_pictures(folder: Path, drawn: Pictures) -> Pictures:
    """Write the pictures, and name them as the report refers to them."""
    named = {f"plots/{name}.png": picture for name, picture in drawn.items()}
    for name, (_, data) in named.items():
        write_bytes(folder / name, data)
    return named


def draw(measured: Measurement) -> Pictures:
    """Draw models that read the same documents, and their spectra."""
    drawn = Pictures()
    styled = plots.styles(measured.models)
    if measured.readings:
        drawn |= _text_pictures(measured, styled)
    drawn |= heat_pictures(measured)
    spectra = _spectra(measured)
    if set(spectra) - {BASE}:
        limits = {"trained context": measured.frame.context}
        drawn["spectra"] = WAVELENGTHS, plots.spectra(WAVELENGTHS, spectra, styled, limits)
    return drawn


def _spectra(*measured: Measurement) -> dict[str, Sequence[float]]:
    """The frequencies of every model that rotates."""
    models = (pair for each in measured for pair in each.models.items())
    return {label: model.inv_freq for label, model in models if model.inv_freq}


def _text_pictures(measured: Measurement, styled: Mapping[str, Style]) -> Pictures:
    frame = measured.frame
    readings = measured.readings
    drawn = Pictures()
    shape = (frame.context, frame.longest)
    y = "NLL (nats per token)"
    name = "nll-by-position"
    what = "by position"
    spans = _by_position(frame)
    if frame.mask_stride:  # the tail alone is scored
        name = "tail"
        what = f"of {tables.tail_text(frame.tail, frame.lengths, frame.mask_stride)}"
        spans = {float(length): frame.tail_span(length) for length in frame.lengths}
    if len(spans) > 1:  # one point above another is what the table says better
        caption = f"Loss {what}: lower is better"
        lines = losses(measured, spans)
        drawn[name] = caption, plots.lines(caption, y, lines, *shape, False, READS, styled)
    if (base := readings.pop(BASE, None)) is not None and readings and not frame.mask_stride:
        lines = _curves(readings, _by_position(frame), partial(frame.difference, base))
        caption = "Context gain by position: above zero the long context helps"
        y = "gain over the base's short window (nats)"
        drawn["gain"] = caption, plots.lines(caption, y, lines, *shape, True, PAIRED, styled)
    return drawn


Spans = Mapping[float, Span]  # by their place on the axis


def _by_position(frame: Frame) -> Spans:
    spans = frame.octaves(PARTS)
    spans = spans[1:] or spans  # the first, all early tokens together, has no place on the axis
    return {math.sqrt(start * stop): (start, stop) for start, stop in spans}


def losses(measured: Measurement, spans: Spans | None = None) -> list[Curve]:
    """The loss of each model, by position or over other spans."""
    spans = _by_position(measured.frame) if spans is None else spans
    return _curves(measured.readings, spans, measured.frame.nll)


def _curves(
    readings: Mapping[str, Reading], spans: Spans, value: Callable[[Reading, Span], Value]
) -> list[Curve]:
    return [
        Curve(label, tuple(spans), tuple(value(reading, span) for span in spans.values()))
        for label, reading in readings.items()
    ]


def heat_pictures(*measured: Measurement) -> Pictures:
    """One picture per task, the models side by side."""
    maps: dict[str, dict[str, Any]] = {}
    for label, model in (pair for each in measured for pair in each.models.items()):
        for task, cells in heat_map(model.items).items():
            maps.setdefault(task, {})[label] = cells
    drawn = {}
    for task, own_maps in maps.items():
        caption = f"Retrieval, {task}: depth by length"
        scale = "share named" if find_task(task).in_words else "share answered exactly"
        picture = plots.heat_maps(caption, scale, own_maps)
        drawn[f"retrieval-{task}"] = caption, picture
    return drawn


@dataclass(frozen=True)
class Compared:
    """Models side by side on the same tokens and questions, as paired differences: `ropext
    compare`. None or empty where fewer than two have a reading or answers.
    """

    parts: Mapping[str, Measurement]  # each model alone
    text: Comparison | None
    items: Mapping[str, Mapping[str, Value]]  # of answers, against `asked`
    asked: str  # the first that was asked any question; the base is asked none
    split: Mapping[str, Mapping[tuple[str, int], Discordance]]  # the same, text by text

    @property
    def tables(self) -> list[Table]:
        """What is printed, and stands in the reports."""
        sections = tables.comparison_tables(self.text) if self.text else []
        of_servers = tables.discordance_table(self.split, self.asked)
        return with_rows([*sections, tables.item_table(self.items, self.asked), of_servers])

    def __repr__(self) -> str:
        return f"<Compared: {', '.join(self.parts)}>"

    def write(self, folder: Path, runs: Sequence[Measurement]) -> None:
        """Write report.md, report.html and the pictures; `runs` are those compared."""
        drawn = Pictures()
        spectra = _spectra(*runs)
        styled = plots.styles([*self.parts, *spectra])
        if self.text is not None and not self.text.measured.frame.mask_stride:
            drawn |= _difference_picture(self.text.measured.frame, self.text, styled)
        drawn |= heat_pictures(*self.parts.values())
        if spectra:
            drawn["spectra"] = WAVELENGTHS, plots.spectra(WAVELENGTHS, spectra, styled)
        title = f"ropext compare: {', '.join(self.parts)}"
        subtitle = "paired by the hash of each document's tokens; the first run is the reference"
        keys = "\n".join(dict.fromkeys(f"{run.path}: run key {run.key}" for run in runs))
        shown = write_pictures(folder, drawn)
        html.write(folder, title, subtitle, [], [], self.tables, shown, keys)


def compare_runs(
    specs: Sequence[str], output: Path | None = None
) -> tuple[list[Measurement], Compared]:
    """Finished runs, opened, and set side by side; with `output` the report is written there."""
    guard.check({"RUN": [split_spec(spec)[0] for spec in specs]}, {"--output": output})
    opened, parts = rundir.gather(specs)
    compared = compare(parts)
    if output is not None:
        place = Workdir(output, "compare", {})
        with place.claimed(None):
            place.write_results()
            compared.write(output, opened)
    return opened, compared


def compare(parts: Mapping[str, Measurement]) -> Compared:
    """Pair everyone with the first; answers with those of the first that was asked any."""
    readers = [part for part in parts.values() if part.readings]
    text = compare_text(readers) if len(readers) > 1 else None
    answers = {label: part.models[label].items for label, part in parts.items()}
    first, *others = [label for label, items in answers.items() if items] or [""]
    items = dict[str, Mapping[str, Value]]()
    split = dict[str, Mapping[tuple[str, int], Discordance]]()
    for label in others:
        check_alike(answers[label], answers[first], (label, first))
        items[label] = item_differences(
            answers[label], answers[first], parts[first].frame.bootstrap
        )
        if any(item.outcome is not None for item in answers[label]):
            split[label] = discordances(answers[label], answers[first])
    return Compared(parts, text, items, first, split)


def _difference_picture(
    frame: Frame, compared: Comparison, styled: Mapping[str, Style]
) -> Pictures:
    caption = f"NLL difference to {compared.reference} by position: below zero is better"
    deltas = [
        Curve(
            label,
            tuple(math.sqrt(row["start"] * row["stop"]) for row in rows),
            tuple(row["difference"] for row in rows),
        )
        for label, rows in ((label, row[1:] or row) for label, row in compared.positions.items())
    ]
    shape = frame.context, frame.longest
    y = "ΔNLL (nats per token)"
    picture = plots.lines(caption, y, deltas, *shape, True, PAIRED, styled)
    return {"difference-by-position": (caption, picture)}
