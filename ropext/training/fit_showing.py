"""A fit in words, tables and pictures: for the terminal, the card, ropext.json, OUT/fit."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ropext import scaling
from ropext.errors import UsageError
from ropext.lengths import length_text, octaves
from ropext.planning import Plan, PlannedSite
from ropext.results.overlap import as_json, marked
from ropext.results.perplexity import Reading, by_position
from ropext.results.values import Value
from ropext.table import Table, as_text
from ropext.training.fit_data import MEASURED
from ropext.training.showing import overlap_lines, settings_lines

if TYPE_CHECKING:
    from ropext.training.fit_judging import FitJudge
    from ropext.training.fit_writing import Fitted
    from ropext.training.fitting import PlannedFit

BESIDE = ("pi", "ntk", "yarn")  # closed forms that a fit is shown beside
FITTED = "fitted"  # its name in pictures and tables
ROWS = {
    "base": "base, through its short window",
    "start": "{start}",
    "fitted": FITTED,
}


def pair_factors(site: PlannedSite) -> tuple[float, ...]:
    """By how much each pair is slowed against what the model was trained with."""
    pairs = zip(site.rope.spectrum.inv_freq, site.wanted.inv_freq, strict=True)
    return tuple(now / new for now, new in pairs)


def change_text(change: Value) -> str:
    """`0.0540 nats a token lower over the far half, 95 % interval -0.0770 to -0.0310`."""
    way = "lower" if change.value < 0 else "higher"
    text = f"{abs(change.value):.4f} nats a token {way} over the far half"
    if change.ci95 is None:
        return f"{text}, without an interval"
    return f"{text}, 95 % interval {change.ci95[0]:+.4f} to {change.ci95[1]:+.4f}"


def share_text(change: Value) -> str:
    """Points of right answers with their interval."""
    ends = change.ci95 or (change.value, change.value)
    return f"{change.value:+.2f}, 95 % interval {ends[0]:+.2f} to {ends[1]:+.2f}"


def plan_text(planned: "PlannedFit") -> str:
    """What --dry-run prints."""
    prepared = planned.prepared
    plan = prepared.plan
    shown = {name: own for name, own in vars(prepared.settings).items() if own.source != "no LoRA"}
    if planned.search:
        shown = {"row tokens": prepared.settings.row_tokens}
    starts = list(prepared.starts)
    start = starts[0] if len(starts) == 1 else f"the best of {', '.join(starts)}"
    lines = [
        f"{prepared.base.snapshot.name}: from {plan.context} to {plan.target} tokens, "
        f"{planned.moving} number{'s move' if planned.moving > 1 else ' moves'} "
        f"({prepared.within}), starting from {start}",
        "",
        *settings_lines(shown),
        "",
        f"documents: {len(prepared.rows.texts.documents)} to fit on, "
        f"{len(prepared.documents.judging)} held out, {prepared.documents.too_short} too short",
        *_costs(planned),
        *overlap_lines(prepared.overlap),
        *(f"note: {note}" for note in prepared.notes),
    ]
    return "\n".join(lines)


def _costs(planned: "PlannedFit") -> list[str]:
    if planned.search:
        return [f"tokens: at most {planned.forward_tokens:,}, none of them with gradients"]
    return [
        f"tokens: {planned.tokens:,} with gradients, {planned.forward_tokens:,} without; FLOPs of "
        f"the training: {planned.estimate.flops:.2e}",
        f"memory of one device: about {planned.estimate.peak_bytes / 1e6:,.0f} MB",
    ]


def result_text(done: "Fitted") -> str:
    """What the command prints at its end."""
    what = f"the fitted spectrum, as {done.plan.method}"
    if done.kept != "fitted":
        what = f"{done.start}, the start: the fit was not surely better"
    lines = [f"wrote {done.output}: {what}"]
    lines += ["", as_text(tables(done))]
    lines += ["", *(f"note: {note}" for note in done.notes)]
    lines += [
        f"cost: {len(done.losses)} steps, {done.tokens:,} tokens with gradients, "
        f"{'at most ' if done.planned.search else ''}{done.planned.forward_tokens:,} without",
        "",
        f"next: ropext verify {done.output}",
    ]
    return "\n".join(lines)


def summary(done: "Fitted") -> tuple[str, ...]:
    """Sentences of the card."""
    if done.kept == "start":
        return (
            f"A fit of the spectrum was tried ({done.tokens:,} tokens) and not kept: "
            f"{done.reason}.",
        )
    tried = f"{len(done.trials) - 1} settings tried by forward passes alone"
    return (
        f"Its spectrum was fitted on text with the weights frozen: {done.planned.moving} numbers, "
        f"{tried if done.trials else f'{done.steps} steps'}, starting from {done.start}; "
        f"{done.reason}.",
    )


def tables(done: "Fitted") -> tuple[Table, ...]:
    """Numbers on held-out documents, and what moved."""
    return _numbers(done), _factors(done.plan)


def _documents(done: "Fitted") -> str:
    found = done.planned.prepared.overlap
    return marked("documents", found.mark if found else "")


def _numbers(done: "Fitted") -> Table:
    target = done.plan.target
    header = (
        *("", "tail perplexity", "tail loss", "far half loss", "short tax"),
        f"{MEASURED} at {length_text(target)}",
    )
    found = done.planned.prepared.overlap
    rows, mark = [], found.mark if found else ""
    for label, title in ROWS.items():
        values = done.numbers.get(label)
        if values is None:
            continue
        asked = values.get(f"{MEASURED}@{target}")
        tax = "" if label == "base" else f"{values['short_tax']['value']:+.4f}"
        cells = [f"{values[name]['value']:.4f}" for name in
                 (f"tail@{target}", f"tail_nll@{target}", f"far_half_nll@{target}")]  # fmt: skip
        shown = "" if asked is None else f"{asked['value']:.2f} of {asked['n']}"
        if label == "base" and (own := values.get(f"{MEASURED}@{done.plan.context}")):
            shown = f"{own['value']:.2f} of {own['n']} at {length_text(done.plan.context)}"
        name = marked(title.format(start=done.start), mark if label == "fitted" else "")
        rows.append((name, *cells, tax, shown))
    title = f"On held-out {_documents(done)}, at {length_text(target)} tokens"
    return Table(title, "", header, tuple(rows))


def _factors(plan: Plan) -> Table:
    forms = closed_forms(plan.main, plan.target)
    rope = plan.main.rope
    columns = {"written": pair_factors(plan.main)} | {n: own[0] for n, own in forms.items()}
    rows = [
        (f"{pair}", f"{wavelength:.4g}", *(f"{own[pair]:.3f}" for own in columns.values()))
        for pair, wavelength in enumerate(rope.spectrum.wavelengths)
    ]
    attention = [plan.main.wanted.attention_factor / rope.attention_factor]
    attention += [own[1] for own in forms.values()]
    rows.append(("attention factor", "", *(f"{own:.4f}" for own in attention)))
    title = "Pair factors (by how much each pair is slowed)"
    return Table(title, "", ("pair", "wavelength", *columns), tuple(rows))


def closed_forms(site: PlannedSite, target: int) -> dict[str, tuple[tuple[float, ...], float]]:
    """Pair factors and attention factor of the forms that a fit is shown beside."""
    found = {}
    for method in BESIDE:
        try:
            own = scaling.scale(site.rope, method, target, scaling.find(method).knobs(), None)
        except UsageError:
            continue  # a single pair has no NTK
        found[method] = (own.pair_factors, own.attention_factor)
    return found


def section(done: "Fitted") -> dict[str, Any]:
    """Of ropext.json, under "fit"."""
    prepared = done.planned.prepared
    return {
        "kept": done.kept,
        "reason": done.reason,
        "start": done.start,
        "within": prepared.within,
        "step": done.steps,
        "tokens": done.tokens,
        "settings": {
            name: {"value": own.value, "source": own.source}
            for name, own in vars(prepared.settings).items()
            if own.source != "no LoRA"
        },
        "ceiling": prepared.options.ceiling,
        "retrieval_share": prepared.options.retrieval_share,
        "keep_short": prepared.options.keep_short,
        "packing": prepared.options.packing,
        "seed": prepared.options.seed,
        "documents": len(prepared.rows.texts.documents),
        "searched": prepared.options.search,
        "judging": [own.name for own in prepared.documents.judging],
        "change": done.change,
        "numbers": done.numbers,
        "overlap": as_json(prepared.overlap),
        "notes": list(done.notes),
    }


def files(
    done: "Fitted",
    judge: "FitJudge",
    readings: Mapping[str, Reading],
    closed: Mapping[str, Reading],
) -> dict[str, bytes]:
    """OUT/pair-factors.json and OUT/fit."""
    out = {
        "pair-factors.json": {
            "pair_factors": list(done.pair_factors),
            "attention_factor": done.attention_factor,
        },
        "fit/numbers.json": {
            "numbers": done.numbers,
            "change": done.change,
            "closed_forms": {m: judge.loss(reading) for m, reading in closed.items()},
        },
        "fit/losses.json": {
            "losses": list(done.losses),
            "judgements": [{"step": k, "far_half_nll": v} for k, v in done.judgements.items()],
        },
    }
    if done.trials:
        out["fit/trials.json"] = {"trials": [trial.to_json() for trial in done.trials]}
    texts = {name: (json.dumps(own, indent=1) + "\n").encode() for name, own in out.items()}
    return texts | {
        "fit/pair-factors.png": _factors_picture(done.plan, done.start),
        "fit/positions.png": _positions_picture(done, judge, readings),
    }


def _factors_picture(plan: Plan, start: str) -> bytes:
    """The pair factors beside those of the closed forms."""
    from matplotlib.ticker import FuncFormatter

    from ropext.report import plots

    axis = plots.axes("Pair factors", "by how much each pair is slowed", "pair")
    forms = closed_forms(plan.main, plan.target)
    styled = plots.styles([*forms, FITTED])
    for name, own in forms.items():
        plots.by_pair(axis, own[0], f"{name}, the start" if name == start else name, styled[name])
    plots.by_pair(axis, pair_factors(plan.main), "written", styled[FITTED])
    axis.set_yscale("log")
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    axis.yaxis.set_major_formatter(plain)
    axis.yaxis.set_minor_formatter(plain)
    return plots.finished(axis)


def _positions_picture(done: "Fitted", judge: "FitJudge", readings: Mapping[str, Reading]) -> bytes:
    from ropext.report import plots

    frame = judge.frame
    middles = tuple((a * b) ** 0.5 for a, b in octaves(frame.context, frame.longest))
    lines = [
        plots.Curve(
            ROWS[label].format(start=done.start),
            middles,
            tuple(row["nll"] for row in by_position(frame, reading, None)),
            reference=label == "base",
        )
        for label, reading in readings.items()
    ]
    title = "Loss by position, held-out documents"
    return plots.lines(title, "nats per token", lines, frame.context, frame.longest)
