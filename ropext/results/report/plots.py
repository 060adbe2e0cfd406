"""Draw every picture as PNG bytes in one style; the same data give the same bytes. A method has one
colour in all of them. The picture of a scaling (`inspect --plot`) needs no data."""

import hashlib
import io
import math
import re
import struct
import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropext.base import guard
from ropext.base.atomic import replace_whole
from ropext.base.errors import UsageError
from ropext.base.lengths import length_text
from ropext.files.inspecting import Inspection
from ropext.planning import ExtensionPlan
from ropext.results import BASE, FITTED, UNTOUCHED
from ropext.results.retrieval import HeatCell
from ropext.results.values import Value
from ropext.scaling import METHODS
from ropext.scaling.rope import Rope, Spectrum

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

    from ropext.files.schemes.inspection import PositionFacts


Style = dict[str, Any]  # a line's style, as matplotlib takes it
# Okabe and Ito's palette, which colour-blind readers can tell apart, and two more.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5C00", "#7B3FA0"]
GREY = "#6b6b6b"
INK = "#222222"
FAINT = "#e9e9e9"
DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (7, 2, 2, 2)))
# The reference is grey, and dark if it is read beyond its window.
REFERENCE: Style = {"color": GREY, "ls": (0, (5, 2)), "lw": 2.2}
LONGEST_NAME = 48  # letters of a name in a legend
# An exploded model would flatten all others: the axis ends this far above the best one's worst.
HEADROOM_NATS = 1.5


def _method_colours() -> dict[str, int]:
    """Return the colour of each method's line in all plots, as a place in COLOURS; methods that
    name no colour take the next ones, in order."""
    places = dict[str, int]()
    for method in METHODS.values():
        if method.colour is not None:
            places[method.name] = method.colour
    for name in METHODS:
        places.setdefault(name, len(places) % len(COLOURS))
    places[FITTED] = places["longrope"]  # pair factors
    return places


PALETTE = _method_colours()


def line_styles(labels: Iterable[str]) -> dict[str, Style]:
    """Return the colour and the dashes of each line of a plot: a method's own (`yarn`, `yarn-4x`),
    with other dashes for its further factors; other names take the colours that are left, in
    order."""
    chosen = {BASE: REFERENCE, UNTOUCHED: {"color": INK, "ls": "-", "lw": 1.8}}
    methods = {name: re.sub(r"-[\d.]+x$", "", name) for name in labels if name not in chosen}
    used = {PALETTE[method] for method in methods.values() if method in PALETTE}
    free = [place for place in range(len(COLOURS)) if place not in used] or list(used)
    lines_of_colour = [0] * len(COLOURS)
    others = dict[str, int]()
    for name, method in methods.items():
        place = PALETTE.get(method)
        if place is None:
            place = others.setdefault(method, free[len(others) % len(free)])
        dashes = DASHES[(place + lines_of_colour[place]) % len(DASHES)]
        chosen[name] = {"color": COLOURS[place], "ls": dashes, "lw": 1.8}
        lines_of_colour[place] += 1
    return chosen


def literal_letters(text: str) -> str:
    """Return a text for a plot with names in it so that matplotlib shows it letter by letter: a $
    begins no formula."""
    printable = list[str]()
    for letter in text:
        printable.append(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}")
    return "".join(printable).replace("$", r"\$")


def legend_name(name: str) -> str:
    """Write the name of a model or a run for a legend. Shorten a long name, which would leave no
    room for the axes. Put a space before a leading _, because matplotlib leaves such names out."""
    shown = name
    if len(name) > LONGEST_NAME:
        shown = f"{name[: LONGEST_NAME // 2]}…{name[-15:]}"
    if shown.startswith("_"):
        shown = f" {shown}"
    return literal_letters(shown)


def png_bytes(figure: "Figure") -> bytes:
    """Return a plot's figure as PNG bytes with ropext's name and its own digest, which identifies
    the file, and without a date. Ignore matplotlib's warnings, such as those about letters that its
    font lacks."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        figure.savefig(stream, format="png", metadata={"Software": "ropext"})
    return _signed_png(stream.getvalue())


def _signed_png(picture: bytes) -> bytes:
    """Return a plot's PNG with its digest in a chunk before the last one, which is IEND. A chunk is
    length, name, text, and the checksum of name and text."""
    body = picture[:-12]
    end = picture[-12:]
    sign = guard.PICTURE
    length = struct.pack(">I", len(sign.begin) - 4 + 64)
    digest = hashlib.sha256(body + length + sign.begin + sign.blank + end).hexdigest().encode()
    chunk = sign.begin + digest
    return body + length + chunk + struct.pack(">I", zlib.crc32(chunk)) + end


def picture_with_legend(axis: "Axes") -> bytes:
    """Return the PNG of a plot with one panel, its lines named on the right."""
    figure = axis.get_figure(root=True)
    assert figure is not None
    figure.legend(loc="outside right upper", frameon=False, fontsize=9, labelcolor=INK)
    return png_bytes(figure)


def style_axes(axis: "Axes", title: str, x: str, y: str) -> None:
    """Set the title and the axis names of a plot's panel, and the look that all panels share."""
    axis.set_title(title, loc="left", fontsize=12, color=INK)
    axis.set_xlabel(x, color=INK)
    axis.set_ylabel(y, color=INK)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(colors=INK)
    axis.margins(x=0.01)


