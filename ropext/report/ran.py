"""A whole run in words: what became of each stage, what was measured, what was estimated."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ropext.report import measured
from ropext.report.text import table

if TYPE_CHECKING:
    from ropext.pipeline.outcome import CellRan, Ran


def ran_text(done: "Ran") -> str:
    """What the command prints at its end."""
    parts = [_cell(cell) for cell in done.cells]
    if done.failed:
        rows = [(name, why) for name, why in done.failed.items()]
        parts.append(f"Failed\n{table(('cell', 'why'), rows)}")
    if done.comparison and done.comparison.get("text"):
        parts.append(_comparison(done.comparison["text"]))
        parts.append(f"comparison: {done.folder / 'report.html'}")
    return "\n\n".join(parts)


def _cell(cell: "CellRan") -> str:
    lines = [f"{cell.name or 'stages'}: " + ", ".join(f"{k} {v}" for k, v in cell.stages.items())]
    results = cell.evidence.results
    if results is not None:
        shown = [measured.headline(results), measured.summary(results)]
        tables = [own for own in shown if own] + measured.retrieval_tables(results)
        lines += ["", measured.as_text(tables, measured.verdict_lines(results)), ""]
    lines += [
        f"gate {'passed' if gate.passed else 'FAILED'}: {gate.reason}"
        for gate in cell.evidence.gates
    ]
    if cell.output is not None:
        lines += [f"wrote {cell.output}", f"report: {cell.folder / 'report.html'}"]
        lines += [f"next: ropext verify {cell.output}"]
    return "\n".join(lines)


def _comparison(text: Mapping[str, Any]) -> str:
    """Tails of all cells and the winner, from the JSON of a comparison."""
    labels = list(text["lengths"][0]["tail"])
    header = ("tail perplexity", *(str(row["length"]) for row in text["lengths"]))
    rows = [
        (label, *(f"{row['tail'][label]['value']:.3f}" for row in text["lengths"]))
        for label in labels
    ]
    rows.append(("winner", *(row["winner"] or "-" for row in text["lengths"])))
    return table(header, rows)


def estimate_text(found: Mapping[str, Any]) -> str:
    """What --dry-run prints: each stage with what it takes."""
    parts = []
    for cell in found["cells"]:
        rows = [(name, own["what"]) for name, own in cell["stages"].items()]
        title = f"{cell['cell']}\n" if cell["cell"] else ""
        parts.append(title + table(("stage", "what it takes"), rows))
    return "\n\n".join(parts)
