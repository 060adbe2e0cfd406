"""Results of an evaluation or a comparison as tables: for the terminal, Markdown and HTML alike."""

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ropext.lengths import length_text
from ropext.report.text import table
from ropext.results.comparison import Comparison
from ropext.results.overlap import mark_of, marked
from ropext.results.values import Value

Results = Mapping[str, Any]
NOTHING = "-"


@dataclass(frozen=True)
class Table:
    """One table with what it shows, in words."""

    title: str
    note: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def number(value: float, digits: int = 3) -> str:
    """Plain where it fits, with an exponent where a perplexity exploded."""
    if math.isnan(value):
        return "?"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return f"{value:.{digits}f}" if abs(value) < 10000 else f"{value:.2e}"


def shown(value: Value | None, digits: int = 3, sign: bool = False) -> str:
    """`8.412 ±0.103` with an interval, `8.412 (8.1–8.9)` with a range only."""
    if value is None or value.n == 0:
        return NOTHING
    text = number(value.value, digits)
    if sign and value.value > 0:
        text = f"+{text}"
    if value.ci95 is not None:
        half = (value.ci95[1] - value.ci95[0]) / 2
        return f"{text} ±{number(half, digits)}"
    if value.range is not None and value.n > 1:
        low, high = (number(end, digits) for end in value.range)
        return f"{text} ({low}…{high})"
    return text


def metrics_of(results: Results, label: str) -> dict[str, Value]:
    """The values of one variant."""
    stored = results["variants"][label]["metrics"]
    return {name: Value.from_json(data) for name, data in stored.items()}


def _row_name(results: Results, label: str, *, questions: bool = False) -> str:
    """A variant with the mark of numbers over documents that it was trained on."""
    return marked(label, mark_of(results["variants"][label], questions=questions))


def _per_length(
    results: Results, name: str, title: str, note: str, digits: int = 3, sign: bool = False
) -> Table | None:
    """A row per variant, a column per length; None where nothing was measured."""
    lengths, rows = results["lengths"], []
    for label in results["variants"]:
        values = metrics_of(results, label)
        if any(f"{name}@{length}" in values for length in lengths):
            cells = [shown(values.get(f"{name}@{length}"), digits, sign) for length in lengths]
            rows.append((_row_name(results, label), *cells))
    if not rows:
        return None
    return Table(title, note, ("", *(length_text(length) for length in lengths)), tuple(rows))


def tail_text(tail: int, lengths: Sequence[int]) -> str:
    """Which tokens a tail has; a length shorter than it has no more than its own."""
    short = [length_text(length) for length in lengths if length < tail]
    fewer = f" (before {', '.join(short)} all there are)" if short else ""
    return f"the last {tail} tokens before each length{fewer}"


def headline(results: Results) -> Table | None:
    """The number that the protocol is about."""
    names = {
        "tail": f"Tail perplexity: {tail_text(results['tail_tokens'], results['lengths'])}",
        "yarn": "Perplexity, protocol yarn (mean over documents of one truncated window)",
        "hf_stride": "Perplexity, protocol hf-stride (windows of the length, over whole documents)",
    }
    name = results["headline"]
    note = "base = the model before extension through its short window, on the same tokens"
    if "untouched" in results["variants"]:
        note += "; untouched = that model, read beyond its window"
    note += "; after ± half the 95 % interval"
    if name != "tail":
        note = results["protocol_text"]
    return _per_length(results, name, names[name], note)


def text_tables(results: Results) -> list[Table]:
    """Everything about text, the headline first."""
    found = [
        headline(results),
        _per_length(
            results,
            "gain",
            "Context gain (nats per token)",
            "NLL of the base through its short window minus NLL of this model, on the same tokens; "
            "below zero, truncating the text beats the long context",
            digits=4,
            sign=True,
        ),
        summary(results),
        _per_length(
            results,
            "cumulative",
            "Cumulative perplexity (over all tokens before each length)",
            "what most papers print; it averages early tokens in and hides failures at the end",
        ),
        _per_length(results, "bpb", "Bits per byte", "comparable across tokenizers", digits=4),
        _positions(results),
    ]
    return [part for part in found if part is not None]


def summary(results: Results) -> Table | None:
    rows = []
    for label in results["variants"]:
        values = metrics_of(results, label)
        if "short_tax" in values:
            reach = values["effective_context"]
            sure = "" if reach.ci95 else " (point)"
            rows.append(
                (
                    _row_name(results, label),
                    shown(values["short_tax"], 4, sign=True),
                    length_text(int(reach.value)) + sure,
                )
            )
    if not rows:
        return None
    return Table(
        "Inside and outside the trained context",
        "short tax: NLL change inside the trained context, nats per token; effective context: the "
        "longest length up to which the tail stays within 0.02 nats of the base's (95 %, "
        f"one-sided), from the first length of at least {results['tail_tokens']} tokens on; 0: not "
        "even that one",
        ("", "short tax", "effective context"),
        tuple(rows),
    )


def _positions(results: Results) -> Table | None:
    rows, header = [], None
    for label, variant in results["variants"].items():
        if variant["positions"]:
            header = ("", *(f"{row['start']}…{row['stop']}" for row in variant["positions"]))
            cells = [number(_read(row["nll"]).value) for row in variant["positions"]]
            rows.append((_row_name(results, label), *cells))
    if header is None:
        return None
    note = "nats per token at positions [start, stop); octaves split at the trained context"
    return Table("NLL by position", note, header, tuple(rows))