def plot_axes(title: str, y: str, x: str = "position (tokens)", note: str = "") -> "Axes":
    """Return the axes of a plot with one panel."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 5.4), dpi=110, layout="constrained")
    axis = figure.subplots()
    shown = literal_letters(title)
    style_axes(axis, f"{shown}\n" if note else shown, x, y)
    axis.text(0, 1.02, note, transform=axis.transAxes, fontsize=9, color=GREY)
    return axis


@dataclass(frozen=True)
class Curve:
    """One line: values at places along x, with their intervals."""

    label: str
    places: tuple[float, ...]
    values: tuple[Value, ...]

    @property
    def points(self) -> list[float]:
        """Return the values of a plot's line without their intervals."""
        return [value.value for value in self.values]

    @property
    def bands(self) -> list[tuple[float, float]]:
        """Return the ribbon of a plot's line: the interval of each value, or its range if it has no
        interval."""
        bands = list[tuple[float, float]]()
        for value in self.values:
            bands.append(value.ci95 or value.range or (value.value, value.value))
        return bands


@dataclass(frozen=True)
class LinePlot:
    """The surroundings of lines over tokens: a title, the name of the y axis, the trained context,
    the longest length, and a note. `has_zero` is true if the lines are differences around zero."""

    title: str
    y: str
    context: int
    longest: int
    note: str = ""
    has_zero: bool = False
    headroom: float = HEADROOM_NATS


