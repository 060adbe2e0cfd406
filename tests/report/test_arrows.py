"""Lines that leave a picture: the numbers beside their arrows do not lie over one another."""

from itertools import combinations

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Annotation, Text

from ropext.report import plots
from ropext.report.plots import Curve, LinePlot
from ropext.results.values import Value

PLACES = (181.0, 304.4, 362.0, 430.5, 512.0, 608.9, 724.1, 861.1, 939.0)


def curve(label, first_that_falls, depth):
    """A line that stays at zero and falls from one place on."""
    values = [0.0] * first_that_falls
    values += [depth] * (len(PLACES) - first_that_falls)
    return Curve(label, PLACES, tuple(Value(value, 0.0, None, 8) for value in values))


def test_the_numbers_beside_arrows_stand_apart():
    """As in the demo: several lines fall out of the frame within a quarter of an octave."""
    lines = [
        curve("yarn-4x", len(PLACES), 0.0),
        curve("untouched", 1, -2.4),
        curve("pi-4x", 1, -2.08),
        curve("ntk-4x", 2, -1.9),
        curve("mine", 3, -1.8),
    ]
    axis = plots.axes("Gain", "nats")
    plots.draw_curves(axis, LinePlot("Gain", "nats", 256, 1024, has_zero=True), lines)
    figure = axis.get_figure(root=True)
    canvas = FigureCanvasAgg(figure)
    figure.legend(loc="outside right upper")
    canvas.draw()
    texts = [child for child in axis.get_children() if isinstance(child, Annotation)]
    assert sorted(text.get_text() for text in texts) == ["-1.8", "-1.9", "-2.08", "-2.4"]
    # Of the numbers alone: an annotation's own extent has its arrow in it.
    boxes = [Text.get_window_extent(text, canvas.get_renderer()) for text in texts]
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


# The gain of the demo's untouched model and of PI, from 35 to 940 tokens.
OCTAVES = tuple(256.0 * 2 ** (k / 4) for k in range(-11, 8))
UNTOUCHED = (0.0,) * 12 + (-0.07, -0.71, -1.13, -1.37, -1.77, -2.33, -2.4)
PI = (-1.77, -1.46, -1.57, -1.64, -1.84, -1.55, -1.78, -1.96, -1.89, -1.78, -1.99)
PI += (-1.94, -1.98, -1.83, -1.84, -2.05, -2.08, -1.98, -2.02)


def drawn_pi(points):
    """The arrows of a picture with PI's line, the name of the shaded window, and a renderer."""
    lines = []
    for label, values in (("ntk-4x", (0.0,) * 19), ("untouched", UNTOUCHED), ("pi-4x", points)):
        lines.append(Curve(label, OCTAVES, tuple(Value(value, 0.0, None, 8) for value in values)))
    axis = plots.axes("Gain", "nats")
    plots.draw_curves(axis, LinePlot("Gain", "nats", 256, 1024, has_zero=True), lines)
    figure = axis.get_figure(root=True)
    canvas = FigureCanvasAgg(figure)
    figure.legend(loc="outside right upper")
    canvas.draw()
    (name,) = (text for text in axis.texts if text.get_text() == "trained context")
    arrows = {text.get_text(): text for text in axis.texts if isinstance(text, Annotation)}
    return arrows, name, canvas.get_renderer()


def test_a_line_that_comes_back_has_its_arrow_where_it_leaves_for_good():
    arrows, name, renderer = drawn_pi(PI)
    assert set(arrows) == {"-2.4", "-2.08"}
    # PI is in the frame at 45, 54 and 91 tokens, and below it from there on.
    assert OCTAVES[5] < arrows["-2.08"].xy[0] < OCTAVES[6]
    box = Text.get_window_extent(arrows["-2.08"], renderer)
    assert not box.overlaps(name.get_window_extent(renderer))


def test_a_line_that_is_never_in_the_frame_has_its_arrow_where_it_is_furthest():
    arrows = drawn_pi(tuple(value - 1 for value in PI))[0]
    assert arrows["-3.08"].xy[0] == OCTAVES[PI.index(-2.08)]


def banded(label, bands):
    """A line at zero with these bands."""
    values = tuple(Value(0.0, 0.1, band, 8) for band in bands)
    return Curve(label, PLACES[: len(bands)], values)


def marks_of(axis):
    """Where a picture marks that a band goes on beyond its frame: place, edge, mark, colour."""
    found = []
    for line in axis.get_lines():
        if line.get_marker() in ("^", "v") and len(line.get_xdata()):
            (at,) = zip(line.get_xdata(), line.get_ydata(), strict=True)
            found.append((*at, line.get_marker(), line.get_color()))
    return found


def test_a_band_that_the_frame_cuts_is_marked_where_it_leaves():
    """At the first place of each stretch that lies outside, in the colour of its line."""
    low = (-9.0, 0.0)
    high = (0.0, 9.0)
    inside = (0.0, 0.0)
    lines = [banded("one", (inside, low, low, inside, low)), banded("two", (high,))]
    axis = plots.axes("Gain", "nats")
    plots.draw_curves(axis, LinePlot("Gain", "nats", 256, 1024, has_zero=True), lines)
    floor, ceiling = axis.get_ylim()
    colours = {line.get_label(): line.get_color() for line in axis.get_lines()}
    assert marks_of(axis) == [
        (PLACES[1], floor, "v", colours["one"]),
        (PLACES[4], floor, "v", colours["one"]),
        (PLACES[0], ceiling, "^", colours["two"]),
    ]
    assert "a band goes on" in colours


def test_a_line_that_leaves_the_frame_has_its_arrow_and_no_mark():
    exploded = Curve("one", PLACES[:2], (Value(0.0, 0.1, None, 8), Value(-9.0, 0.1, (-9.5, -8), 8)))
    axis = plots.axes("Gain", "nats")
    plot = LinePlot("Gain", "nats", 256, 1024, has_zero=True)
    plots.draw_curves(axis, plot, [exploded, banded("two", ((0.0, 0.0), (0.0, 0.0)))])
    assert [text.get_text() for text in axis.texts if isinstance(text, Annotation)] == ["-9"]
    assert marks_of(axis) == []


def test_a_picture_whose_bands_lie_in_the_frame_has_no_mark():
    lines = [Curve("one", PLACES[:2], (Value(0.0, 0.1, (0.0, 0.1), 8), Value(1.0, 0.1, None, 8)))]
    axis = plots.axes("Gain", "nats")
    plots.draw_curves(axis, LinePlot("Gain", "nats", 256, 1024), lines)
    assert marks_of(axis) == []
    assert "a band goes on" not in axis.get_legend_handles_labels()[1]
