"""The reports of an evaluation and of a comparison: Markdown, PNG files, one HTML file."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropext import guard
from ropext.files import write_bytes
from ropext.report import html, plots, tables
from ropext.report.plots import BASE, Curve, Style
from ropext.results import comparison, rundir
from ropext.results.comparison import Comparison, Contender
from ropext.results.gates import split_spec
from ropext.results.perplexity import Frame, Reading, Span
from ropext.results.retrieval import heat_map
from ropext.results.rules import difference
from ropext.results.values import Value, values_json
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


def write_report(run: rundir.Run) -> None:
    """Write report.md, report.html and plots/*.png of a finished run into its folder."""
    results = run.results
    title = f"ropext eval: {', '.join(dict.fromkeys(run.manifest['names']['models'].values()))}"
    html.write(
        run.path,
        title,
        _subtitle(results),
        tables.verdict_lines(results),
        results["warnings"],
        tables.evaluation_tables(results),
        write_pictures(run.path, pictures(run)),
        json.dumps(run.manifest, indent=1, ensure_ascii=False),
    )


def _subtitle(results: Mapping[str, Any]) -> str:
    documents = results["documents"]
    packed = bool(documents and documents["packed"])
    unit = "glued sequences (packed)" if packed else "documents"
    read = f"{documents['used']} {unit}; " if documents else ""
    return (
        f"protocol {results['protocol']}: {results['protocol_text']}. {read}trained context "
        f"{results['context']} tokens; 95 % intervals from {results['resamples']} resamples of "
        f"whole {'sequences' if packed else 'documents'}"
    )


def write_pictures(folder: Path, drawn: Pictures) -> Pictures:
    """Write the pictures, and name them as the report refers to them."""
    named = {f"plots/{name}.png": picture for name, picture in drawn.items()}
    for name, (_, data) in named.items():
        write_bytes(folder / name, data)
    return named


def pictures(run: rundir.Run) -> Pictures:
    """Draw everything that was measured."""
    return draw(run.contenders, _spectra([run]), int(run.results["context"]))


def _spectra(runs: Sequence[rundir.Run]) -> dict[str, Sequence[float]]:
    """The frequencies of every variant that rotates."""
    return {
        label: inv_freq
        for run in runs
        for label, own in run.results["variants"].items()
        if (inv_freq := own.get("inv_freq"))
    }


def draw(
    contenders: Mapping[str, Contender], spectra: Mapping[str, Sequence[float]], context: int
) -> Pictures:
    """Draw models that read the same documents, and their spectra."""
    drawn: Pictures = {}
    styled = plots.styles(contenders)
    readers = [own for own in contenders.values() if own.reading is not None]
    if readers:
        drawn |= _text_pictures(readers, styled)
    drawn |= heat_pictures(contenders)
    if set(spectra) - {BASE}:
        drawn["spectra"] = (
            WAVELENGTHS,
            plots.spectra(WAVELENGTHS, spectra, styled, {"trained context": context}),
        )
    return drawn


def _text_pictures(readers: Sequence[Contender], styled: Mapping[str, Style]) -> Pictures:
    frame, drawn = readers[0].frame, Pictures()
    shape, y = (frame.context, frame.longest), "NLL (nats per token)"
    name, what, spans = "nll-by-position", "by position", _by_position(frame)
    if frame.mask_stride:  # the tail alone is scored
        name = "tail"
        what = f"of {tables.tail_text(frame.tail, frame.lengths, frame.mask_stride)}"
        spans = {float(length): frame.tail_span(length) for length in frame.lengths}
    if len(spans) > 1:  # one point above another is what the table says better
        caption, lines = f"Loss {what}: lower is better", losses(readers, spans)
        drawn[name] = caption, plots.lines(caption, y, lines, *shape, False, READS, styled)
    base = next((own for own in readers if own.label == BASE), None)
    if base is not None and len(readers) > 1 and not frame.mask_stride:

        def gain(own: Contender, span: Span) -> Value:
            return difference(frame, _reading(base), _reading(own), span)

        others = [own for own in readers if own is not base]
        lines = _curves(others, _by_position(frame), gain)
        caption = "Context gain by position: above zero the long context helps"
        y = "gain over the base's short window (nats)"
        drawn["gain"] = caption, plots.lines(caption, y, lines, *shape, True, PAIRED, styled)
    return drawn


Spans = Mapping[float, Span]  # by their place on the axis


def _by_position(frame: Frame) -> Spans:
    spans = frame.octaves(PARTS)
    spans = spans[1:] or spans  # the first, all early tokens together, has no place on the axis
    return {math.sqrt(start * stop): (start, stop) for start, stop in spans}


def losses(readers: Sequence[Contender], spans: Spans | None = None) -> list[Curve]:
    """The loss of each model, by position or over other spans."""
    frame = readers[0].frame

    def mean(own: Contender, span: Span) -> Value:
        return frame.bootstrap.ratio(*_reading(own).sums(*span))

    return _curves(readers, _by_position(frame) if spans is None else spans, mean)


def _curves(
    readers: Sequence[Contender],
    spans: Spans,
    value: Callable[[Contender, Span], Value],
) -> list[Curve]:
    return [
        Curve(own.label, tuple(spans), tuple(value(own, span) for span in spans.values()))
        for own in readers
    ]


def _reading(own: Contender) -> Reading:
    assert own.reading is not None, own.label  # callers pass readers only
    return own.reading


def heat_pictures(contenders: Mapping[str, Contender]) -> Pictures:
    """One picture per task, the models side by side."""
    maps: dict[str, dict[str, Any]] = {}
    for label, own in contenders.items():
        for task, cells in heat_map(own.items).items():
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

    contenders: Mapping[str, Contender]
    text: Comparison | None
    items: Mapping[str, Mapping[str, Value]]  # of answers, against `asked`
    asked: str  # the first that was asked any question; the base is asked none

    @property
    def tables(self) -> list[Table]:
        """What is printed, and stands in the reports."""
        found = tables.comparison_tables(self.text) if self.text else []
        return with_rows([*found, tables.item_table(self.items, self.asked)])

    def to_json(self) -> dict[str, Any]:
        """As `ropext compare --json` prints it."""
        return {
            "text": comparison.to_json(self.text) if self.text else None,
            "retrieval": values_json(self.items),
        }

    def __repr__(self) -> str:
        return f"<Compared: {', '.join(self.contenders)}>"

    def write(
        self, folder: Path, runs: Mapping[str, rundir.Run], spectra: Mapping[str, Sequence[float]]
    ) -> None:
        """Write report.md, report.html and the pictures; `runs` are those compared, by name."""
        drawn, styled = Pictures(), plots.styles([*self.contenders, *spectra])
        if self.text is not None and not self.text.frame.mask_stride:
            drawn |= _difference_picture(self.text.frame, self.text, styled)
        drawn |= heat_pictures(self.contenders)
        if spectra:
            drawn["spectra"] = WAVELENGTHS, plots.spectra(WAVELENGTHS, spectra, styled)
        title = f"ropext compare: {', '.join(self.contenders)}"
        subtitle = "paired by the hash of each document's tokens; the first run is the reference"
        keys = "\n".join(f"{name}: run key {run.key}" for name, run in runs.items())
        shown = write_pictures(folder, drawn)
        html.write(folder, title, subtitle, [], [], self.tables, shown, keys)


def compare_runs(
    specs: Sequence[str], output: Path | None = None
) -> tuple[list[rundir.Run], Compared]:
    """Finished runs, opened, and set side by side; with `output` the report is written there."""
    guard.check({"RUN": [split_spec(spec)[0] for spec in specs]}, {"--output": output})
    opened, contenders = rundir.gather(specs)
    compared = compare(contenders)
    if output is not None:
        with Workdir(output, "compare", {}).claimed(None):
            compared.write(output, {str(run.path): run for run in opened}, _spectra(opened))
    return opened, compared


def compare(contenders: Mapping[str, Contender]) -> Compared:
    """Pair everyone with the first; answers with those of the first that was asked any."""
    readers = [own for own in contenders.values() if own.reading is not None]
    text = comparison.compare_text(readers) if len(readers) > 1 else None
    asked = [own for own in contenders.values() if own.items]
    items = {
        own.label: comparison.item_differences(own.items, asked[0].items, asked[0].frame.bootstrap)
        for own in asked[1:]
    }
    return Compared(contenders, text, items, asked[0].label if asked else "")


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
        for label, rows in ((label, own[1:] or own) for label, own in compared.positions.items())
    ]
    shape = frame.context, frame.longest
    y = "ΔNLL (nats per token)"
    picture = plots.lines(caption, y, deltas, *shape, True, PAIRED, styled)
    return {"difference-by-position": (caption, picture)}
