"""What a running server answered, as tables and sentences."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ropext.lengths import length_text
from ropext.ports.plan import CUT, PORT
from ropext.report.tables import Column, Results, nats, share, table_of, text_tables
from ropext.results.measurement import Measurement, item_differences
from ropext.results.retrieval import FOUND, NO_ANSWER, OUTCOMES, REFUSED, TRUNCATED
from ropext.results.values import Value, values_of
from ropext.table import Table, with_rows

WORDS = {
    REFUSED: "refused",
    TRUNCATED: "cut by the server",
    NO_ANSWER: "not answered",
}


def is_of_port(results: Results) -> bool:
    """Whether results are of a running server."""
    return "endpoint" in results


def port_tables(run: Measurement) -> list[Table]:
    """Shares by length beside those on cut text, depths, and what became of the questions."""
    results = run.results
    asked = [_shares(run), *_by_task(results), _depths(results), _outcomes(results)]
    return with_rows([*asked, *_texts(results)])


def _texts(results: Results) -> list[Table]:
    """The tables of a directory's evaluation, where texts were read."""
    return text_tables({**results, "headline": "tail"}) if results["documents"] else []


def row_names(results: Results) -> dict[str, str]:
    """How the two rows are called."""
    told = results["endpoint"]
    names = {PORT: told["model"]}
    if CUT in results["variants"]:
        window = length_text(told["window"])
        plain = told["plain"]
        reader = "this server" if plain is None else f"{plain['model']} at {plain['url']}"
        names[CUT] = f"cut to {window}, read by {reader}"
    return names


def _columns(name: str, results: Results) -> list[Column]:
    return [(length_text(at), f"{name}@{at}", share) for at in results["lengths"]]


def _rows(results: Results) -> list[tuple[str, dict[str, Value]]]:
    names = row_names(results)
    variants = results["variants"]
    return [(name, values_of(variants[label]["metrics"])) for label, name in names.items()]


def _shares(run: Measurement) -> Table:
    """The two rows, and their difference over the same questions."""
    results = run.results
    note = (
        "share found of what is asked for, over the questions that were read, with its 95 % "
        "interval (questions over one text count for fewer where texts differ)"
    )
    table = table_of("Found, by length", note, _rows(results), _columns(FOUND, results))
    if CUT not in run.models or not table.rows:
        return table
    gains = item_differences(run.models[PORT].items, run.models[CUT].items, run.frame.bootstrap)
    columns = [(length_text(at), f"{FOUND}@{at}", nats) for at in results["lengths"]]
    difference = table_of("", "", [("difference, the same questions", gains)], columns)
    return replace(table, rows=(*table.rows, *difference.rows))


def _by_task(results: Results) -> list[Table]:
    """A table for each task, where there are several."""
    tasks = list(results["variants"][PORT]["retrieval"])
    if len(tasks) < 2:
        return []
    note = "the same, of one task"
    return [
        table_of(f"Found: {task}", note, _rows(results), _columns(task, results)) for task in tasks
    ]


def _depths(results: Results) -> Table:
    """Found by depth and length, of the server's own row."""
    cells = [
        (cell["depth"], cell["length"], cell["share"])
        for task_cells in results["variants"][PORT]["retrieval"].values()
        for cell in task_cells
        if cell["depth"] is not None
    ]
    depths = sorted({depth for depth, _, _ in cells})
    lengths = results["lengths"]
    rows = [
        (f"{depth:g}", *(_found_at(cells, depth, length) for length in lengths)) for depth in depths
    ]
    header = ("depth", *map(length_text, lengths))
    note = "found of questions read; 0 is the start of the text, 1 its end"
    return Table("Found, by depth and length", note, header, tuple(rows))


def _found_at(
    cells: Sequence[tuple[float, int, Mapping[str, Any]]], depth: float, length: int
) -> str:
    here = [share for at, of, share in cells if (at, of) == (depth, length)]
    count = sum(share["n"] for share in here)
    right = sum(share["value"] * share["n"] for share in here)
    return f"{right:g} of {count}" if count else "-"


def _outcomes(results: Results) -> Table:
    """How many questions became what."""
    rows = [
        (
            length_text(row["length"]),
            _range(row["counted"]),
            _range(row["used"]),
            *(str(row["counts"][name]) for name in OUTCOMES),
        )
        for row in results["variants"][PORT]["outcomes"]
    ]
    header = ("length", "tokens counted", "by the server", *OUTCOMES)
    note = f"prompts are counted by {results['endpoint']['counted_by']}; usage is the server's own"
    return Table("What became of the questions", note, header, tuple(rows))


def _range(ends: Sequence[int] | None) -> str:
    if ends is None:
        return "-"
    low, high = ends
    return f"{low}" if low == high else f"{low}\u2026{high}"


def port_lines(results: Results) -> list[str]:
    """What the numbers say, and why some questions were not read."""
    told = results["endpoint"]
    lines = [
        _reach_line(name, results["variants"][label]) for label, name in row_names(results).items()
    ]
    for row in results["variants"][PORT]["outcomes"]:
        for outcome, reason in row["reasons"].items():
            count = row["counts"][outcome]
            length = length_text(row["length"])
            lines.append(f"{length}: {count} {WORDS.get(outcome, outcome)}: {reason}")
    lines += [*results["variants"][PORT]["verdicts"], *told["remarks"]]
    if told["window"] is None:
        lines.append("no row of cut text: give --context, or --against what was extended")
    return lines


def _reach_line(name: str, variant: Mapping[str, Any]) -> str:
    reached = variant["reached"]
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
