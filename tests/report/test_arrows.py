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
