"""Compare finished evaluations: the tables that `ropext compare` prints, and its report."""

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ropext.base import guard
from ropext.base.errors import InputError, UsageError
from ropext.base.jsontext import Json, JsonObject, values_json
from ropext.base.table import Table, with_rows
from ropext.base.workdir import Workdir
from ropext.results import rundir
from ropext.results.gates import Gate, Outcome, other_runs, split_run_spec
from ropext.results.measurement import (
    Discordance,
    Measurement,
    check_same_questions,
    discordances,
    item_differences,
)
from ropext.results.report import comparison, html, plots
from ropext.results.report.evaluation import (
    PAIRED,
    WAVELENGTHS,
    Drawn,
    heat_pictures,
    logarithmic_middle,
    spectra_of,
    write_pictures,
)
from ropext.results.report.html import Page
from ropext.results.report.plots import Curve, LinePlot, Style
from ropext.results.report.result import Result
from ropext.results.rules import Comparison, compare_text
from ropext.results.values import Value

# In the manifest of a comparison: its runs with the keys of their numbers, and the user's labels.
RUNS = "runs"
LABELS = "labels"


@dataclass(frozen=True, repr=False, eq=False)
class Compared(Result):
    """Models paired on the same tokens and questions, with their differences: `ropext compare`.
    `text` is None, or `items` empty, if fewer than two models have a reading or answers."""

    parts: Mapping[str, Measurement]  # each model alone
    text: Comparison | None
    items: Mapping[str, Mapping[str, Value]]  # differences of answers, against `asked`
    asked: str  # the first model with answers
    split: Mapping[str, Mapping[tuple[str, int], Discordance]]  # the same, text by text
    gates: Sequence[Outcome] = ()  # of `ropext compare --fail-if`

    @property
    def title(self) -> str:
        """Return the title above the tables of a comparison in Python: the names of its models."""
        return f"<Compared: {', '.join(self.parts)}>"

    @property
    def tables(self) -> list[Table]:
        """Return the tables of a comparison for its report and for `ropext compare`."""
        sections = list[Table]()
        if self.text is not None:
            sections += comparison.comparison_tables(self.text)
        sections.append(comparison.answer_difference_table(self.items, self.asked))
        sections.append(comparison.discordance_table(self.split, self.asked))
        return with_rows(sections)

    @property
    def tidy(self) -> list[Table]:
        """Return the tables of a comparison for programs: a row for each length and model."""
        sections = [comparison.tidy_comparison_table(self.text, self.items, self.asked)]
        sections.append(comparison.discordance_table(self.split, self.asked))
        return with_rows(sections)

    def to_json(self) -> dict[str, Json]:
        """Return a comparison's metrics and intervals as JSON, without its gates. It is for `ropext
        compare --json`."""
        return {"text": values_json(self.text), "retrieval": values_json(self.items)}

    def _same_documents(self) -> Measurement | None:
        """Return the compared models with losses of the same documents; None if fewer than two have
        any."""
        return None if self.text is None else self.text.measured

    def _asked(self) -> Iterable[Measurement]:
        """Return the measurement of each compared model alone, for its answers."""
        return self.parts.values()

    def write(self, folder: Path, runs: Sequence[Measurement]) -> None:
        """Write report.md, report.html and the pictures of a comparison; `runs` are the compared
        ones."""
        drawn = Drawn()
        spectra = spectra_of(runs)
        styled = plots.line_styles(itertools.chain(self.parts, spectra))
        if self.text is not None and self.text.measured.frame.scoring.scores_all:
            drawn |= _difference_picture(self.text, styled)
        drawn |= heat_pictures(self.parts.values())
        if spectra:
            drawn["spectra"] = (WAVELENGTHS, plots.plot_wavelengths(WAVELENGTHS, spectra, styled))
        keys = dict.fromkeys(f"{run.path}: run key {run.key}" for run in runs)
        page = Page(
            title=f"ropext compare: {', '.join(self.parts)}",
            subtitle="paired by the tokens of each document; the first run is the reference",
            tables=self.tables,
            details="\n".join(keys),
        )
        html.write_page(folder, page, write_pictures(folder, drawn))


