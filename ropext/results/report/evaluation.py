"""Write the report of an evaluation: Markdown, PNG files, one HTML file."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from ropext.base.atomic import write_bytes
from ropext.base.table import with_rows
from ropext.results import BASE
from ropext.results.measurement import Measurement
from ropext.results.perplexity import LossStatistics, Reading, Span
from ropext.results.report import html, plots, tables
from ropext.results.report.gates import failed_gate_lines, gate_table
from ropext.results.report.html import Page, Pictures
from ropext.results.report.plots import Curve, LinePlot, Style
from ropext.results.retrieval import HeatCell, heat_map_cells
from ropext.results.values import FEWEST_DOCUMENTS, Value
from ropext.tasks import is_in_words

Drawn = dict[str, tuple[str, bytes]]  # name of a picture -> caption, PNG
PARTS = 4  # steps of an octave in the pictures
# Under a picture's title.
BANDS = f"bands: 95 % interval over documents, or the range of fewer than {FEWEST_DOCUMENTS}"
READS = f"base: on text truncated to its context; {BANDS}"
PAIRED = f"difference on the same tokens; {BANDS}"
WAVELENGTHS = "Wavelength of each rotary pair"


def write_report(run: Measurement) -> None:
    """Write report.md, report.html and plots/*.png of a finished run into its folder."""
    assert run.path is not None  # it was kept
    models = dict.fromkeys(run.manifest["names"]["models"].values())
    shown = [gate_table(run.gates)]
    shown += tables.evaluation_tables(run)
    page = Page(
        title=f"ropext eval: {', '.join(models)}",
        subtitle=_subtitle(run),
        verdicts=failed_gate_lines(run.gates) + tables.verdict_lines(run),
        warnings=run.facts.warnings,
        tables=with_rows(shown),
        details=json.dumps(run.manifest, indent=1, ensure_ascii=False),
    )
    html.write_page(run.path, page, write_pictures(run.path, draw_evaluation(run)))


def _subtitle(run: Measurement) -> str:
    """Write the line below the title of an evaluation's report.md: protocol, documents, trained
    context."""
    facts = run.facts
    read = ""
    if facts.documents is not None:
        read = f"{facts.documents['used']} documents; "
    return (
        f"protocol {facts.protocol}: {facts.protocol_text}. {read}trained context "
        f"{run.frame.context} tokens; 95 % intervals from {run.frame.bootstrap.resamples} "
        "resamples of whole documents"
    )


def write_pictures(folder: Path, drawn: Drawn) -> Pictures:
    """Write the PNG files of a report, and return them by the names that report.md uses."""
    pictures = dict[str, tuple[str, bytes]]()
    for name, picture in drawn.items():
        file = f"plots/{name}.png"
        pictures[file] = picture
        write_bytes(folder / file, picture[1])
    return pictures


def draw_evaluation(measured: Measurement) -> Drawn:
    """Draw the pictures of an evaluation's report: losses, gains, heat maps and wavelengths."""
    drawn = Drawn()
    styled = plots.line_styles(measured.models)
    if measured.readings:
        drawn |= _text_pictures(measured, styled)
    drawn |= heat_pictures([measured])
    spectra = spectra_of([measured])
    if set(spectra) - {BASE}:
        limits = {"trained context": measured.frame.context}
        picture = plots.plot_wavelengths(WAVELENGTHS, spectra, styled, limits)
        drawn["spectra"] = (WAVELENGTHS, picture)
    return drawn


def spectra_of(measured: Iterable[Measurement]) -> dict[str, Sequence[float]]:
    """Return the inverse frequencies of every model that rotates, for the plot of wavelengths.
    Leave out a model with a rounded cache if its unrounded model is in the same run: both have the
    same frequencies."""
    spectra = dict[str, Sequence[float]]()
    for each in measured:
        for label, model in each.models.items():
            if model.source.inv_freq and model.unrounded not in each.models:
                spectra[label] = model.source.inv_freq
    return spectra


def _text_pictures(measured: Measurement, styled: Mapping[str, Style]) -> Drawn:
    """Draw the losses of an evaluation's models, and their gains over truncation."""
    drawn = Drawn()
    frame = measured.frame
    name = "nll-by-position"
    what = "by position"
    spans = _position_spans(frame)
    if not frame.scoring.scores_all:
        name = "tail"
        what = f"of {tables.tail_description(frame)}"
        spans = {float(length): frame.tail_span(length) for length in frame.lengths}
    if len(spans) > 1:  # the table shows one point above another better
        caption = f"Loss {what}: lower is better"
        plot = LinePlot(caption, "loss (NLL, nats per token)", frame.context, frame.longest, READS)
        drawn[name] = (caption, plots.line_plot(plot, loss_curves(measured, spans), styled))
    readings = measured.readings
    base = readings.pop(BASE, None)
    if base is not None and readings and frame.scoring.scores_all:
        gains = _model_curves(readings, _position_spans(frame), partial(frame.difference, base))
        caption = "Gain over truncation by position: above 0 the longer context helps"
        y = "gain over truncation (nats per token)"
        plot = LinePlot(caption, y, frame.context, frame.longest, PAIRED, has_zero=True)
        drawn["gain"] = (caption, plots.line_plot(plot, gains, styled))
    return drawn


Spans = Mapping[float, Span]  # by their place on the axis


def logarithmic_middle(start: int, stop: int) -> float:
    """Return the middle of a range of positions on the logarithmic axis of a report's plot."""
    return math.sqrt(start * stop)


def _position_spans(frame: LossStatistics) -> Spans:
    """Return the ranges of positions of a plot, by their place on its axis."""
    octaves = frame.octaves(PARTS)
    # The first, all early tokens together, has no place on the axis.
    octaves = octaves[1:] or octaves
    return {logarithmic_middle(start, stop): (start, stop) for start, stop in octaves}


def loss_curves(measured: Measurement, spans: Spans | None = None) -> list[Curve]:
    """Return the curves of a plot: the loss of each model, by position or over other spans."""
    if spans is None:
        spans = _position_spans(measured.frame)
    return _model_curves(measured.readings, spans, measured.frame.nll)


def _model_curves(
    readings: Mapping[str, Reading], spans: Spans, value: Callable[[Reading, Span], Value]
) -> list[Curve]:
    """Return a plot's curve for each model, with a value over each span."""
    curves = list[Curve]()
    for label, reading in readings.items():
        values = tuple(value(reading, span) for span in spans.values())
        curves.append(Curve(label, tuple(spans), values))
    return curves


def heat_pictures(measured: Iterable[Measurement]) -> Drawn:
    """Draw one heat map of retrieval per task, the models side by side."""
    maps = dict[str, dict[str, Sequence[HeatCell]]]()
    for each in measured:
        for label, model in each.models.items():
            for task, cells in heat_map_cells(model.items).items():
                maps.setdefault(task, {})[label] = cells
    drawn = Drawn()
    for task, cells_of_models in maps.items():
        caption = f"Retrieval, {task}: depth by length"
        scale = "share answered exactly"
        if is_in_words(task):
            scale = "share named"
        picture = plots.heat_maps(caption, scale, cells_of_models)
        drawn[f"retrieval-{task}"] = (caption, picture)
    return drawn
