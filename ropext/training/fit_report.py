"""Describe a fit in words, tables and pictures: for the terminal, the card, ropext.json and OUT."""

from ropext import scaling
from ropext.base.errors import listed
from ropext.base.jsontext import JsonObject
from ropext.base.lengths import octaves
from ropext.base.table import Table, as_text, wrapped_line
from ropext.families.loaders import WRONG, newest
from ropext.planning import Plan
from ropext.results import FITTED, START
from ropext.results.perplexity import loss_by_position
from ropext.results.values import Value
from ropext.training.report import (
    TrainingSummary,
    json_files,
    record_section,
)
from ropext.training.result import Fitted

# Options, and facts of the result, that the record repeats.
FITTED_BY = ("ceiling", "retrieval_share", "keep_short", "packing", "seed", "data_seed", "strategy")
FIT_FACTS = ("kept", "reason", "start", "step", "tokens", "change")


def change_text(change: Value) -> str:
    """Write the change of the loss by a fit as `0.0540 nats per token lower over the second
    half, 95 % interval -0.0770 to -0.0310`."""
    way = "lower" if change.value < 0 else "higher"
    text = f"{abs(change.value):.4f} nats per token {way} over the second half"
    if change.ci95 is None:
        return f"{text}, without an interval"
    return f"{text}, 95 % interval {change.ci95[0]:+.4f} to {change.ci95[1]:+.4f}"


def share_text(change: Value) -> str:
    """Write by how much a fit changes the share of right answers, with the interval."""
    ends = change.ci95 or (change.value, change.value)
    return f"{change.value:+.2f}, 95 % interval {ends[0]:+.2f} to {ends[1]:+.2f}"


def fit_result(done: Fitted) -> str:
    """Write the text for the terminal after the training of a fit: the spectrum, its tables, notes
    and the cost."""
    what = f"the fitted RoPE frequencies, as {done.method}"
    if done.kept != FITTED:
        what = f"{done.start}, the starting point: the fit is not better at 95 % confidence"
    lines = [f"wrote {done.output}: {what}", "", as_text(fit_tables(done)), ""]
    for note in done.notes:
        lines.append(wrapped_line(f"note: {note}"))
    lines += [
        f"cost: {len(done.by_step)} steps, {done.tokens:,} tokens with gradients, "
        f"{done.forward_tokens:,} without",
        "",
        f"next: ropext verify {done.output}",
    ]
    return "\n".join(lines)


def readers_note(written: Plan, yarn: Plan | None, distance: float) -> str:
    """Return the note on engines that no longer read the form of a fitted spectrum, and on how
    much the narrower form costs at most. A fit within yarn begins at yarn's closed form, whose loss
    is `distance` above this one."""
    lost = list[str]()  # loaders that read it otherwise
    names = list[str]()
    for reading in newest(written.readings):
        if reading.verdict in WRONG:
            lost.append(reading.loader)
            names.append(f"{reading.loader} ({reading.verdict})")
    if not lost:
        return ""
    form = written.main.params["rope_type"]
    text = f"written as {form}, which these engines do not compute as planned: {', '.join(names)}"
    gained = list[str]()
    if yarn is not None:
        same = {reading.loader for reading in newest(yarn.readings) if reading.verdict == "same"}
        gained = [loader for loader in lost if loader in same]
    if form != "longrope" or not gained:
        return text
    cost = f"at most {distance:.4f} nats per token here" if distance > 0 else "nothing here"
    return f"{text}; with --within yarn {listed(gained)} do, too, and it costs {cost} (second half)"


def fit_tables(done: Fitted) -> tuple[Table, ...]:
    """Return the tables of a fit: numbers on held-out documents, and the pair factors."""
    return done.tables[0], _pair_factors_table(done)


