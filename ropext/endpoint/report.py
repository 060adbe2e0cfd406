"""Present the answers of a running server: tables, sentences, and a report with pictures."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from ropext.base.jsontext import JsonObject
from ropext.base.lengths import length_text
from ropext.base.table import Table, with_rows
from ropext.endpoint.plan import CUT, SERVER
from ropext.results import FOUND
from ropext.results.measurement import Measurement, item_differences
from ropext.results.numbers import ModelNumbers
from ropext.results.report import html
from ropext.results.report.cells import columns_at_lengths, nats_cell, share_cell, table_of_values
from ropext.results.report.evaluation import Drawn, heat_pictures, write_pictures
from ropext.results.report.html import Page
from ropext.results.report.tables import text_tables
from ropext.results.retrieval import NO_ANSWER, OUTCOMES, REFUSED, TRUNCATED, HeatCell
from ropext.results.values import Value

WORDS = {
    REFUSED: "refused",
    TRUNCATED: "cut by the server",
    NO_ANSWER: "not answered",
}


def endpoint_of(run: Measurement) -> JsonObject:
    """Return the facts that `eval --endpoint` kept about the running server that answered it, such
    as its URL and how its prompts are counted."""
    assert run.facts.endpoint is not None  # a run of a server has it
    return run.facts.endpoint


def _numbers_of(run: Measurement, label: str) -> ModelNumbers:
    """Return the numbers of one row of a server's run."""
    numbers = run.models[label].numbers
    assert numbers is not None  # a run that was written has them
    return numbers


def server_tables(run: Measurement) -> list[Table]:
    """Return the tables of a server's run: shares by length, full and truncated, depths, and
    outcomes."""
    tables = [_shares_table(run)]
    tables += _task_tables(run)
    tables += [_depth_table(run), _outcomes_table(run)]
    tables += _perplexity_tables(run)
    return with_rows(tables)


def _perplexity_tables(run: Measurement) -> list[Table]:
    """Return the tables of a server's losses of texts, as for a directory. Return no table if no
    texts were read."""
    if not run.facts.documents:
        return []
    return text_tables(replace(run, facts=replace(run.facts, headline="tail")))


def row_names(run: Measurement) -> dict[str, str]:
    """Return the names of a server's two rows: its model, and the truncated questions."""
    endpoint = endpoint_of(run)
    names = {SERVER: endpoint["model"]}
    if CUT in run.models:
        window = length_text(endpoint["window"])
        plain = endpoint["plain"]
        reader = "this server" if plain is None else f"{plain['model']} at {plain['url']}"
        names[CUT] = f"truncated to {window}, on {reader}"
    return names


def _values_by_row(run: Measurement) -> list[tuple[str, dict[str, Value]]]:
    """Return the numbers of a server's rows by the names of the rows."""
    return [(name, run.values(label)) for label, name in row_names(run).items()]


def _shares_table(run: Measurement) -> Table:
    """Return the table of the shares that a server found, full and truncated, and of their
    difference over the same questions."""
    lengths = run.frame.lengths
    note = (
        "share of needles found, over the answered questions, with its 95 % interval (questions "
        "over one text count less if texts differ)"
    )
    table = table_of_values(
        "Found, by length",
        note,
        _values_by_row(run),
        columns_at_lengths(FOUND, lengths, share_cell),
    )
    if CUT not in run.models or not table.rows:
        return table
    gains = item_differences(run.models[SERVER].items, run.models[CUT].items, run.frame.bootstrap)
    columns = columns_at_lengths(FOUND, lengths, nats_cell)
    difference = table_of_values("", "", [("difference, the same questions", gains)], columns)
    return replace(table, rows=(*table.rows, *difference.rows))


def _task_tables(run: Measurement) -> list[Table]:
    """Return a table of a server's shares for each task, if there are several."""
    tasks = list(_numbers_of(run, SERVER).retrieval)
    if len(tasks) < 2:
        return []
    note = "the same, of one task"
    tables = list[Table]()
    for task in tasks:
        columns = columns_at_lengths(task, run.frame.lengths, share_cell)
        tables.append(table_of_values(f"Found: {task}", note, _values_by_row(run), columns))
    return tables


def _depth_table(run: Measurement) -> Table:
    """Return the table of the shares that the server found, by depth and length."""
    cells = list[HeatCell]()
    for cells_of_task in _numbers_of(run, SERVER).retrieval.values():
        cells += cells_of_task
    lengths = run.frame.lengths
    rows = list[tuple[str, ...]]()
    for depth in sorted({cell.depth for cell in cells if cell.depth is not None}):
        found = [_found_text(cells, depth, length) for length in lengths]
        rows.append((f"{depth:g}", *found))
    header = ("depth", *map(length_text, lengths))
    note = "found of questions read; 0 is the start of the text, 1 its end"
    return Table("Found, by depth and length", note, header, tuple(rows))


