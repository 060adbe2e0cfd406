"""Four pictures of what a scaling does, without data: `inspect --plot` and `plan --plot`.

Wavelengths, phase needed over phase seen, local compression, and the distance kernel
g(D) = a^2 * mean cos(D f): the mean over pairs of what rotation leaves of a logit at distance D.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropext.rope import Rope, Spectrum, compression, phase_ratio

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which colour-blind readers can tell apart; the model as it is is grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5C00")
UNTOUCHED = "untouched"
LONGEST_NAME = 48  # letters of a name in a legend
GREY, INK, FAINT = "#6b6b6b", "#222222", "#e9e9e9"
DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (7, 2, 2, 2)))

Lines = Sequence[tuple[str, Spectrum, str, Any]]  # name, spectrum, colour, dashes


def letters(text: str) -> str:
    """A text with names in it, as matplotlib shows it letter by letter: a $ begins no formula."""
    return "".join(c if c.isprintable() else "�" for c in text).replace("$", r"\$")


def plain(name: str) -> str:
    """A model's or a run's name in a legend, where a long one would leave no room for the axes and
    one with a leading _ would be left out."""
    shown = name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME // 2]}…{name[-15:]}"
    return letters(f" {shown}" if shown.startswith("_") else shown)


def save(figure: "Figure", target: Any, **more: Any) -> None:
    """As PNG. What matplotlib warns of, a letter that its font lacks, nobody asked for."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        figure.savefig(target, format="png", **more)


def kernel(spectrum: Spectrum, distances: "np.ndarray") -> "np.ndarray":
    """g(D) = a^2 * mean over pairs of cos(D f)."""
    import numpy as np

    angles = np.outer(np.asarray(distances, dtype=float), np.array(spectrum.inv_freq))
    means: np.ndarray = np.cos(angles).mean(axis=1)
    return means * spectrum.attention_factor**2


def smooth_kernel(
    spectrum: Spectrum, limit: int, points: int = 400
) -> tuple["np.ndarray", "np.ndarray"]:
    """The kernel averaged over each distance's neighbours within 6 %, on a logarithmic grid.

    Single distances swing by 0.2 from one to the next; the mean shows the trend. In closed form:
    the mean of cos(D f) over [D - w, D + w] is cos(D f) sin(w f)/(w f).
    """
    import numpy as np

    distances = np.geomspace(1, limit, points)
    angles = np.outer(distances, np.array(spectrum.inv_freq))
    means = (np.cos(angles) * np.sinc(0.06 * angles / np.pi)).mean(axis=1)
    return distances, means * spectrum.attention_factor**2


def first_negative(spectrum: Spectrum, limit: int) -> int | None:
    """The first distance up to `limit` at which the kernel falls below zero."""
    import numpy as np

    for start in range(0, limit + 1, 4096):
        distances = np.arange(start, min(start + 4096, limit + 1))
        below = np.flatnonzero(kernel(spectrum, distances) < 0)
        if below.size:
            return int(distances[below[0]])
    return None


def plot(
    rope: Rope, spectra: Mapping[str, Spectrum], target: int, path: Path | str, title: str = ""
) -> None:
    """Write the four panels as a PNG of 1600 x 1000 pixels."""
    save(draw(rope, spectra, target, title), path)


def draw(rope: Rope, spectra: Mapping[str, Spectrum], target: int, title: str = "") -> "Figure":
    """The four panels, for the model as it is and for each named spectrum."""
    from matplotlib.figure import Figure

    lines = _lines(rope, spectra)
    figure = Figure(figsize=(16, 10), dpi=100)
    figure.set_layout_engine("constrained", w_pad=0.15, h_pad=0.15)
    axes = figure.subplots(2, 2)
    heading = f"rotary dim {rope.dim}, theta {rope.theta:g}: {rope.context} to {target} tokens"
    figure.suptitle(f"{letters(title)}   {heading}".strip(), fontsize=15, color=INK)
    _wavelengths(axes[0][0], rope, lines, target)
    _phases(axes[0][1], rope, lines, target)
    _compressions(axes[1][0], rope, lines)
    _kernels(axes[1][1], rope, lines, target)
    return figure


def _lines(rope: Rope, spectra: Mapping[str, Spectrum]) -> Lines:
    drawn: list[tuple[str, Spectrum, str, Any]] = [(UNTOUCHED, rope.spectrum, GREY, "-")]
    for i, (name, spectrum) in enumerate(spectra.items()):
        drawn.append((name, spectrum, COLOURS[i % len(COLOURS)], DASHES[i % len(DASHES)]))
    return drawn


def _style(axis: "Axes", title: str, x: str, y: str) -> None:
    axis.set_title(title, loc="left", fontsize=13, color=INK)
    axis.set_xlabel(x, fontsize=11, color=INK)
    axis.set_ylabel(y, fontsize=11, color=INK)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=10, colors=INK)
    axis.margins(x=0.01)


def _label(axis: "Axes", ends: Sequence[tuple[str, float, str]]) -> None:
    """Name each line at its right end; names that would overlap are moved apart, with a leader."""
    low, high = axis.get_ylim()
    up = axis.transData.transform
    edge = axis.get_xlim()[1]
    to_axes = axis.transAxes.inverted().transform

    def height(value: float) -> float:
        clipped = min(max(value, low), high)
        return float(to_axes(up((edge, clipped)))[1])

    gap = 0.047
    placed = sorted((height(value), name, colour) for name, value, colour in ends)
    spots = _spread([spot for spot, _, _ in placed], gap)
    for (true, name, colour), spot in zip(placed, spots, strict=True):
        axis.annotate(
            name,
            xy=(1.0, true),
            xytext=(1.035, spot),
            xycoords="axes fraction",
            textcoords="axes fraction",
            va="center",
            fontsize=11,
            color=colour,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "lw": 0.7,
                "shrinkA": 1,
                "shrinkB": 0,
                "relpos": (0, 0.5),
            },
            annotation_clip=False,
        )


