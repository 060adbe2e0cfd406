"""Describe a fine-tuning in words, tables and pictures: for the terminal, the card, ropext.json and
OUT."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ropext.base.jsontext import JsonObject, read_values
from ropext.base.lengths import length_text
from ropext.base.table import Table, as_text
from ropext.results import BASE, CONTROL, TUNED, UNTUNED
from ropext.results.overlap import read_overlap
from ropext.results.values import FEWEST_DOCUMENTS, Value, Values
from ropext.training.judge import BEYOND_CONTROL, GAIN, Numbers
from ropext.training.report import (
    TrainingSummary,
    json_files,
    record_section,
    short_windows_text,
    trained_to_retrieve_text,
)
from ropext.training.result import RESULT, Finetuned
from ropext.training.tables import finetune_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Options that the record repeats.
TUNED_BY = (
    "strategy",
    "packing",
    "train_norms",
    "train_embeddings",
    "retrieval_share",
    "keep_short",
    "seed",
    "data_seed",
)


SECTION = "finetune of ropext.json"


def finetune_result(done: Finetuned) -> str:
    """Write the text for the terminal after a fine-tuning: its trained steps, held-out losses and
    notes."""
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
        lines += finetune_verdict(done.numbers, target)
    for note in done.notes:
        lines.append(f"note: {note}")
    lines += ["", f"next: ropext verify {done.output}"]
    return "\n".join(lines)


def recorded_finetune_table(section: JsonObject, target: int) -> Table | None:
    """Return the table of a tuned model against its base and control, as its fine-tuning recorded
    it in ropext.json; None if no document was read."""
    overlap = read_overlap(section.get("overlap"), SECTION)
    numbers = read_values(dict[str, Values], section.get("numbers") or {}, SECTION)
    table = finetune_table(numbers, target, overlap, "Fine-tuning")
    if table is None:
        return None
    note = f"{section['steps']} steps, {section['tokens']:,} tokens"
    if overlap is not None:
        note += f"; {overlap.of_documents}"
    return replace(table, note=note)


def finetune_verdict(numbers: Numbers, target: int) -> list[str]:
    """Write from a fine-tuning's table how much the tuned model gains beyond its control, to
    separate extension from adaptation to the text."""
    if not numbers:
        return []
    tails = {label: values[f"tail_nll@{target}"] for label, values in numbers.items()}
    if tails[BASE].ci95 is None:
        return [f"Fewer than {FEWEST_DOCUMENTS} documents give numbers, and no verdict."]
    gain = numbers[TUNED][f"{GAIN}{target}"]
    line = (
        f"At {length_text(target)} the tuned model's loss on the last tokens is "
        f"{_gain_text(gain)} the base's in its own window{_gain_interval(gain)}"
    )
    if CONTROL not in tails:
        return [f"{line}; a part of any gain is adaptation to the text (--control measures it)."]
    of_control = numbers[CONTROL][f"{GAIN}{target}"]
    beyond = numbers[TUNED].get(f"{BEYOND_CONTROL}{target}")
    if beyond is None:  # the results of an evaluation do not have it
        beyond = Value(gain.value - of_control.value, None, None, gain.n)
    return [
        f"{line}, and {_gain_text(beyond)} the control's{_gain_interval(beyond)}. The control's is "
        f"{_gain_text(of_control)} the base's{_gain_interval(of_control)} by adaptation to the "
        "text alone."
    ]


def _gain_text(gain: Value) -> str:
    """Write, for a fine-tuning's report, how far its loss is below or above another one."""
    side = "below" if gain.value > 0 else "above"
    return f"{abs(gain.value):.4f} nats per token {side}"


def _gain_interval(gain: Value) -> str:
    """Write, for a fine-tuning's report, the interval of its loss above another one. Say so if it
    does not tell them apart."""
    if gain.ci95 is None:
        return ""
    low, high = gain.ci95
    known = "" if gain.sign else ", so which is lower is not known"
    return f" (95 % interval {-high:+.4f} to {-low:+.4f}{known})"


def finetune_summary(done: Finetuned, new_rows: Sequence[str]) -> TrainingSummary:
    """Return the story of a fine-tuning, for the record and the card."""
    training = done.training
    options = training.options
    settings = training.settings
    overlap = training.overlap
    steps = done.kept_step
    tokens = done.kept_step * settings.step_tokens
    section = record_section(done, TUNED_BY, ("stopped_early", "passes")) | {
        "targets": done.counted["targets"],
        "steps": steps,
        "trained_steps": done.steps,
        "tokens": tokens,
        "data_sha256": training.data.digest(),
        "final_loss": _loss_at(done.by_step, steps),
        "control": done.control is not None,
    }
    ways = [f"in {rows}" for rows in new_rows]
    if settings.rank is not None:
        rank = settings.rank.value
        ways.append(f"with a LoRA of rank {rank}, which is merged into the weights")
    summary = [
        f"It was then trained for {steps} steps ({tokens:,} tokens, strategy {options.strategy}) "
        f"{' and '.join(ways)}."
    ]
    if options.retrieval_share:
        summary.append(trained_to_retrieve_text(options.retrieval_share))
    summary += short_windows_text(training)
    summary += finetune_verdict(done.numbers, training.target)
    if lineage := training.lineage(overlap):
        summary.append(f"{lineage[0].upper()}{lineage[1:]}.")
    scored = training.learning.scored
    documents = overlap.of_documents if overlap else "documents"
    caption = (
        f"Loss over the last {scored} before {training.target:,}, in nats per token, on the same "
        f"tokens of {documents}"
    )
    table = finetune_table(done.numbers, training.target, overlap, caption)
    tables = () if table is None else (table,)
    return TrainingSummary(section, tuple(summary), tables, training.used.to_json())


def _loss_at(by_step: Sequence[Mapping[str, float]], step: int) -> float | None:
    """Return the training loss of the last logged step whose update the written weights hold."""
    losses = [entry["loss"] for entry in by_step if entry["step"] <= step]
    return losses[-1] if losses else None


def finetune_files(done: Finetuned, kept: JsonObject) -> dict[str, bytes]:
    """Return the files of OUT/training: the record `kept` in result.json, and its parts in separate
    files."""
    record = done.to_json()
    contents = {
        "settings.json": record[done.counted_as],
        "losses.json": {
            "tuned": record["losses"],
            "evaluations": record["evaluations"],
            "control": done.control and done.control["losses"],
        },
        "numbers.json": record["numbers"],
        RESULT: kept,
    }
    return json_files(contents) | {"loss.png": _losses_picture(done)}


def _losses_picture(done: Finetuned) -> bytes:
    """Draw the training loss of a fine-tuning and its control, and the evaluations, by optimiser
    step, as OUT/training/loss.png."""
    from matplotlib.ticker import MaxNLocator

    from ropext.results.report import plots

    axis = plots.plot_axes("Loss of the training", "nats per token", "step")
    _draw_losses(axis, done.by_step, "training loss", plots.COLOURS[0])
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
    return plots.picture_with_legend(axis)


def _draw_losses(
    axis: "Axes", losses: Sequence[Mapping[str, float]], label: str, colour: str
) -> None:
    """Draw the losses that a fine-tuning or its control logged while it trained, by step."""
    if losses:
        steps = [entry["step"] for entry in losses]
        values = [entry["loss"] for entry in losses]
        axis.plot(steps, values, color=colour, lw=1.2, label=label)
