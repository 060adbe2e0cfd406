"""The four pictures: their numbers against plain arithmetic, and what is drawn where."""

import math
from pathlib import Path

import numpy as np
import pytest

from ropext import scaling
from ropext.report import plots
from ropext.rope import Rope, Spectrum, compression, phase_ratio

ROPE = Rope(128, 1e4, 4096)
TARGET = 32768


def scaled(rope: Rope, method: str, target: int) -> Spectrum:
    entry = scaling.find(method)
    return scaling.compose(rope, entry.scale(rope, target, entry.knobs()), target)


NAMED = {name: scaled(ROPE, name, TARGET) for name in ("pi", "ntk", "yarn")}


@pytest.fixture(scope="module")
def panels():
    return plots.draw(ROPE, NAMED, TARGET, "a model").axes


def test_kernel_by_hand():
    """Two pairs, a quarter turn and nothing per token: g = a^2 (cos(D pi/2) + 1) / 2."""
    two = Spectrum((math.pi / 2, 0.0), attention_factor=3.0)
    found = plots.kernel(two, np.array([0, 1, 2, 4]))
    assert found == pytest.approx([9.0, 4.5, 0.0, 9.0])


def plain_kernel(spectrum: Spectrum, distance: float) -> float:
    cosines = [math.cos(distance * f) for f in spectrum.inv_freq]
    return spectrum.attention_factor**2 * math.fsum(cosines) / len(cosines)


def test_first_negative_against_a_plain_search():
    for spectrum in (ROPE.spectrum, NAMED["yarn"]):
        wanted = next(d for d in range(TARGET) if plain_kernel(spectrum, d) < 0)
        assert plots.first_negative(spectrum, TARGET) == wanted
    assert plots.first_negative(ROPE.spectrum, 100) is None


def test_smooth_kernel_is_the_mean_over_neighbours():
    distances, values = plots.smooth_kernel(NAMED["yarn"], 1024, points=5)
    assert distances[[0, -1]] == pytest.approx([1, 1024])
    for distance, value in zip(distances, values, strict=True):
        # The midpoint rule on a fine grid over [0.94 D, 1.06 D].
        steps = 1000
        grid = [distance * (0.94 + 0.12 * (k + 0.5) / steps) for k in range(steps)]
        mean = math.fsum(plain_kernel(NAMED["yarn"], d) for d in grid) / steps
        assert value == pytest.approx(mean, abs=2e-4)


def curves(panel) -> list[list[float]]:
    """The y values of the plotted lines, without the horizontal rules (two points each)."""
    return [list(line.get_ydata()) for line in panel.lines if len(line.get_ydata()) > 2]


def test_each_panel_draws_its_quantity_for_the_model_and_every_method(panels):
    wanted = [ROPE.spectrum, *NAMED.values()]
    waves, phases, slower, kernels = panels
    assert curves(waves) == [list(s.wavelengths) for s in wanted]
    assert curves(phases) == [list(phase_ratio(ROPE, s, TARGET)) for s in wanted]
    assert curves(slower) == [list(compression(ROPE.spectrum, s)) for s in wanted]
    assert len(curves(kernels)) == 4
    for drawn, spectrum in zip(curves(kernels), wanted, strict=True):
        assert drawn[0] == pytest.approx(plain_kernel(spectrum, 1.0), abs=2e-3)


def test_scales_rules_and_shades(panels):
    waves, phases, _, kernels = panels
    assert waves.get_yscale() == "log"
    rules = {line.get_ydata()[0] for line in waves.lines if len(line.get_ydata()) == 2}
    assert rules == {4096, TARGET}
    (shade,) = phases.patches
    assert shade.get_y() == 1, "only ratios above 1 are beyond training"
    assert phases.get_ylim()[1] > 8
    assert kernels.get_xscale() == "log"
    (window,) = kernels.patches
    assert (window.get_x(), window.get_x() + window.get_width()) == (1, 4096)


def test_every_line_is_named_once_in_its_colour(panels):
    (legend,) = panels[0].figure.legends
    names = {t.get_text().split(":")[0]: t.get_color() for t in legend.get_texts()}
    for panel in panels:
        colours = [line.get_color() for line in panel.lines if len(line.get_ydata()) > 2]
        assert dict(zip(["untouched", *NAMED], colours, strict=True)) == names
    assert len(set(names.values())) == 4


def test_a_method_has_one_colour_in_all_pictures():
    alone, among = plots.styles(["yarn"]), plots.styles(["base", "ntk-4x", "yarn-2x", "yarn-4x"])
    assert alone["yarn"]["color"] == among["yarn-2x"]["color"] == among["yarn-4x"]["color"]
    assert among["yarn-2x"]["ls"] != among["yarn-4x"]["ls"]
    assert len({own["color"] for own in plots.styles(scaling.METHODS).values()}) == 10
    other = plots.styles(["a run", "another", "pi", "ntk"])
    assert len({own["color"] for own in other.values()}) == 6, "no method's colour is taken"
    assert len(plots.styles(map(str, range(40)))) == 42


def test_the_picture_on_disk(tmp_path: Path):
    from matplotlib.image import imread

    plots.plot(ROPE, NAMED, TARGET, tmp_path / "out.png")
    picture = imread(tmp_path / "out.png")
    assert picture.shape[:2] == (1000, 1600)
    for rows in (slice(0, 500), slice(500, 1000)):
        for columns in (slice(0, 800), slice(800, 1600)):
            assert picture[rows, columns, :3].std() > 0.05, "no panel is blank"


def test_pairs_that_stand_still_and_a_model_alone(tmp_path: Path):
    """Proportional spectra have frequency 0 in most pairs; one pair is the smallest rotary dim."""
    still = Rope(8, 1e6, 512, pair_factors=(1.0, 1.0, math.inf, math.inf))
    plots.plot(still, {}, 2048, tmp_path / "still.png")
    small = Rope(2, 1e4, 512)
    plots.plot(small, {"pi": scaled(small, "pi", 1024)}, 1024, tmp_path / "small.png")
    assert (tmp_path / "still.png").stat().st_size > 10_000
    assert (tmp_path / "small.png").stat().st_size > 10_000
