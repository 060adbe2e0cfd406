"""Lay out the results of `ropext compare` as tables."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ropext.base.lengths import length_text
from ropext.base.table import BLANK, Number, Table
from ropext.results.gates import metric_text
from ropext.results.measurement import Discordance
from ropext.results.overlap import marked_name
from ropext.results.report.cells import (
    Column,
    Values,
    columns_at_lengths,
    nats_cell,
    table_of_values,
    value_cell,
)
from ropext.results.report.tables import score_text
from ropext.results.rules import Comparison
from ropext.results.values import Value


def comparison_tables(compared: Comparison) -> list[Table]:
    """Return the tables of `ropext compare`: tails with their winner, and paired differences to the
    first run."""
    frame = compared.measured.frame
    lengths = [row.length for row in compared.lengths]
    rows = _comparison_rows(compared)
    scoring = frame.scoring
    tails = table_of_values(
        f"Tail {scoring.perplexity}, {compared.documents} paired documents",
        f"{scoring.tail_text(frame.tail, ())}; winner: lower than every other model at 95 % "
        "confidence, paired by document and corrected for all comparisons",
        rows,
        columns_at_lengths("tail", lengths, value_cell),
    )
    winners = ["winner"]
    for row in compared.lengths:
        winners.append(row.winner or BLANK)
    return [
        replace(tails, rows=(*tails.rows, tuple(winners))),
        table_of_values(
            f"Loss difference to {compared.reference} (nats per token, paired by document)",
            "below 0, the model is better than the reference",
            rows,
            columns_at_lengths("behind", lengths, nats_cell),
        ),
        table_of_values(
            f"Loss difference to {compared.reference} inside the trained context (nats per token)",
            scoring.inside_text(frame.context),
            rows,
            [Column("difference", "short", nats_cell)],
        ),
    ]


def _comparison_rows(compared: Comparison) -> list[tuple[str, Values]]:
    """Return the rows of `ropext compare`: each model's tail at each length, `tail@C`, and its
    differences to the reference: `behind@C`, and `short` inside the trained context."""
    rows = list[tuple[str, Values]]()
    for label in compared.lengths[0].tail:
        values = dict[str, Value | None]()
        for row in compared.lengths:
            values[f"tail@{row.length}"] = row.tail[label]
            if label in row.difference:
                values[f"behind@{row.length}"] = row.difference[label]
        if label in compared.short:
            values["short"] = compared.short[label]
        rows.append((marked_name(label, compared.marks.get(label, "")), values))
    return rows


def tidy_comparison_table(
    compared: Comparison | None, differences: Mapping[str, Mapping[str, Value]], reference: str
) -> Table:
    """Return the table of `ropext compare` for programs, with the differences of answers to
    `reference`: a row for each length and model."""
    names = _share_metrics(differences)
    tasks = _task_names(names)
    title = f"Retrieval, difference to {reference}"
    perplexity = ""
    marks: Mapping[str, str] = {}
    models = dict[str, Values]()
    read = list[int]()
    if compared is not None:
        perplexity = f"tail {compared.measured.frame.scoring.perplexity}"
        also = f"; r{title[1:]}" if tasks else ""
        title = f"{perplexity.capitalize()} and loss difference to {compared.reference}{also}"
        marks = compared.marks
        models = dict(_comparison_rows(compared))
        read = [row.length for row in compared.lengths]
    for label, values in differences.items():
        name = marked_name(label, marks.get(label, ""))
        models[name] = dict(models.get(name, {})) | dict(values)
    rows = list[tuple[str, ...]]()
    header = list[str]()
    asked = [int(name.partition("@")[2]) for name in names]
    for length in sorted(set(read + asked)):
        columns = _text_columns(perplexity, length, is_read=length in read)
        columns += [Column(task, f"{task}@{length}", _signed_cell) for task in tasks]
        header = ["length", "model"]
        header += [column.head for column in columns]
        name = Number(length_text(length), length)
        for cells in table_of_values("", "", models.items(), columns).rows:
            rows.append((name, *cells))
    return Table(title, "", tuple(header), tuple(rows))


def _text_columns(perplexity: str, length: int, *, is_read: bool) -> list[Column]:
    """Return the columns of a comparison about text at a length; without a perplexity there are
    none."""
    if not perplexity:
        return []
    return [
        Column(perplexity, f"tail@{length}", value_cell),
        Column("difference", f"behind@{length}", nats_cell),
        Column("difference inside", "short" if is_read else "", nats_cell),
    ]


def answer_difference_table(
    differences: Mapping[str, Mapping[str, Value]], reference: str
) -> Table:
    """Return the table of `ropext compare` with the differences of answers by task and length, for
    each model."""
    names = _share_metrics(differences)
    columns = list[Column]()
    for name in names:
        columns.append(Column(metric_text(name), name, _signed_cell))
    note = f"difference on the same questions; {score_text(_task_names(names))}"
    return table_of_values(
        f"Retrieval, difference to {reference}", note, differences.items(), columns
    )


def _share_metrics(differences: Mapping[str, Mapping[str, Value]]) -> list[str]:
    """Return the names of the compared metrics that are shares of answers, each once."""
    names = dict[str, None]()
    for values in differences.values():
        for name in values:
            if "_nll@" not in name:
                names[name] = None
    return list(names)


def _task_names(names: Iterable[str]) -> list[str]:
    """Return the retrieval tasks of some metrics, each once."""
    return list(dict.fromkeys(name.partition("@")[0] for name in names))


def _signed_cell(value: Value | None) -> str:
    """Write a difference of shares as a table's cell, with its sign."""
    return value_cell(value, sign=True)


def discordance_table(
    runs: Mapping[str, Mapping[tuple[str, int], Discordance]], reference: str
) -> Table:
    """Return the table of `ropext compare` about paired answers of servers. It shows for how many
    texts a model reads better than the reference, and how probable so uneven a split is."""
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
