"""A run in words, tables and one picture: for the terminal, the card, ropext.json, OUT/training."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ropext.lengths import length_text
from ropext.results.overlap import as_json, mark_of, marked
from ropext.results.values import FEWEST_DOCUMENTS, Value
from ropext.table import Table, columns

if TYPE_CHECKING:
    from ropext.results.overlap import Overlap
    from ropext.training.defaults import Setting
    from ropext.training.engine import History
    from ropext.training.outcome import Story
    from ropext.training.run import Finetuned, Planned
    from ropext.training.sequences import Rows

Numbers = dict[str, dict[str, Value]]

ROWS = {
    "base": "base, through its short window",
    "untuned": "extended, not trained",
    "control": "control: base trained on the same tokens, through its short window",
    "tuned": "extended and trained",
}
TRAINED = ("control", "tuned")


def plan_text(planned: "Planned") -> str:
    """What --dry-run prints."""
    prepared, found = planned.prepared, planned.estimate
    lines = [
        f"{prepared.origin.snapshot.name}: {prepared.origin.told}, strategy "
        f"{prepared.options.strategy}, packing {prepared.options.packing}",
        "",
    ]
    lines += settings_lines(vars(prepared.settings))
    lines += [
        "",
        f"trained: {planned.trained:,} parameters in {', '.join(planned.targets)}",
        f"documents: {len(prepared.rows.documents)} used, {prepared.rows.too_short} too short, "
        f"{prepared.evaluated} to evaluate on",
        *([f"not evaluated: {prepared.why_no_judge()}"] if prepared.is_unjudged else []),
        *overlap_lines(prepared.overlap),
        passes_text(prepared.rows),
        *_asked(prepared.options.retrieval_share),
        f"tokens: {found.tokens:,}; FLOPs: {found.flops:.2e}",
        f"memory of one device: about {found.peak_bytes / 1e6:,.0f} MB (weights "
        f"{found.weight_bytes / 1e6:,.0f}, trained {found.trained_bytes / 1e6:,.0f}, activations "
        f"{found.activation_bytes / 1e6:,.0f}, loss {found.loss_bytes / 1e6:,.0f})",
    ]
    if planned.tight is not None:
        lines.append(f"note: {planned.tight}")
    if planned.sliced is not None:
        lines.append(f"the loss needs whole logits: {planned.sliced}")
    return "\n".join(lines)


def overlap_lines(found: "Overlap | None") -> list[str]:
    """What is said of an evaluation on what was trained on."""
    return [f"warning: {found.sentence}"] if found and found.sentence else []


def settings_lines(settings: Mapping[str, "Setting"]) -> list[str]:
    """Each setting with where it comes from."""
    rows = [
        (name.replace("_", " "), _plain(own.value), own.source) for name, own in settings.items()
    ]
    return columns((), rows).splitlines()


def passes_text(rows: "Rows") -> str:
    """How often the same text is read."""
    text = f"rows: {len(rows):,}, and the documents hold {rows.per_pass:,}"
    if rows.passes <= 1:
        return text
    return f"{text}: the run goes through them {rows.passes:.1f} times"


def _asked(share: float) -> list[str]:
    """What must be known to read a retrieval score of a model that was trained to retrieve."""
    if not share:
        return []
    return [
        f"Of the rows {share:.0%} state keys and ask for them, in the wording of the task mkey: "
        "its retrieval scores are those of a trained task."
    ]


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return "/".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def result_text(done: "Finetuned") -> str:
    """What the command prints at its end."""
    target = done.planned.prepared.origin.target
    lines = [f"wrote {done.output}: trained {done.steps} steps" + _early(done.stopped_early)]
    table = table_of(done.numbers, target, done.overlap)
    if table is not None:
        lines += ["", columns(table.header, table.rows), "", *verdict(done.numbers, target)]
    lines += [f"note: {note}" for note in done.notes]
    lines += ["", f"next: ropext verify {done.output}"]
    return "\n".join(lines)


def _early(early: bool) -> str:
    return ", stopped early: the best evaluated weights are kept" if early else ""


def table_of(
    numbers: dict[str, dict[str, Any]],
    target: int,
    overlap: Mapping[str, Any] | None,
    title: str = "",
) -> Table | None:
    """Base, untuned, control, tuned; numbers as JSON."""
    if not numbers:
        return None
    mark = mark_of({"overlap": overlap})
    header = ("", f"tail loss at {length_text(target)}", "95 % interval", "short tax")
    rows = []
    for label, model in ROWS.items():
        if label in numbers:
            values = numbers[label]
            tail, tax = values[f"tail_nll@{target}"], values.get("short_tax")
            shown = "" if label == "base" or tax is None else f"{tax['value']:+.4f}"
            name = marked(model, mark if label in TRAINED else "")
            rows.append((name, f"{tail['value']:.4f}", _interval(tail), shown))
    return Table(title, "", header, tuple(rows))


def _interval(value: dict[str, Any]) -> str:
    if value["ci95"]:
        return f"{value['ci95'][0]:.4f} to {value['ci95'][1]:.4f}"
    low, high = value.get("range") or (value["value"],) * 2
    return f"{low:.4f} to {high:.4f} (range of {value['n']})"


def verdict(numbers: dict[str, dict[str, Any]], target: int) -> list[str]:
    """What the table says, in words; adaptation to the text is told from extension."""
    if not numbers:
        return []
    if numbers["base"][f"tail_nll@{target}"]["ci95"] is None:
        return [f"Fewer than {FEWEST_DOCUMENTS} documents give numbers, and no verdict."]

    def tail(label: str) -> float:
        return float(numbers[label][f"tail_nll@{target}"]["value"])

    gain = tail("base") - tail("tuned")
    lines = [
        f"At {length_text(target)} the trained model predicts the last tokens by {abs(gain):.4f} "
        f"nats a token {'better' if gain > 0 else 'worse'} than the base in its own window"
    ]
    if "control" in numbers:
        own = tail("control") - tail("tuned")
        lines[0] += (
            f", and by {abs(own):.4f} {'better' if own > 0 else 'worse'} than the control: the "
            f"control's own gain of {tail('base') - tail('control'):.4f} is adaptation to the text."
        )
    else:
        lines[0] += "; a part of any gain is adaptation to the text (--control measures it)."
    return lines


def story(
    planned: "Planned", history: "History", control: "History | None", numbers: Numbers
) -> "Story":
    """For the record and the card."""
    from ropext.training import evaluating
    from ropext.training.outcome import Story

    prepared = planned.prepared
    found = {label: evaluating.to_json(values) for label, values in numbers.items()}
    section = {
        "settings": prepared.settings.to_json(),
        "strategy": prepared.options.strategy,
        "packing": prepared.options.packing,
        "targets": list(planned.targets),
        "train_norms": prepared.options.train_norms,
        "train_embeddings": prepared.options.train_embeddings,
        "retrieval_share": prepared.options.retrieval_share,
        "seed": prepared.options.seed,
        "steps": history.steps,
        "stopped_early": history.stopped_early,
        "tokens": history.steps * prepared.settings.tokens // prepared.settings.steps.value,
        "passes": prepared.rows.passes * history.steps / prepared.settings.steps.value,
        "data_sha256": prepared.data.digest(),
        "final_loss": history.losses[-1]["loss"] if history.losses else None,
        "control": control is not None,
        "numbers": found,
        "overlap": as_json(prepared.overlap),
    }
    target = prepared.origin.target
    summary = [
        f"It was then trained for {section['steps']} steps ({section['tokens']:,} tokens, strategy "
        f"{section['strategy']}) with a LoRA of rank {prepared.settings.rank.value}, which is "
        "merged into the weights.",
        *_asked(prepared.options.retrieval_share),
        *verdict(found, target),
    ]
    overlap = prepared.overlap
    if overlap and overlap.sentence:
        summary.append(f"{overlap.sentence[0].upper()}{overlap.sentence[1:]}.")
    caption = (
        f"Loss over the last tokens before {target:,}, in nats a token, on the same tokens of "
        f"{overlap.of_documents if overlap else 'documents'}"
    )
    table = table_of(found, target, section["overlap"], caption)
    return Story(section, tuple(summary), (table,) if table else (), prepared.trained_on.to_json())


def files(
    planned: "Planned", history: "History", control: "History | None", numbers: Numbers
) -> dict[str, bytes]:
    """OUT/training."""
    from ropext.training import evaluating

    content: dict[str, Any] = {
        "settings.json": planned.to_json(),
        "losses.json": {
            "tuned": history.losses,
            "evaluations": history.evaluations,
            "control": control.losses if control else None,
        },
        "numbers.json": {label: evaluating.to_json(values) for label, values in numbers.items()},
    }
    out = {name: (json.dumps(value, indent=1) + "\n").encode() for name, value in content.items()}
    return out | {"loss.png": curve(history, control)}


def curve(history: "History", control: "History | None") -> bytes:
    """Loss by step as a PNG."""
    from matplotlib.ticker import MaxNLocator

    from ropext.report import plots

    axis = plots.axes("Loss of the training", "nats per token", "step")
    for label, losses, colour in (
        ("training loss", history.losses, plots.COLOURS[0]),
        ("training loss of the control", control.losses if control else [], plots.GREY),
    ):
        if losses:
            steps, values = [e["step"] for e in losses], [e["loss"] for e in losses]
            axis.plot(steps, values, color=colour, lw=1.2, label=label)
    if history.evaluations:
        steps = [e["step"] for e in history.evaluations]
        values = [e["tail_nll"] for e in history.evaluations]
        label = "tail loss, held-out documents"
        axis.plot(steps, values, "o-", color=plots.COLOURS[1], label=label)
    axis.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
    return plots.finished(axis)
