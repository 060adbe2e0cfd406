"""A training in words, tables and pictures: for the terminal, the card, ropext.json and OUT."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ropext import scaling
from ropext.errors import listed
from ropext.lengths import length_text, octaves
from ropext.planning import Plan
from ropext.planning.plan import WRONG, newest
from ropext.report.text import size
from ropext.results.overlap import mark_of, marked
from ropext.results.perplexity import Reading, by_position
from ropext.results.values import FEWEST_DOCUMENTS, Value, values_json
from ropext.table import Table, as_text, columns

if TYPE_CHECKING:
    from ropext.options.training import Training
    from ropext.training.finetune import Finetuned
    from ropext.training.fit import Fitted
    from ropext.training.judge import Judge
    from ropext.training.rows import Rows
    from ropext.training.run import Planned
    from ropext.training.writing import Story

Numbers = dict[str, dict[str, Any]]  # label -> values as JSON

# The rows of a fine-tuning's table, and of a fit's.
TUNED_ROWS = {"base": "base", "untuned": "extended", "control": "control", "tuned": "tuned"}
TRAINED = ("control", "tuned")
# From here on repeated text teaches less and less (Muennighoff et al. 2023, figure 1).
MANY_PASSES = 8
FITTED = "fitted"  # its name in pictures and tables
FIT_ROWS = {"base": "base", "start": "{start}", "fitted": FITTED}
# Options that the record repeats.
TUNED_BY = ("train_norms", "train_embeddings", "retrieval_share", "keep_short", "seed")
FITTED_BY = ("ceiling", "retrieval_share", "keep_short", "packing", "seed")


def plan_text(planned: "Planned[Any]") -> str:
    """What `--dry-run` prints: each setting with where it comes from, then what it takes."""
    prepared, settings, rows = planned.prepared, planned.prepared.settings, planned.prepared.rows
    named = settings.named.items()
    shown = [(name.replace("_", " "), _plain(own.value), own.source) for name, own in named]
    most = "at most " if settings.is_open else ""
    lines = [
        f"trained: {planned.moving:,} parameters in {', '.join(planned.targets)}",
        f"documents: {len(rows.documents)} to train on, {prepared.judged} to judge by, "
        f"{rows.too_short} too short",
        passes_text(rows, most),
        *_kept(prepared.options, prepared.context),
        f"tokens: {most}{planned.tokens:,} with gradients, {prepared.forward_tokens:,} without "
        f"(evaluations, one every {settings.between} steps)",
        f"bytes: {size(planned.weight_bytes)} of weights, {size(planned.moving_bytes)} of what is "
        "trained with its gradient and AdamW's two moments",
    ]
    if planned.recompute:
        lines.append("layers are run again in the backward pass")
    if planned.sliced:
        lines.append(f"the loss needs whole logits: {planned.sliced}")
    if prepared.lineage:
        lines.append(f"warning: {prepared.lineage}")
    lines += [f"note: {remark}" for remark in prepared.remarks]
    title = f"{prepared.snapshot.name}: {prepared.title}"
    return "\n".join([title, "", *columns((), shown).splitlines(), "", *lines])


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return "/".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def _json_files(contents: Mapping[str, Any]) -> dict[str, bytes]:
    return {name: (json.dumps(own, indent=1) + "\n").encode() for name, own in contents.items()}


# Of a fine-tuning.


def _kept(options: "Training", context: int) -> list[str]:
    """The sentence on windows of the original length."""
    if not options.keep_short:
        return []
    return [f"Each step also reads {options.keep_short} windows of {context} tokens."]


def passes_text(rows: "Rows", most: str = "") -> str:
    """How often the same text is read."""
    text = f"rows: {most}{len(rows):,}, and the documents hold {rows.per_pass:,}"
    if rows.passes <= 1:
        return text
    # How often it was really read is said at the end, where the documents decide.
    return f"{text}: {most}{rows.passes:,.1f} passes{'' if most else too_often(rows.passes)}"


def too_often(passes: float) -> str:
    """The warning where the same text is read often; "" elsewhere."""
    if passes < MANY_PASSES:
        return ""
    return (
        f" (warning: from {MANY_PASSES} passes on the same text teaches less and less; more "
        "documents are better)"
    )


def finetune_result(done: "Finetuned") -> str:
    """What `finetune` prints at its end."""
    target = done.planned.prepared.target
    settings = done.planned.prepared.settings
    early = ", stopped: held-out documents no longer improved" if done.stopped_early else ""
    best = (
        f"; the weights of step {done.kept_step}, the best, are kept" if settings.patience else ""
    )
    lines = [f"wrote {done.output}: trained {done.steps} steps{early}{best}"]
    table = finetune_table(done.numbers, target, done.overlap, "On held-out documents")
    if table is not None:
        lines += ["", as_text([table]), "", *verdict(done.numbers, target)]
    lines += [f"note: {note}" for note in done.notes]
    return "\n".join([*lines, "", f"next: ropext verify {done.output}"])


def finetune_table(
    numbers: Numbers, target: int, overlap: Mapping[str, Any] | None, title: str = ""
) -> Table | None:
    """Base, untuned, control, tuned."""
    if not numbers:
        return None
    mark = mark_of({"overlap": overlap})
    header = ("", f"tail loss at {length_text(target)}", "against the base", "short tax")
    note = "The base is read through its short window"
    if "control" in numbers:
        both = "Base and control (the base trained on the same tokens)"
        note = f"{both} are read through the short window"
    rows = []
    for label, name in TUNED_ROWS.items():
        if label in numbers:
            values = numbers[label]
            tail, tax = values[f"tail_nll@{target}"], values.get("short_tax")
            shown = "" if label == "base" or tax is None else f"{tax['value']:+.4f}"
            name = marked(name, mark if label in TRAINED else "")
            rows.append(
                (
                    name,
                    f"{tail['value']:.4f}",
                    "" if label == "base" else _behind(values, target),
                    shown,
                )
            )
    return Table(title, note, header, tuple(rows))


def _behind(values: Mapping[str, Any], target: int) -> str:
    """Nats a token above the base on the same tokens, paired by document."""
    gain = values.get(f"gain@{target}")
    if gain is None:
        return ""
    if not gain["ci95"]:
        return f"{-gain['value']:+.4f} ({gain['n']} documents)"
    return f"{-gain['value']:+.4f} ±{(gain['ci95'][1] - gain['ci95'][0]) / 2:.4f}"


def verdict(numbers: Numbers, target: int) -> list[str]:
    """What the table says, in words; adaptation to the text is told from extension."""
    if not numbers:
        return []
    tails = {label: own[f"tail_nll@{target}"] for label, own in numbers.items()}
    if tails["base"]["ci95"] is None:
        return [f"Fewer than {FEWEST_DOCUMENTS} documents give numbers, and no verdict."]
    base, tuned = tails["base"]["value"], tails["tuned"]["value"]
    line = (
        f"At {length_text(target)} the tuned model's loss on the last tokens is "
        f"{_apart(tuned, base)} the base's in its own window"
    )
    if "control" not in tails:
        return [f"{line}; a part of any gain is adaptation to the text (--control measures it)."]
    control = tails["control"]["value"]
    return [
        f"{line}, and {_apart(tuned, control)} the control's, which is {_apart(control, base)} "
        "the base's by adaptation to the text alone."
    ]


def _apart(one: float, other: float) -> str:
    return f"{abs(one - other):.4f} nats a token {'below' if one < other else 'above'}"


def finetune_story(done: "Finetuned") -> "Story":
    """For the record and the card."""
    from ropext.training.finetune import NEW_ROWS, asked_text
    from ropext.training.writing import Story

    prepared = done.planned.prepared
    options, settings, overlap = prepared.options, prepared.settings, prepared.overlap
    section = {
        "settings": settings.to_json(),
        "strategy": options.strategy,
        "packing": options.packing,
        "targets": list(done.planned.targets),
        **{name: getattr(options, name) for name in TUNED_BY},
        "steps": done.kept_step,
        "trained_steps": done.steps,
        "stopped_early": done.stopped_early,
        "tokens": done.kept_step * settings.step_tokens,
        "passes": done.passes,
        "data_sha256": prepared.data.digest(),
        "final_loss": done.losses[-1]["loss"] if done.losses else None,
        "control": done.control is not None,
        "numbers": done.numbers,
        "overlap": done.overlap,
    }
    told = prepared.lineage
    ways = [f"in {own}" for own in done.planned.targets if NEW_ROWS in own]
    if settings.lora is not None:
        rank = settings.lora.rank.value
        ways.append(f"with a LoRA of rank {rank}, which is merged into the weights")
    summary = [
        f"It was then trained for {section['steps']} steps ({section['tokens']:,} tokens, strategy "
        f"{options.strategy}) {' and '.join(ways)}.",
        *asked_text(options.retrieval_share),
        *_kept(options, prepared.context),
        *verdict(done.numbers, prepared.target),
        *([f"{told[0].upper()}{told[1:]}."] if told else []),
    ]
    caption = (
        f"Loss over the last {'masked ' if prepared.masking else ''}tokens before "
        f"{prepared.target:,}, in nats a token, on the same "
        f"tokens of {overlap.of_documents if overlap else 'documents'}"
    )
    table = finetune_table(done.numbers, prepared.target, done.overlap, caption)
    return Story(section, tuple(summary), (table,) if table else (), prepared.used.to_json())


def finetune_files(done: "Finetuned") -> dict[str, bytes]:
    """OUT/training."""
    contents = {
        "settings.json": done.planned.to_json(),
        "losses.json": {
            "tuned": done.losses,
            "evaluations": done.evaluations,
            "control": done.control and done.control["losses"],
        },
        "numbers.json": done.numbers,
    }
    return _json_files(contents) | {"loss.png": _losses_picture(done)}


def _losses_picture(done: "Finetuned") -> bytes:
    """Loss by step as a PNG."""
    from matplotlib.ticker import MaxNLocator

    from ropext.report import plots

    axis = plots.axes("Loss of the training", "nats per token", "step")
    for label, losses, colour in (
        ("training loss", done.losses, plots.COLOURS[0]),
        ("training loss of the control", (done.control or {}).get("losses"), plots.GREY),
    ):
        if losses:
            steps, values = [e["step"] for e in losses], [e["loss"] for e in losses]
            axis.plot(steps, values, color=colour, lw=1.2, label=label)
    if done.evaluations:
        steps = [e["step"] for e in done.evaluations]
        values = [e["tail_nll"] for e in done.evaluations]
        key = f"tail_nll@{done.planned.prepared.target}"
        if "untuned" in done.numbers:  # before the first step
            steps, values = [0, *steps], [done.numbers["untuned"][key]["value"], *values]
        if "base" in done.numbers:
            base = done.numbers["base"][key]["value"]
            axis.axhline(base, label="base, in its window", **plots.REFERENCE)
        label = "tail loss, held-out documents"
        axis.plot(steps, values, "o-", color=plots.COLOURS[1], label=label)
    axis.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
    return plots.finished(axis)


# Of a fit.


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


def fit_result(done: "Fitted") -> str:
    """What `fit` prints at its end."""
    what = f"the fitted spectrum, as {done.plan.method}"
    if done.kept != FITTED:
        what = f"{done.start}, the start: the fit was not surely better"
    lines = [f"wrote {done.output}: {what}", "", as_text(fit_tables(done)), ""]
    lines += [f"note: {note}" for note in done.notes]
    lost = done.tokens // done.planned.prepared.settings.step_tokens - len(done.losses)
    left = f" and {lost} that were given up" if lost else ""
    lines += [
        f"cost: {len(done.losses)} steps{left}, {done.tokens:,} tokens with gradients, "
        f"{done.planned.prepared.forward_tokens:,} without",
        "",
        f"next: ropext verify {done.output}",
    ]
    return "\n".join(lines)


def readers_note(written: Plan, yarn: Plan | None, distance: float) -> str:
    """Who no longer reads what is written, and what the narrower form would cost at most: a fit
    within yarn begins at its closed form, which is `distance` above this one."""
    lost = {own.loader: own.verdict for own in newest(written.readings) if own.verdict in WRONG}
    if not lost:
        return ""
    said = ", ".join(f"{loader} ({verdict})" for loader, verdict in lost.items())
    form = written.main.params["rope_type"]
    text = f"not read as planned by {said}: it is written as {form}"
    same = {own.loader for own in newest(yarn.readings) if own.verdict == "same"} if yarn else set()
    gained = [loader for loader in lost if loader in same]
    if form != "longrope" or not gained:
        return text
    cost = f"at most {distance:.4f} nats a token here" if distance > 0 else "nothing here"
    return f"{text}; --within yarn is read by {listed(gained)} too, and costs {cost} (far half)"


def _fit_summary(done: "Fitted") -> str:
    """The sentence of the card."""
    if done.kept == "start":
        return (
            f"A fit of the spectrum was tried ({done.tokens:,} tokens) and not kept: {done.reason}."
        )
    return (
        f"Its spectrum was fitted on text with the weights frozen: {done.planned.moving} numbers, "
        f"{done.steps} steps, starting from {done.begun}; "
        f"{done.reason}."
    )


def fit_tables(done: "Fitted") -> tuple[Table, ...]:
    """Numbers on held-out documents, and what moved."""
    return _fit_numbers(done), _fit_factors(done)


def _fit_numbers(done: "Fitted") -> Table:
    from ropext.training.rows import MEASURED

    target, found = done.plan.target, done.planned.prepared.overlap
    header: tuple[str, ...] = (
        *("", "tail perplexity", "tail loss", "far half loss", "short tax"),
        f"{MEASURED} at {length_text(target)}",
    )
    rows: list[tuple[str, ...]] = []
    mark = found.mark if found else ""
    for label, title in FIT_ROWS.items():
        values = done.numbers.get(label)
        if values is None:
            continue
        asked = values.get(f"{MEASURED}@{target}")
        tax = "" if label == "base" else f"{values['short_tax']['value']:+.4f}"
        names = (f"tail@{target}", f"tail_nll@{target}", f"far_half_nll@{target}")
        cells = [f"{values[name]['value']:.4f}" for name in names]
        shown = "" if asked is None else f"{asked['value']:.2f} of {asked['n']}"
        if label == "base" and (own := values.get(f"{MEASURED}@{done.plan.context}")):
            shown = f"{own['value']:.2f} of {own['n']} at {length_text(done.plan.context)}"
        name = marked(title.format(start=done.start), mark if label == FITTED else "")
        rows.append((name, *cells, tax, shown))
    if not any(row[-1] for row in rows):  # no question was asked
        header, rows = header[:-1], [row[:-1] for row in rows]
    title = f"On held-out {marked('documents', mark)}, at {length_text(target)} tokens"
    return Table(title, "", header, tuple(rows))


def _fit_factors(done: "Fitted") -> Table:
    site = done.plan.main
    forms = scaling.well_known(site.rope, done.plan.target)
    columns = {"written": done.pair_factors}
    columns |= {name: own.pair_factors for name, own in forms.items()}
    rows = [
        (f"{pair}", f"{wavelength:.4g}", *(f"{own[pair]:.3f}" for own in columns.values()))
        for pair, wavelength in enumerate(site.rope.spectrum.wavelengths)
    ]
    attention = [done.attention_factor / site.rope.attention_factor]
    attention += [own.attention_factor for own in forms.values()]
    rows.append(("attention factor", "", *(f"{own:.4f}" for own in attention)))
    title = "Pair factors (by how much each pair is slowed)"
    return Table(title, "", ("pair", "wavelength", *columns), tuple(rows))


def fit_story(done: "Fitted") -> "Story":
    """For the record and the card."""
    from ropext.training.writing import Story

    prepared = done.planned.prepared
    options = prepared.options
    section = {
        "kept": done.kept,
        "reason": done.reason,
        "start": done.start,
        "begun": done.begun,
        "within": prepared.within,
        "step": done.steps,
        "tokens": done.tokens,
        "settings": prepared.settings.to_json(),
        **{name: getattr(options, name) for name in FITTED_BY},
        "documents": len(prepared.rows.documents),
        "strategy": options.strategy,
        "judging": [own.name for own in prepared.judge.documents],
        "change": done.change,
        "numbers": done.numbers,
        "overlap": values_json(prepared.overlap),
        "notes": list(done.notes),
    }
    summary, tables = (_fit_summary(done),), fit_tables(done)
    return Story(section, summary, tables, prepared.used.to_json())


def fit_files(
    done: "Fitted",
    judge: "Judge",
    readings: Mapping[str, Reading],
    closed: Mapping[str, Reading],
) -> dict[str, bytes]:
    """OUT/pair-factors.json and OUT/fit."""
    out: dict[str, Any] = {
        "pair-factors.json": {
            "pair_factors": list(done.pair_factors),
            "attention_factor": done.attention_factor,
        },
        "fit/numbers.json": {
            "numbers": done.numbers,
            "change": done.change,
            "closed_forms": {m: judge.loss(reading) for m, reading in closed.items()},
        },
        "fit/losses.json": {"losses": list(done.losses), "judgements": done.judged},
    }
    return _json_files(out) | {
        "fit/pair-factors.png": _factors_picture(done),
        "fit/positions.png": _positions_picture(done, judge, readings),
    }


def _factors_picture(done: "Fitted") -> bytes:
    """The pair factors beside those of the closed forms."""
    from matplotlib.ticker import FuncFormatter

    from ropext.report import plots

    axis = plots.axes("Pair factors", "by how much each pair is slowed", "pair")
    forms = scaling.well_known(done.plan.main.rope, done.plan.target)
    styled = plots.styles([*forms, FITTED])
    for name, own in forms.items():
        label = f"{name}, the start" if name == done.start else name
        plots.by_pair(axis, own.pair_factors, label, styled[name])
    plots.by_pair(axis, done.pair_factors, "written", styled[FITTED])
    axis.set_yscale("log")
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    axis.yaxis.set_major_formatter(plain)
    axis.yaxis.set_minor_formatter(plain)
    return plots.finished(axis)


def _positions_picture(done: "Fitted", judge: "Judge", readings: Mapping[str, Reading]) -> bytes:
    from ropext.report import plots

    frame = judge.frame
    middles = tuple((a * b) ** 0.5 for a, b in octaves(frame.context, frame.longest))
    lines = [
        plots.Curve(
            FIT_ROWS[label].format(start=done.start),
            middles,
            tuple(row["nll"] for row in by_position(frame, reading, None)),
        )
        for label, reading in readings.items()
    ]
    title = "Loss by position, held-out documents"
    return plots.lines(title, "nats per token", lines, frame.context, frame.longest)
