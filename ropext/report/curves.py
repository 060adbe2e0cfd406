"""Pictures of an evaluation and of a comparison, as PNG bytes; same data, same bytes."""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ropext.lengths import length_text
from ropext.report.spectra import COLOURS, DASHES, FAINT, GREY, INK, letters, plain, save
from ropext.results.values import Value

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# An exploded model would flatten all others: the axis ends this far above the best one's worst.
HEADROOM_NATS = 1.5
BASE = "base"


@dataclass(frozen=True)
class Curve:
    """One line: values at places along x, with their intervals."""

    label: str
    places: tuple[float, ...]
    values: tuple[Value, ...]
    reference: bool = False  # drawn grey, as what the others are held against
    index: int | None = None  # which colour, where several pictures are to agree


def _style(index: int, curve: Curve) -> dict[str, Any]:
    if curve.reference:
        return {"color": GREY, "ls": (0, (5, 2)), "lw": 2.2}
    dashes = DASHES[index // len(COLOURS) % len(DASHES)]
    return {"color": COLOURS[index % len(COLOURS)], "ls": dashes, "lw": 1.8}


def png(figure: "Figure") -> bytes:
    """Without the software's name or a date."""
    stream = io.BytesIO()
    save(figure, stream, metadata={"Software": None})
    return stream.getvalue()


def _axes(
    title: str, y: str, x: str = "position (tokens)", note: str = ""
) -> tuple["Figure", "Axes"]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 5.4), dpi=110)
    figure.set_layout_engine("constrained")
    axis = figure.subplots()
    _dress(axis, title, y, x, note)
    return figure, axis


def _dress(
    axis: "Axes", title: str, y: str = "", x: str = "position (tokens)", note: str = ""
) -> None:
    shown = letters(title)
    axis.set_title(f"{shown}\n" if note else shown, loc="left", fontsize=12, color=INK)
    axis.text(0, 1.02, note, transform=axis.transAxes, fontsize=9, color=GREY)
    axis.set_xlabel(x, color=INK)
    axis.set_ylabel(y, color=INK)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(colors=INK)


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
    axis.text(
        low * 1.03,
        0.015,
        "trained context",
        transform=axis.get_xaxis_transform(),
        fontsize=9,
        color=INK,
        va="bottom",
        bbox={"facecolor": FAINT, "edgecolor": "none", "pad": 1.5},
        zorder=5,
    )


def lines(
    title: str,
    y: str,
    curves: Sequence[Curve],
    context: int,
    longest: int,
    zero: bool = False,
    note: str = "",
) -> bytes:
    """Lines with ribbons over positions or lengths; with `zero`, differences around a zero line."""
    figure, axis = _axes(title, y, note=note)
    _plot(axis, curves, context, longest, zero)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9, labelcolor=INK)
    return png(figure)