def _pair_factors_table(done: Fitted) -> Table:
    """Return the table of the pair factors: fitted, and of the closed forms."""
    site = done.plan.main
    forms = scaling.well_known(site.rope, done.plan.target)
    header = ["pair", "wavelength", "written"]
    header += forms
    rows = list[tuple[str, ...]]()
    for pair, wavelength in enumerate(site.rope.spectrum.wavelengths):
        row = [f"{pair}", f"{wavelength:.4g}", f"{done.pair_factors[pair]:.3f}"]
        for form in forms.values():
            row.append(f"{form.pair_factors[pair]:.3f}")
        rows.append(tuple(row))
    written = done.attention_factor / site.rope.attention_factor
    last_row = ["attention factor", "", f"{written:.4f}"]
    for form in forms.values():
        last_row.append(f"{form.attention_factor:.4f}")
    rows.append(tuple(last_row))
    title = "Pair factors (by how much each pair is slowed)"
    return Table(title, "", tuple(header), tuple(rows))


def fit_summary(done: Fitted, within: str) -> TrainingSummary:
    """Return the story of a fit, for the record and the card."""
    training = done.training
    judge = training.judge
    assert judge is not None  # of a fit
    section = record_section(done, FITTED_BY, FIT_FACTS) | {
        "within": within,
        "documents": len(training.rows.documents),
        "judging": [document.name for document in judge.documents],
        "notes": list(done.notes),
    }
    summary = (
        "Its RoPE frequencies were fitted on text with the weights frozen: "
        f"{done.counted['moving']} numbers, {done.step} steps, starting from {done.start}; "
        f"{done.reason}."
    )
    if done.kept == START:
        summary = (
            f"A fit of the RoPE frequencies was tried ({done.tokens:,} tokens) and not kept: "
            f"{done.reason}."
        )
    return TrainingSummary(section, (summary,), fit_tables(done), training.used.to_json())


def fit_files(done: Fitted, kept: JsonObject) -> dict[str, bytes]:
    """Return OUT/pair-factors.json and the files of OUT/fit: the record `kept`, and its parts in
    separate files."""
    record = done.to_json()
    out: JsonObject = {
        "pair-factors.json": {
            "pair_factors": done.pair_factors,
            "attention_factor": done.attention_factor,
        },
        "fit/numbers.json": {
            "numbers": record["numbers"],
            "change": record["change"],
            "closed_forms": done.closed_forms,
        },
        "fit/losses.json": {"losses": record["losses"], "judgements": record["judgements"]},
        done.file: kept,
    }
    return json_files(out) | {
        "fit/pair-factors.png": _factors_picture(done),
        "fit/positions.png": _positions_picture(done),
    }


def _factors_picture(done: Fitted) -> bytes:
    """Draw the pair factors that a fit writes after its training, and the closed forms', as
    OUT/fit/pair-factors.png."""
    from matplotlib.ticker import FuncFormatter

    from ropext.results.report import plots

    axis = plots.plot_axes("Pair factors", "by how much each pair is slowed", "pair")
    forms = scaling.well_known(done.plan.main.rope, done.plan.target)
    styled = plots.line_styles([*forms, FITTED])
    for name, form in forms.items():
        label = f"{name}, the start" if name == done.start else name
        plots.draw_by_pair(axis, form.pair_factors, label, styled[name])
    plots.draw_by_pair(axis, done.pair_factors, "written", styled[FITTED])
    axis.set_yscale("log")
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    axis.yaxis.set_major_formatter(plain)
    axis.yaxis.set_minor_formatter(plain)
    return plots.picture_with_legend(axis)


def _positions_picture(done: Fitted) -> bytes:
    """Draw the loss by position before and after the training of a fit, on held-out documents, as
    OUT/fit/positions.png."""
    from ropext.results.report import plots

    assert done.measurement is not None  # of a fit
    frame = done.measurement.frame
    readings = done.measurement.readings
    middles = tuple((a * b) ** 0.5 for a, b in octaves(frame.context, frame.longest))
    curves = list[plots.Curve]()
    for label, reading in readings.items():
        name = done.start if label == START else label
        losses = tuple(octave.nll for octave in loss_by_position(frame, reading, None))
        curves.append(plots.Curve(name, middles, losses))
    title = "Loss by position, held-out documents"
    plot = plots.LinePlot(title, "nats per token", frame.context, frame.longest)
    return plots.line_plot(plot, curves)