def _spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Ascending heights at least `gap` apart, each group centred on what its members wanted."""
    groups: list[list[float]] = []
    for value in wanted:
        groups.append([value])
        while len(groups) > 1 and _bottom(groups[-1], gap) < _top(groups[-2], gap) + gap:
            last = groups.pop()
            groups[-1] += last
    return [_bottom(group, gap) + gap * i for group in groups for i in range(len(group))]


def _bottom(group: Sequence[float], gap: float) -> float:
    return sum(group) / len(group) - gap * (len(group) - 1) / 2


def _top(group: Sequence[float], gap: float) -> float:
    return _bottom(group, gap) + gap * (len(group) - 1)


def _wavelengths(axis: "Axes", rope: Rope, lines: Lines, target: int) -> None:
    _style(axis, "Wavelength of each pair", "pair", "tokens per full turn")
    axis.set_yscale("log")
    for _, spectrum, colour, dashes in lines:
        _curve(axis, spectrum.wavelengths, colour, dashes)
    for tokens, what in ((rope.context, "trained context"), (target, "target")):
        axis.axhline(tokens, color=INK, lw=0.8, ls=":")
        axis.text(0, tokens * 1.08, f"{what} {tokens}", fontsize=10, color=INK, va="bottom")
    _label(axis, [(n, _last(s.wavelengths), c) for n, s, c, _ in lines])


def _curve(axis: "Axes", values: Sequence[float], colour: str, dashes: Any) -> None:
    """One value per pair; with few pairs each is marked."""
    marker = "o" if len(values) <= 32 else ""
    axis.plot(range(len(values)), values, color=colour, ls=dashes, lw=1.9, marker=marker, ms=4)


def _last(values: Sequence[float]) -> float:
    """The last finite value, at which a line ends."""
    return next((v for v in reversed(values) if math.isfinite(v)), 1.0)


def _phases(axis: "Axes", rope: Rope, lines: Lines, target: int) -> None:
    _style(axis, "Phase needed at the target / phase seen in training", "pair", "ratio")
    ratios = {name: phase_ratio(rope, spectrum, target) for name, spectrum, _, _ in lines}
    # An unbounded ratio belongs to a pair that stood still in training: no place on this axis.
    finite = [r for row in ratios.values() for r in row if 0 < r < math.inf]
    low, high = min(0.5, *finite) / 1.15, max(2.0, *finite) * 1.15
    _doubling(axis, low, high)
    for name, _, colour, dashes in lines:
        _curve(axis, ratios[name], colour, dashes)
    axis.axhspan(1, high, color="#D55E00", alpha=0.08, lw=0)
    axis.axhline(1, color=INK, lw=0.8, ls=":")
    axis.text(0, high / 1.03, "phases never seen in training", fontsize=10, color=INK, va="top")
    _label(axis, [(n, _last(ratios[n]), c) for n, _, c, _ in lines])


def _doubling(axis: "Axes", low: float, high: float) -> None:
    """A logarithmic axis whose ticks are the powers of two, written as plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_yscale("log", base=2)
    axis.set_ylim(low, high)
    axis.yaxis.set_major_locator(LogLocator(base=2))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _compressions(axis: "Axes", rope: Rope, lines: Lines) -> None:
    _style(axis, "Local compression: how much slower each pair turns", "pair", "times slower")
    rows = {name: compression(rope, spectrum) for name, spectrum, _, _ in lines}
    finite = [c for row in rows.values() for c in row if 0 < c < math.inf]
    _doubling(axis, min(finite) / 1.15, max(2.0, *finite) * 1.15)
    for name, _, colour, dashes in lines:
        _curve(axis, rows[name], colour, dashes)
    _label(axis, [(n, _last(rows[n]), c) for n, _, c, _ in lines])


def _kernels(axis: "Axes", rope: Rope, lines: Lines, target: int) -> None:
    from matplotlib.ticker import FuncFormatter

    title = "Distance kernel a²·mean cos(Δ f), averaged over neighbouring distances"
    _style(axis, title, "distance Δ in tokens (labels: the first single Δ with g < 0)", "g(Δ)")
    axis.set_xscale("log", base=2)
    ends = []
    for name, spectrum, colour, dashes in lines:
        distances, values = smooth_kernel(spectrum, target)
        axis.plot(distances, values, color=colour, ls=dashes, lw=1.7)
        below = first_negative(spectrum, target)
        first = f"{name}: first < 0 at {below}" if below else f"{name}: nowhere < 0"
        ends.append((first, float(values[-1]), colour))
    axis.set_xlim(1, target)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axis.axvspan(1, rope.context, color=FAINT, lw=0, zorder=0)
    axis.axhline(0, color=INK, lw=0.8)
    low, high = axis.get_ylim()
    axis.set_ylim(low - 0.06 * (high - low), high)
    axis.text(1.15, low, "trained window", fontsize=10, color=GREY, va="center")
    _label(axis, ends)
