"""Every picture, as PNG bytes in one style; same data, same bytes.

A method has one colour in all of them. The picture of a scaling (`inspect --plot`) needs no data.
"""

import hashlib
import io
import math
import re
import struct
import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropext import guard
from ropext.atomic import replace_whole
from ropext.errors import UsageError
from ropext.inspecting import Inspection, Unrotated
from ropext.lengths import length_text
from ropext.planning import ExtensionPlan
from ropext.results import BASE, FITTED, UNTOUCHED
from ropext.results.values import Value
from ropext.rope import Rope, Spectrum

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Style = dict[str, Any]  # of a line, as matplotlib takes it
# Okabe and Ito's palette, which colour-blind readers can tell apart, and two more.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5C00", "#7B3FA0"]
GREY = "#6b6b6b"
INK = "#222222"
FAINT = "#e9e9e9"
DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (7, 2, 2, 2)))
# The place in COLOURS of each method; a fitted spectrum is a longrope's pair factors.
METHODS = ("pi", "ntk", "yarn", "by-parts", "llama3", "dynamic", "abf", "longrope")
PALETTE = {name: number for number, name in enumerate(METHODS)} | {FITTED: 7}
# What the others are held against is grey, and dark where it is read beyond its window.
REFERENCE: Style = {"color": GREY, "ls": (0, (5, 2)), "lw": 2.2}
LONGEST_NAME = 48  # letters of a name in a legend
# An exploded model would flatten all others: the axis ends this far above the best one's worst.
HEADROOM_NATS = 1.5
# Beside an arrow, in points; and the axis' share of a picture with its legend, at least.
ARROW_SHIFT = 18
TEXT_WIDTH = 36
AXIS_SHARE = 0.6


def styles(labels: Iterable[str]) -> dict[str, Style]:
    """The colour and the dashes of each line: a method's own (`yarn`, `yarn-4x`), with other dashes
    for its further factors; other names take the colours that are left, in order."""
    chosen = {BASE: REFERENCE, UNTOUCHED: {"color": INK, "ls": "-", "lw": 1.8}}
    names = [label for label in dict.fromkeys(labels) if label not in chosen]
    methods = {name: re.sub(r"-[\d.]+x$", "", name) for name in names}
    places = {name: PALETTE.get(method) for name, method in methods.items()}
    used = {place for place in places.values() if place is not None}
    free = [place for place in range(len(COLOURS)) if place not in used] or [*used]
    seen = [0] * len(COLOURS)
    others = dict[str, int]()
    for name, place in places.items():
        if place is None:
            place = others.setdefault(methods[name], free[len(others) % len(free)])
        dashes = DASHES[(place + seen[place]) % len(DASHES)]
        chosen[name] = {"color": COLOURS[place], "ls": dashes, "lw": 1.8}
        seen[place] += 1
    return chosen


def letters(text: str) -> str:
    """A text with names in it, as matplotlib shows it letter by letter: a $ begins no formula."""
    return "".join(c if c.isprintable() else "�" for c in text).replace("$", r"\$")


def plain(name: str) -> str:
    """A model's or a run's name in a legend, where a long one would leave no room for the axes and
    one with a leading _ would be left out."""
    shown = name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME // 2]}…{name[-15:]}"
    return letters(f" {shown}" if shown.startswith("_") else shown)


def png(figure: "Figure") -> bytes:
    """With ropext's name and its own digest, by which the file is known, and without a date. What
    matplotlib warns of, a letter that its font lacks, nobody asked for."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        figure.savefig(stream, format="png", metadata={"Software": "ropext"})
    return _signed(stream.getvalue())


def _signed(picture: bytes) -> bytes:
    """A PNG with its digest in a chunk before the last one, which is IEND: length, name, text, and
    the checksum of name and text."""
    body = picture[:-12]
    end = picture[-12:]
    sign = guard.PICTURE
    length = struct.pack(">I", len(sign.begin) - 4 + 64)
    digest = hashlib.sha256(body + length + sign.begin + sign.blank + end).hexdigest().encode()
    chunk = sign.begin + digest
    return body + length + chunk + struct.pack(">I", zlib.crc32(chunk)) + end


def finished(axis: "Axes") -> bytes:
    """The picture of one panel, its lines named on the right."""
    figure = axis.get_figure(root=True)
    assert figure is not None
    figure.legend(loc="outside right upper", frameon=False, fontsize=9, labelcolor=INK)
    return png(figure)


def panel(axis: "Axes", title: str, x: str, y: str) -> None:
    """The look of all axes."""
    axis.set_title(title, loc="left", fontsize=12, color=INK)
    axis.set_xlabel(x, color=INK)
    axis.set_ylabel(y, color=INK)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(colors=INK)
    axis.margins(x=0.01)


def axes(title: str, y: str, x: str = "position (tokens)", note: str = "") -> "Axes":
    """A picture of one panel."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 5.4), dpi=110, layout="constrained")
    axis = figure.subplots()
    shown = letters(title)
    panel(axis, f"{shown}\n" if note else shown, x, y)
    axis.text(0, 1.02, note, transform=axis.transAxes, fontsize=9, color=GREY)
    return axis