def compare_runs(
    given: Sequence[str | Measurement],
    output: Path | None = None,
    labels: Mapping[str, str] | None = None,
    gates: Sequence[Gate] = (),
) -> tuple[rundir.OpenedRuns, Compared]:
    """Return measured runs and the comparison of their results with paired intervals, under the
    user's labels if there are any. With `output`, write its report there. Refuse a run that
    `gates` name if it is edited, or if the report would overwrite it."""
    specs = list[str]()  # empty for a result that was not kept
    for each in given:
        specs.append(each if isinstance(each, str) else str(each.path or ""))
    guard.check(
        {"RUN": [split_run_spec(spec)[0] for spec in specs if spec]},
        {"--output": output},
    )
    opened = rundir.open_runs_to_compare(given, labels)
    others = other_runs(gates, opened.variants)
    guard.check({"--fail-if": others}, {"--output": output})
    for other in others:
        if other.is_dir():  # else the gate says that it is not there
            rundir.read_run(other)
    outcomes = opened.judge(gates)  # it refuses before the report is written
    compared = replace(compare_models(opened.alone), gates=outcomes)
    if output is not None:
        if "" in specs:
            raise UsageError(
                "--output keeps the paths of the runs, and a result was not kept in a folder; give "
                "ropext.evaluate an output, or compare without one"
            )
        manifest: dict[str, Json] = {RUNS: _relative_runs(output, specs, opened.runs)}
        if labels:
            manifest[LABELS] = dict(labels)
        place = Workdir(output, "compare", {}, manifest)
        with place.claimed(None):
            place.write_results()
            compared.write(output, opened.runs)
    return opened, compared


def _relative_runs(
    output: Path, specs: Sequence[str], runs: Sequence[Measurement]
) -> list[JsonObject]:
    """Return the path of each compared run relative to the comparison's folder. So a user can move
    all of them together."""
    named = list[JsonObject]()
    for spec, run in zip(specs, runs, strict=True):
        path, variant = split_run_spec(spec)
        try:
            place = Path(os.path.relpath(path.resolve(), output.resolve()))
        except ValueError:  # on another drive
            place = path.resolve()
        named.append({"run": place.as_posix(), "variant": variant, "key": run.key})
    return named


def reopen_comparison(folder: Path, manifest: JsonObject) -> Compared:
    """Compute a comparison's intervals again from the runs that its folder names. Raise InputError
    if one of its runs has changed."""
    named = manifest.get(RUNS)
    if not named:
        raise InputError(
            f"{folder} does not name the runs that it compares; run ropext compare again"
        )
    specs = list[str]()
    for each in named:
        spec = str((folder / each["run"]).resolve())
        if each["variant"] is not None:
            spec += f":{each['variant']}"
        specs.append(spec)
    opened = rundir.open_runs_to_compare(specs, manifest.get(LABELS))
    for each, run in zip(named, opened.runs, strict=True):
        if run.key != each["key"]:
            raise InputError(
                f"{run.path} changed since {folder} compared it; run ropext compare again"
            )
    return compare_models(opened.alone)


def compare_models(parts: Mapping[str, Measurement]) -> Compared:
    """Return the comparison of every model with the first one. Pair its answers with the answers of
    the first model that has any."""
    readers = [part for part in parts.values() if part.readings]
    text = None
    if len(readers) > 1:
        text = compare_text(readers)
    answers = {label: part.models[label].items for label, part in parts.items()}
    first = ""
    items = dict[str, Mapping[str, Value]]()
    split = dict[str, Mapping[tuple[str, int], Discordance]]()
    for label, answered in answers.items():
        if not answered:
            continue
        if not first:
            first = label
            continue
        check_same_questions(answered, answers[first], (label, first))
        bootstrap = parts[first].frame.bootstrap
        items[label] = item_differences(answered, answers[first], bootstrap)
        if any(item.outcome is not None for item in answered):
            split[label] = discordances(answered, answers[first])
    return Compared(parts, text, items, first, split)


def _difference_picture(compared: Comparison, styled: Mapping[str, Style]) -> Drawn:
    """Draw a comparison's loss differences by position."""
    caption = f"Loss difference to {compared.reference} by position: below 0 is better"
    curves = list[Curve]()
    for label, octaves in compared.positions.items():
        # The first, all early tokens together, has no place on the axis.
        drawn_octaves = octaves[1:] or octaves
        places = tuple(logarithmic_middle(octave.start, octave.stop) for octave in drawn_octaves)
        values = tuple(octave.difference for octave in drawn_octaves)
        curves.append(Curve(label, places, values))
    frame = compared.measured.frame
    y = "loss difference (nats per token)"
    plot = LinePlot(caption, y, frame.context, frame.longest, PAIRED, has_zero=True)
    return {"difference-by-position": (caption, plots.line_plot(plot, curves, styled))}