def _found_text(cells: Sequence[HeatCell], depth: float, length: int) -> str:
    """Count the right answers of a running server to the questions at a depth and a length, for a
    cell: `7 of 8`."""
    count = 0
    right = 0.0
    for cell in cells:
        if (cell.depth, cell.length) == (depth, length):
            count += cell.share.n
            right += cell.share.value * cell.share.n
    return f"{right:g} of {count}" if count else "-"


def _outcomes_table(run: Measurement) -> Table:
    """Return the table of the server's answers by outcome."""
    outcomes = _numbers_of(run, SERVER).outcomes or ()
    has_usage = any(row["used"] is not None for row in outcomes)
    header = ["length", "tokens counted"]
    note = f"prompts are counted by {endpoint_of(run)['counted_by']}; "
    if has_usage:
        header.append("by the server")
        note += "usage is the server's own"
    else:
        note += "the server reported no usage"
    rows = list[tuple[str, ...]]()
    for row in outcomes:
        cells = [length_text(row["length"]), _range_text(row["counted"])]
        if has_usage:
            cells.append(_range_text(row["used"]))
        cells += [str(row["counts"][name]) for name in OUTCOMES]
        rows.append(tuple(cells))
    return Table("What became of the questions", note, (*header, *OUTCOMES), tuple(rows))


def _range_text(ends: Sequence[int] | None) -> str:
    """Return the smallest and largest number of tokens of a server's prompts: `512…530`."""
    if ends is None:
        return "-"
    low, high = ends
    return f"{low}" if low == high else f"{low}\u2026{high}"


def server_lines(run: Measurement) -> list[str]:
    """Return the lines of `eval --endpoint` about a running server: the verdicts on its answers,
    and why it did not read some questions."""
    endpoint = endpoint_of(run)
    lines = list[str]()
    for label, name in row_names(run).items():
        lines.append(_reach_line(name, _numbers_of(run, label).reached or {}))
    for row in _numbers_of(run, SERVER).outcomes or ():
        for outcome, reason in row["reasons"].items():
            count = row["counts"][outcome]
            length = length_text(row["length"])
            lines.append(f"{length}: {count} {WORDS.get(outcome, outcome)}: {reason}")
    lines += _numbers_of(run, SERVER).verdicts
    lines += endpoint["remarks"]
    if endpoint["window"] is None:
        lines.append("no row of cut text: give --context, or --against what was extended")
    return lines


def _reach_line(name: str, reached: Mapping[str, Any]) -> str:
    """Return the sentence about the longest length up to which a server finds enough."""
    share_text = f"{reached['share']:.0%}"
    if not reached["by_point"]:
        return f"{name}: not at any length are {share_text} found"
    point = length_text(reached["by_point"])
    if not reached["by_interval"]:
        return f"{name}: at least {share_text} found up to {point}; by the interval at no length"
    return (
        f"{name}: at least {share_text} found up to {point}; by the interval up to "
        f"{length_text(reached['by_interval'])}"
    )


def write_server_report(run: Measurement) -> None:
    """Write report.md, report.html and plots/*.png of `eval --endpoint` into the folder of its run.
    They tabulate the answers of the running server."""
    assert run.path is not None  # it was kept
    endpoint = endpoint_of(run)
    asked = f"questions in words to {endpoint['url']}, answered greedily"
    page = Page(
        title=f"ropext eval --endpoint: {endpoint['model']}",
        subtitle=f"{asked}; {endpoint['counted_by']} counts",
        verdicts=server_lines(run),
        warnings=run.facts.warnings,
        tables=server_tables(run),
        details=json.dumps(run.manifest, indent=1, ensure_ascii=False),
    )
    html.write_page(run.path, page, write_pictures(run.path, _depth_pictures(run)))


def _depth_pictures(run: Measurement) -> Drawn:
    """Return pictures of the answers that `eval --endpoint` got from a running server, depth by
    length. They leave out questions that the server did not read. Return none if matplotlib is not
    installed."""
    if find_spec("matplotlib") is None:
        return {}
    models = {
        label: replace(model, items=tuple(item for item in model.items if item.is_read))
        for label, model in run.models.items()
    }
    return heat_pictures([replace(run, models=models)])
