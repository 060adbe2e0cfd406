"""The demo's pictures, as PNG bytes: one overview, and the details from the report room."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ropext.demo.steps import CONTEXT, FACTOR, LENGTHS, TASKS
from ropext.demo.targets import BASE, EXTENDED, FITTED, TARGET, TUNED, UNTOUCHED, Model
from ropext.lengths import length_text, octaves
from ropext.report import evaluation, plots
from ropext.report.plots import FAINT, GREY, INK, Curve
from ropext.results.comparison import difference, pair
from ropext.results.values import Value

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Pictures = dict[str, tuple[str, bytes]]
Lines = Mapping[str, Sequence[Value]]  # by model, one value per place

PI, NTK = f"pi-{FACTOR}x", f"ntk-{FACTOR}x"
NAMES = {
    BASE: "base, in its window",
    UNTOUCHED: "untouched",
    PI: "PI",
    NTK: "NTK-aware",
    EXTENDED: "YaRN",
    FITTED: "fitted spectrum",
    TUNED: "YaRN, tuned",
}
STYLES = plots.styles(list(NAMES.values())[1:])  # the base, against which all are held, is grey


def draw(read: Mapping[str, Model]) -> Pictures:
    """File name to (caption, PNG)."""
    shown = {label: own for label, own in read.items() if label in NAMES and own.contender}
    spans = octaves(CONTEXT, TARGET, parts=4)[1:]
    losses, gains = _by_position(shown, spans)
    places = tuple(math.sqrt(start * stop) for start, stop in spans)
    drawn: Pictures = {}
    for name, caption, values in (
        ("nll-by-position", "Loss by position (base: through its short window)", losses),
        ("gain", "Gain over the base's short window, by position", gains),
    ):
        lines = [
            Curve(NAMES[label], places, tuple(own), reference=label == BASE)
            for label, own in values.items()
        ]
        y, zero = "nats per token", values is gains
        picture = plots.lines(caption, y, lines, CONTEXT, TARGET, zero, styled=STYLES)
        drawn[name] = caption, picture
    drawn |= evaluation.heat_pictures(
        {NAMES[label]: own.contender for label, own in shown.items() if own.contender}
    )
    caption = "Wavelength of each rotary pair"
    spectra = {
        plots.BASE if label == BASE else NAMES[label]: own.inv_freq
        for label, own in shown.items()
        if own.inv_freq
    }
    drawn["spectra"] = caption, plots.spectra(caption, spectra, STYLES, CONTEXT)
    title = f"Loss and retrieval up to {FACTOR} times the trained context"
    return {"overview": (title, overview(losses, places, _found(shown)))} | drawn


def draw_far(far: Mapping[str, Model]) -> Pictures:
    """Depth by length of the keys found far out; nothing where none were asked for."""
    own = {label: model.contender for label, model in far.items() if model.contender}
    return {
        f"far-{name}": (f"Far beyond: {caption}", picture)
        for name, (caption, picture) in evaluation.heat_pictures(own).items()
    }


def _by_position(shown: Mapping[str, Model], spans: Sequence[tuple[int, int]]) -> tuple[Lines, ...]:
    """Loss of every model, and what it gains over the base, on the same tokens."""
    own = [replace(m.contender, label=label) for label, m in shown.items() if m.contender]
    frame, readings, _ = pair(own)
    losses = {
        label: [frame.bootstrap.ratio(*reading.sums(*span)) for span in spans]
        for label, reading in readings.items()
    }
    base = readings[BASE]
    gains = {
        label: [difference(frame, base, reading, span) for span in spans]
        for label, reading in readings.items()
        if label != BASE
    }
    return losses, gains


def _found(shown: Mapping[str, Model]) -> dict[str, list[Value]]:
    """Share of questions answered, by length; the base is asked nothing beyond its window."""
    found = {}
    for label, own in shown.items():
        values = [own.retrieval(length) for length in LENGTHS]
        if all(values):
            found[label] = [value for value in values if value is not None]
    return found


def overview(losses: Lines, places: Sequence[float], found: Lines) -> bytes:
    """Loss by position, and retrieval by length, side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), dpi=100)
    figure.set_layout_engine("constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.35, 1))
    _panel(left, "Loss by position", "nats per token", (places[0], TARGET))
    for label, own in losses.items():
        middle = [value.value for value in own]
        left.plot(places, middle, label=NAMES[label], **_style(label))
    base, untouched = ([v.value for v in losses[name]] for name in (BASE, UNTOUCHED))
    left.set_ylim(min(base) - 0.15, max(untouched) + 0.1)
    title = f"Questions answered ({' and '.join(TASKS)})"
    _panel(right, title, "share", (LENGTHS[0] * 0.9, TARGET * 1.1))
    for label, own in found.items():
        right.plot(LENGTHS, [value.value for value in own], marker="o", ms=4, **_style(label))
    right.set_ylim(-0.06, 1.06)
    figure.legend(loc="outside lower center", ncols=7, frameon=False, fontsize=9, labelcolor=INK)
    return plots.png(figure)


def _style(label: str) -> dict[str, Any]:
    # Wide lines lie under thin ones, so that both are seen where they meet.
    wide = {TUNED: 5.0, FITTED: 3.0}.get(label, 1.6)
    dashes = (0, (5, 2)) if label == BASE else "-"
    return {
        "color": GREY if label == BASE else STYLES[NAMES[label]]["color"],
        "lw": wide,
        "ls": dashes,
        "zorder": 3 - wide / 5,
    }


def _panel(axis: "Axes", title: str, y: str, limits: tuple[float, float]) -> None:
    """A logarithmic axis of tokens, the trained window shaded."""
    from matplotlib.ticker import NullLocator

    axis.set_title(title, loc="left", fontsize=11, color=INK)
    axis.set_xscale("log", base=2)
    axis.set_xlim(*limits)
    ticks = [tick for k in range(8) if limits[0] <= (tick := CONTEXT // 8 << k) <= limits[1]]
    axis.set_xticks(ticks, [length_text(tick) for tick in ticks])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("tokens", color=INK)
    axis.set_ylabel(y, color=INK)
    axis.axvspan(limits[0], CONTEXT, color=FAINT, lw=0, zorder=0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(colors=INK)