@dataclass(frozen=True)
class Curve:
    """One line: values at places along x, with their intervals."""

    label: str
    places: tuple[float, ...]
    values: tuple[Value, ...]


def _positions(axis: "Axes", context: int, longest: int, places: Sequence[float]) -> None:
    """A logarithmic axis of tokens with the trained window shaded."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axis.set_xscale("log", base=2)
    low = min(places) / 1.1
    axis.set_xlim(low, longest * 1.05)
    ticks = [context * 2.0**k for k in range(-12, 16) if low <= context * 2.0**k <= longest]
    axis.xaxis.set_major_locator(FixedLocator([*ticks, longest] if longest not in ticks else ticks))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: length_text(int(value))))
    axis.axvspan(low, min(context, longest * 1.05), color=FAINT, lw=0, zorder=0)
    if context < longest:
        axis.axvline(context, color=GREY, lw=0.8, ls=":")
    if math.log(context / low) > 0.2 * math.log(longest / low):  # else it would lie on the lines
        look: Style = {"facecolor": FAINT, "edgecolor": "none", "pad": 1.5}
        where: Style = {"transform": axis.get_xaxis_transform(), "va": "bottom", "zorder": 5}
        axis.text(low * 1.03, 0.015, "trained context", fontsize=9, color=INK, bbox=look, **where)


def lines(
    title: str,
    y: str,
    curves: Sequence[Curve],
    context: int,
    longest: int,
    zero: bool = False,
    note: str = "",
    styled: Mapping[str, Style] | None = None,
) -> bytes:
    """Lines with ribbons over positions or lengths; with `zero`, differences around a zero line.
    `styled` are the styles where several pictures are to agree."""
    axis = axes(title, y, note=note)
    _curves(axis, curves, context, longest, styled, zero)
    return finished(axis)


def side_by_side(
    panels: Mapping[str, Sequence[Curve]], context: int, longest: int, styled: Mapping[str, Style]
) -> bytes:
    """Panels of lines by title; the first has them all, and nothing is off its scale."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), dpi=100, layout="constrained")
    drawn = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (title, curves) in zip(drawn, panels.items(), strict=True):
        panel(axis, title, "tokens", "")
        _curves(axis, curves, context, longest, styled, headroom=math.inf)
    lines, names = drawn[0].get_legend_handles_labels()
    look = {"frameon": False, "fontsize": 9, "labelcolor": INK}
    figure.legend(lines, names, loc="outside lower center", ncols=len(names), **look)
    return png(figure)


def _curves(
    axis: "Axes",
    curves: Sequence[Curve],
    context: int,
    longest: int,
    styled: Mapping[str, Style] | None,
    zero: bool = False,
    headroom: float = HEADROOM_NATS,
) -> None:
    floor, ceiling = _limits(curves, zero, headroom)
    styled = styled or styles(curve.label for curve in curves)
    for curve in curves:
        style = styled[curve.label]
        middle = [value.value for value in curve.values]
        outside = not any(floor <= value <= ceiling for value in middle)
        label = plain(curve.label) + (" (off the scale)" if outside else "")
        axis.plot(curve.places, middle, label=label, marker="o", ms=3, **style)
        ends = [value.ci95 or value.range or (value.value,) * 2 for value in curve.values]
        lows = [low for low, _ in ends]
        highs = [high for _, high in ends]
        axis.fill_between(curve.places, lows, highs, color=style["color"], alpha=0.15, lw=0)
    if zero:
        axis.axhline(0, color=INK, lw=0.9)
    axis.set_ylim(floor, ceiling)
    _positions(axis, context, longest, [place for curve in curves for place in curve.places])
    _arrows(axis, curves, styled)