def _read(data: Mapping[str, Any]) -> Value:
    return Value.from_json(dict(data))


def retrieval_tables(results: Results) -> list[Table]:
    """Per task the share of questions answered exactly, by length."""
    tasks = dict.fromkeys(
        task for variant in results["variants"].values() for task in variant["retrieval"]
    )
    tables = []
    for task in tasks:
        rows = []
        for label, variant in results["variants"].items():
            if task in variant["retrieval"]:
                values = metrics_of(results, label)
                cells = [share(values.get(f"{task}@{length}")) for length in results["lengths"]]
                reach = length_text(int(values[f"effective_context.{task}"].value))
                rows.append((_row_name(results, label, questions=True), *cells, reach))
        header = ("", *(length_text(length) for length in results["lengths"]), "effective")
        note = (
            "share of questions whose every answer token is the model's first choice, with its "
            "95 % Wilson interval (questions over one haystack count for fewer where haystacks "
            "differ); effective: longest length at 85 % of the short score"
        )
        tables.append(Table(f"Retrieval: {task}", note, header, tuple(rows)))
    return tables


def share(value: Value | None) -> str:
    """`0.95 [0.88, 0.98]`."""
    if value is None or value.ci95 is None:
        return NOTHING
    return f"{value.value:.2f} [{value.ci95[0]:.2f}, {value.ci95[1]:.2f}]"


def harness_table(results: Results) -> Table | None:
    """What lm-evaluation-harness said, as it said it."""
    rows = [
        (label, task, name, number(float(score), 4))
        for label, tasks in results.get("lm_eval", {}).items()
        for task, scores in tasks.items()
        for name, score in scores.items()
        if isinstance(score, int | float) and not isinstance(score, bool)
    ]
    if not rows:
        return None
    note = "scores of lm-evaluation-harness on the same loaded model"
    return Table("lm-eval", note, ("", "task", "metric", "value"), tuple(rows))


def comparison_tables(compared: Comparison) -> list[Table]:
    """Tails with their winner, and paired differences to the first run."""
    labels = list(compared.rows[0].tails)
    lengths = tuple(length_text(row.length) for row in compared.rows)
    others = [label for label in labels if label != compared.reference]
    names = {label: marked(label, compared.marks.get(label, "")) for label in labels}
    tails = [
        (names[label], *(shown(row.tails[label]) for row in compared.rows)) for label in labels
    ]
    tails.append(("winner", *(row.winner or NOTHING for row in compared.rows)))
    deltas = [
        (names[label], *(shown(row.differences[label], 4, sign=True) for row in compared.rows))
        for label in others
    ]
    short = [(names[label], shown(compared.short[label], 4, sign=True)) for label in others]
    return [
        Table(
            f"Tail perplexity, {compared.paired} paired documents",
            f"last {compared.frame.tail} tokens before each length; a winner only where it is "
            "surely below every other one, paired, all comparisons allowed for",
            ("", *lengths),
            tuple(tails),
        ),
        Table(
            f"NLL difference to {compared.reference} (nats per token, paired)",
            "below zero is better than the reference",
            ("", *lengths),
            tuple(deltas),
        ),
        Table(
            f"NLL difference to {compared.reference} inside the trained context",
            f"positions before {compared.frame.context}",
            ("", "difference"),
            tuple(short),
        ),
    ]


def item_table(runs: Mapping[str, Mapping[str, Value]], reference: str) -> Table | None:
    """Retrieval differences by task and length, from `item_differences` per label."""
    names = list(dict.fromkeys(name for values in runs.values() for name in values))
    names = [name for name in names if "_nll@" not in name]
    if not names:
        return None
    rows = [
        (label, *(shown(values.get(name), 3, sign=True) for name in names))
        for label, values in runs.items()
    ]
    header = tuple(_metric(name) for name in names)
    note = "difference of the share answered exactly, over the same questions"
    return Table(f"Retrieval, difference to {reference}", note, ("", *header), tuple(rows))


def _metric(name: str) -> str:
    task, _, length = name.partition("@")
    return f"{task}@{length_text(int(length))}"


def verdict_lines(results: Results) -> list[str]:
    """What the numbers say, per variant."""
    return [line for variant in results["variants"].values() for line in variant["verdicts"]]


def as_text(tables: Iterable[Table], lines: Sequence[str] = ()) -> str:
    """For a terminal."""
    parts = []
    for own in tables:
        note = textwrap.wrap(own.note, 96, initial_indent="  ", subsequent_indent="  ")
        parts.append("\n".join([own.title, *note, table(own.header, own.rows)]))
    return "\n\n".join([*parts, *(["\n".join(lines)] if lines else [])])


def as_markdown(tables: Iterable[Table]) -> str:
    """For report.md; cells are escaped, for labels and paths come from elsewhere."""
    parts = []
    for own in tables:
        head = "| " + " | ".join(map(_cell, own.header)) + " |"
        rule = "|" + "---|" * len(own.header)
        body = ["| " + " | ".join(map(_cell, row)) + " |" for row in own.rows]
        parts.append("\n".join([f"## {own.title}", "", own.note, "", head, rule, *body]))
    return "\n\n".join(parts)


def _cell(text: str) -> str:
    for character in ("\\", "|", "<", "*", "_", "`"):
        text = text.replace(character, f"\\{character}")
    return text
