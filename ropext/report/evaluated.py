"""The report of an evaluation or of a comparison: Markdown, PNG files, one HTML file."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ropext.files import write_bytes, write_text
from ropext.lengths import octaves
from ropext.report import curves, measured, page
from ropext.report.curves import BASE, Curve
from ropext.results import rundir
from ropext.results.comparison import Comparison, Contender, difference
from ropext.results.perplexity import Frame
from ropext.results.readings import Reading
from ropext.results.retrieval import heat_map
from ropext.results.values import Value

PARTS = 4  # steps of an octave in the pictures
# Under a picture's title. Below eight documents the band is from the smallest to the largest.
READS = (
    "base: the model before extension, which sees its trained window and no more; bands: 95 % "
    "over documents"
)
PAIRED = "difference on the same tokens; bands: 95 % over documents"


def write_report(run: rundir.Run) -> None:
    """report.md, report.html and plots/*.png of a finished run."""
    results = run.results
    tables = [*measured.text_tables(results), *measured.retrieval_tables(results)]
    harness = measured.harness_table(results)
    tables += [harness] if harness else []
    title = f"ropext eval: {', '.join(dict.fromkeys(run.manifest['names']['models'].values()))}"
    write(
        run.path,
        title,
        _subtitle(results),
        measured.verdict_lines(results),
        results["warnings"],
        tables,
        pictures(run),
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


def write(
    path: Path,
    title: str,
    subtitle: str,
    verdicts: Sequence[str],
    warnings: Sequence[str],
    tables: Sequence[measured.Table],
    drawn: Mapping[str, tuple[str, bytes]],
    details: str,
) -> None:
    """Write report.md, report.html and plots/*.png; `drawn` is file name to (caption, PNG)."""
    for name, (_, data) in drawn.items():
        write_bytes(path / "plots" / f"{name}.png", data)
    lines = [f"# {title}", "", subtitle, ""]
    lines += [f"- {line}" for line in (*verdicts, *(f"Note: {w}" for w in warnings))]
    lines += ["", measured.as_markdown(tables), ""]
    lines += [f"![{caption}](plots/{name}.png)\n" for name, (caption, _) in drawn.items()]
    write_text(path / "report.md", "\n".join(lines).rstrip() + "\n")
    html = page.page(title, subtitle, verdicts, warnings, tables, dict(drawn.values()), details)
    write_text(path / "report.html", html)


def pictures(run: rundir.Run) -> dict[str, tuple[str, bytes]]:
    """File name to (caption, PNG) for everything that was measured."""
    found = {label: own.get("inv_freq") for label, own in run.results["variants"].items()}
    spectra = {label: inv_freq for label, inv_freq in found.items() if inv_freq}
    return draw(run.contenders, spectra, int(run.results["context"]))


def draw(
    contenders: Mapping[str, Contender], spectra: Mapping[str, Sequence[float]], context: int
) -> dict[str, tuple[str, bytes]]:
    """Draw models that read the same documents: file name to (caption, PNG)."""
    drawn: dict[str, tuple[str, bytes]] = {}
    readers = {label: own for label, own in contenders.items() if own.reading is not None}
    colours = colours_of(contenders)
    if readers:
        drawn |= _text_pictures(list(readers.values()), colours)
    drawn |= heat_pictures(contenders)
    if set(spectra) - {BASE}:
        caption = "Wavelength of each rotary pair"
        drawn["spectra"] = caption, curves.spectra(caption, spectra, colours, context)
    return drawn


def colours_of(labels: Iterable[str]) -> dict[str, int]:
    """The colour of every model but the base, the same in all pictures of a report."""
    return {label: number for number, label in enumerate(own for own in labels if own != BASE)}


def _text_pictures(
    readers: Sequence[Contender], colours: Mapping[str, int]
) -> dict[str, tuple[str, bytes]]:
    frame = readers[0].frame
    by_position = losses(readers, colours)
    at_lengths = [
        Curve(
            own.label,
            tuple(float(length) for length in frame.lengths),
            tuple(
                frame.bootstrap.ratio(*_reading(own).sums(*frame.tail_span(length)))
                for length in frame.lengths
            ),
            reference=own.label == BASE,
            index=colours.get(own.label),
        )
        for own in readers
    ]
    shape = frame.context, frame.longest
    y = "NLL (nats per token)"
    caption = "Loss by position: lower is better"
    picture = curves.lines(caption, y, by_position, *shape, note=READS)
    drawn = {"nll-by-position": (caption, picture)}
    caption = f"Loss of {measured.tail_text(frame.tail, frame.lengths)}: lower is better"
    picture = curves.lines(caption, y, at_lengths, *shape, note=READS)
    drawn["tail"] = caption, picture
    base = next((own for own in readers if own.label == BASE), None)
    others = [own for own in readers if own is not base]
    if base is not None and others:
        against = _reading(base)
        spans = _spans(frame)
        gains = [
            _curve(
                own, spans, [difference(frame, against, _reading(own), s) for s in spans], colours
            )
            for own in others
        ]
        caption = "Context gain by position: above zero the long context helps"
        y = "gain over the base's short window (nats)"
        picture = curves.lines(caption, y, gains, *shape, zero=True, note=PAIRED)
        drawn["gain"] = caption, picture
    return drawn


def losses(readers: Sequence[Contender], colours: Mapping[str, int]) -> list[Curve]:
    """The loss of each model by position."""
    ratio, spans = readers[0].frame.bootstrap.ratio, _spans(readers[0].frame)
    return [
        _curve(own, spans, [ratio(*_reading(own).sums(*span)) for span in spans], colours)
        for own in readers
    ]


def _curve(
    own: Contender,
    spans: Sequence[tuple[int, int]],
    values: Sequence[Value],
    colours: Mapping[str, int],
) -> Curve:
    places = tuple(math.sqrt(start * stop) for start, stop in spans)
    return Curve(own.label, places, tuple(values), own.label == BASE, colours.get(own.label))


def _spans(frame: Frame) -> tuple[tuple[int, int], ...]:
    """Quarter octaves; the first bucket, all early tokens together, has no place on the axis."""
    spans = octaves(frame.context, frame.longest, PARTS)
    return spans[1:] or spans


def _reading(own: Contender) -> Reading:
    assert own.reading is not None, own.label  # callers pass readers only
    return own.reading


def heat_pictures(contenders: Mapping[str, Contender]) -> dict[str, tuple[str, bytes]]:
    """One picture per task, the models side by side."""
    maps: dict[str, dict[str, Any]] = {}
    for label, own in contenders.items():
        for task, cells in heat_map(own.items).items():
            maps.setdefault(task, {})[label] = cells
    drawn = {}
    for task, own_maps in maps.items():
        caption = f"Retrieval, {task}: depth by length"
        picture = curves.heat_maps(caption, own_maps, lambda cell: float(cell["exact"].value))
        drawn[f"retrieval-{task}"] = caption, picture
    return drawn


def write_comparison(
    path: Path,
    compared: Comparison | None,
    tables: Sequence[measured.Table],
    contenders: Mapping[str, Contender],
    spectra: Mapping[str, Sequence[float]],
    details: str,
) -> None:
    """The report of `ropext compare`."""
    drawn: dict[str, tuple[str, bytes]] = {}
    if compared is not None:
        drawn |= _difference_pictures(compared.frame, compared, colours_of(contenders))
    drawn |= heat_pictures(contenders)
    if spectra:
        caption = "Wavelength of each rotary pair"
        drawn["spectra"] = caption, curves.spectra(caption, spectra, colours_of(contenders))
    title = f"ropext compare: {', '.join(contenders)}"
    subtitle = "paired by the hash of each document's tokens; the first run is the reference"
    write(path, title, subtitle, [], [], tables, drawn, details)


def _difference_pictures(
    frame: Frame, compared: Comparison, colours: Mapping[str, int]
) -> dict[str, tuple[str, bytes]]:
    caption = f"NLL difference to {compared.reference} by position: below zero is better"
    deltas = [
        Curve(
            label,
            tuple(math.sqrt(start * stop) for start, stop, _ in rows),
            tuple(value for _, _, value in rows),
            index=colours.get(label),
        )
        for label, rows in ((label, own[1:] or own) for label, own in compared.positions.items())
    ]
    y = "ΔNLL (nats per token)"
    shape = frame.context, frame.longest
    picture = curves.lines(caption, y, deltas, *shape, zero=True, note=PAIRED)
    return {"difference-by-position": (caption, picture)}
