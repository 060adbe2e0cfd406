"""A training in words, tables and pictures: for the terminal, the card, ropext.json and OUT."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ropext import scaling
from ropext.checkpoint.provenance import TRAINED_ON
from ropext.errors import listed
from ropext.jsontext import JsonObject, values_json
from ropext.lengths import length_text, octaves
from ropext.planning import Plan
from ropext.planning.plan import WRONG, newest
from ropext.report.cells import Column, nats, table_of
from ropext.report.text import size
from ropext.results import BASE, CONTROL, EXTENDED, FITTED, START, TUNED, UNTUNED
from ropext.results.overlap import Overlap, marked, overlap_in
from ropext.results.perplexity import by_position
from ropext.results.values import FEWEST_DOCUMENTS, Value, values_of
from ropext.table import Table, as_text, columns, folded
from ropext.training.judge import Numbers
from ropext.training.objective import Objective
from ropext.training.result import Finetuned, Fitted, judged_steps
from ropext.training.rows import FIT_TASK, Rows
from ropext.training.training import Training

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The rows of a fine-tuning's table, and of a fit's.
TUNED_ROWS = {BASE: BASE, UNTUNED: EXTENDED, CONTROL: CONTROL, TUNED: TUNED}
# From here on repeated text teaches less and less (Muennighoff et al. 2023, figure 1).
MANY_PASSES = 8
NEW_ROWS = " new rows of "  # among what a fine-tuning trains
# What the record repeats of the options, and of a fit's result.
TUNED_BY = (
    "strategy",
    "packing",
    "train_norms",
    "train_embeddings",
    "retrieval_share",
    "keep_short",
    "seed",
)
FITTED_BY = ("ceiling", "retrieval_share", "keep_short", "packing", "seed", "strategy")
FIT_FACTS = ("kept", "reason", "start", "step", "tokens", "change")


@dataclass(frozen=True)
class Story:
    """What the record and the cards say of a training."""

    section: Mapping[str, Any]  # of ropext.json, under "finetune" or "fit"
    summary: tuple[str, ...]
    numbers: tuple[Table, ...]
    trained_on: Mapping[str, Any]  # of ropext.json, and beside the adapter

    def sections(self, name: str) -> dict[str, Any]:
        """Of ropext.json."""
        return {name: dict(self.section), TRAINED_ON: dict(self.trained_on)}


def plan_text(objective: Objective[Any]) -> str:
    """What `--dry-run` prints: each setting with where it comes from, then what it takes."""
    training = objective.training
    settings = objective.settings
    counts = objective.needs
    rows = training.rows
    settings_rows = list[tuple[str, str, str]]()
    for name, setting in settings.named.items():
        settings_rows.append((name.replace("_", " "), _plain(setting.value), setting.source))
    most = "at most " if settings.is_open else ""
    lines = [
        f"trained: {counts.moving:,} parameters in {', '.join(counts.targets)}",
        f"documents: {len(rows.documents)} to train on, {training.judged} to judge by, "
        f"{rows.too_short} too short",
        passes_text(rows, most),
    ]
    lines += _short_windows(training)
    lines += [
        f"tokens: {most}{objective.tokens:,} with gradients, {objective.forward_tokens:,} without "
        f"(evaluations, one every {settings.between} steps)",
        f"bytes: {size(counts.weight_bytes)} of weights, {size(counts.moving_bytes)} of what is "
        "trained with its gradient and AdamW's two moments",
    ]
    if counts.recompute:
        lines.append("layers are run again in the backward pass")
    if counts.sliced:
        lines.append(f"the loss needs whole logits: {counts.sliced}")
    if training.lineage:
        lines.append(f"warning: [seen] {training.lineage}")
    lines += [f"note: {remark}" for remark in objective.remarks]
    title = f"{training.snapshot.name}: {objective.title}"
    return "\n".join([f"{title}\n\n{columns((), settings_rows)}\n", *lines])


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple | list):
        return "/".join(map(str, value))
    return str(value)


def _json_files(contents: Mapping[str, Any]) -> dict[str, bytes]:
    files = dict[str, bytes]()
    for name, content in contents.items():
        text = json.dumps(content, indent=1)
        files[name] = f"{text}\n".encode()
    return files


def _rows(names: Mapping[str, str], numbers: Numbers) -> list[tuple[str, dict[str, Value]]]:
    """Return the models that were read, by their names. The base has no number that is held against
    the base."""
    rows = list[tuple[str, dict[str, Value]]]()
    for label, name in names.items():
        if label not in numbers:
            continue
        values = dict(numbers[label])
        if label == BASE:
            for metric in numbers[label]:
                if metric.startswith(("gain@", "short_tax")):
                    del values[metric]
        rows.append((name, values))
    return rows


def _plain_value(value: Value | None) -> str:
    return "" if value is None else f"{value.value:.4f}"


def _signed_value(value: Value | None) -> str:
    return "" if value is None else f"{value.value:+.4f}"


SHORT_TAX = Column("short tax", "short_tax", _signed_value)


def _section(
    done: Finetuned | Fitted, options: Iterable[str], facts: Iterable[str]
) -> dict[str, Any]:
    """Return what ropext.json says of either training, with some options, and facts of the
    result."""
    training = done.training
    section = dict[str, Any](settings=training.settings.named, overlap=training.overlap)
    section["numbers"] = done.numbers
    for name in facts:
        section[name] = getattr(done, name)
    written: dict[str, Any] = values_json(section)
    for name in options:
        written[name] = getattr(training.options, name)
    return written


# Of a fine-tuning.


def asked_text(share: float) -> list[str]:
    """What must be known to read a retrieval score of a model that was trained to retrieve."""
    if not share:
        return []
    return [
        f"{share:.0%} of the training rows are retrieval questions worded like the task mkey, so "
        "its scores are those of a trained task."
    ]


def _short_windows(training: Training) -> list[str]:
    """The sentence on windows of the original length."""
    if not training.options.keep_short:
        return []
    return [
        f"Each step also reads {training.options.keep_short} windows of {training.context} tokens."
    ]


def passes_text(rows: Rows, most: str = "") -> str:
    """How often the same text is read."""
    text = f"rows: {most}{len(rows):,}, and the documents hold {rows.per_pass:,}"
    if rows.passes <= 1:
        return text
    text += f": {most}{rows.passes:,.1f} passes"
    if most:  # how often it was really read is said at the end, where the documents decide
        return text
    return text + too_often(rows.passes)


def too_often(passes: float) -> str:
    """The warning where the same text is read often; "" elsewhere."""
    if passes < MANY_PASSES:
        return ""
    return (
        f" (warning: [passes] after {MANY_PASSES} passes the same text teaches less and less; "
        "more documents are better)"
    )


def finetune_result(done: Finetuned) -> str:
    """What `finetune` prints at its end."""
    target = done.training.target
    line = f"wrote {done.output}: trained {done.steps} steps"
    if done.stopped_early:
        line += ", stopped: held-out documents no longer improved"
    if done.training.settings.patience:
        line += f"; the weights of step {done.kept_step}, the best, are kept"
    lines = [line]
    overlap = done.training.overlap
    table = finetune_table(done.numbers, target, overlap, "On held-out documents")
    if table is not None:
        lines += ["", as_text([table]), ""]
        lines += verdict(done.numbers, target)
    for note in done.notes:
        lines.append(f"note: {note}")
    lines += ["", f"next: ropext verify {done.output}"]
    return "\n".join(lines)


def finetune_table(
    numbers: Numbers, target: int, overlap: Overlap | None, title: str = ""
) -> Table | None:
    """Lay out base, untuned, control and tuned; None where no document was read."""
    if not numbers:
        return None
    mark = "" if overlap is None else overlap.mark
    note = "The base is read through its short window"
    if CONTROL in numbers:
        both = "Base and control (the base trained on the same tokens)"
        note = f"{both} are read through the short window"
    names = dict(TUNED_ROWS)
    for label in (CONTROL, TUNED):
        names[label] = marked(label, mark)
    columns = [
        Column(f"tail loss at {length_text(target)}", f"tail_nll@{target}", _plain_value),
        Column("against the base", f"gain@{target}", _behind),
        SHORT_TAX,
    ]
    return table_of(title, note, _rows(names, numbers), columns)


def recorded_table(section: JsonObject, target: int) -> Table | None:
    """Lay out what ropext.json keeps of a fine-tuning; None where no document was read."""
    overlap = overlap_in(section.get("overlap"))
    numbers = dict[str, dict[str, Value]]()
    for label, metrics in (section.get("numbers") or {}).items():
        numbers[label] = values_of(metrics)
    table = finetune_table(numbers, target, overlap, "Fine-tuning")
    if table is None:
        return None
    note = f"{section['steps']} steps, {section['tokens']:,} tokens"
    if overlap is not None:
        note += f"; {overlap.of_documents}"
    return replace(table, note=note)


def _behind(gain: Value | None) -> str:
    """Write nats a token above the base on the same tokens, paired by document."""
    if gain is None:
        return ""
    if gain.ci95 is None:
        return f"{-gain.value:+.4f} ({gain.n} documents)"
    low, high = gain.ci95
    return nats(replace(gain, value=-gain.value, ci95=(-high, -low)))


def verdict(numbers: Numbers, target: int) -> list[str]:
    """Say what the table shows; adaptation to the text is told apart from extension."""
    if not numbers:
        return []
    tails = {label: values[f"tail_nll@{target}"] for label, values in numbers.items()}
    if tails[BASE].ci95 is None:
        return [f"Fewer than {FEWEST_DOCUMENTS} documents give numbers, and no verdict."]
    base = tails[BASE].value
    tuned = tails[TUNED].value
    line = (
        f"At {length_text(target)} the tuned model's loss on the last tokens is "
        f"{_apart(tuned, base)} the base's in its own window"
    )
    if CONTROL not in tails:
        return [f"{line}; a part of any gain is adaptation to the text (--control measures it)."]
    control = tails[CONTROL].value
    return [
        f"{line}, and {_apart(tuned, control)} the control's, which is {_apart(control, base)} "
        "the base's by adaptation to the text alone."
    ]


def _apart(one: float, other: float) -> str:
    side = "below" if one < other else "above"
    return f"{abs(one - other):.4f} nats a token {side}"


def finetune_story(done: Finetuned) -> Story:
    """For the record and the card."""
    training = done.training
    targets = done.objective.needs.targets
    options = training.options
    settings = training.settings
    overlap = training.overlap
    steps = done.kept_step
    tokens = done.kept_step * settings.step_tokens
    final_loss = done.losses[-1]["loss"] if done.losses else None
    section = _section(done, TUNED_BY, ("stopped_early", "passes")) | {
        "targets": list(targets),
        "steps": steps,
        "trained_steps": done.steps,
        "tokens": tokens,
        "data_sha256": training.data.digest(),
        "final_loss": final_loss,
        "control": done.control is not None,
    }
    ways = [f"in {target}" for target in targets if NEW_ROWS in target]
    if settings.rank is not None:
        rank = settings.rank.value
        ways.append(f"with a LoRA of rank {rank}, which is merged into the weights")
    summary = [
        f"It was then trained for {steps} steps ({tokens:,} tokens, strategy {options.strategy}) "
        f"{' and '.join(ways)}."
    ]
    summary += asked_text(options.retrieval_share)
    summary += _short_windows(training)
    summary += verdict(done.numbers, training.target)
    if lineage := training.lineage:
        summary.append(f"{lineage[0].upper()}{lineage[1:]}.")
    scored = training.learning.scored
    documents = overlap.of_documents if overlap else "documents"
    caption = (
        f"Loss over the last {scored} before {training.target:,}, in nats a token, on the same "
        f"tokens of {documents}"
    )
    table = finetune_table(done.numbers, training.target, overlap, caption)
    tables = () if table is None else (table,)
    return Story(section, tuple(summary), tables, training.used.to_json())


def finetune_files(done: Finetuned) -> dict[str, bytes]:
    """OUT/training."""
    contents = {
        "settings.json": done.objective.to_json(),
        "losses.json": {
            "tuned": done.losses,
            "evaluations": done.evaluations,
            "control": done.control and done.control["losses"],
        },
        "numbers.json": values_json(done.numbers),
    }
    return _json_files(contents) | {"loss.png": _losses_picture(done)}


def _losses_picture(done: Finetuned) -> bytes:
    """Loss by step as a PNG."""
    from matplotlib.ticker import MaxNLocator

    from ropext.report import plots

    axis = plots.axes("Loss of the training", "nats per token", "step")
    _draw_losses(axis, done.losses, "training loss", plots.COLOURS[0])
    if done.control is not None:
        _draw_losses(axis, done.control["losses"], "training loss of the control", plots.GREY)
    if done.evaluations:
        steps = list[float]()
        values = list[float]()
        key = f"tail_nll@{done.training.target}"
        if UNTUNED in done.numbers:  # before the first step
            steps.append(0)
            values.append(done.numbers[UNTUNED][key].value)
        for evaluation in done.evaluations:
            steps.append(evaluation["step"])
            values.append(evaluation["tail_nll"])
        if BASE in done.numbers:
            base = done.numbers[BASE][key].value
            axis.axhline(base, label="base, in its window", **plots.REFERENCE)
        label = "tail loss, held-out documents"
        axis.plot(steps, values, "o-", color=plots.COLOURS[1], label=label)
    axis.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
    return plots.finished(axis)


def _draw_losses(
    axis: "Axes", losses: Sequence[Mapping[str, float]], label: str, colour: str
) -> None:
    """Draw the loss of each logged step."""
    if losses:
        steps = [entry["step"] for entry in losses]
        values = [entry["loss"] for entry in losses]
        axis.plot(steps, values, color=colour, lw=1.2, label=label)


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


def fit_result(done: Fitted) -> str:
    """What `fit` prints at its end."""
    what = f"the fitted spectrum, as {done.method}"
    if done.kept != FITTED:
        what = f"{done.start}, the start: the fit was not surely better"
    lines = [f"wrote {done.output}: {what}", "", as_text(fit_tables(done)), ""]
    for note in done.notes:
        lines.append(folded(f"note: {note}"))
    lines += [
        f"cost: {len(done.losses)} steps, {done.tokens:,} tokens with gradients, "
        f"{done.forward_tokens:,} without",
        "",
        f"next: ropext verify {done.output}",
    ]
    return "\n".join(lines)


def readers_note(written: Plan, yarn: Plan | None, distance: float) -> str:
    """Who no longer reads what is written, and what the narrower form would cost at most: a fit
    within yarn begins at its closed form, which is `distance` above this one."""
    lost = list[str]()  # loaders that read it otherwise
    names = list[str]()
    for reading in newest(written.readings):
        if reading.verdict in WRONG:
            lost.append(reading.loader)
            names.append(f"{reading.loader} ({reading.verdict})")
    if not lost:
        return ""
    form = written.main.params["rope_type"]
    text = f"not read as planned by {', '.join(names)}: it is written as {form}"
    gained = list[str]()
    if yarn is not None:
        same = {reading.loader for reading in newest(yarn.readings) if reading.verdict == "same"}
        gained = [loader for loader in lost if loader in same]
    if form != "longrope" or not gained:
        return text
    cost = f"at most {distance:.4f} nats a token here" if distance > 0 else "nothing here"
    return f"{text}; --within yarn is read by {listed(gained)} too, and costs {cost} (far half)"


def fit_tables(done: Fitted) -> tuple[Table, ...]:
    """Numbers on held-out documents, and what moved."""
    return _fit_numbers(done), _fit_factors(done)


def _fit_numbers(done: Fitted) -> Table:
    training = done.training
    target = done.training.target
    mark = training.overlap.mark if training.overlap else ""

    names = {BASE: BASE, START: done.start, FITTED: marked(FITTED, mark)}
    rows = _rows(names, done.numbers)
    asked = f"{FIT_TASK}@{target}"
    _, base_values = rows[0]
    near = base_values.get(f"{FIT_TASK}@{training.context}")
    if near is not None:  # the base is asked inside its own context
        base_values[asked] = near

    def answers(value: Value | None) -> str:
        if value is None:
            return ""
        text = f"{value.value:.2f} of {value.n}"
        if value is near:
            text += f" at {length_text(training.context)}"
        return text

    columns = [
        Column("tail perplexity", f"tail@{target}", _plain_value),
        Column("tail loss", f"tail_nll@{target}", _plain_value),
        Column("far half loss", f"far_half_nll@{target}", _plain_value),
        SHORT_TAX,
    ]
    if any(asked in values for _, values in rows):
        columns.append(Column(f"{FIT_TASK} at {length_text(target)}", asked, answers))
    title = f"On held-out {marked('documents', mark)}, at {length_text(target)} tokens"
    return table_of(title, "", rows, columns)


def _fit_factors(done: Fitted) -> Table:
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


def fit_story(done: Fitted) -> Story:
    """For the record and the card."""
    training = done.training
    objective = done.objective
    judge = done.training.judge
    assert judge is not None  # of a fit
    section = _section(done, FITTED_BY, FIT_FACTS) | {
        "within": objective.facts["within"],
        "documents": len(training.rows.documents),
        "judging": [document.name for document in judge.documents],
        "notes": list(done.notes),
    }
    summary = (
        f"Its spectrum was fitted on text with the weights frozen: {objective.needs.moving} "
        f"numbers, {done.step} steps, starting from {done.start}; {done.reason}."
    )
    if done.kept == START:
        summary = (
            f"A fit of the spectrum was tried ({done.tokens:,} tokens) and not kept: {done.reason}."
        )
    return Story(section, (summary,), fit_tables(done), training.used.to_json())


def fit_files(done: Fitted) -> dict[str, bytes]:
    """OUT/pair-factors.json and OUT/fit."""
    out: dict[str, Any] = {
        "pair-factors.json": {
            "pair_factors": done.pair_factors,
            "attention_factor": done.attention_factor,
        },
        "fit/numbers.json": {
            "numbers": values_json(done.numbers),
            "change": values_json(done.change),
            "closed_forms": done.closed_forms,
        },
        "fit/losses.json": {"losses": done.losses, "judgements": judged_steps(done.judgements)},
    }
    return _json_files(out) | {
        "fit/pair-factors.png": _factors_picture(done),
        "fit/positions.png": _positions_picture(done),
    }


def _factors_picture(done: Fitted) -> bytes:
    """The pair factors beside those of the closed forms."""
    from matplotlib.ticker import FuncFormatter

    from ropext.report import plots

    axis = plots.axes("Pair factors", "by how much each pair is slowed", "pair")
    forms = scaling.well_known(done.plan.main.rope, done.plan.target)
    styled = plots.styles([*forms, FITTED])
    for name, form in forms.items():
        label = f"{name}, the start" if name == done.start else name
        plots.by_pair(axis, form.pair_factors, label, styled[name])
    plots.by_pair(axis, done.pair_factors, "written", styled[FITTED])
    axis.set_yscale("log")
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    axis.yaxis.set_major_formatter(plain)
    axis.yaxis.set_minor_formatter(plain)
    return plots.finished(axis)


def _positions_picture(done: Fitted) -> bytes:
    from ropext.report import plots

    assert done.measurement is not None  # of a fit
    frame = done.measurement.frame
    readings = done.measurement.readings
    middles = tuple((a * b) ** 0.5 for a, b in octaves(frame.context, frame.longest))
    curves = list[plots.Curve]()
    for label, reading in readings.items():
        name = done.start if label == START else label
        losses = tuple(octave.nll for octave in by_position(frame, reading, None))
        curves.append(plots.Curve(name, middles, losses))
    title = "Loss by position, held-out documents"
    plot = plots.LinePlot(title, "nats per token", frame.context, frame.longest)
    return plots.lines(plot, curves)