def _arrows(axis: "Axes", curves: Sequence[Curve], styled: Mapping[str, Style]) -> None:
    """At the frame, where a line leaves it: an arrow, with the value that lies furthest outside."""
    for edge, side in zip(axis.get_ylim(), (1, -1), strict=True):
        leaving = list[tuple[float, float, str]]()  # where, how far, whose
        for curve in curves:
            values = [value.value for value in curve.values]
            far = min(values) if side == 1 else max(values)
            if (edge - far) * side > 0 and math.isfinite(far):
                leaving.append((_crossing(curve.places, values, edge, side), far, curve.label))
        leaving.sort()
        shifts = _apart([_points(axis, place) for place, _, _ in leaving])
        for (place, far, label), shift in zip(leaving, shifts, strict=True):
            colour = styled[label]["color"]
            look: Style = {
                "ha": "center",
                "va": "center",
                "fontsize": 9,
                "color": colour,
                "zorder": 6,
                "textcoords": "offset points",
                "arrowprops": {"arrowstyle": "->", "color": colour},
            }
            axis.annotate(f"{far:.3g}", (place, edge), (shift, 30 * side), **look)


def _crossing(places: Sequence[float], values: Sequence[float], edge: float, side: int) -> float:
    """Where a line leaves the frame, on a logarithmic axis."""
    first = next(i for i, value in enumerate(values) if (edge - value) * side > 0)
    if first == 0:
        return places[0]
    share = (edge - values[first - 1]) / (values[first] - values[first - 1])
    return places[first - 1] * math.pow(places[first] / places[first - 1], share)


def _points(axis: "Axes", place: float) -> float:
    """About where a place lies on a logarithmic axis, in points; the legend is not laid out yet."""
    figure = axis.get_figure(root=True)
    assert figure is not None
    low, high = axis.get_xlim()
    width = 72.0 * figure.get_figwidth() * AXIS_SHARE
    return width * math.log(place / low) / math.log(high / low)


def _apart(centres: Sequence[float]) -> list[float]:
    """How far each text stands from its place, in order, so that none lies over another."""
    shifts = list[float]()
    last = -math.inf
    for centre in centres:
        at = max(centre + ARROW_SHIFT, last + TEXT_WIDTH)
        shifts.append(at - centre)
        last = at
    return shifts


def _limits(curves: Sequence[Curve], zero: bool, headroom: float) -> tuple[float, float]:
    """Keep the lines that work readable beside those that exploded."""
    finite = [[v.value for v in c.values if math.isfinite(v.value)] for c in curves]
    tops = [max(v) for v in finite if v]
    bottoms = [min(v) for v in finite if v]
    if not tops:
        return 0.0, 1.0
    if zero:  # on either side of it
        tops = [max(top, 0.0) for top in tops]
        bottoms = [min(low, 0.0) for low in bottoms]
    ceiling = min(max(tops), min(tops) + headroom)
    floor = max(min(bottoms), max(bottoms) - headroom) if zero else min(bottoms)
    margin = max(0.06 * (ceiling - floor), 1e-3)
    return floor - margin, ceiling + margin


