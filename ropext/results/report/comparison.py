"""Lay out the results of `ropext compare` as tables."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ropext.base.lengths import length_text
from ropext.base.table import BLANK, Number, Table
from ropext.results.gates import metric_text
from ropext.results.measurement import Discordance
from ropext.results.overlap import marked
from ropext.results.report.cells import Column, Values, at_lengths, nats, shown, table_of
from ropext.results.report.tables import score_text
from ropext.results.rules import Comparison
from ropext.results.values import Value


def comparison_tables(compared: Comparison) -> list[Table]:
    """Return the tables of tails with their winner, and of paired differences to the first run."""
    frame = compared.measured.frame
    lengths = [row.length for row in compared.lengths]
    rows = _rows(compared)
    scoring = frame.scoring
    tails = table_of(
        f"Tail {scoring.perplexity}, {compared.documents} paired documents",
        f"{scoring.tail_text(frame.tail, ())}; winner: lower than every other model at 95 % "
        "confidence, paired by document and corrected for all comparisons",
        rows,
        at_lengths("tail", lengths, shown),
    )
    winners = ["winner"]
    for row in compared.lengths:
        winners.append(row.winner or BLANK)
    return [
        replace(tails, rows=(*tails.rows, tuple(winners))),
        table_of(
            f"Loss difference to {compared.reference} (nats per token, paired by document)",
            "below 0, the model is better than the reference",
            rows,
            at_lengths("behind", lengths, nats),
        ),
        table_of(
            f"Loss difference to {compared.reference} inside the trained context (nats per token)",
            scoring.inside_text(frame.context),
            rows,
            [Column("difference", "short", nats)],
        ),
    ]


def _rows(compared: Comparison) -> list[tuple[str, Values]]:
    """Return each model's tail at each length, `tail@C`, and its differences to the reference:
    `behind@C`, and `short` inside the trained context."""
    rows = list[tuple[str, Values]]()
    for label in compared.lengths[0].tail:
        values = dict[str, Value | None]()
        for row in compared.lengths:
            values[f"tail@{row.length}"] = row.tail[label]
            if label in row.difference:
                values[f"behind@{row.length}"] = row.difference[label]
        if label in compared.short:
            values["short"] = compared.short[label]
        rows.append((marked(label, compared.marks.get(label, "")), values))
    return rows


def tidy_table(compared: Comparison) -> Table:
    """Return the same for programs: a row for each length and model."""
    perplexity = compared.measured.frame.scoring.perplexity
    rows = list[tuple[str, ...]]()
    for at in compared.lengths:
        columns = [
            Column(f"tail {perplexity}", f"tail@{at.length}", shown),
            Column("difference", f"behind@{at.length}", nats),
            Column("difference inside", "short", nats),
        ]
        rows += _rows_at(at.length, table_of("", "", _rows(compared), columns))
    header = ("length", "model", f"tail {perplexity}", "difference", "difference inside")
    title = f"Tail {perplexity} and loss difference to {compared.reference}"
    return Table(title, "", header, tuple(rows))


def _rows_at(length: int, table: Table) -> list[tuple[str, ...]]:
    """Put a length in front of a table's rows."""
    name = Number(length_text(length), length)
    return [(name, *cells) for cells in table.rows]


def item_table(differences: Mapping[str, Mapping[str, Value]], reference: str) -> Table:
    """Return the table of the differences of answers by task and length, for each model."""
    names = _answered(differences)
    columns = list[Column]()
    for name in names:
        columns.append(Column(metric_text(name), name, _signed))
    note = f"difference on the same questions; {score_text(_tasks(names))}"
    return table_of(f"Retrieval, difference to {reference}", note, differences.items(), columns)


def tidy_item_table(differences: Mapping[str, Mapping[str, Value]], reference: str) -> Table:
    """Return the same for programs: a row for each length and model, a column for each task."""
    names = _answered(differences)
    tasks = _tasks(names)
    lengths = list[int]()
    for name in names:
        length = int(name.partition("@")[2])
        if length not in lengths:
            lengths.append(length)
    rows = list[tuple[str, ...]]()
    for length in sorted(lengths):
        columns = [Column(task, f"{task}@{length}", _signed) for task in tasks]
        rows += _rows_at(length, table_of("", "", differences.items(), columns))
    title = f"Retrieval, difference to {reference}"
    return Table(title, "", ("length", "model", *tasks), tuple(rows))


def _answered(differences: Mapping[str, Mapping[str, Value]]) -> list[str]:
    """Name the differences that are shares of answers, each once."""
    names = dict[str, None]()
    for values in differences.values():
        for name in values:
            if "_nll@" not in name:
                names[name] = None
    return list(names)


def _tasks(names: Iterable[str]) -> list[str]:
    """Name the tasks of some metrics, each once."""
    return list(dict.fromkeys(name.partition("@")[0] for name in names))


def _signed(value: Value | None) -> str:
    return shown(value, sign=True)


def discordance_table(
    runs: Mapping[str, Mapping[tuple[str, int], Discordance]], reference: str
) -> Table:
    """Return the table of how many texts one of two servers reads better, with the probability of
    so uneven a split."""
    rows = list[tuple[str, ...]]()
    for label, places in runs.items():
        for (task, length), split in places.items():
            rows.append(
                (
                    label,
                    task,
                    Number(length_text(length), length),
                    str(split.more),
                    str(split.fewer),
                    str(split.alike),
                    Number(f"{split.p:.3f}", split.p),
                )
            )
    header = ("", "task", "length", "found more", "found fewer", "as many", "p")
    note = (
        "texts, each with all its questions; p: exact sign test (McNemar's test if each text has "
        "one question)"
    )
    return Table(f"Text by text, against {reference}", note, header, tuple(rows))
