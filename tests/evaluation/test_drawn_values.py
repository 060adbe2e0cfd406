"""Pictures draw the measured values: every line, band and cell is compared with results.json."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from tiny_checkpoints import write_checkpoint, write_documents

from ropext.base.table import with_rows
from ropext.files.checkpoint import card
from ropext.pipeline.public import evaluate
from ropext.results.report import plots, tables
from ropext.results.report.evaluation import draw_evaluation, heat_pictures


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("drawn")
    model = write_checkpoint(path / "model")
    data = write_documents(path / "docs.jsonl")
    asked = {"tasks": "passkey", "items": 2, "depths": "0,0.5,1", "lengths": "64,128,256"}
    options = {"method": "yarn", "factor": 4.0, "data": str(data), **asked}
    return evaluate(str(model), path / "run", **options)


@pytest.fixture(scope="module")
def figures(run):
    """Return each picture's figure by its name, before it became PNG bytes."""
    kept = {}
    png = plots.png_bytes

    def keeping(figure):
        kept[len(kept)] = figure
        return png(figure)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "png_bytes", keeping)
        names = draw_evaluation(run)
    return dict(zip(names, kept.values(), strict=True))


def results_of(run):
    return json.loads((run.path / "results.json").read_text(encoding="utf-8"))


def curves_in(figure):
    """Return each named line: its places and values, and the lower and upper edge of its band
    there."""
    (axis,) = figure.axes
    named = [line for line in axis.lines if not line.get_label().startswith("_")]
    lines = [line for line in named if len(line.get_xdata())]  # without the legend's samples
    curves = {}
    for line, band in zip(lines, axis.collections, strict=True):
        places = line.get_xdata()
        corners = band.get_paths()[0].vertices
        lows = [corners[corners[:, 0] == place, 1].min() for place in places]
        highs = [corners[corners[:, 0] == place, 1].max() for place in places]
        curves[line.get_label()] = (places, line.get_ydata(), np.array(lows), np.array(highs))
    return curves


@pytest.mark.parametrize(("picture", "number"), [("nll-by-position", "nll"), ("gain", "gain")])
def test_lines_over_positions_add_up_to_the_octaves_of_the_results(run, figures, picture, number):
    """A picture's places are quarters of the octaves that results.json has."""
    variants = results_of(run)["variants"]
    curves = curves_in(figures[picture])
    quarters = run.frame.octaves(4)[1:]
    assert list(curves) == [label for label in variants if (picture, label) != ("gain", "base")]
    for label, (places, values, lows, highs) in curves.items():
        assert places == pytest.approx([math.sqrt(start * stop) for start, stop in quarters])
        assert all(lows <= values)
        assert all(values <= highs)
        for row in variants[label]["positions"]:
            inside = [k for k, (start, _) in enumerate(quarters) if start in range(*span(row))]
            if not inside:  # the first tokens have no place on the axis
                assert row["start"] == 1
                continue
            sizes = [quarters[k][1] - quarters[k][0] for k in inside]
            assert sum(sizes) == row["stop"] - row["start"]
            mean = np.average(values[inside], weights=sizes)
            assert mean == pytest.approx(row[number]["value"], rel=1e-9, abs=1e-12)


def span(row):
    return row["start"], row["stop"]


def test_bands_are_the_intervals_over_documents(run, figures):
    """Where a quarter is a whole number of tokens that results.json has too: from its documents'
    means, without the code that draws."""
    readings = run.readings
    for label, (_, values, lows, highs) in curves_in(figures["nll-by-position"]).items():
        for k, quarter in enumerate(run.frame.octaves(4)[1:]):
            sums, counts = readings[label].sums(*quarter)
            means = np.asarray(sums) / np.asarray(counts)
            assert values[k] == pytest.approx(means.mean())
            assert means.min() - 3 * means.std() < lows[k] < means.mean() < highs[k]
            measured = run.frame.nll(readings[label], quarter)
            assert (lows[k], highs[k]) == pytest.approx(measured.ci95)


def test_cells_of_a_heat_map_are_the_shares_of_the_answers(run, monkeypatch):
    """Each cell has its own share: at length 64 none, at 128 half, at 256 all, but at its end
    none."""
    answered = [0.0, 0.0, 0.0, 0.5, 0.5, 0.5, 1.0, 1.0, 0.0]  # three depths of each length
    model = run.models["yarn-4x"]
    places = [(length, depth) for length in (64, 128, 256) for depth in (0.0, 0.5, 1.0)]
    items = []
    for item in model.items:
        share = answered[places.index((item.length, item.depth))]
        items.append(replace(item, exact=share == 1 or (share == 0.5 and item.index == 0)))
    measured = replace(run, models={"m": replace(model, items=tuple(items))})
    kept = []
    monkeypatch.setattr(plots, "png_bytes", kept.append)
    heat_pictures([measured])
    axis = kept[0].axes[0]
    assert [text.get_text() for text in axis.get_xticklabels()] == ["64", "128", "256"]
    assert [text.get_text() for text in axis.get_yticklabels()] == ["0", "0.5", "1"]
    assert axis.images[0].get_array().T.flatten().tolist() == answered
    columns = np.reshape([text.get_text() for text in axis.texts], (3, 3)).T
    assert columns.flatten().tolist() == [f"{share:.0%}" for share in answered]


def test_wavelengths_are_those_of_the_results(run, figures):
    variants = results_of(run)["variants"]
    (axis,) = figures["spectra"].axes
    drawn = {line.get_label(): line.get_ydata() for line in axis.lines}
    for label in ("base", "yarn-4x"):
        turns = [2 * math.pi / frequency for frequency in variants[label]["inv_freq"]]
        assert drawn[label] == pytest.approx(turns)


def test_numbers_on_a_card_are_those_of_the_results(run):
    """They are compared row by row from the Markdown, as far as it prints them."""
    results = results_of(run)
    numbers = with_rows([tables.headline_table(run), tables.summary_table(run)])
    plain = card.Card(title="m", base="b", base_is_hub_id=False, summary=("Extended.",))
    text = card.with_evidence(card.render(plain), ["Measured."], numbers)
    body = re.compile(r"\| [a-z].*")  # not a table's head, whose first cell is empty
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if body.fullmatch(line)]
    assert [row[0] for row in rows] == [*results["variants"], "untouched", "yarn-4x"]
    compared = 0
    for name, *cells in rows:
        metrics = results["variants"][name]["metrics"]
        wanted = [f"tail@{length}" for length in (64, 128, 256)]
        wanted = wanted if len(cells) == 3 else ["short_tax", "effective_context"]
        for cell, metric in zip(cells, wanted, strict=True):
            value = metrics[metric]
            written = [float(number) for number in re.findall(r"[-+]?\d+\.?\d*", cell)]
            ends = written[1:]
            assert written[0] == pytest.approx(value["value"], abs=6e-4)
            if len(ends) == 1:  # half of the interval, which is about even here
                low, high = value["ci95"]
                assert ends[0] == pytest.approx((high - low) / 2, abs=6e-4)
                compared += 1
            elif ends:
                assert ends == pytest.approx(value["ci95"], abs=6e-4)
                compared += 1
    assert compared > 5