def heat_maps(title: str, scale: str, maps: Mapping[str, Sequence[Mapping[str, Any]]]) -> bytes:
    """Depth by length, one panel per model; `scale` says what a colour is."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    columns = min(4, len(maps))
    rows = -(-len(maps) // columns)
    figure = Figure(figsize=(1.0 + 3.0 * columns, 0.9 + 2.5 * rows), dpi=110, layout="constrained")
    figure.suptitle(title, fontsize=12, color=INK, x=0.01, ha="left")
    panels = figure.subplots(rows, columns, squeeze=False)
    image = None
    for number, axis in enumerate(panels.flat):
        if number >= len(maps):
            axis.set_visible(False)
            continue
        label, cells = list(maps.items())[number]
        image = _heat_map(axis, label, cells)
    if image is not None:
        bar = figure.colorbar(image, ax=list(panels.flat), shrink=0.8)
        bar.set_label(scale, color=INK)
        bar.ax.yaxis.set_major_formatter(PercentFormatter(1))
    return png(figure)


def _heat_map(axis: "Axes", label: str, cells: Sequence[Mapping[str, Any]]) -> Any:
    lengths = sorted({int(cell["length"]) for cell in cells})
    depths = sorted({cell["depth"] for cell in cells}, key=lambda depth: depth or 0.0)
    grid = [[float("nan")] * len(lengths) for _ in depths]
    for cell in cells:
        at = depths.index(cell["depth"]), lengths.index(int(cell["length"]))
        grid[at[0]][at[1]] = cell["share"].value
    # Cividis reads the same to colour-blind eyes and in grey.
    image = axis.imshow(grid, vmin=0, vmax=1, cmap="cividis", aspect="auto")
    for row, values in enumerate(grid):
        for column, share in enumerate(values):
            colour = "white" if share < 0.5 else "black"
            text = "" if math.isnan(share) else f"{share:.0%}"
            axis.text(column, row, text, ha="center", va="center", fontsize=8, color=colour)
    axis.set_title(plain(label), loc="left", fontsize=10, color=INK)
    axis.set_xticks(range(len(lengths)), [length_text(length) for length in lengths], fontsize=8)
    shown = ["all" if depth is None else f"{depth:g}" for depth in depths]
    axis.set_yticks(range(len(depths)), shown, fontsize=8)
    axis.set_xlabel("length", fontsize=9)
    axis.set_ylabel("depth (0 start, 1 end)", fontsize=9)
    return image


def spectra(
    title: str,
    models: Mapping[str, Sequence[float]],
    styled: Mapping[str, Style] | None = None,
    lengths: Mapping[str, int] = {},
) -> bytes:
    """Wavelength of each pair, one line per model; the base's, if it is there, is grey. A dotted
    line marks each named length."""
    axis = axes(title, "tokens per full turn", "pair (0 turns fastest)")
    styled = dict(styled or {})
    last = max(len(inv_freq) for inv_freq in models.values()) - 1
    for what, tokens in lengths.items():
        axis.axhline(tokens, color=GREY, lw=0.8, ls=":")
        axis.text(last, tokens, what, fontsize=9, color=GREY, ha="right", va="bottom")
    for label, inv_freq in models.items():
        waves = [2 * math.pi / f if f else math.inf for f in inv_freq]
        by_pair(axis, waves, plain(label), (styled or styles(models))[label])
    axis.set_yscale("log")
    return finished(axis)


def by_pair(axis: "Axes", values: Sequence[float], label: str, style: Style) -> None:
    """One value per pair; with few pairs each is marked."""
    marker = "o" if len(values) <= 32 else ""
    axis.plot(range(len(values)), values, label=label, marker=marker, ms=3.5, **style)


def write(of: ExtensionPlan | Inspection | Unrotated, path: Path) -> None:
    """The file that --plot asks for: spectra, or how alike the rows of a position table are."""
    if isinstance(of, Unrotated):
        data = plot_rows(of.rows(), of.name)
    elif named := of.spectra():
        data = plot(of.main.rope, named, of.target, of.name)
    else:
        raise UsageError("--plot draws spectra; `ropext inspect --plot` draws a table's rows")
    replace_whole(path, lambda stream: stream.write(data), keep=True)


def plot(rope: Rope, named: Mapping[str, Spectrum], target: int, title: str = "") -> bytes:
    """The wavelengths of the model as it is and of each named spectrum."""
    models = {UNTOUCHED: rope.spectrum.inv_freq}
    models |= {name: spectrum.inv_freq for name, spectrum in named.items()}
    heading = f"{title}: rotary dim {rope.dim}, theta {rope.theta:g}".removeprefix(": ")
    lengths = {"trained context": rope.context, "target": target}
    return spectra(heading, models, lengths=lengths)


def similarity(rows: "np.ndarray", most: int = 512) -> "np.ndarray":
    """The cosine of every row with every other, their mean taken away; of `most` rows at most."""
    import numpy as np

    rows = rows[np.linspace(0, len(rows) - 1, min(len(rows), most)).astype(int)]
    rows = rows - rows.mean(axis=0)
    rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)
    alike: np.ndarray = rows @ rows.T
    return alike


def plot_rows(rows: "np.ndarray", title: str = "") -> bytes:
    """How alike the rows of a position table are, pair by pair and by distance."""
    import numpy as np
    from matplotlib.figure import Figure

    alike = similarity(rows)
    count = len(rows)
    figure = Figure(figsize=(14, 6), dpi=100)
    figure.set_layout_engine("constrained", w_pad=0.15, h_pad=0.15)
    left, right = figure.subplots(1, 2)
    figure.suptitle(f"{letters(title)}   {count} rows".strip(), fontsize=15, color=INK)
    shown = left.imshow(alike, vmin=-1, vmax=1, cmap="RdBu_r", extent=(0, count, count, 0))
    figure.colorbar(shown, ax=left)
    panel(left, "Cosine of two rows, their mean taken away", "position", "position")
    step = (count - 1) / max(1, len(alike) - 1)
    means = [float(np.diagonal(alike, far).mean()) for far in range(len(alike))]
    panel(right, "Mean cosine by distance", "distance in tokens", "cosine")
    right.plot([far * step for far in range(len(alike))], means, color=INK)
    right.axhline(0, color=GREY, lw=0.8, ls=":")
    return png(figure)
