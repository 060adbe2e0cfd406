"""Names that a directory may have, in the legends and titles of pictures."""

import warnings

import pytest

from ropext.results.report import plots
from ropext.results.report.plots import Curve, LinePlot
from ropext.results.retrieval import HeatCell
from ropext.results.values import Value
from ropext.scaling.rope import Rope

NAMES = (r"a$\frac$b", "$x$", r"\$x$", "_hidden", "x" * 250, "中文 é", "bell\x07\n", "a_b")
VALUES = (Value(1.0, None, None, 1), Value(2.0, None, None, 1))


@pytest.mark.parametrize("name", NAMES)
def test_pictures_draw_any_name_without_a_warning(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        line = Curve(name, (16.0, 128.0), VALUES)
        drawn = [
            plots.line_plot(LinePlot(f"difference to {name}", "y", 64, 128), [line]),
            plots.plot_wavelengths("T", {name: [1.0, 0.5], "base": [1.0, 0.4]}),
            plots.heat_maps("T", "share", {name: [HeatCell(64, 0.5, VALUES[0])]}),
        ]
        drawn.append(plots.plot_spectra(Rope(8, 1e4, 64), {}, 128, name))
    for picture in drawn:
        assert picture.startswith(b"\x89PNG")


def test_a_name_is_shown_letter_by_letter():
    assert plots.plot_axes("a$b$_c", "y").get_title(loc="left") == r"a\$b\$_c"
    assert plots.legend_name("_a_b") == " _a_b"
    assert len(plots.legend_name("x" * 250)) == 40


def drawn(zero, **lines):
    """Draw some lines over four places and return their axes."""
    curves = [
        Curve(name, (32.0, 128.0, 512.0, 2048.0), tuple(Value(v, None, None, 1) for v in values))
        for name, values in lines.items()
    ]
    axis = plots.plot_axes("t", "y")
    plots.draw_curves(axis, LinePlot("t", "y", 256, 2048, has_zero=zero), curves)
    return axis


def names_of(axis):
    return axis.get_legend_handles_labels()[1]


def test_a_line_that_leaves_the_picture_is_named_with_its_furthest_value():
    axis = drawn(False, yarn=(3, 2.5, 2.4, 2.3), pi=(3, 2.5, 6, 9), ntk=(8, 7, 7.5, 7))
    floor, ceiling = axis.get_ylim()
    assert names_of(axis) == ["yarn", "pi (off the scale: 9)", "ntk (off the scale: 8)"]
    assert floor < 2.3
    assert 3 < ceiling < 6


def test_an_exploded_line_hides_no_gain():
    axis = drawn(True, yarn=(0, 0, 0.2, 0.4), pi=(-4, -5, -4, -6))
    floor, ceiling = axis.get_ylim()
    assert -4 < floor < -1
    assert ceiling > 0.4
    assert names_of(axis) == ["yarn", "pi (off the scale: -6)"]


def test_a_line_with_a_missing_value_is_not_marked_as_off_the_scale():
    axis = drawn(True, one=(0, -0.5, -1, -1.4), two=(0, float("nan"), 0, 0))
    assert names_of(axis) == ["one", "two"]