def panels(own: Mapping[str, Sequence[Curve]], context: int, longest: int) -> bytes:
    """Lines side by side, by title; the first panel has them all, and nothing is off its scale."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), dpi=100)
    figure.set_layout_engine("constrained")
    axes = figure.subplots(1, len(own), squeeze=False)[0]
    for axis, (title, curves) in zip(axes, own.items(), strict=True):
        _dress(axis, title, x="tokens")
        _plot(axis, curves, context, longest, headroom=math.inf)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=len(labels),
        frameon=False,
        fontsize=9,
        labelcolor=INK,
    )
    return png(figure)


def _plot(
    axis: "Axes",
    curves: Sequence[Curve],
    context: int,
    longest: int,
    zero: bool = False,
    headroom: float = HEADROOM_NATS,
) -> None:
    floor, ceiling = _limits(curves, zero, headroom)
    index = 0
    for curve in curves:
        style = _style(index if curve.index is None else curve.index, curve)
        index += not curve.reference
        middle = [value.value for value in curve.values]
        outside = not any(floor <= value <= ceiling for value in middle)
        label = plain(curve.label) + (" (off the scale)" if outside else "")
        axis.plot(curve.places, middle, label=label, marker="o", ms=3, **style)
        ends = [value.ci95 or value.range or (value.value,) * 2 for value in curve.values]
        lows, highs = [low for low, _ in ends], [high for _, high in ends]
        axis.fill_between(curve.places, lows, highs, color=style["color"], alpha=0.15, lw=0)
    if zero:
        axis.axhline(0, color=INK, lw=0.9)
    axis.set_ylim(floor, ceiling)
    _positions(axis, context, longest, [place for curve in curves for place in curve.places])


def _limits(curves: Sequence[Curve], zero: bool, headroom: float) -> tuple[float, float]:
    """Keep the lines that work readable beside those that exploded."""
    finite = [[v.value for v in c.values if math.isfinite(v.value)] for c in curves]
    tops, bottoms = [max(own) for own in finite if own], [min(own) for own in finite if own]
    if not tops:
        return 0.0, 1.0
    ceiling = min(max(tops), min(tops) + headroom)
    floor = max(min(bottoms), max(bottoms) - headroom) if zero else min(bottoms)
    if zero:
        floor, ceiling = min(floor, 0.0), max(ceiling, 0.0)
    margin = max(0.06 * (ceiling - floor), 1e-3)
    return floor - margin, ceiling + margin


def heat_maps(
    title: str, maps: Mapping[str, Sequence[Mapping[str, Any]]], read: Callable[[Any], float]
) -> bytes:
    """Depth by length, one panel per model; `read` gives a cell's share answered exactly."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    columns = min(4, len(maps))
    rows = -(-len(maps) // columns)
    figure = Figure(figsize=(1.0 + 3.0 * columns, 0.9 + 2.5 * rows), dpi=110)
    figure.set_layout_engine("constrained")
    figure.suptitle(title, fontsize=12, color=INK, x=0.01, ha="left")
    panels = figure.subplots(rows, columns, squeeze=False)
    image = None
    for number, axis in enumerate(panels.flat):
        if number >= len(maps):
            axis.set_visible(False)
            continue
        label, cells = list(maps.items())[number]
        image = _heat_map(axis, label, cells, read)
    if image is not None:
        bar = figure.colorbar(image, ax=list(panels.flat), shrink=0.8)
        bar.set_label("share answered exactly", color=INK)
        bar.ax.yaxis.set_major_formatter(PercentFormatter(1))
    return png(figure)


def _heat_map(
    axis: "Axes", label: str, cells: Sequence[Mapping[str, Any]], read: Callable[[Any], float]
) -> Any:
    lengths = sorted({int(cell["length"]) for cell in cells})
    depths = sorted({float(cell["depth"]) for cell in cells})
    grid = [[float("nan")] * len(lengths) for _ in depths]
    for cell in cells:
        at = depths.index(float(cell["depth"])), lengths.index(int(cell["length"]))
        grid[at[0]][at[1]] = read(cell)
    # Cividis reads the same to colour-blind eyes and in grey.
    image = axis.imshow(grid, vmin=0, vmax=1, cmap="cividis", aspect="auto")
    for row, values in enumerate(grid):
        for column, share in enumerate(values):
            colour = "white" if share < 0.5 else "black"
            text = "" if math.isnan(share) else f"{share:.0%}"
            axis.text(column, row, text, ha="center", va="center", fontsize=8, color=colour)
    axis.set_title(plain(label), loc="left", fontsize=10, color=INK)
    axis.set_xticks(range(len(lengths)), [length_text(length) for length in lengths], fontsize=8)
    axis.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths], fontsize=8)
    axis.set_xlabel("length", fontsize=9)
    axis.set_ylabel("depth (0 start, 1 end)", fontsize=9)
    return image


def spectra(
    title: str,
    models: Mapping[str, Sequence[float]],
    colours: Mapping[str, int] | None = None,
    context: int | None = None,
) -> bytes:
    """Wavelength of each pair, one line per model; the base's, if it is there, is grey."""
    figure, axis = _axes(title, "tokens per full turn", x="pair (0 turns fastest)")
    if context is not None:
        axis.axhline(context, color=GREY, lw=0.8, ls=":")
        last = max(len(inv_freq) for inv_freq in models.values()) - 1
        axis.text(last, context, "trained context", fontsize=9, color=GREY, ha="right", va="bottom")
    for number, (label, inv_freq) in enumerate(models.items()):
        index = number if colours is None else colours.get(label, number)
        turning = [(pair, 6.283185307179586 / f) for pair, f in enumerate(inv_freq) if f]
        axis.plot(
            [pair for pair, _ in turning],
            [wavelength for _, wavelength in turning],
            label=plain(label),
            marker="o" if len(inv_freq) <= 32 else "",
            ms=3,
            **_style(index, Curve(label, (), (), reference=label == BASE)),
        )
    axis.set_yscale("log")
    figure.legend(loc="outside right upper", frameon=False, fontsize=9, labelcolor=INK)
    return png(figure)
