"""The reports of an evaluation and of a comparison: Markdown, PNG files, one HTML file."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropext.files import write_bytes
from ropext.lengths import octaves
from ropext.report import html, plots, tables
from ropext.report.plots import BASE, Curve, Style
from ropext.results import comparison, rundir
from ropext.results.comparison import Comparison, Contender, difference
from ropext.results.perplexity import Frame, Reading
from ropext.results.retrieval import heat_map
from ropext.results.values import Value
from ropext.table import Table

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
        _written(run.path, pictures(run)),
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


def _written(folder: Path, drawn: Pictures) -> Pictures:
    """Write the pictures, and name them as the report refers to them."""
    named = {f"plots/{name}.png": picture for name, picture in drawn.items()}
    for name, (_, data) in named.items():
        write_bytes(folder / name, data)
    return named


def pictures(run: rundir.Run) -> Pictures:
    """Draw everything that was measured."""
    drawn: Pictures = {}
    styled = plots.styles(run.contenders)
    readers = [own for own in run.contenders.values() if own.reading is not None]
    if readers:
        drawn |= _text_pictures(readers, styled)
    drawn |= heat_pictures(run.contenders)
    found = {label: own.get("inv_freq") for label, own in run.results["variants"].items()}
    spectra = {label: inv_freq for label, inv_freq in found.items() if inv_freq}
    if set(spectra) - {BASE}:
        context = int(run.results["context"])
        drawn["spectra"] = WAVELENGTHS, plots.spectra(WAVELENGTHS, spectra, styled, context)
    return drawn


def _text_pictures(readers: Sequence[Contender], styled: Mapping[str, Style]) -> Pictures:
    frame, drawn = readers[0].frame, Pictures()
    spans = octaves(frame.context, frame.longest, PARTS)
    spans = spans[1:] or spans  # the first, all early tokens together, has no place on the axis
    middles = tuple(math.sqrt(start * stop) for start, stop in spans)

    def draw(
        name: str,
        caption: str,
        places: Sequence[float],
        value: Callable[[Contender, int], Value],
        y: str = "NLL (nats per token)",
        but: Contender | None = None,
    ) -> None:
        """Of every reader but one, its value at each place."""
        lines = [
            Curve(
                own.label,
                tuple(map(float, places)),
                tuple(value(own, at) for at in range(len(places))),
                own.label == BASE,
            )
            for own in readers
            if own is not but
        ]
        zero, note = but is not None, READS if but is None else PAIRED
        shape = frame.context, frame.longest
        drawn[name] = caption, plots.lines(caption, y, lines, *shape, zero, note, styled)

    def mean(own: Contender, span: tuple[int, int]) -> Value:
        return frame.bootstrap.ratio(*_reading(own).sums(*span))

    caption = "Loss by position: lower is better"
    draw("nll-by-position", caption, middles, lambda own, at: mean(own, spans[at]))
    caption = f"Loss of {tables.tail_text(frame.tail, frame.lengths)}: lower is better"
    tails = [frame.tail_span(length) for length in frame.lengths]
    draw("tail", caption, frame.lengths, lambda own, at: mean(own, tails[at]))
    base = next((own for own in readers if own.label == BASE), None)
    if base is not None and len(readers) > 1:
        against = _reading(base)
        draw(
            "gain",
            "Context gain by position: above zero the long context helps",
            middles,
            lambda own, at: difference(frame, against, _reading(own), spans[at]),
            "gain over the base's short window (nats)",
            base,
        )
    return drawn


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
        picture = plots.heat_maps(caption, own_maps, lambda cell: float(cell["exact"].value))
        drawn[f"retrieval-{task}"] = caption, picture
    return drawn


@dataclass(frozen=True)
class Compared:
    """Models side by side on the same tokens and questions, as paired differences: `ropext
    compare`, and the end of a grid. None or empty where fewer than two have a reading or answers.
    """

    contenders: Mapping[str, Contender]
    text: Comparison | None
    items: Mapping[str, Mapping[str, Value]]  # of answers, against `asked`
    asked: str  # the first that was asked any question; the base is asked none

    @property
    def tables(self) -> list[Table]:
        """What is printed, and stands in the reports."""
        found = tables.comparison_tables(self.text) if self.text else []
        answered = {label: own for label, own in self.items.items() if own}
        retrieval = tables.item_table(answered, self.asked)
        return found + ([retrieval] if retrieval else [])

    def to_json(self) -> dict[str, Any]:
        """As `ropext compare --json` prints it."""
        return {
            "text": comparison.to_json(self.text) if self.text else None,
            "retrieval": {
                label: {name: value.to_json() for name, value in own.items()}
                for label, own in self.items.items()
            },
        }

    def write(
        self, folder: Path, runs: Mapping[str, rundir.Run], spectra: Mapping[str, Sequence[float]]
    ) -> None:
        """Write report.md, report.html and the pictures; `runs` are those compared, by name."""
        drawn, styled = Pictures(), plots.styles([*self.contenders, *spectra])
        if self.text is not None:
            drawn |= _difference_picture(self.text.frame, self.text, styled)
        drawn |= heat_pictures(self.contenders)
        if spectra:
            drawn["spectra"] = WAVELENGTHS, plots.spectra(WAVELENGTHS, spectra, styled)
        title = f"ropext compare: {', '.join(self.contenders)}"
        subtitle = "paired by the hash of each document's tokens; the first run is the reference"
        keys = "\n".join(f"{name}: run key {run.key}" for name, run in runs.items())
        html.write(folder, title, subtitle, [], [], self.tables, _written(folder, drawn), keys)


def compare(contenders: Mapping[str, Contender]) -> Compared:
    """The first is the reference; of the questions the first that was asked any."""
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
            tuple(math.sqrt(start * stop) for start, stop, _ in rows),
            tuple(value for _, _, value in rows),
        )
        for label, rows in ((label, own[1:] or own) for label, own in compared.positions.items())
    ]
    shape = frame.context, frame.longest
    y = "ΔNLL (nats per token)"
    picture = plots.lines(caption, y, deltas, *shape, True, PAIRED, styled)
    return {"difference-by-position": (caption, picture)}
