"""The picture of the spectra: its numbers against plain arithmetic, and its curves and marks."""

import io
import math
from dataclasses import replace

import pytest

from ropext import scaling
from ropext.results import EXTENDED
from ropext.results.measurement import MeasuredModel, Measurement
from ropext.results.numbers import ModelSource
from ropext.results.perplexity import LossStatistics
from ropext.results.report import plots
from ropext.results.report.evaluation import spectra_of
from ropext.results.values import Bootstrap
from ropext.scaling.rope import Rope, Spectrum

ROPE = Rope(128, 1e4, 4096)
TARGET = 32768


def scaled(rope: Rope, method: str, target: int) -> Spectrum:
    entry = scaling.find(method)
    return scaling.compose(rope, entry.scale(rope, target, entry.knobs()), target)


NAMED = {name: scaled(ROPE, name, TARGET) for name in ("pi", "ntk", "yarn")}


@pytest.fixture
def axis(monkeypatch):
    """Return the one panel of the picture, as it was drawn."""
    drawn, finished = [], plots.picture_with_legend
    monkeypatch.setattr(
        plots, "picture_with_legend", lambda own: drawn.append(own) or finished(own)
    )
    plots.plot_spectra(ROPE, NAMED, TARGET, "a model")
    return drawn[0]


def test_the_panel_has_the_wavelengths_of_the_model_and_of_every_method(axis):
    curves = [list(line.get_ydata()) for line in axis.lines if len(line.get_ydata()) > 2]
    by_hand = [2 * math.pi * 1e4 ** (2 * pair / 128) for pair in range(64)]
    assert curves[0] == pytest.approx(by_hand, rel=1e-12)
    assert curves[1] == pytest.approx([8 * wave for wave in by_hand], rel=1e-12)  # pi
    assert curves[2:] == [list(NAMED[name].wavelengths) for name in ("ntk", "yarn")]
    assert axis.get_yscale() == "log"
    rules = {line.get_ydata()[0] for line in axis.lines if len(line.get_ydata()) == 2}
    assert rules == {4096, TARGET}


def test_every_line_is_named_once_in_its_colour(axis):
    colours = [line.get_color() for line in axis.lines if len(line.get_ydata()) > 2]
    (legend,) = axis.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["untouched", *NAMED]
    assert len(set(colours)) == 4


def test_a_method_has_one_colour_in_all_pictures():
    alone = plots.line_styles(["yarn"])
    among = plots.line_styles(["base", "ntk-4x", "yarn-2x", "yarn-4x"])
    assert alone["yarn"]["color"] == among["yarn-2x"]["color"] == among["yarn-4x"]["color"]
    assert among["yarn-2x"]["ls"] != among["yarn-4x"]["ls"]
    assert len({own["color"] for own in plots.line_styles(scaling.METHODS).values()}) == 10
    other = plots.line_styles(["a run", "another", "pi", "ntk"])
    assert len({own["color"] for own in other.values()}) == 6, "no method's colour is taken"
    assert len(plots.line_styles(map(str, range(40)))) == 42
    twice, four = (plots.line_styles(["own-2x", "own-4x"])[f"own-{factor}x"] for factor in (2, 4))
    assert twice["color"] == four["color"]
    assert twice["ls"] != four["ls"]


def test_the_picture_is_not_blank():
    from matplotlib.image import imread

    drawn = io.BytesIO(plots.plot_spectra(ROPE, NAMED, TARGET))
    assert imread(drawn)[:, :, :3].std() > 0.05, "it is not blank"


def test_pairs_of_frequency_zero_and_a_model_alone():
    """Proportional spectra have frequency 0 in most pairs; one pair is the smallest rotary dim."""
    still = Rope(8, 1e6, 512, pair_factors=(1.0, 1.0, math.inf, math.inf))
    assert len(plots.plot_spectra(still, {}, 2048)) > 10_000
    small = Rope(2, 1e4, 512)
    assert len(plots.plot_spectra(small, {"pi": scaled(small, "pi", 1024)}, 1024)) > 10_000


def test_the_plot_of_spectra_leaves_out_rounded_caches():
    plain = MeasuredModel(EXTENDED, source=ModelSource(info={"inv_freq": [1.0, 0.5]}))
    rounded = replace(plain, unrounded="yarn")
    frame = LossStatistics(64, (256,), 16, Bootstrap(0))
    both = Measurement(frame, {"yarn": plain, "yarn+kv-q4_0": rounded})
    assert spectra_of([both]) == {"yarn": (1.0, 0.5)}
    alone = Measurement(frame, {"run:yarn+kv-q4_0": rounded})  # as `compare` names it
    assert list(spectra_of([alone])) == ["run:yarn+kv-q4_0"]