def _draw_positions(axis: "Axes", plot: LinePlot, places: Sequence[float]) -> None:
    """Make a plot's x axis logarithmic in tokens, with the trained context shaded."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    context = plot.context
    longest = plot.longest
    axis.set_xscale("log", base=2)
    low = min(places) / 1.1
    axis.set_xlim(low, longest * 1.05)
    ticks = list[float]()
    for octave in range(-12, 16):
        place = context * 2.0**octave
        if low <= place <= longest:
            ticks.append(place)
    if longest not in ticks:
        ticks.append(longest)
    axis.xaxis.set_major_locator(FixedLocator(ticks))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: length_text(int(value))))
    axis.axvspan(low, min(context, longest * 1.05), color=FAINT, lw=0, zorder=0)
    if context < longest:
        axis.axvline(context, color=GREY, lw=0.8, ls=":")
    if math.log(context / low) > 0.2 * math.log(longest / low):  # else it would cover the lines
        axis.text(
            low * 1.03,
            0.015,
            "trained context",
            fontsize=9,
            color=INK,
            bbox={"facecolor": FAINT, "edgecolor": "none", "pad": 1.5},
            transform=axis.get_xaxis_transform(),
            va="bottom",
            zorder=5,
        )


def line_plot(
    plot: LinePlot, curves: Sequence[Curve], styled: Mapping[str, Style] | None = None
) -> bytes:
    """Draw lines with ribbons over positions or lengths. `styled` gives the styles if several
    pictures have to agree."""
    axis = plot_axes(plot.title, plot.y, note=plot.note)
    draw_curves(axis, plot, curves, styled)
    return picture_with_legend(axis)


def line_plots_side_by_side(plots: Sequence[tuple[LinePlot, Sequence[Curve]]]) -> bytes:
    """Draw panels of lines; the first has them all, and nothing is off its scale."""
    from matplotlib.figure import Figure

    labels = list[str]()
    for _, curves in plots:
        labels += [curve.label for curve in curves]
    styled = line_styles(labels)
    figure = Figure(figsize=(11, 4.4), dpi=100, layout="constrained")
    panels = figure.subplots(1, len(plots), squeeze=False)[0]
    for axis, (plot, curves) in zip(panels, plots, strict=True):
        style_axes(axis, plot.title, "tokens", plot.y)
        draw_curves(axis, replace(plot, headroom=math.inf), curves, styled)
    named: dict[str, Artist] = {}
    for axis in panels:
        handles, names = axis.get_legend_handles_labels()
        for handle, name in zip(handles, names, strict=True):
            named.setdefault(name, handle)
    figure.legend(
        list(named.values()),
        list(named),
        loc="outside lower center",
        ncols=len(named),
        frameon=False,
        fontsize=9,
        labelcolor=INK,
    )
    return png_bytes(figure)


def draw_curves(
    axis: "Axes", plot: LinePlot, curves: Sequence[Curve], styled: Mapping[str, Style] | None = None
) -> None:
    """Draw lines on an axis, each with its band; the legend names lines that leave the frame."""
    floor, ceiling = _y_limits(plot, curves)
    styled = styled or line_styles(curve.label for curve in curves)
    places = list[float]()
    for curve in curves:
        style = styled[curve.label]
        label = legend_name(curve.label)
        outside = [value for value in curve.points if value < floor or value > ceiling]
        if outside:
            label += f" (off the scale: {max(outside, key=abs):.3g})"
        axis.plot(curve.places, curve.points, label=label, marker="o", ms=3, **style)
        lows = [low for low, _ in curve.bands]
        highs = [high for _, high in curve.bands]
        axis.fill_between(curve.places, lows, highs, color=style["color"], alpha=0.15, lw=0)
        places += curve.places
    if plot.has_zero:
        axis.axhline(0, color=INK, lw=0.9)
    axis.set_ylim(floor, ceiling)
    _draw_positions(axis, plot, places)


def _y_limits(plot: LinePlot, curves: Sequence[Curve]) -> tuple[float, float]:
    """Return the lower and upper end of a plot's y axis. They keep working models readable next to
    exploded ones."""
    tops = list[float]()
    bottoms = list[float]()
    for curve in curves:
        shown = curve.points
        if plot.headroom == math.inf:  # nothing is off the scale
            for low, high in curve.bands:
                shown += [low, high]
        finite = [value for value in shown if math.isfinite(value)]
        if plot.has_zero and finite:  # on either side of it
            finite.append(0.0)
        if finite:
            tops.append(max(finite))
            bottoms.append(min(finite))
    if not tops:
        return 0.0, 1.0
    ceiling = min(max(tops), min(tops) + plot.headroom)
    floor = min(bottoms)
    if plot.has_zero:
        floor = max(floor, max(bottoms) - plot.headroom)
    margin = max(0.06 * (ceiling - floor), 1e-3)
    return floor - margin, ceiling + margin


def heat_maps(title: str, scale: str, maps: Mapping[str, Sequence[HeatCell]]) -> bytes:
    """Draw depth by length, one panel per model; `scale` names the quantity that the colours
    show."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    columns = min(4, len(maps))
    rows = -(-len(maps) // columns)
    figure = Figure(figsize=(1.0 + 3.0 * columns, 0.9 + 2.5 * rows), dpi=110, layout="constrained")
    figure.suptitle(title, fontsize=12, color=INK, x=0.01, ha="left")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis in panels[len(maps) :]:
        axis.set_visible(False)
    image = None
    for axis, (label, cells) in zip(panels, maps.items(), strict=False):
        image = _heat_map(axis, label, cells)
    if image is not None:
        bar = figure.colorbar(image, ax=panels, shrink=0.8)
        bar.set_label(scale, color=INK)
        bar.ax.yaxis.set_major_formatter(PercentFormatter(1))
    return png_bytes(figure)


def _heat_map(axis: "Axes", label: str, cells: Sequence[HeatCell]) -> "AxesImage":
    """Draw the retrieval of one model on a panel of a heat map: depth by length."""
    lengths = sorted({cell.length for cell in cells})
    depths = sorted({cell.depth for cell in cells}, key=lambda depth: depth or 0.0)
    grid = [[math.nan] * len(lengths) for _ in depths]
    for cell in cells:
        row = grid[depths.index(cell.depth)]
        row[lengths.index(cell.length)] = cell.share.value
    # Cividis reads the same to colour-blind eyes and in grey.
    image = axis.imshow(grid, vmin=0, vmax=1, cmap="cividis", aspect="auto")
    for row_number, row in enumerate(grid):
        for column, share in enumerate(row):
            colour = "white" if share < 0.5 else "black"
            text = "" if math.isnan(share) else f"{share:.0%}"
            axis.text(column, row_number, text, ha="center", va="center", fontsize=8, color=colour)
    axis.set_title(legend_name(label), loc="left", fontsize=10, color=INK)
    axis.set_xticks(range(len(lengths)), [length_text(length) for length in lengths], fontsize=8)
    names = ["all" if depth is None else f"{depth:g}" for depth in depths]
    axis.set_yticks(range(len(depths)), names, fontsize=8)
    axis.set_xlabel("length (tokens)", fontsize=9)
    axis.set_ylabel("depth (0 start, 1 end)", fontsize=9)
    return image


def plot_wavelengths(
    title: str,
    models: Mapping[str, Sequence[float]],
    styled: Mapping[str, Style] | None = None,
    lengths: Mapping[str, int] = {},
) -> bytes:
    """Draw the wavelength of each pair, one line per model; the base's line, if there is one, is
    grey. A dotted line marks each named length."""
    axis = plot_axes(title, "tokens per rotation", "rotary pair (0 is the fastest)")
    styled = dict(styled or {})
    last = max(len(inv_freq) for inv_freq in models.values()) - 1
    for what, tokens in lengths.items():
        axis.axhline(tokens, color=GREY, lw=0.8, ls=":")
        axis.text(last, tokens, what, fontsize=9, color=GREY, ha="right", va="bottom")
    for label, inv_freq in models.items():
        waves = [2 * math.pi / f if f else math.inf for f in inv_freq]
        draw_by_pair(axis, waves, legend_name(label), (styled or line_styles(models))[label])
    axis.set_yscale("log")
    return picture_with_legend(axis)


def draw_by_pair(axis: "Axes", values: Sequence[float], label: str, style: Style) -> None:
    """Draw a plot's line with one value per rotary pair; mark each if there are few pairs."""
    marker = "o" if len(values) <= 32 else ""
    axis.plot(range(len(values)), values, label=label, marker=marker, ms=3.5, **style)


def write_plot(of: "ExtensionPlan | Inspection | PositionFacts", path: Path) -> None:
    """Write the file for --plot: spectra, or the similarity of the rows of a position table."""
    if isinstance(of, ExtensionPlan | Inspection):
        named = of.spectra()
        if not named:
            raise UsageError("--plot draws spectra; `ropext inspect --plot` draws a table's rows")
        data = plot_spectra(of.main.rope, named, of.target, of.name)
    else:
        data = plot_position_rows(of.rows(), of.name)
    replace_whole(path, lambda stream: stream.write(data), keep=True)


def plot_spectra(rope: Rope, named: Mapping[str, Spectrum], target: int, title: str = "") -> bytes:
    """Draw for --plot the wavelengths of the unchanged model and of each named spectrum."""
    models = {UNTOUCHED: rope.spectrum.inv_freq}
    models |= {name: spectrum.inv_freq for name, spectrum in named.items()}
    heading = f"rotary dim {rope.dim}, theta {rope.theta:g}"
    if title:
        heading = f"{title}: {heading}"
    lengths = {"trained context": rope.context, "target": target}
    return plot_wavelengths(heading, models, lengths=lengths)


def row_similarity(rows: "np.ndarray", most: int = 512) -> "np.ndarray":
    """Return for a plot the cosine of every row of a position table with every other, after their
    mean is subtracted. Use at most `most` rows, evenly spaced."""
    import numpy as np

    rows = rows[np.linspace(0, len(rows) - 1, min(len(rows), most)).astype(int)]
    rows = rows - rows.mean(axis=0)
    rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)
    alike: np.ndarray = rows @ rows.T
    return alike


def plot_position_rows(rows: "np.ndarray", title: str = "") -> bytes:
    """Draw the similarity of the rows of a position table, pair by pair and by distance."""
    import numpy as np
    from matplotlib.figure import Figure

    alike = row_similarity(rows)
    count = len(rows)
    figure = Figure(figsize=(14, 6), dpi=100)
    figure.set_layout_engine("constrained", w_pad=0.15, h_pad=0.15)
    left, right = figure.subplots(1, 2)
    figure.suptitle(f"{literal_letters(title)}   {count} rows".strip(), fontsize=15, color=INK)
    shown = left.imshow(alike, vmin=-1, vmax=1, cmap="RdBu_r", extent=(0, count, count, 0))
    figure.colorbar(shown, ax=left)
    style_axes(left, "Cosine of two rows, their mean taken away", "position", "position")
    step = (count - 1) / max(1, len(alike) - 1)
    means = [float(np.diagonal(alike, far).mean()) for far in range(len(alike))]
    style_axes(right, "Mean cosine by distance", "distance in tokens", "cosine")
    right.plot([far * step for far in range(len(alike))], means, color=INK)
    right.axhline(0, color=GREY, lw=0.8, ls=":")
    return png_bytes(figure)
